"""Two ranks in one process, several threads on each: messages of all ways, one-sided transfers, looks at
what is in flight. `make tsan` runs it too: the thread sanitizer sees both ends, and soft0 between them (H8).
"""

import threading

import numpy as np
import pytest
from together import together

SIZES = (8, 3000, 400_000)      # in a slot, in a slot, pulled


def crowd(jobs):
    """Runs them all, each in a thread; what one raises is raised here."""
    failures = []

    def run(job):
        try:
            job()
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def pattern(size, rank, tag, turn):
    return np.full(size, (rank * 101 + tag * 17 + turn) % 251, np.uint8)


def blocking(comm, tag, rounds):
    other = 1 - comm.rank
    for turn in range(rounds):
        for size in SIZES:
            into = np.empty(size, np.uint8)
            if comm.rank:
                comm.recv(into, other, tag=tag)
                comm.send(pattern(size, 1, tag, turn), other, tag=tag)
            else:
                comm.send(pattern(size, 0, tag, turn), other, tag=tag)
                comm.recv(into, other, tag=tag)
            assert (into == pattern(size, other, tag, turn)).all()


def requests(comm, tag, rounds):
    """Another thread looks at each request until it ends."""
    other = 1 - comm.rank
    for turn in range(rounds):
        into = [np.empty(size, np.uint8) for size in SIZES]
        todo = [comm.irecv(a, other, tag=tag) for a in into]
        todo += [comm.isend(pattern(size, comm.rank, tag, turn), other, tag=tag) for size in SIZES]

        def look(todo=todo):
            for request in todo:
                while not request.done:
                    assert request.source == other and request.tag == tag
        watcher = threading.Thread(target=look)
        watcher.start()
        comm.wait_all(todo)
        watcher.join()
        assert all((a == pattern(a.size, other, tag, turn)).all() for a in into)


def looking(comm, tag, rounds):
    """Probes, statistics, and what is called off."""
    other = 1 - comm.rank
    for turn in range(rounds):
        late = comm.irecv(np.empty(1), other, tag=tag + 1)
        sent = comm.isend(pattern(8, comm.rank, tag, turn), other, tag=tag)
        assert comm.probe(other, tag=tag).nbytes == 8
        while comm.iprobe(other, tag=tag) is None:
            pass
        into = np.empty(8, np.uint8)
        comm.recv(into, other, tag=tag)
        assert (into == pattern(8, other, tag, turn)).all()
        sent.wait()
        assert comm.counters["messages_sent"] > 0 and late.cancel()


def one_sided(comm, remote, part, rounds):
    """Each thread has its part of the peer's region."""
    mine, back = np.empty(100, "u8"), np.empty(100, "u8")
    for turn in range(rounds):
        mine[:] = turn * 7 + part
        comm.write(mine, remote, offset=800 * part)
        comm.read(back, remote, offset=800 * part)
        assert (mine == back).all()


@pytest.mark.parametrize("progress", [None, "thread"])
def test_two_ranks_with_threads_in_one_process(device, scale, progress):
    rounds = scale.rounds(12, 2)
    with together(2, device, progress=progress) as comms:
        regions = [comm.register(np.zeros(300, "u8")) for comm in comms]
        jobs = []
        for comm, region in zip(comms, reversed(regions), strict=True):
            remote = comm.open(region.descriptor())
            jobs += [lambda c=comm: blocking(c, 1, rounds), lambda c=comm: blocking(c, 2, rounds),
                     lambda c=comm: requests(c, 3, rounds), lambda c=comm: looking(c, 4, rounds),
                     lambda c=comm, r=remote: one_sided(c, r, 0, rounds),
                     lambda c=comm, r=remote: one_sided(c, r, 1, rounds)]
        crowd(jobs)
        for region in regions:
            region.close()
