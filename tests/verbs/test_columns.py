"""Posting and polling structured arrays: no Python object per entry."""

import threading
import tracemalloc

import numpy as np
import pytest
from verbs.pair import End, Pair, drain, supported

from rocecomm import verbs as v
from rocecomm.errors import VerbsError


@pytest.fixture
def ends(device):
    with Pair(device, depth=1024, max_send_wr=512, max_recv_wr=512, max_send_sge=3, max_recv_sge=3) as p:
        yield p


def sends(n, opcode=v.IBV_WR_SEND, flags=v.IBV_SEND_SIGNALED):
    w = np.zeros(n, v.SEND_WR_DTYPE)
    w["wr_id"], w["opcode"], w["send_flags"] = np.arange(n), opcode, flags
    return w


def recvs(n):
    w = np.zeros(n, v.RECV_WR_DTYPE)
    w["wr_id"] = np.arange(n)
    return w


def poll(cq, n, factor):
    import time
    out, got, end = np.zeros(n, v.WC_DTYPE), 0, time.monotonic() + 20 * factor
    while got < n:
        got += cq.poll_array(out, got)
        assert time.monotonic() < end, out[:got]
    assert not out["status"].any(), out
    return out


def test_send_and_receive(ends, scale):
    a, b = ends
    n = 400
    x, y = np.arange(n, dtype="u8") * 3, np.zeros(n, "u8")
    src, dst = a.mr(x), b.mr(y)
    r, s = recvs(n), sends(n, v.IBV_WR_SEND_WITH_IMM)
    r["addr"], r["length"], r["lkey"] = dst.addr + 8 * np.arange(n), 8, dst.lkey
    s["addr"], s["length"], s["lkey"] = src.addr + 8 * np.arange(n), 8, src.lkey
    s["imm_data"] = 0xFFFFFFFF - np.arange(n)
    assert b.qp.post_recv_array(r) == n and a.qp.post_send_array(s) == n
    got, sent = poll(b.recv_cq, n, scale.time), poll(a.send_cq, n, scale.time)
    assert (got["wr_id"] == np.arange(n)).all() and (sent["wr_id"] == np.arange(n)).all()
    assert (got["imm_data"] == 0xFFFFFFFF - np.arange(n)).all() and (got["byte_len"] == 8).all()
    assert (got["opcode"] == v.IBV_WC_RECV).all() and (got["qp_num"] == b.qp.qp_num).all()
    assert (x == y).all()


def test_one_sided(ends, scale):
    a, b = ends
    n = 100
    x, y, z = np.arange(n, dtype="u8"), np.zeros(n, "u8"), np.zeros(n, "u8")
    src, dst, back = a.mr(x), b.mr(y), a.mr(z)
    order = np.random.default_rng(3).permutation(n)
    s = sends(n, v.IBV_WR_RDMA_WRITE, 0)
    s["addr"], s["length"], s["lkey"] = src.addr + 8 * np.arange(n), 8, src.lkey
    s["remote_addr"], s["rkey"] = dst.addr + 8 * order, dst.rkey
    s["send_flags"][-1] = v.IBV_SEND_SIGNALED
    a.qp.post_send_array(s)
    assert poll(a.send_cq, 1, scale.time)["wr_id"][0] == n - 1
    assert (y[order] == x).all()
    s["opcode"], s["addr"], s["lkey"], s["send_flags"] = v.IBV_WR_RDMA_READ, back.addr + 8 * np.arange(n), \
        back.lkey, v.IBV_SEND_SIGNALED
    a.qp.post_send_array(s)
    poll(a.send_cq, n, scale.time)
    assert (z == x).all()
    s = sends(2, v.IBV_WR_ATOMIC_FETCH_AND_ADD)
    s["addr"], s["length"], s["lkey"] = back.addr + 8 * np.arange(2), 8, back.lkey
    s["remote_addr"], s["rkey"], s["compare_add"] = dst.addr, dst.rkey, [5, 7]
    first = int(y[0])
    a.qp.post_send_array(s)
    poll(a.send_cq, 2, scale.time)
    assert z[:2].tolist() == [first, first + 5] and y[0] == first + 12
    s["opcode"][0], s["compare_add"][0], s["swap"][0] = v.IBV_WR_ATOMIC_CMP_AND_SWP, first + 12, 99
    a.qp.post_send_array(s[:1])
    poll(a.send_cq, 1, scale.time)
    assert y[0] == 99


def test_element_lists(ends, scale):
    a, b = ends
    x, y = np.arange(60, dtype="u1"), np.zeros(60, "u1")
    src, dst = a.mr(x), b.mr(y)
    g = np.zeros(5, v.SGE_DTYPE)
    g["addr"], g["length"], g["lkey"] = src.addr + np.array([50, 0, 20, 10, 40]), [3, 2, 4, 1, 5], src.lkey
    t = np.zeros(2, v.SGE_DTYPE)
    t["addr"], t["length"], t["lkey"] = [dst.addr, dst.addr + 30], [4, 10], dst.lkey
    r, s = recvs(2), sends(2)
    r["sge_start"], r["num_sge"] = 0, [2, 1]
    s["sge_start"], s["num_sge"] = [0, 3], [3, 2]
    # one at a time: the second message must not land where the first did
    b.qp.post_recv_array(r[:1], t)
    a.qp.post_send_array(s[:1], g)
    assert poll(b.recv_cq, 1, scale.time)["byte_len"][0] == 9
    assert y[:4].tolist() == [50, 51, 52, 0] and y[30:35].tolist() == [1, 20, 21, 22, 23]
    for bad in ((4, 2), (0, 6), (2**32 - 1, 1)):
        s["sge_start"][1], s["num_sge"][1] = bad
        with pytest.raises(ValueError, match="row 1 names elements outside of the 5 rows"):
            a.qp.post_send_array(s, g)
    r["sge_start"][1] = 2
    with pytest.raises(ValueError, match="row 1"):
        b.qp.post_recv_array(r, t)
    with pytest.raises(ValueError, match="0 rows"):
        b.qp.post_recv_array(r)


def test_longer_than_one_chain(device, scale):
    """1000 rows are posted in several chains; a full queue stops in the middle and says where."""
    with Pair(device, depth=4096, max_send_wr=1000, max_recv_wr=1000) as (a, b):
        n = 1000
        assert b.qp.post_recv_array(recvs(n)) == n
        assert a.qp.post_send_array(sends(n)) == n
        assert (poll(b.recv_cq, n, scale.time)["wr_id"] == np.arange(n)).all()
        poll(a.send_cq, n, scale.time)
        too_many = b.qp.max_recv_wr + 300
        with pytest.raises(VerbsError, match="is full") as e:
            b.qp.post_recv_array(recvs(too_many))
        assert n <= e.value.posted < too_many
        left = e.value.posted
        while left:     # the queues of the two directions need not be of one size
            part = min(left, a.qp.max_send_wr)
            a.qp.post_send_array(sends(part))
            poll(b.recv_cq, part, scale.time)
            poll(a.send_cq, part, scale.time)
            left -= part


def test_wrong_arrays(ends):
    a, b = ends
    for bad in (np.zeros(3), [1, 2], None, np.zeros((2, 2), v.SEND_WR_DTYPE), np.zeros(2, v.RECV_WR_DTYPE)):
        with pytest.raises(TypeError, match="one-dimensional array of dtype"):
            a.qp.post_send_array(bad)
    with pytest.raises(TypeError):
        a.send_cq.poll_array(np.zeros(3, "u8"))
    with pytest.raises(BufferError):
        a.qp.post_send_array(sends(6)[::2])
    frozen = np.zeros(3, v.WC_DTYPE)
    frozen.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        a.send_cq.poll_array(frozen)
    for start in (-1, 4):
        with pytest.raises(ValueError, match="start row"):
            a.send_cq.poll_array(np.zeros(3, v.WC_DTYPE), start)
    assert a.send_cq.poll_array(np.zeros(3, v.WC_DTYPE), 3) == 0
    assert a.qp.post_send_array(sends(0)) == 0 and b.qp.post_recv_array(recvs(0)) == 0
    with pytest.raises(ValueError, match="opcode 8"):
        a.qp.post_send_array(sends(1, 8))


def test_shared_receive_queue(device, scale):
    with Pair(device, srq=dict(max_wr=64)) as (a, b):
        assert b.srq.post_recv_array(recvs(64)) == 64
        for i in range(64):
            a.qp.post_send(v.IBV_WR_SEND, None)
            drain(a.send_cq, 1, scale.time)[0].check()
            assert drain(b.recv_cq, 1, scale.time)[0].check().wr_id == i
        with pytest.raises(VerbsError) as e:
            b.srq.post_recv_array(recvs(8 * b.srq.max_wr))
        assert b.srq.max_wr <= e.value.posted < 8 * b.srq.max_wr


def test_datagrams(device, scale):
    a = supported(lambda: End(device, v.IBV_QPT_UD))
    b = End(device, v.IBV_QPT_UD)
    for e in (a, b):
        e.qp.to_init(qkey=0x1234)
        e.qp.to_rtr()
        e.qp.to_rts()
    ah = v.AH(a.pd, v.AHAttr(dgid=b.gid.gid, sgid_index=a.gid.index))
    with pytest.raises(TypeError, match="ah, remote_qpn"):
        a.qp.post_send_array(sends(1))
    b.qp.post_recv(b.mr(bytearray(256)), wr_id=1)
    s = sends(1)
    src = a.mr(np.arange(100, dtype="u1"))
    s["addr"], s["length"], s["lkey"] = src.addr, 100, src.lkey
    a.qp.post_send_array(s, ah=ah, remote_qpn=b.qp.qp_num, remote_qkey=0x1234)
    poll(a.send_cq, 1, scale.time)
    w = drain(b.recv_cq, 1, scale.time)[0].check()
    assert (w.byte_len, w.src_qp) == (140, a.qp.qp_num)
    a.close()
    b.close()


def test_two_threads_post_on_one_queue_pair(ends, scale):
    """The prepared arrays serve one thread at a time; nobody's requests are mixed up."""
    a, b = ends
    n, rounds = 50, scale.rounds(40, 4)
    x, y = np.arange(2 * n, dtype="u8"), np.zeros(2 * n, "u8")
    src, dst = a.mr(x), b.mr(y)

    def writer(k, errors):
        try:
            s = sends(n, v.IBV_WR_RDMA_WRITE, 0)
            s["addr"] = src.addr + 8 * (np.arange(n) + k * n)
            s["length"], s["lkey"], s["rkey"] = 8, src.lkey, dst.rkey
            s["remote_addr"] = dst.addr + 8 * (np.arange(n) + k * n)
            s["send_flags"][-1] = v.IBV_SEND_SIGNALED
            s["wr_id"] = k
            for _ in range(rounds):
                a.qp.post_send_array(s)
                done.wait(0.0005)
        except BaseException as error:
            errors.append(error)

    done, errors, seen = threading.Event(), [], []
    threads = [threading.Thread(target=writer, args=(k, errors)) for k in range(2)]
    for t in threads:
        t.start()
    import time
    end = time.monotonic() + 30 * scale.time
    while len(seen) < 2 * rounds and not errors and time.monotonic() < end:
        seen += [w.check().wr_id for w in a.send_cq.poll()]
    done.set()
    for t in threads:
        t.join()
    assert not errors and sorted(seen) == [0] * rounds + [1] * rounds and (x == y).all()


def test_no_python_object_per_entry(ends, scale):
    a, b = ends
    n = 256
    r, s, out = recvs(n), sends(n), np.zeros(n, v.WC_DTYPE)

    def once():
        b.qp.post_recv_array(r)
        a.qp.post_send_array(s)
        for cq in (b.recv_cq, a.send_cq):
            got = 0
            while got < n:
                got += cq.poll_array(out, got)

    once()
    tracemalloc.start()
    try:
        once()
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        for _ in range(scale.rounds(20, 2)):
            once()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - base < 16 * n         # 256 objects would take more
