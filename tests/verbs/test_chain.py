"""Chains that are made once and posted often, and polling until completions are there."""

import copy
import signal
import threading
import time
import tracemalloc

import numpy as np
import pytest
from verbs.pair import End, Pair, pattern

from rocecomm import verbs as v
from rocecomm.errors import ClosedError, VerbsError


@pytest.fixture
def ends(device):
    with Pair(device, depth=256, max_send_wr=64, max_recv_wr=64, max_send_sge=3, max_recv_sge=3) as p:
        yield p


def rows(dtype, n, mr, size=8, **more):
    w = np.zeros(n, dtype)
    w["wr_id"] = np.arange(n)
    w["addr"], w["length"], w["lkey"] = mr.addr + size * np.arange(n), size, mr.lkey
    for name, value in more.items():
        w[name] = value
    return w


def take(cq, n, scale):
    out = np.zeros(n, v.WC_DTYPE)
    assert cq.poll_until(out, n, timeout=20 * scale.time) == n
    assert not out["status"].any(), out
    return out


def test_posted_again_and_again(ends, scale):
    a, b = ends
    n = 20
    x, y = np.zeros(n, "u8"), np.zeros(n, "u8")
    send = v.SendChain(a.qp, rows(v.SEND_WR_DTYPE, n, a.mr(x), opcode=v.IBV_WR_SEND_WITH_IMM,
                                  send_flags=v.IBV_SEND_SIGNALED, imm_data=np.arange(n)))
    recv = v.RecvChain(b.qp, rows(v.RECV_WR_DTYPE, n, b.mr(y)))
    assert len(send) == len(recv) == n
    for turn in range(3):
        x[:] = np.arange(n) + 1000 * turn
        recv.post()
        send.post()
        got = take(b.recv_cq, n, scale)
        assert (got["wr_id"] == np.arange(n)).all() and (got["imm_data"] == np.arange(n)).all()
        assert (take(a.send_cq, n, scale)["wr_id"] == np.arange(n)).all()
        assert (x == y).all()


def test_elements_are_copied_when_it_is_made(ends, scale):
    a, b = ends
    x, y = pattern(64), np.zeros(64, "u1")
    src, dst = a.mr(x), b.mr(y)
    sges = np.zeros(3, v.SGE_DTYPE)
    sges["addr"], sges["length"], sges["lkey"] = src.addr + np.array([0, 40, 16]), 8, src.lkey
    wrs = rows(v.SEND_WR_DTYPE, 1, src, opcode=v.IBV_WR_RDMA_WRITE, send_flags=v.IBV_SEND_SIGNALED,
               remote_addr=dst.addr, rkey=dst.rkey, sge_start=1, num_sge=2)
    chain = v.SendChain(a.qp, wrs, sges)
    wrs[:], sges[:] = 0, 0
    chain.post()
    take(a.send_cq, 1, scale)
    assert (y[:16] == np.r_[x[40:48], x[16:24]]).all() and not y[16:].any()


def test_srq(device, scale):
    with Pair(device, depth=64, srq={"max_wr": 16}, max_send_wr=16) as (a, b):
        x, y = np.arange(4, dtype="u8"), np.zeros(4, "u8")
        recv = v.RecvChain(b.srq, rows(v.RECV_WR_DTYPE, 4, b.mr(y)))
        recv.post()
        v.SendChain(a.qp, rows(v.SEND_WR_DTYPE, 4, a.mr(x), opcode=v.IBV_WR_SEND)).post()
        take(b.recv_cq, 4, scale)
        assert (x == y).all()
        with pytest.raises(ValueError, match="SRQ"):
            v.RecvChain(b.qp, rows(v.RECV_WR_DTYPE, 1, b.mrs[0]))


def test_datagrams_go_to_the_address_of_the_chain(device, scale):
    with End(device, v.IBV_QPT_UD).ctx as ctx:
        end = End(device, v.IBV_QPT_UD, ctx=ctx)
        end.qp.to_init(qkey=7)
        end.qp.to_rtr()
        end.qp.to_rts()
        x, y = np.arange(8, dtype="u1"), np.zeros(48, "u1")
        wrs = rows(v.SEND_WR_DTYPE, 1, end.mr(x), opcode=v.IBV_WR_SEND, send_flags=v.IBV_SEND_SIGNALED)
        with pytest.raises(TypeError, match="ah"):
            v.SendChain(end.qp, wrs)
        ah = v.AH(end.pd, v.AHAttr(dgid=end.gid.gid, sgid_index=end.gid.index))
        chain = v.SendChain(end.qp, wrs, ah=ah, remote_qpn=end.qp.qp_num, remote_qkey=7)
        v.RecvChain(end.qp, rows(v.RECV_WR_DTYPE, 1, end.mr(y), size=48)).post()
        chain.post()
        take(end.recv_cq, 1, scale)
        assert (y[40:] == x).all()
        ah.close()
        with pytest.raises(ClosedError):
            chain.post()


def test_what_the_queue_does_not_take(ends, scale):
    a, b = ends
    send = v.SendChain(a.qp, rows(v.SEND_WR_DTYPE, 200, a.mr(np.zeros(200, "u8")), opcode=v.IBV_WR_SEND))
    with pytest.raises(VerbsError, match="the queue takes") as caught:
        send.post()
    assert 64 <= caught.value.posted < 200
    recv = v.RecvChain(b.qp, rows(v.RECV_WR_DTYPE, 1000, b.mr(np.zeros(1000, "u8"))))
    with pytest.raises(VerbsError, match="the queue takes") as caught:
        recv.post()
    assert 64 <= caught.value.posted < 1000


def test_bad_arguments(ends):
    a, _ = ends
    good = rows(v.SEND_WR_DTYPE, 2, a.mr(np.zeros(2, "u8")), opcode=v.IBV_WR_SEND)
    for bad, error in ((good["wr_id"], TypeError), (good.reshape(1, 2), TypeError), (None, TypeError),
                       (good[:0], ValueError)):
        with pytest.raises(error):
            v.SendChain(a.qp, bad)
    with pytest.raises(BufferError, match="contiguous"):
        v.SendChain(a.qp, good[::-1])
    good["num_sge"][1] = 1
    with pytest.raises(ValueError, match="row 1 names elements"):
        v.SendChain(a.qp, good)
    good["num_sge"], good["opcode"][1] = 0, 99
    with pytest.raises(ValueError, match="opcode 99"):
        v.SendChain(a.qp, good)
    with pytest.raises(TypeError):
        v.RecvChain(a.pd, np.zeros(1, v.RECV_WR_DTYPE))
    chain = v.RecvChain(a.qp, np.zeros(1, v.RECV_WR_DTYPE))
    with pytest.raises(TypeError):
        copy.copy(chain)
    a.qp.close()
    with pytest.raises(ClosedError):
        chain.post()
    assert "closed" in repr(chain)


def test_poll_until_takes_what_is_there_or_times_out(ends, scale):
    a, b = ends
    out = np.zeros(8, v.WC_DTYPE)
    start = time.monotonic()
    assert a.send_cq.poll_until(out, 1, timeout=0.05) == 0
    assert 0.05 <= time.monotonic() - start < 2 * scale.time
    write = v.SendChain(a.qp, rows(v.SEND_WR_DTYPE, 3, a.mr(np.zeros(3, "u8")), opcode=v.IBV_WR_RDMA_WRITE,
                                   send_flags=v.IBV_SEND_SIGNALED, remote_addr=b.mr(np.zeros(3, "u8")).addr,
                                   rkey=b.mrs[0].rkey))
    write.post()
    assert a.send_cq.poll_until(out, 4, timeout=0.3 * scale.time, start=2) == 3
    assert (out["wr_id"][2:5] == np.arange(3)).all() and not out["status"].any()
    for count, first in ((0, 0), (9, 0), (1, 8), (1, -1)):
        with pytest.raises(ValueError, match="do not fit"):
            a.send_cq.poll_until(out, count, start=first)
    for bad, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error):
            a.send_cq.poll_until(out, 1, bad)


def test_poll_until_gives_way_to_threads_signals_and_close(ends, scale):
    a, _ = ends
    out = np.zeros(1, v.WC_DTYPE)
    ended = []

    def wait():
        try:
            a.send_cq.poll_until(out)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)            # the GIL is free meanwhile

    def stop(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            a.recv_cq.poll_until(out, timeout=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    a.qp.close()
    a.send_cq.close()
    thread.join(10 * scale.time)
    assert ended and not thread.is_alive()


def test_no_memory_per_post(ends, scale):
    a, b = ends
    n = 16
    write = v.SendChain(a.qp, rows(v.SEND_WR_DTYPE, n, a.mr(np.zeros(n, "u8")), opcode=v.IBV_WR_RDMA_WRITE,
                                   send_flags=v.IBV_SEND_SIGNALED, remote_addr=b.mr(np.zeros(n, "u8")).addr,
                                   rkey=b.mrs[0].rkey))
    out = np.zeros(n, v.WC_DTYPE)

    def turns(count):
        for _ in range(count):
            write.post()
            a.send_cq.poll_until(out, n)

    turns(3)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()
        turns(scale.rounds(200, 10))
        after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after[0] - before[0] < 2000 and after[1] - before[0] < 6000
