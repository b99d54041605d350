"""Requests, blocking sends to each other, messages to oneself: cases C10, C13."""

import faulthandler
import gc
import random
import time
import weakref

import numpy as np
import pytest

from rocecomm import ANY_SOURCE, ANY_TAG, MessageTruncatedError, RocecommError


def requests_in_every_order(comm, n):
    other, rng = 1 - comm.rank, random.Random(7)
    size = [20000 if i % 3 == 0 else 10 for i in range(n)]
    into = [np.zeros(size[i], "i4") for i in range(n)]
    receives = [comm.irecv(into[i], other, tag=i) for i in range(n)]
    sends = [comm.isend(np.full(size[i], i, "i4"), other, tag=i) for i in range(n)]
    for i in rng.sample(range(n), n):
        assert receives[i].wait() == receives[i].wait(0) == size[i] * 4
        assert receives[i].test() and receives[i].done and receives[i].error is None
        assert (receives[i].source, receives[i].tag) == (other, i)
        assert (into[i] == i).all()
    for send in reversed(sends):
        assert send.wait() == send.nbytes
    assert "done" in repr(sends[0])


def test_requests_in_random_order_and_twice(world, scale):
    world(2, requests_in_every_order, scale.rounds(1000, 60), timeout=60)


def cancelling(comm):
    if comm.rank == 0:
        first, second, third = np.zeros(4), np.zeros(4), np.zeros(4)
        request = comm.irecv(first, 1, tag=1)
        assert not request.test() and request.cancel() and not request.cancel()
        with pytest.raises(RocecommError, match="cancelled"):
            request.wait()
        comm.irecv(second, 1, tag=2)                            # dropped, not cancelled
        comm.send(b"x", 1)
        comm.recv(third, 1, tag=1)
        assert (third == 3).all() and not first.any()
        while not (second == 4).all():
            comm.progress()
        big = comm.isend(np.zeros(100000), 1, tag=5)
        assert big.cancel() is False                            # asked back
        comm.send(b"x", 1, tag=9)
        with pytest.raises(RocecommError, match="cancelled"):
            big.wait(20)
        comm.send(np.full(10, 9.0), 1, tag=5)
        assert "failed" in repr(big)
    else:
        comm.recv(bytearray(1), 0)
        comm.send(np.full(4, 3.0), 0, tag=1)
        comm.send(np.full(4, 4.0), 0, tag=2)
        comm.recv(bytearray(1), 0, tag=9)                       # and takes part in the withdrawal
        got = np.zeros(100000)
        assert comm.recv(got, 0, tag=5) == 80
        assert (got[:10] == 9).all()


def test_cancelling(world):
    world(2, cancelling)


def waiting_for_any(comm):
    if comm.rank == 0:
        a, b = np.zeros(1), np.zeros(1)
        both = [comm.irecv(a, 1, tag=1), comm.irecv(b, 1, tag=2)]
        assert comm.wait_any(both) == 1 and b[0] == 2
        comm.send(b"x", 1)
        assert comm.wait_all(both) == [8, 8] and a[0] == 1
    else:
        comm.send(np.float64([2]), 0, tag=2)
        comm.recv(bytearray(1), 0)
        comm.send(np.float64([1]), 0, tag=1)


def test_wait_any(world):
    world(2, waiting_for_any)


# ------------------------------------------------------------------------ both send, C10

def both_send_first(comm, sizes):
    other = 1 - comm.rank
    outcome = {}
    for n in sizes:
        mine, got = np.full(n, comm.rank + 1, "u1"), np.zeros(n, "u1")
        start = time.monotonic()
        try:
            comm.send(mine, other)
            comm.recv(got, other)
            assert (got == other + 1).all()
            outcome[n] = "sent"
        except RocecommError as error:
            assert str(n) in str(error) and "sendrecv" in str(error) and f"rank {other}" in str(error)
            outcome[n] = "refused"
        assert time.monotonic() - start < 10
        assert comm.sendrecv(mine, other, got, other) == n
        assert (got == other + 1).all()
        sending = comm.isend(mine, other)
        comm.recv(got, other)
        sending.wait()
    return outcome


def test_both_sides_send_first(world, scale):
    sizes = scale.sizes(1024, 64 << 10, 1 << 20, 64 << 20)
    for outcome in world(2, both_send_first, sizes, timeout=60):
        assert outcome.pop(1024) == outcome.pop(64 << 10) == "sent"     # within the eager limit
        assert set(outcome.values()) == {"refused"}


def posted_receive_breaks_the_cycle(comm, n):
    other = 1 - comm.rank
    for _ in range(20):
        got = np.zeros(n, "u1")
        into = comm.irecv(got, other)
        comm.send(np.full(n, comm.rank + 1, "u1"), other, timeout=20)
        into.wait(20)
        assert (got == other + 1).all()


def test_no_false_alarm_when_a_receive_is_posted(world):
    world(2, posted_receive_breaks_the_cycle, 200000)


def to_oneself(comm):
    comm.send(b"abc", comm.rank)
    word = bytearray(3)
    assert comm.recv(word, comm.rank) == 3 and word == b"abc"
    big = np.arange(1 << 18)
    out = np.zeros_like(big)
    sending = comm.isend(big, comm.rank, tag=4)
    assert comm.recv(out, comm.rank, tag=4) == big.nbytes and (out == big).all()
    assert sending.wait() == big.nbytes
    out[:] = 0
    into = comm.irecv(out, ANY_SOURCE)
    comm.send(big, comm.rank)
    assert into.wait() == big.nbytes and (out == big).all()
    with pytest.raises(RocecommError, match="oneself"):
        comm.send(big, comm.rank)
    dropped = comm.isend(big, comm.rank, tag=7)
    dropped.cancel()
    with pytest.raises(RocecommError, match="cancelled"):
        dropped.wait()
    with pytest.raises(MessageTruncatedError):
        sending = comm.isend(big, comm.rank)
        comm.recv(out[:5], comm.rank)
    assert sending.wait() == big.nbytes
    if comm.size == 2:                          # until then the other one is there
        comm.sendrecv(word, 1 - comm.rank, bytearray(3), 1 - comm.rank, 9, 9)


def test_messages_to_oneself(world):
    world(1, to_oneself)
    world(2, to_oneself)


# -------------------------------------------------------------- the cycle collector

class Node:
    """Garbage that only the cycle collector finds."""

    def __init__(self, *held):
        self.held = held
        self.me = self


class Late(Node):
    """Uses a request while the collector is at work on both."""

    found = []

    def __del__(self):
        request = self.held[0]
        self.found.append((request.done, request.cancel(), str(request.error)))


def collected_in_a_cycle(comm):
    """The collector finds Requests in flight: their memory stays until they have ended."""
    other, n = 1 - comm.rank, 300000
    for make in (lambda: [np.full(n, 7, "u1")], lambda: [np.full(n // 2, 7, "u1"), np.full(n // 2, 7, "u1")]):
        into, data = make(), make()
        refs = [weakref.ref(a) for a in into + data]
        Node(comm.irecv(into if len(into) > 1 else into[0], other, tag=1))
        Node(comm.isend(data if len(data) > 1 else data[0], other, tag=2))
        Node(Late(comm.irecv(bytearray(n), other, tag=3)))
        del into, data
        gc.collect()
        assert all(ref() is not None for ref in refs)           # nothing has been received yet
        comm.barrier()
        got = np.zeros(n, "u1")
        assert comm.sendrecv(bytes(n), other, got, other, sendtag=1, recvtag=2) == n
        assert (got == 7).all()
        comm.send(bytes(n), other, tag=3)
        deadline = time.monotonic() + 20
        while any(ref() is not None for ref in refs):           # all goes in the end
            comm.progress()
            assert time.monotonic() < deadline
    assert len(Late.found) == 2 and all("dropped" in error for _, _, error in Late.found)
    comm.barrier()


def test_requests_that_the_collector_finds_hold_their_memory(world):
    world(2, collected_in_a_cycle)


class Polls(Node):
    def __del__(self):
        self.held[0].progress()


def collected_in_a_probe(comm):
    """A probe makes an object, which may run the collector: nothing is locked then."""
    faulthandler.dump_traceback_later(15, exit=True)
    threshold = gc.get_threshold()
    gc.disable()
    try:
        for _ in range(3):
            comm.isend(b"x", comm.rank, tag=1)
            Polls(comm, comm.irecv(bytearray(4), comm.rank, tag=5))
            gc.set_threshold(1)
            gc.enable()
            assert comm.probe(comm.rank, 1).nbytes == 1
            gc.disable()
            comm.recv(bytearray(1), comm.rank, tag=1)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
        faulthandler.cancel_dump_traceback_later()


def test_the_collector_may_run_in_a_probe(world):
    world(1, collected_in_a_probe)


def refused_timeouts(comm):
    for timeout in ("1", -1, float("nan")):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            comm.sendrecv(b"x", comm.rank, bytearray(1), comm.rank, timeout=timeout)
        with pytest.raises((TypeError, ValueError), match="timeout"):
            comm.wait_all([], timeout=timeout)
    assert comm.iprobe(comm.rank, ANY_TAG) is None


def test_a_bad_timeout_is_refused_before_anything_is_sent(world):
    world(1, refused_timeouts)
