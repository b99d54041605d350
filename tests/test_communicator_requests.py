"""Requests, blocking sends to each other, messages to oneself: cases C10, C13."""

import random
import time

import numpy as np
import pytest

from rocecomm import ANY_SOURCE, MessageTruncatedError, RocecommError


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
        assert outcome.pop(1024) == "sent"
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
