"""Rings of ranks that block in large sends (C10): each is told, and nobody who is not in one."""

import signal
import threading
import time

import numpy as np
import pytest

import rocecomm
from rocecomm import RocecommError

N = 100_000


def refused(error, comm, to, n=N):
    assert type(error) is RocecommError, error
    assert f"rank {to}" in str(error) and str(n) in str(error) and "sendrecv" in str(error), error
    return True


def ring(comm, rounds, length):
    """Ranks 0 to length - 1 in a ring; the others hang on to it, in a chain."""
    right = (comm.rank + 1) % length
    left = (comm.rank - 1) % length
    mine, got = np.full(N, comm.rank, "u1"), np.zeros(N, "u1")
    for turn in range(rounds):
        if turn % 2:
            time.sleep(0.02 * ((comm.rank + turn // 2) % comm.size))    # another one comes last
        begin = time.monotonic()
        if comm.rank < length:
            with pytest.raises(RocecommError) as caught:
                comm.send(mine, right, tag=turn)
            refused(caught.value, comm, right)
            assert length == 2 or f"{length} ranks block" in str(caught.value)
            assert length == 2 or f"to rank {(right + 1) % length}" in str(caught.value)
            assert time.monotonic() - begin < 5
            assert comm.sendrecv(mine, right, got, left, 1000, 1000) == N
            assert (got == left).all()
            if comm.rank == 0 and comm.size > length:
                for source in range(length, comm.size):
                    comm.recv(got, source, tag=turn)                    # it was not told
                    assert (got == source).all()
        else:
            comm.send(mine, 0, tag=turn)
        comm.barrier()
    return True


@pytest.mark.parametrize("size, length", [(2, 2), (3, 3), (4, 4), (4, 3), (4, 2)])
def test_every_rank_of_a_ring_is_told(world, scale, size, length):
    assert all(world(size, ring, scale.rounds(6, 3), length, timeout=60))


def broken_ring(comm, how):
    """A ring in which one rank takes the message: nobody may get an error."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(N, "u1")
    for _ in range(5):
        mine = np.full(N, comm.rank, "u1")
        pending = None
        if comm.rank == 1 and how == "posted":
            pending = comm.irecv(got, left)
        if comm.rank == 1 and how == "isend":
            sending = comm.isend(mine, right)
            comm.recv(got, left)
            sending.wait()
        elif comm.rank == 1 and how == "thread":
            thread = threading.Thread(target=lambda: (time.sleep(0.05), comm.recv(got, left)))
            thread.start()
            comm.send(mine, right)
            thread.join()
        elif comm.rank == 1 and how == "first":
            time.sleep(0.05)
            comm.recv(got, left)
            comm.send(mine, right)
        else:
            comm.send(mine, right)
            if pending is not None:
                pending.wait()
            else:
                comm.recv(got, left)
        assert (got == left).all()
        got[:] = 99
    return True


@pytest.mark.parametrize("how", ["posted", "isend", "thread", "first"])
def test_no_false_alarm(world, how):
    assert all(world(3, broken_ring, how, timeout=60))


def given_up(comm, seconds, rounds):
    """One rank of the ring gives up by itself, at about the time when the others are told."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, got = np.full(N, comm.rank, "u1"), np.zeros(N, "u1")
    outcomes = set()
    for turn in range(rounds):
        comm.barrier()
        try:
            comm.send(mine, right, timeout=seconds * (turn % 8) if comm.rank == 1 else 20)
            outcomes.add("sent")
        except rocecomm.TimeoutError:
            assert comm.rank == 1
            outcomes.add("timeout")
        except RocecommError as error:
            refused(error, comm, right)
            outcomes.add("refused")
        marker = comm.isend(b"x", right)
        while (n := comm.recv(got, left, tag=0)) != 1:      # what was not dropped arrives
            assert n == N and (got == left).all()
        marker.wait()
    return outcomes


def test_a_timeout_within_a_ring(world, scale):
    outcomes = set().union(*world(3, given_up, 0.0002 * scale.time, scale.rounds(24, 8), timeout=60))
    assert "refused" in outcomes


def interrupted(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(N, "u1")
    if comm.rank == 0:
        def stop(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            comm.send(np.zeros(N, "u1"), right)
        comm.recv(got, left)
        assert (got == left).all()
        comm.barrier()
        return True
    time.sleep(0.5)
    if comm.rank == 1:                          # rank 0's message is gone: no ring is left
        with pytest.raises(rocecomm.TimeoutError):
            comm.recv(got, left, timeout=0.1)
    comm.send(np.full(N, comm.rank, "u1"), right, timeout=20)
    if comm.rank == 2:
        comm.recv(got, left)
        assert (got == left).all()
    comm.barrier()
    return True


def test_a_send_that_was_interrupted_is_in_no_ring(world):
    assert all(world(3, interrupted))
