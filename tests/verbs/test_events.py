"""Completion channels: sleeping until a peer sends, arming, solicited events, many CQs."""

import select
import threading
import time

import numpy as np
import pytest
from verbs.pair import End, Pair, drain, quiet

from rocecomm import verbs as v
from rocecomm.errors import ClosedError

SEND = v.IBV_WR_SEND


def test_armed_queue_makes_one_event(device, scale):
    with Pair(device, channel=True) as (a, b):
        for _ in range(4):
            b.qp.post_recv(None)
        b.recv_cq.req_notify()
        assert b.channel.get_event(0) is None
        a.qp.post_send(SEND, None)
        assert b.channel.get_event(10 * scale.time) is b.recv_cq
        assert b.channel.get_event(0.05) is None        # not armed again
        drain(b.recv_cq, 1, scale.time)
        a.qp.post_send(SEND, None)
        drain(a.send_cq, 2, scale.time)
        drain(b.recv_cq, 1, scale.time)
        assert b.channel.get_event(0.05) is None
        b.recv_cq.req_notify()
        a.qp.post_send(SEND, None)
        assert b.channel.get_event(10 * scale.time) is b.recv_cq


def test_completion_before_arming_makes_no_event(device, scale):
    """The rule that every waiter must know: arm, poll once more, then sleep."""
    with Pair(device, channel=True) as (a, b):
        b.qp.post_recv(None)
        a.qp.post_send(SEND, None)
        drain(a.send_cq, 1, scale.time)
        time.sleep(0.02)
        b.recv_cq.req_notify()
        assert drain(b.recv_cq, 1, scale.time)[0].ok


def test_solicited_only(device, scale):
    with Pair(device, channel=True) as (a, b):
        for i in range(4):
            b.qp.post_recv(None, wr_id=i)
        b.recv_cq.req_notify(True)
        a.qp.post_send(SEND, None)
        drain(a.send_cq, 1, scale.time)
        assert b.channel.get_event(0.1) is None
        a.qp.post_send(SEND, None, flags=v.IBV_SEND_SIGNALED | v.IBV_SEND_SOLICITED)
        assert b.channel.get_event(10 * scale.time) is b.recv_cq
        drain(b.recv_cq, 2, scale.time)


def test_an_error_is_solicited(device, scale):
    with Pair(device, channel=True) as (a, b):
        b.qp.post_recv(None)
        b.recv_cq.req_notify(True)
        b.qp.modify(v.IBV_QPS_ERR)
        assert b.channel.get_event(10 * scale.time) is b.recv_cq
        assert drain(b.recv_cq, 1, scale.time)[0].status == v.IBV_WC_WR_FLUSH_ERR


def test_send_side_event(device, scale):
    with Pair(device, channel=True) as (a, b):
        b.qp.post_recv(None)
        a.send_cq.req_notify()
        a.qp.post_send(SEND, None)
        assert a.channel.get_event(10 * scale.time) is a.send_cq


def test_channel_in_select_and_poll(device, scale):
    with Pair(device, channel=True) as (a, b):
        b.qp.post_recv(None)
        b.recv_cq.req_notify()
        assert select.select([b.channel], [], [], 0)[0] == []
        a.qp.post_send(SEND, None)
        assert select.select([b.channel], [], [], 10 * scale.time)[0] == [b.channel]
        epoll = select.epoll()
        epoll.register(b.channel.fd, select.EPOLLIN)
        assert epoll.poll(10 * scale.time)[0][0] == b.channel.fd
        assert b.channel.get_event(0) is b.recv_cq
        assert epoll.poll(0) == []
        epoll.close()


def sleeper(peers, delay):
    """Rank 0 sleeps on its channel, rank 1 sends after `delay`; CPU time of the sleeper."""
    mine = End(peers.device, channel=True)
    addresses = peers.all_gather("a", mine.address())
    mine.connect(addresses[1 - peers.rank])
    data = np.zeros(1000, "u1")
    mr = mine.mr(data)
    result = None
    if peers.rank == 0:
        mine.qp.post_recv(mr)
        mine.recv_cq.req_notify()
    peers.barrier()
    if peers.rank == 0:
        cpu, start = time.process_time(), time.monotonic()
        cq = mine.channel.get_event(60)
        result = time.process_time() - cpu, time.monotonic() - start, cq is mine.recv_cq
        assert drain(mine.recv_cq, 1, 10)[0].check().byte_len == 1000 and (data == 7).all()
    else:
        data[:] = 7
        time.sleep(delay)
        mine.qp.post_send(SEND, mr)
        drain(mine.send_cq, 1, 10)[0].check()
    peers.barrier()
    mine.close()
    return result


def test_sleeper_is_woken_by_another_process(world, scale):
    cpu, wall, right = world(2, sleeper, 1.0, plain=True)[0]
    assert right and 0.5 < wall < 5 * scale.time and cpu < 0.25 * wall


def receive_late(peers):
    """Rank 0's send waits for a receive and rank 0 sleeps; rank 1 posts the receive later."""
    mine = End(peers.device, channel=True)
    addresses = peers.all_gather("a", mine.address())
    mine.connect(addresses[1 - peers.rank])
    data = np.full(100000, peers.rank, "u1")
    mr = mine.mr(data)
    peers.barrier()
    if peers.rank == 0:
        mine.send_cq.req_notify()
        mine.qp.post_send(SEND, mr)
        if not mine.send_cq.poll(1):
            assert mine.channel.get_event(60) is mine.send_cq
            drain(mine.send_cq, 1, 10)[0].check()
    else:
        time.sleep(0.5)
        mine.qp.post_recv(mr)
        drain(mine.recv_cq, 1, 10)[0].check()
        assert not data.any()
    peers.barrier()
    mine.close()
    return True


def test_sleeping_sender_is_completed_by_the_late_receiver(world):
    assert world(2, receive_late, plain=True) == [True, True]


@pytest.mark.parametrize("rnr_retry, expected", [(3, v.IBV_WC_RNR_RETRY_EXC_ERR)])
def test_deadline_reaches_a_sleeper(device, scale, rnr_retry, expected):
    """Retries that run out wake a sender that is asleep on its channel."""
    with Pair(device, channel=True, options=dict(rnr_retry=rnr_retry, min_rnr_timer=14)) as (a, b):
        a.send_cq.req_notify()
        a.qp.post_send(SEND, None)
        start = time.monotonic()
        if not (got := a.send_cq.poll(1)):
            assert a.channel.get_event(20 * scale.time) is a.send_cq
            got = drain(a.send_cq, 1, scale.time)
        assert got[0].status == expected and time.monotonic() - start < 5 * scale.time


def test_timeout_and_arguments(device, scale):
    with v.open_device(device) as ctx:
        ch = v.CompChannel(ctx)
        start = time.monotonic()
        assert ch.get_event(0.3) is None
        assert 0.25 < time.monotonic() - start < 2 * scale.time
        with pytest.raises(ValueError):
            ch.get_event(-1)
        with pytest.raises(TypeError):
            ch.get_event("1")


def test_close_ends_a_sleep(device):
    ctx = v.open_device(device)
    ch = v.CompChannel(ctx)
    cq = v.CQ(ctx, 4, ch)
    cq.req_notify()
    out = []

    def wait():
        try:
            ch.get_event(30)
        except ClosedError as error:
            out.append(error)

    t = threading.Thread(target=wait)
    t.start()
    time.sleep(0.2)
    ch.close()
    t.join(10)
    assert not t.is_alive() and len(out) == 1 and cq.closed
    ctx.close()


def test_other_threads_run_while_one_sleeps(device):
    with v.open_device(device) as ctx:
        ch = v.CompChannel(ctx)
        t = threading.Thread(target=ch.get_event, args=(0.5,))
        t.start()
        n, end = 0, time.monotonic() + 0.4
        while time.monotonic() < end:
            n += 1
        t.join()
        assert n > 10000


def test_two_queues_on_one_channel(device, scale):
    with Pair(device, channel=True) as (a, b):
        b.qp.post_recv(None)
        b.qp.post_recv(None)
        a.qp.post_recv(None)
        for cq in (b.recv_cq, b.send_cq):
            cq.req_notify()
        b.qp.post_send(SEND, None)
        a.qp.post_send(SEND, None)
        got = {b.channel.get_event(10 * scale.time), b.channel.get_event(10 * scale.time)}
        assert got == {b.recv_cq, b.send_cq}


def test_event_for_a_closed_queue_is_swallowed(device, scale):
    with Pair(device, channel=True) as (a, b):
        cq2 = v.CQ(b.ctx, 8, b.channel)
        b.qp.post_recv(None)
        b.recv_cq.req_notify()
        a.qp.post_send(SEND, None)
        drain(a.send_cq, 1, scale.time)
        time.sleep(0.05)
        b.qp.close()
        b.recv_cq.close()
        assert b.channel.get_event(0.1) is None
        quiet(cq2, seconds=0.01)
