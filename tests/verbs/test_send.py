"""Send and receive on RC: sizes, elements, inline, immediate data, flags, SRQ."""

import numpy as np
import pytest
from verbs.departures import rxe
from verbs.pair import LOCAL, Pair, drain, pattern, quiet

from rocecomm import verbs as v
from rocecomm.errors import VerbsError

SEND, SEND_IMM = v.IBV_WR_SEND, v.IBV_WR_SEND_WITH_IMM


@pytest.fixture
def ends(device):
    with Pair(device, max_send_sge=4, max_recv_sge=4, max_inline_data=64) as p:
        yield p


def exchange(a, b, data, room=None, late=False, scale=1.0):
    """a sends `data`, b receives into `room` bytes; returns what arrived and guards it."""
    target = np.full((len(data) if room is None else room) + 64, 0xAA, "u1")
    src, dst = a.mr(data), b.mr(target)
    into = dst.sge(32, len(target) - 64)
    if not late:
        b.qp.post_recv(into, wr_id=5)
    a.qp.post_send(SEND, src, wr_id=6)
    if late:
        quiet(a.send_cq, b.recv_cq)
        b.qp.post_recv(into, wr_id=5)
    got = drain(b.recv_cq, 1, scale)[0].check()
    sent = drain(a.send_cq, 1, scale)[0].check()
    assert (got.wr_id, got.opcode, got.qp_num) == (5, v.IBV_WC_RECV, b.qp.qp_num)
    assert (sent.wr_id, sent.opcode, sent.qp_num) == (6, v.IBV_WC_SEND, a.qp.qp_num)
    assert got.imm_data is None
    assert (target[:32] == 0xAA).all() and (target[32 + got.byte_len:] == 0xAA).all()
    src.close()
    dst.close()
    return target[32:32 + got.byte_len]


@pytest.mark.parametrize("late", [False, True])
def test_sizes(ends, scale, late):
    a, b = ends
    for n in scale.sizes(1, 2, 7, 8, 63, 64, 65, 255, 256, 257, 511, 512, 1023, 1024, 1025, 4095, 4096,
                         4097, 65536, 65537, (1 << 20) - 1, 8 << 20, (64 << 20) - 3):
        assert (exchange(a, b, pattern(n, n), late=late, scale=scale.time) == pattern(n, n)).all(), n


def test_smaller_message_leaves_the_rest(ends, scale):
    got = exchange(*ends, pattern(100), room=4096, scale=scale.time)
    assert len(got) == 100 and (got == pattern(100)).all()


def test_zero_bytes(ends, scale):
    a, b = ends
    for local in (None, []):
        b.qp.post_recv(None, wr_id=1)
        b.qp.post_recv(b.mr(bytearray(16)), wr_id=2)
        a.qp.post_send(SEND, local, wr_id=3)
        a.qp.post_send(SEND, local, wr_id=4)
        got = drain(b.recv_cq, 2, scale.time)
        assert [(w.check().wr_id, w.byte_len) for w in got] == [(1, 0), (2, 0)]
        assert [w.check().wr_id for w in drain(a.send_cq, 2, scale.time)] == [3, 4]


def test_scatter_and_gather(ends, scale):
    a, b = ends
    parts = [pattern(n, n) for n in (5, 1000, 3)]
    targets = [np.zeros(n, "u1") for n in (400, 8, 600, 10)]
    sources, sinks = [a.mr(p) for p in parts], [b.mr(t) for t in targets]
    b.qp.post_recv(sinks)
    a.qp.post_send(SEND, sources)
    assert drain(b.recv_cq, 1, scale.time)[0].check().byte_len == 1008
    drain(a.send_cq, 1, scale.time)[0].check()
    assert np.concatenate(targets)[:1008].tobytes() == np.concatenate(parts).tobytes()
    assert not targets[3].any()


def test_too_many_elements(ends):
    a, b = ends
    mr = a.mr(bytearray(64))
    limit = a.qp.max_send_sge
    with pytest.raises(VerbsError, match="element") as e:
        a.qp.post_send(SEND, [mr.sge(0, 1)] * (limit + 1))
    assert e.value.errno == 22
    with pytest.raises(VerbsError, match="element"):
        b.qp.post_recv([b.mr(bytearray(8))] * (b.qp.max_recv_sge + 1))


def test_inline(ends, scale):
    a, b = ends
    limit = a.qp.max_inline_data
    target = np.zeros(limit, "u1")
    sink = b.mr(target)
    for n in (1, 8, limit):
        data = pattern(n, n)
        b.qp.post_recv(sink)
        a.qp.post_send(SEND, data, flags=v.IBV_SEND_SIGNALED | v.IBV_SEND_INLINE)
        data[:] = 0             # inline: the memory is free as soon as the post returns
        assert drain(b.recv_cq, 1, scale.time)[0].check().byte_len == n
        drain(a.send_cq, 1, scale.time)[0].check()
        assert (target[:n] == pattern(n, n)).all()
    b.qp.post_recv(sink)
    a.qp.post_send(SEND, [b"ab", a.mr(bytearray(b"cd")), b"e"],
                   flags=v.IBV_SEND_SIGNALED | v.IBV_SEND_INLINE)
    assert drain(b.recv_cq, 1, scale.time)[0].byte_len == 5 and target[:5].tobytes() == b"abcde"
    drain(a.send_cq, 1, scale.time)
    with pytest.raises(VerbsError, match="inline"):
        a.qp.post_send(SEND, bytes(limit + 1), flags=v.IBV_SEND_INLINE)
    with pytest.raises(TypeError, match="registered first"):
        a.qp.post_send(SEND, b"not registered")


# D8 holds for sends as well
@pytest.mark.parametrize("value", [0, 1, 0x89ABCDEF, 0xFFFFFFFF])
def test_immediate(ends, scale, value):
    a, b = ends
    b.qp.post_recv(None)
    a.qp.post_send(SEND_IMM, None, imm_data=value)
    w = drain(b.recv_cq, 1, scale.time)[0].check()
    assert w.imm_data == value and w.wc_flags & v.IBV_WC_WITH_IMM and w.opcode == v.IBV_WC_RECV
    assert drain(a.send_cq, 1, scale.time)[0].check().imm_data is None


def test_arguments_of_a_send(ends):
    a, _ = ends
    for bad in (2**32, -1):
        with pytest.raises(ValueError, match="imm_data must lie"):
            a.qp.post_send(SEND_IMM, None, imm_data=bad)
        with pytest.raises(ValueError):
            a.qp.post_send(SEND, None, wr_id=-1 if bad < 0 else 2**64)
    with pytest.raises(ValueError, match="needs imm_data"):
        a.qp.post_send(SEND_IMM, None)
    with pytest.raises(ValueError, match="only"):
        a.qp.post_send(SEND, None, imm_data=3)
    with pytest.raises(ValueError, match="opcode 8"):
        a.qp.post_send(8)
    with pytest.raises(TypeError, match="remote_addr and rkey"):
        a.qp.post_send(v.IBV_WR_RDMA_WRITE, None)
    with pytest.raises(TypeError, match="an MR, an SGE"):
        a.qp.post_send(SEND, 3)
    with pytest.raises(ValueError, match="2\\*\\*32-1"):
        v.SGE(0, 2**32, 0)


def test_unsignaled(ends, scale):
    a, b = ends
    sink = b.mr(bytearray(8 * 8))
    src = a.mr(np.arange(8, dtype="u8"))
    for i in range(8):
        b.qp.post_recv(sink.sge(8 * i, 8), wr_id=i)
    for i in range(8):
        a.qp.post_send(SEND, src.sge(8 * i, 8), wr_id=i, flags=v.IBV_SEND_SIGNALED if i == 7 else 0)
    assert [w.wr_id for w in drain(b.recv_cq, 8, scale.time)] == list(range(8))
    assert [w.check().wr_id for w in drain(a.send_cq, 1, scale.time)] == [7]
    assert np.frombuffer(sink.buffer, "u8").tolist() == list(range(8))


def test_all_signaled(device, scale):
    with Pair(device, sq_sig_all=True) as (a, b):
        b.qp.post_recv(None)
        a.qp.post_send(SEND, None, wr_id=9, flags=0)
        assert drain(a.send_cq, 1, scale.time)[0].check().wr_id == 9 and a.qp.sq_sig_all


def test_order_of_many(ends, scale):
    """Thousands of messages arrive in order, in windows that fill the queues."""
    a, b = ends
    n, window = scale.rounds(4000, 200), 16
    values = np.arange(n, dtype="u8")
    room = np.zeros(window, "u8")
    src, sink = a.mr(values), b.mr(room)
    for start in range(0, n, window):
        some = range(start, min(n, start + window))
        for i in some:
            b.qp.post_recv(sink.sge(8 * (i % window), 8), wr_id=i)
        for i in some:
            a.qp.post_send(SEND, src.sge(8 * i, 8), wr_id=i)
        assert [w.check().wr_id for w in drain(b.recv_cq, len(some), scale.time)] == list(some)
        assert [w.check().wr_id for w in drain(a.send_cq, len(some), scale.time)] == list(some)
        assert room[:len(some)].tolist() == list(some)


def test_full_send_queue(device, scale):
    """Posting more than the queue holds raises ENOMEM, and nothing that was taken is lost."""
    with Pair(device, max_send_wr=8, max_recv_wr=8, depth=256) as (a, b):
        taken = 0
        with pytest.raises(VerbsError, match="queue takes .* and is full") as e:
            while taken < 5000:
                a.qp.post_send(SEND, None, wr_id=taken)
                taken += 1
        assert e.value.errno == 12 and taken >= 8
        done = 0
        while done < taken:
            b.qp.post_recv(None)
            got = drain(a.send_cq, 1, scale.time)[0].check()
            drain(b.recv_cq, 1, scale.time)[0].check()
            assert got.wr_id == done
            done += 1
        b.qp.post_recv(None)
        a.qp.post_send(SEND, None)
        drain(a.send_cq, 1, scale.time)[0].check()


def test_full_receive_queue(ends):
    _, b = ends
    with pytest.raises(VerbsError, match="is full") as e:
        for _ in range(4 * b.qp.max_recv_wr):       # a device may take more than it grants
            b.qp.post_recv(None)
    assert e.value.errno == 12


def test_both_ways_at_once(ends, scale):
    a, b = ends
    x, y = pattern(50000, 1), pattern(50000, 2)
    into_a, into_b = np.zeros(50000, "u1"), np.zeros(50000, "u1")
    a.qp.post_recv(a.mr(into_a))
    b.qp.post_recv(b.mr(into_b))
    a.qp.post_send(SEND, a.mr(x, 0))
    b.qp.post_send(SEND, b.mr(y, 0))
    for cq in (a.recv_cq, b.recv_cq, a.send_cq, b.send_cq):
        drain(cq, 1, scale.time)[0].check()
    assert (into_a == y).all() and (into_b == x).all()


def test_to_itself(device, scale):
    from verbs.pair import End
    e = End(device)
    e.connect(e.address())
    target = bytearray(11)
    e.qp.post_recv(e.mr(target))
    e.qp.post_send(SEND, e.mr(b"hello world", 0))
    drain(e.recv_cq, 1, scale.time)[0].check()
    drain(e.send_cq, 1, scale.time)[0].check()
    assert target == b"hello world"
    e.close()


def test_read_only_source(ends, scale, tmp_path):
    """A3: a file mapped for reading can be sent; registering it for writing is refused."""
    a, b = ends
    path = tmp_path / "data"
    path.write_bytes(pattern(10000).tobytes())
    m = np.memmap(path, mode="r")
    target = np.zeros(10000, "u1")
    b.qp.post_recv(b.mr(target))
    if rxe(a.ctx):              # departure "shared-file"
        with pytest.raises(VerbsError, match="mode 'c'"):
            a.mr(m, 0)
        m = np.memmap(path, mode="c")
    a.qp.post_send(SEND, a.mr(m, 0))
    drain(b.recv_cq, 1, scale.time)[0].check()
    drain(a.send_cq, 1, scale.time)[0].check()
    assert (target == m).all()
    with pytest.raises(BufferError, match="read-only"):
        a.mr(np.memmap(path, mode="r"), LOCAL)


# --------------------------------------------------------------------------- SRQ
def test_shared_receive_queue(device, scale):
    with Pair(device, srq=dict(max_wr=32)) as (a, b):
        assert b.srq.max_wr >= 32 and b.srq.max_sge >= 1 and b.qp.srq is b.srq
        data = np.zeros(32, "u8")
        sink = b.mr(data)
        for i in range(16):
            b.srq.post_recv(sink.sge(8 * i, 8), wr_id=100 + i)
        src = a.mr(np.arange(16, dtype="u8"))
        for i in range(16):
            a.qp.post_send(SEND, src.sge(8 * i, 8), wr_id=i)
            w = drain(b.recv_cq, 1, scale.time)[0].check()
            assert (w.wr_id, w.qp_num) == (100 + i, b.qp.qp_num)
            drain(a.send_cq, 1, scale.time)[0].check()
        assert data[:16].tolist() == list(range(16))
        with pytest.raises(ValueError, match="SRQ"):
            b.qp.post_recv(None)


def test_srq_serves_several_queue_pairs(device, scale):
    from verbs.pair import End
    hub = End(device, srq=dict(max_wr=16))
    qps = [hub.qp] + [v.QP(hub.pd, hub.send_cq, hub.recv_cq, srq=hub.srq) for _ in range(2)]
    spokes = [End(device, ctx=hub.ctx) for _ in qps]
    for qp, s in zip(qps, spokes, strict=True):
        hub.qp = qp
        hub.connect(s.address())
        s.connect((qp.qp_num, hub.gid.gid))
    room = np.zeros(16, "u8")
    sink = hub.mr(room)
    for i in range(9):
        hub.srq.post_recv(sink.sge(8 * i, 8), wr_id=i)
    values = np.arange(9, dtype="u8") + 50
    src = hub.mr(values)
    for i in range(9):
        s = spokes[i % 3]
        v_src = s.mr(values, 0)
        s.qp.post_send(SEND, v_src.sge(8 * i, 8))
        drain(s.send_cq, 1, scale.time)[0].check()
    got = drain(hub.recv_cq, 9, scale.time)
    assert sorted(w.check().wr_id for w in got) == list(range(9)) and sorted(room[:9]) == sorted(values)
    assert {w.qp_num for w in got} == {q.qp_num for q in qps}
    src.close()
    hub.close()


def test_srq_limit_event(device, scale):
    with Pair(device, srq=dict(max_wr=16)) as (a, b):
        for i in range(4):
            b.srq.post_recv(None, wr_id=i)
        b.srq.modify(srq_limit=3)
        assert b.srq.query().srq_limit == 3 and b.ctx.get_async_event(0) is None
        for _ in range(2):
            a.qp.post_send(SEND, None)
        drain(a.send_cq, 2, scale.time)
        drain(b.recv_cq, 2, scale.time)
        event = b.ctx.get_async_event(10 * scale.time)
        assert event.event_type == v.IBV_EVENT_SRQ_LIMIT_REACHED and event.element is b.srq
        assert b.srq.query().srq_limit == 0         # it fires once
