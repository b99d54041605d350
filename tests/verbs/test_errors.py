"""Every way a work request can fail: status on both sides, states, flushing, deadlines."""

import os
import signal
import time

import numpy as np
import pytest
from verbs.departures import rxe
from verbs.pair import End, Pair, drain, quiet

from rocecomm import verbs as v
from rocecomm.errors import CompletionError

SEND = v.IBV_WR_SEND


def test_message_longer_than_the_receive(device, scale):
    for late in (False, True):
        with Pair(device) as (a, b):
            theirs = np.full(2000, 7, "u1")
            sink, src = b.mr(theirs), a.mr(np.zeros(2000, "u1"))
            if not late:
                b.qp.post_recv(sink.sge(0, 1000), wr_id=1)
            a.qp.post_send(SEND, src, wr_id=2)
            if late:
                quiet(a.send_cq)
                b.qp.post_recv(sink.sge(0, 1000), wr_id=1)
            mine = drain(a.send_cq, 1, scale.time)[0]
            their = drain(b.recv_cq, 1, scale.time)[0]
            assert (mine.wr_id, their.wr_id) == (2, 1)
            if rxe(a.ctx):      # departure "length"
                assert mine.status in (v.IBV_WC_REM_OP_ERR, v.IBV_WC_REM_INV_REQ_ERR)
                assert their.status in (v.IBV_WC_LOC_QP_OP_ERR, v.IBV_WC_LOC_LEN_ERR)
            else:
                assert mine.status == v.IBV_WC_REM_INV_REQ_ERR
                assert their.status == v.IBV_WC_LOC_LEN_ERR
            assert (theirs[1000:] == 7).all()
            assert a.qp.state == b.qp.state == v.IBV_QPS_ERR


def test_receiver_not_ready_gives_up(device, scale):
    with Pair(device, options=dict(rnr_retry=2, min_rnr_timer=5)) as (a, b):
        start = time.monotonic()
        a.qp.post_send(SEND, None, wr_id=3)
        w = drain(a.send_cq, 1, scale.time)[0]
        assert (w.status, w.wr_id) == (v.IBV_WC_RNR_RETRY_EXC_ERR, 3)
        assert time.monotonic() - start < 3 * scale.time
        assert a.qp.state == v.IBV_QPS_ERR and b.qp.state == v.IBV_QPS_RTS


def test_receiver_not_ready_waits_for_ever_with_seven(device, scale):
    with Pair(device, options=dict(rnr_retry=7, min_rnr_timer=1)) as (a, b):
        a.qp.post_send(SEND, None)
        quiet(a.send_cq, seconds=0.5)
        b.qp.post_recv(None)
        drain(b.recv_cq, 1, scale.time)[0].check()
        drain(a.send_cq, 1, scale.time)[0].check()


def test_receive_in_time_rescues(device, scale):
    """A receive posted within the retries: the send completes. 61.44 ms * 7 is the patience."""
    with Pair(device, options=dict(rnr_retry=6, min_rnr_timer=25)) as (a, b):
        a.qp.post_send(SEND, None)
        quiet(a.send_cq, seconds=0.03)
        b.qp.post_recv(None)
        drain(b.recv_cq, 1, scale.time)[0].check()
        drain(a.send_cq, 1, scale.time)[0].check()


def test_error_flushes_both_queues_in_order(device, scale):
    with Pair(device) as (a, b):
        for i in range(5):
            a.qp.post_recv(None, wr_id=100 + i)
        for i in range(4):      # no receive at the peer: they wait
            a.qp.post_send(SEND, None, wr_id=i, flags=0)
        a.qp.modify(v.IBV_QPS_ERR)
        sends = drain(a.send_cq, 4, scale.time)
        recvs = drain(a.recv_cq, 5, scale.time)
        # unsignaled requests that fail complete as well
        assert [(w.wr_id, w.status) for w in sends] == [(i, v.IBV_WC_WR_FLUSH_ERR) for i in range(4)]
        assert [(w.wr_id, w.status) for w in recvs] == [(100 + i, v.IBV_WC_WR_FLUSH_ERR) for i in range(5)]
        assert {w.qp_num for w in sends + recvs} == {a.qp.qp_num}
        # what is posted to a queue pair in error is flushed as well
        a.qp.post_recv(None, wr_id=7)
        a.qp.post_send(SEND, None, wr_id=8)
        assert drain(a.send_cq, 1, scale.time)[0].status == v.IBV_WC_WR_FLUSH_ERR
        if not rxe(a.ctx):      # departure "late-recv"
            assert drain(a.recv_cq, 1, scale.time)[0].status == v.IBV_WC_WR_FLUSH_ERR


def test_first_error_then_flush(device, scale):
    with Pair(device) as (a, b):
        src, dst = a.mr(np.zeros(64, "u1")), b.mr(np.zeros(64, "u1"))
        for i in range(4):
            a.qp.post_send(v.IBV_WR_RDMA_WRITE, src, wr_id=i, remote_addr=dst.addr,
                           rkey=dst.rkey if i < 2 else dst.rkey ^ 0x55555500)
        got = [(w.wr_id, w.status) for w in drain(a.send_cq, 4, scale.time)]
        assert got == [(0, v.IBV_WC_SUCCESS), (1, v.IBV_WC_SUCCESS), (2, v.IBV_WC_REM_ACCESS_ERR),
                       (3, v.IBV_WC_WR_FLUSH_ERR)]


def test_error_at_the_responder_flushes_its_receives(device, scale):
    """A remote access error moves the responder to ERR as well: its receives are flushed."""
    with Pair(device) as (a, b):
        src, dst = a.mr(np.zeros(64, "u1")), b.mr(np.zeros(64, "u1"))
        b.qp.post_recv(None, wr_id=5)
        a.qp.post_send(v.IBV_WR_RDMA_WRITE, src, remote_addr=dst.addr, rkey=dst.rkey ^ 0x55555500)
        assert drain(a.send_cq, 1, scale.time)[0].status == v.IBV_WC_REM_ACCESS_ERR
        w = drain(b.recv_cq, 1, scale.time)[0]
        assert (w.wr_id, w.status) == (5, v.IBV_WC_WR_FLUSH_ERR) and b.qp.state == v.IBV_QPS_ERR


def test_reset_drops_everything(device, scale):
    with Pair(device) as (a, b):
        for _ in range(3):
            a.qp.post_recv(None)
        a.qp.post_send(SEND, None)
        a.qp.modify(v.IBV_QPS_RESET)
        b.qp.modify(v.IBV_QPS_RESET)
        quiet(a.send_cq, a.recv_cq)
        a.connect(b.address())
        b.connect(a.address())
        b.qp.post_recv(None, wr_id=1)
        a.qp.post_send(SEND, None, wr_id=2)
        assert drain(b.recv_cq, 1, scale.time)[0].check().wr_id == 1
        assert drain(a.send_cq, 1, scale.time)[0].check().wr_id == 2


def test_peer_queue_pair_is_gone(device, scale):
    with Pair(device, options=dict(timeout=8, retry_cnt=2)) as (a, b):
        b.qp.close()
        a.qp.post_send(v.IBV_WR_RDMA_WRITE, a.mr(np.zeros(8, "u1")), wr_id=1, remote_addr=4096, rkey=1)
        w = drain(a.send_cq, 1, scale.time)[0]
        assert (w.wr_id, w.status) == (1, v.IBV_WC_RETRY_EXC_ERR) and a.qp.state == v.IBV_QPS_ERR


def test_never_connected_number(device, scale):
    e = End(device)
    e.connect((0xABCDE, e.gid.gid), timeout=8, retry_cnt=2)
    e.qp.post_send(SEND, None)
    assert drain(e.send_cq, 1, scale.time)[0].status == v.IBV_WC_RETRY_EXC_ERR
    e.close()


def alive(pid):
    """False once a process has ended, reaped by its parent or not."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def die_connected(peers, when):
    mine = End(peers.device)
    data = np.zeros(1 << 20, "u1")
    mr = mine.mr(data)
    everyone = peers.all_gather("a", (mine.address(), mr.addr, mr.rkey, os.getpid()))
    (address, addr, rkey, pid), = [x for r, x in enumerate(everyone) if r != peers.rank]
    mine.connect(address, timeout=10, retry_cnt=3)
    peers.barrier()
    if peers.rank == 1:
        if when == "idle":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)      # with a send of rank 0 waiting for a receive: killed by rank 0
    if when == "idle":
        while alive(pid):
            time.sleep(0.005)
    start = time.monotonic()
    if when == "idle":
        mine.qp.post_send(v.IBV_WR_RDMA_WRITE, mr, remote_addr=addr, rkey=rkey)
    else:
        mine.qp.post_send(SEND, mr)
        quiet(mine.send_cq, seconds=0.2)
        os.kill(pid, signal.SIGKILL)
    status = drain(mine.send_cq, 1, 10)[0].status
    took = time.monotonic() - start
    mine.close()
    return int(status), took


@pytest.mark.parametrize("when", ["idle", "receiver not ready"])
def test_killed_peer(world, scale, when):
    (status, took), _ = world(2, die_connected, when, plain=True, mortal=[1])
    assert status == v.IBV_WC_RETRY_EXC_ERR and took < 10 * scale.time


def test_completion_queue_overrun(device, scale):
    """More completions than the queue holds: an asynchronous event says so, nothing crashes."""
    with v.open_device(device) as ctx:
        pd, small, other = v.PD(ctx), v.CQ(ctx, 1), v.CQ(ctx, 512)
        room = small.capacity
        e = End(device, ctx=ctx)
        qp = v.QP(pd, small, other, max_send_wr=room + 8)
        peer = v.QP(pd, other, other, max_recv_wr=room + 8)
        e.qp = qp
        e.connect((peer.qp_num, e.gid.gid))
        e.qp = peer
        e.connect((qp.qp_num, e.gid.gid))
        for _ in range(room + 4):
            peer.post_recv(None)
        for _ in range(room + 4):
            qp.post_send(SEND, None)
        event = ctx.get_async_event(10 * scale.time)
        assert event is not None and event.event_type in (v.IBV_EVENT_CQ_ERR, v.IBV_EVENT_QP_FATAL)
        assert event.element in (small, qp)


def test_check_raises(device, scale):
    with Pair(device, options=dict(rnr_retry=0, min_rnr_timer=1)) as (a, b):
        a.qp.post_send(SEND, None, wr_id=42)
        w = drain(a.send_cq, 1, scale.time)[0]
        with pytest.raises(CompletionError, match="request 42 on queue pair .*RNR_RETRY_EXC_ERR") as e:
            w.check()
        assert (e.value.status, e.value.wr_id, e.value.qp_num) == (w.status, 42, a.qp.qp_num)
        assert not w.ok and w.opcode is None and w.imm_data is None and "wr_id=42" in repr(w)
