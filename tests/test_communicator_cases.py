"""Cases of theme C that no other file has: the largest sizes, the most senders, slow receivers.

| case | where |
|---|---|
| C1 | test_communicator.py (too large a message), property/ |
| C2 | test_communicator.py (around every limit, beyond 4 GiB), link/test_limits.py (4096), here (2 GiB) |
| C3 | test_communicator.py (empty messages), here (torch, registering nothing) |
| C5 | test_communicator_matching.py (a sender long before the receiver) |
| C6 | test_communicator_matching.py (floods), here (64 senders) |
| C8 | test_communicator.py (bytes match every dtype; units, byte orders, small floats) |
| C10 | test_communicator_requests.py (both send first), link/test_cycle.py (rings) |
| C11 | link/test_exit.py, link/test_failure.py (the sender leaves) |
| C12 | test_communicator.py (impossible peers) |
| C13 | test_communicator_requests.py, here (waiting from another thread, dropped and closed) |
| C14 | test_communicator_matching.py (memory bound), here (given back, 2 GiB) |
| C15 | here |
"""

import gc
import sys
import threading
import time

import numpy as np
import pytest
from verbs.pair import SANITIZED


def pattern(n, start=0):
    """`n` bytes of the pattern of case C2, from byte `start` on."""
    return ((np.arange(start, start + n, dtype="u8") * 2654435761 >> 24) & 255).astype("u1")


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


# --------------------------------------------------------------------------------- sizes, C2 C3

def around_two_gigabytes(comm, sizes):
    for n in sizes:
        buf = np.zeros(n, "u1")
        places = [at for at in (0, 2**31 - 4096, n - 4096) if at + 4096 <= n]
        if comm.rank == 0:
            for at in places:
                buf[at:at + 4096] = pattern(min(4096, n - at), at)
            comm.send(buf, 1)
        else:
            assert comm.recv(buf, 0) == n
            for at in places:
                assert (buf[at:at + 4096] == pattern(min(4096, n - at), at)).all(), (n, at)
        del buf


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_two_gigabytes_more_or_less(world, scale):              # C2
    base = 2**31 if scale.share == 1 else scale.bytes
    world(2, around_two_gigabytes, [base - 1, base, base + 1], timeout=200)


def nothing_at_all(comm, torch):                                # C3
    empties = [np.empty(0), np.empty((2, 0)), b"", []]
    if torch:
        empties.append(sys.modules["torch"].empty(0, 3))
    for empty in empties:
        if comm.rank == 0:
            comm.send(empty, 1)
            comm.isend(empty, 1).wait()
            comm.send(np.arange(2.0), 1)
        else:
            assert comm.recv(bytearray() if isinstance(empty, bytes) else empty, 0) == 0
            assert comm.irecv(np.zeros(4), 0).wait() == 0
            got = np.zeros(2)
            assert comm.recv(got, 0) == 16 and got.tolist() == [0, 1]
    with pytest.raises(ValueError, match="0 bytes"):
        comm.register(np.empty((2, 0)))
    comm.barrier()


def test_messages_of_nothing(world):
    world(2, nothing_at_all, False)


def with_torch(comm):
    pytest.importorskip("torch")
    nothing_at_all(comm, True)


def test_empty_tensors(world):
    pytest.importorskip("torch")
    world(2, with_torch)


# ---------------------------------------------------------------------------------- floods, C6

def all_to_one(comm, each):
    if comm.rank:
        for i in range(each):
            comm.send(np.array([comm.rank, i]), 0)
        return
    got, seen = np.zeros(2, int), np.zeros(comm.size, int)
    from rocecomm import ANY_SOURCE
    for _ in range(each * (comm.size - 1)):
        comm.recv(got, ANY_SOURCE)
        assert got[1] == seen[got[0]], got
        seen[got[0]] += 1
    assert (seen[1:] == each).all()


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_sixty_four_senders(world, scale):                      # C6
    world(65 if scale.share == 1 else scale.ranks, all_to_one, scale.rounds(1000, 50), timeout=300)


# -------------------------------------------------------------------------------- requests, C13

def requests(comm):
    other = 1 - comm.rank
    for n in (4, 50000):
        got = np.zeros(n)
        receiving = comm.irecv(got, other)
        results = []
        threads = [threading.Thread(target=lambda r=receiving, out=results: out.append(r.wait(20)))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        comm.barrier()
        sending = comm.isend(np.full(n, 5.0), other)
        for thread in threads:
            thread.join(20)
        assert results == [8 * n] * 3 and (got == 5).all()
        assert receiving.wait() == receiving.wait(0) == sending.wait() == sending.wait() == 8 * n
        assert receiving.test() and sending.test()
    # dropped: small and large, matched and not, then closed
    for n in (4, 50000):
        comm.irecv(np.zeros(n), other, tag=1)
        comm.isend(np.ones(n), other, tag=1)
        comm.irecv(np.zeros(n), other, tag=2)                   # nothing comes
    gc.collect()
    comm.barrier()


def test_requests_from_other_threads_and_dropped(world):
    world(2, requests)


# --------------------------------------------------------------------------- slow receivers, C14 C15

def slow_receiver(comm, total, piece, sleep):
    gc.collect()
    before, peak = resident(), 0
    n = total // piece
    if comm.rank == 0:
        data = np.zeros(piece, "u1")
        for i in range(n):
            data[:] = i & 255
            comm.send(data, 1)
    else:
        word = np.empty(1, "u1")
        done = comm.irecv(word, 0, tag=7)
        end = time.monotonic() + sleep
        while time.monotonic() < end:
            comm.progress()                                     # stores all it may
            peak = max(peak, resident() - before)
            time.sleep(0.001)
        got = np.empty(piece, "u1")
        for i in range(n):
            comm.recv(got, 0)
            assert got[0] == got[-1] == i & 255
        assert done.cancel()
    comm.barrier()
    return peak, resident() - before


@pytest.mark.parametrize("piece", [64 << 10, 8 << 10])
def test_a_slow_receivers_memory_is_given_back(world, scale, piece):
    total = min(4 * scale.bytes, 256 << 20)
    for peak, left in world(2, slow_receiver, total, piece, 1.0 * min(4, scale.time), timeout=60):
        assert peak < 256 << 20 and (SANITIZED or left < 24 << 20), (peak >> 20, left >> 20)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_two_gigabytes_to_a_sleeping_receiver(world, scale):    # C14
    total = 2 << 30 if scale.share == 1 else 8 * scale.bytes
    for peak, left in world(2, slow_receiver, total, 64 << 10, 10.0, timeout=200):
        assert peak < 256 << 20 and left < 32 << 20, (peak >> 20, left >> 20)


def late_ping_pong(comm, rounds):
    got = np.zeros(1)
    start = time.monotonic()
    for i in range(rounds):
        if comm.rank == 0:
            comm.send(np.full(1, float(i)), 1)
            comm.recv(got, 1)
            assert got[0] == -i
        else:
            time.sleep(0.002)
            comm.recv(got, 0)
            assert got[0] == i
            comm.send(np.full(1, float(-i)), 0)
    return time.monotonic() - start


def test_a_receiver_that_is_a_little_late(world, scale):        # C15: 655 ms for each would be 65 s
    assert max(world(2, late_ping_pong, 100, timeout=50)) < 5 * scale.time
