"""Which message goes to which receive, and where messages wait: cases C5, C6, C14, C15."""

import time

import numpy as np
import pytest

from rocecomm import ANY_SOURCE, ANY_TAG


def tags_out_of_order(comm, n):
    if comm.rank == 0:
        for i in range(n):
            comm.send(np.full(100, i, "i4"), 1, tag=1)
        comm.send(b"later", 1, tag=2)
    else:
        time.sleep(0.3)
        word = bytearray(5)
        comm.recv(word, 0, tag=2, timeout=20)
        assert word == b"later"
        got = np.empty(100, "i4")
        for i in range(n):
            comm.recv(got, 0, tag=1)
            assert (got == i).all()


def test_a_later_tag_overtakes_many_messages(world, scale):
    world(2, tags_out_of_order, scale.rounds(2000, 200))


def announced_out_of_order(comm, n):
    if comm.rank == 0:
        sends = [comm.isend(np.full(5000, i, "i4"), 1, tag=i % 7) for i in range(n)]
        comm.wait_all(sends)
    else:
        time.sleep(0.2)
        got = np.empty(5000, "i4")
        for tag in (6, 3, 0, 1, 5, 2, 4):
            for i in range(tag, n, 7):
                comm.recv(got, 0, tag=tag)
                assert (got == i).all()


def test_tags_in_another_order_with_little_storage(world):
    world(2, announced_out_of_order, 200, env={
        "ROCECOMM_UNEXPECTED_LIMIT": "65536", "ROCECOMM_EAGER_LIMIT": "32768"})


def any_source(comm, each):
    if comm.rank == 0:
        seen = []
        for _ in range(each * (comm.size - 1)):
            value = np.zeros(1, "i8")
            request = comm.irecv(value, ANY_SOURCE, ANY_TAG)
            assert request.wait() == 8
            seen.append((request.source, request.tag, int(value[0])))
        for source in range(1, comm.size):
            assert [v for s, _, v in seen if s == source] == list(range(each))
        assert all(t == v + 10 for _, t, v in seen)
    else:
        for i in range(each):
            comm.send(np.int64([i]), 0, tag=10 + i)


def test_any_source_keeps_the_order_of_each(world):
    world(4, any_source, 20)


def flood(comm, n):                                             # C6
    if comm.rank == 0:
        values = np.arange(n, dtype="i8")
        sends = [comm.isend(values[i:i + 1], 1) for i in range(n)]
        comm.wait_all(sends, timeout=50)
        assert sends[-1].nbytes == 8
    else:
        got = np.empty(1, "i8")
        for i in range(n):
            if i % 100 == 0:
                time.sleep(0.001)
            comm.recv(got, 0)
            assert got[0] == i


@pytest.mark.timeout(100)
def test_flood_of_small_isends(world, scale):
    world(2, flood, scale.rounds(100000, 2000), timeout=80)


def posted_before(comm, n):
    if comm.rank == 0:
        out = np.zeros(n, "i8")
        comm.wait_all([comm.irecv(out[i:i + 1], 1) for i in range(n)])
        assert (out == np.arange(n)).all()
    else:
        for i in range(n):
            comm.send(np.int64([i]), 0)


def test_many_receives_posted_before(world, scale):
    world(2, posted_before, scale.rounds(50000, 2000), timeout=60)


def many_to_one(comm, n):
    if comm.rank == 0:
        got = np.empty(1, "i8")
        time.sleep(0.1)
        for source in reversed(range(1, comm.size)):
            for i in range(n):
                comm.recv(got, source)
                assert got[0] == source * 10**6 + i
    else:
        for i in range(n):
            comm.send(np.int64([comm.rank * 10**6 + i]), 0)


def test_many_senders_to_one_receiver(world, scale):
    world(min(6, scale.ranks), many_to_one, scale.rounds(1000, 100), timeout=60)


def slow_receiver(comm, total, piece):                          # C14
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = total // piece
    if comm.rank == 0:
        data = np.zeros(piece, "u1")
        for i in range(n):
            data[:] = i & 255
            comm.send(data, 1)
    else:
        time.sleep(1.5)
        got = np.empty(piece, "u1")
        for i in range(n):
            comm.recv(got, 0)
            assert got[0] == got[-1] == i & 255
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_slow_receiver_bounds_memory(world, scale):
    grown = world(2, slow_receiver, min(scale.bytes * 8, 512 << 20), 64 << 10, timeout=60)
    small = world(2, slow_receiver, min(scale.bytes * 4, 256 << 20), 8 << 10, timeout=60)
    assert max(grown + small) < 256 << 10, (grown, small)       # KiB


def late_receiver(comm):                                        # C5, C15
    if comm.rank == 0:
        for i in range(10):
            comm.send(np.int32([i]), 1)
    else:
        time.sleep(3)
        got = np.empty(1, "i4")
        for i in range(10):
            comm.recv(got, 0)
            assert got[0] == i


def test_a_sender_long_before_the_receiver(world):
    world(2, late_receiver)
