"""The communicator under each fault: right data, or an exception that names things; never a hang."""

import os
import time

import numpy as np
import pytest
from worlds import run_world

from rocecomm import CompletionError, PeerDeadError, RocecommError, TimeoutError
from rocecomm.enums import WCStatus
from rocecomm.verbs import soft

SLOW = float(os.environ.get("ROCECOMM_TEST_SLOW", "1"))
ENV = {"ROCECOMM_DEAD_AFTER": "1.5"}
SIZES = {"small": 100, "large": 300000}     # an eager message, and one that is fetched

#: what ends in the end, and what does not
BENIGN = {
    "delay": dict(kind="delay", seconds=0.05, p=0.7, seed=7),
    "rnr": dict(kind="rnr", seconds=0.05, times=5),
    "lost once": dict(kind="drop", lost=1, times=3),
    "flap": dict(kind="port_down", seconds=0.2),
}
LETHAL = {
    "drop": dict(kind="drop", after=2),
    "port_down": dict(kind="port_down", after=2),
    "peer_death": dict(kind="peer_death", after=2),
    "cq_overrun": dict(kind="cq_overrun", after=2),
    "access": dict(kind="access", after=2, times=1),
    "receive": dict(kind="loc_access_err", op="recv", after=2, times=1),
}


def world(n, fn, *args, **options):
    return run_world(n, fn, *args, device="soft0", env=ENV, timeout=45 * SLOW, **options)


def exchange(comm, what, nbytes, i):
    """One call; every rank knows what it must get."""
    data = np.full(nbytes, comm.rank + 1 + i % 100, "u1")
    if what == "send":
        if comm.rank == 0:
            comm.send(data, 1)
        elif comm.rank == 1:
            comm.recv(data, 0)
            assert (data == 1 + i % 100).all()
    elif what == "recv":
        exchange_back(comm, data, i)
    else:
        total = np.full(nbytes // 4, comm.rank + 1.0, "f4")
        comm.all_reduce(total)
        assert (total == sum(range(1, comm.size + 1))).all()


def exchange_back(comm, data, i):
    if comm.rank == 1:
        comm.send(data, 0)
    elif comm.rank == 0:
        comm.recv(data, 1)
        assert (data == 2 + i % 100).all()


def goes_on(comm, settings, what, nbytes, rounds):
    comm.barrier()
    fault = soft.inject(**settings) if comm.rank == 0 else None
    for i in range(rounds):
        exchange(comm, what, nbytes, i)
    comm.barrier()
    return fault.hit if fault else 0


@pytest.mark.parametrize("what", ["send", "recv", "all_reduce"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", BENIGN)
def test_goes_on(fault, what, size):
    hit = world(2, goes_on, BENIGN[fault], what, SIZES[size], 12)[0]
    assert hit >= 1


def ends(comm, settings, what, nbytes, victim):
    """Calls until one raises; returns what, on every rank, and that close() comes back."""
    comm.barrier()
    fault = soft.inject(**settings) if comm.rank == victim else None
    start = time.monotonic()
    error = None
    while error is None and time.monotonic() < start + 20:
        try:
            exchange(comm, what, nbytes, 0)
        except RocecommError as found:
            error = found
    assert error is not None, "nothing was raised in 20 s"
    took = time.monotonic() - start
    hit = fault.hit if fault else None
    closing = time.monotonic()
    comm.close()
    return type(error).__name__, str(error), took, time.monotonic() - closing, hit


@pytest.mark.parametrize("what", ["send", "recv", "all_reduce"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", LETHAL)
def test_ends_with_an_exception_on_both_ranks(fault, what, size):
    result = world(2, ends, LETHAL[fault], what, SIZES[size], 0)
    assert result[0][4] >= 1, "the fault did not act"
    for rank, (kind, text, took, closing, _) in enumerate(result):
        if fault == "cq_overrun" and rank == 0:     # all connections of the rank are gone
            assert kind == "VerbsError" and "queue overran" in text and "soft0" in text, text
            continue
        assert kind in ("PeerDeadError", "CompletionError"), (rank, kind, text)
        assert f"rank {1 - rank}" in text and "soft0" in text, (rank, text)
        assert took < 8 * SLOW and closing < 8 * SLOW, (rank, took, closing, text)


def told(comm, name):
    comm.barrier()
    data = np.zeros(100, "u1")
    if comm.rank == 0:
        soft.inject(name, op="send", times=1)
        with pytest.raises((CompletionError, PeerDeadError)) as caught:
            while True:
                comm.send(data, 1)
        return type(caught.value).__name__, str(caught.value), getattr(caught.value, "status", None)
    with pytest.raises(RocecommError):
        while True:
            comm.recv(data, 0)
    return None


@pytest.mark.parametrize("status", [s for s in WCStatus if s], ids=lambda s: s.name)
def test_every_status_of_the_catalogue_reaches_the_caller(status):
    kind, text, number = world(2, told, status.name)[0]
    assert status.name in text and "rank 1" in text and "soft0" in text
    if kind == "CompletionError":
        assert number == status


def in_company(comm, settings):
    """Rank 0 loses rank 1, and only rank 1: with rank 2 it goes on."""
    comm.barrier()
    data = np.zeros(1000, "u1")
    if comm.rank == 0:
        # the queue pairs of rank 0 are not to be had here: the first message goes to rank 1
        with soft.inject(op="send", times=1, **settings), \
                pytest.raises((PeerDeadError, CompletionError), match="rank 1"):
            while True:
                comm.send(data, 1)
    elif comm.rank == 1:
        with pytest.raises((PeerDeadError, CompletionError), match="rank 0"):
            while True:
                comm.recv(data, 0)
        return True
    other = 2 - comm.rank
    for i in range(20):
        data[:] = i
        if comm.rank == 0:
            comm.send(data, other)
        else:
            comm.recv(data, other)
            assert (data == i).all()
    return True


@pytest.mark.parametrize("settings", [dict(kind="drop"), dict(kind="access")], ids=["drop", "access"])
def test_other_ranks_are_not_touched(settings):
    assert world(3, in_company, settings) == [True] * 3


def times_out(comm):
    """A queue that is held for long: the call's own timeout counts."""
    comm.barrier()
    data = np.zeros(100, "u1")
    if comm.rank == 0:
        with soft.inject("delay", seconds=600, op="send+rdma_write_with_imm"):
            start = time.monotonic()
            with pytest.raises((TimeoutError, PeerDeadError)):
                comm.recv(data, 1, timeout=1.0)
                comm.send(data, 1, timeout=1.0)
            assert time.monotonic() - start < 5
        comm.close()
    else:
        with pytest.raises(RocecommError):
            comm.recv(data, 0, timeout=20)
    return True


def test_a_long_delay_ends_with_the_timeout():
    assert world(2, times_out) == [True, True]
