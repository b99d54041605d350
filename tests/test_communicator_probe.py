"""`probe` and `iprobe`: to look at a message before it is received."""

import threading
import time

import numpy as np
import pytest

import rocecomm
from rocecomm import ANY_SOURCE, ANY_TAG, ClosedError, PeerDeadError, RocecommError, TimeoutError


def looks_first(comm, sizes):
    if comm.rank == 0:
        for i, n in enumerate(sizes):
            comm.isend(np.full(n, i, "i2"), 1, tag=i).wait()
        comm.recv(bytearray(1), 1)
    else:
        assert comm.iprobe(0, tag=77) is None
        for i, n in enumerate(sizes):
            status = comm.probe(ANY_SOURCE, ANY_TAG)
            assert status == (0, i, 2 * n, "int16") and isinstance(status, rocecomm.Status)
            assert comm.iprobe(0, i) == comm.probe(0, ANY_TAG, timeout=0) == status     # it stays
            got = np.zeros(n, "i2")
            assert comm.recv(got, status.source, status.tag) == status.nbytes
            assert (got == i).all()
        assert comm.iprobe(ANY_SOURCE, ANY_TAG) is None
        comm.send(b"x", 0)


def test_a_probe_sees_what_the_next_receive_takes(world):
    world(2, looks_first, [0, 1, 100, 4096, 4097, 100000])


def order_and_tags(comm):
    if comm.rank == 0:
        first = comm.probe(ANY_SOURCE, 5)
        assert first.tag == 5 and first.nbytes == 8
        time.sleep(0.2)                                         # all have come
        assert comm.iprobe(1, 6).nbytes == 16
        assert comm.iprobe(2, ANY_TAG).tag == 6                 # the first that it sent
        assert comm.iprobe(1, 9) is None
        pair = np.zeros(2)
        pending = comm.irecv(pair, 1, 6)                        # a message that is spoken for
        assert pending.wait() == 16 and comm.iprobe(1, 6) is None
        for source in (1, 2):
            assert comm.recv(np.zeros(1), source, 5) == 8
        assert comm.probe(ANY_SOURCE, 6).source == 2
        assert comm.recv(pair, 2, 6) == 16
        posted = comm.irecv(np.zeros(1), 1, 8)
        comm.send(b"x", 1)
        with pytest.raises(TimeoutError, match="probe"):        # the posted receive takes it
            comm.probe(1, 8, timeout=0.3)
        assert posted.wait() == 8
    else:
        for tag in ((5, 6) if comm.rank == 1 else (6, 5)):
            comm.send(np.zeros(tag - 4), 0, tag)
        if comm.rank == 1:
            comm.recv(bytearray(1), 0)
            comm.send(np.zeros(1), 0, 8)
    comm.barrier()


def test_probes_match_as_receives_do(world):
    world(3, order_and_tags)


def waits(comm):
    if comm.rank == 0:
        found = []
        threads = [threading.Thread(target=lambda: found.append(comm.probe(1, 3)))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        comm.send(b"x", 1)
        for thread in threads:
            thread.join(20)
        assert found == [(1, 3, 8, "float64")] * 3
        assert comm.recv(np.zeros(1), 1, 3) == 8
        with pytest.raises(TimeoutError):
            comm.probe(0, timeout=0.05)                         # oneself
        comm.send(np.zeros(3, "f4"), 0)
        big = comm.isend(np.zeros(10**6), 0, tag=1)
        assert comm.probe(0) == (0, 0, 12, "float32")
        assert comm.probe(ANY_SOURCE, 1).nbytes == 8 * 10**6
        assert comm.recv(np.zeros(10**6), 0, 1) == 8 * 10**6 and big.wait()
        comm.recv(np.zeros(3, "f4"), 0)
    else:
        comm.recv(bytearray(1), 0)
        comm.send(np.zeros(1), 0, tag=3)


def test_probes_that_wait(world):
    world(2, waits)


def no_more(comm):
    if comm.rank == 1:
        time.sleep(0.5)
        comm.send(b"last", 0, tag=1)
        return
    results = []

    def look(source):
        try:
            comm.probe(source, 2)
        except RocecommError as error:
            results.append(error)
    threads = [threading.Thread(target=look, args=(s,)) for s in (1, ANY_SOURCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)                                         # rank 1 closes
    assert len(results) == 2 and all(isinstance(e, PeerDeadError) for e in results)
    assert comm.probe(1, 1).nbytes == 4                         # what it sent is still here
    with pytest.raises(PeerDeadError):
        comm.probe(1, 2)
    threading.Timer(0.3, comm.close).start()
    with pytest.raises(ClosedError):
        comm.probe(0, 2)
    for call in (comm.probe, comm.iprobe):
        with pytest.raises(ClosedError):
            call(0)


def test_probes_end_with_what_they_wait_for(world):
    world(2, no_more)


def refused(comm):
    for call in (comm.probe, comm.iprobe):
        for source in (-1, comm.size):
            with pytest.raises(ValueError, match="src"):
                call(source)
        for source in (None, "1", True):
            with pytest.raises(TypeError, match="src"):
                call(source)
        with pytest.raises(ValueError, match="tag"):
            call(0, -1)
    with pytest.raises(ValueError, match="timeout"):
        comm.probe(0, timeout=-1)


def test_arguments_of_probes(world):
    world(1, refused)
