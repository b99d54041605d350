"""What takes long between ranks: the largest messages, the most of them, the most ranks, and death.

All of it runs in `make stress` alone. Others of the kind lie beside what they are about
(`grep -rn mark.stress tests`).
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from worlds import Died

from rocecomm import ANY_SOURCE, ANY_TAG, RocecommError

pytestmark = pytest.mark.stress


def pattern(n, start=0):
    """`n` bytes of the pattern of case C2, from byte `start` on."""
    return ((np.arange(start, start + n, dtype="u8") * 2654435761 >> 24) & 255).astype("u1")


# --------------------------------------------------------------------------- the largest, C2

MARK = 4096
EVERY = 8 << 20         # a mark at least so often: no part of a read is without one


def places(n):
    """Where marks lie: at both ends, around every boundary of 2 and 4 GiB, and in between."""
    edges = [0, n - MARK] + [edge - MARK // 2 for edge in (2**31, 2**32) if edge < n]
    between = range(EVERY // 2, n - MARK, EVERY)
    return sorted({at for at in (*edges, *between) if 0 <= at <= n - MARK})


def marked(n):
    buf = np.zeros(n, "u1")
    for at in places(n):
        buf[at:at + MARK] = pattern(MARK, at)
    return buf


def holds_marks(buf, n):
    """Every mark is exact, and between them there is nothing: no byte landed at another place."""
    for at in places(n):
        assert (buf[at:at + MARK] == pattern(MARK, at)).all(), (n, at)
    whole = marked(n)
    for at in range(0, n, 1 << 28):
        end = min(n, at + (1 << 28))
        assert np.array_equal(buf[at:end], whole[at:end]), (n, at)
    assert not buf[n:].any(), "bytes behind the message"


def cut(buf, n, at):
    return [buf[a:b] for a, b in zip([0, *at], [*at, n], strict=True)]


def huge(comm, n, way):
    other = 1 - comm.rank
    if comm.rank == 0:
        buf = marked(n)
    else:
        buf = np.zeros(n + 64, "u1")
        for at in places(n):
            buf[at:at + MARK] = 0xEE        # what must be gone
    # pieces of one side end where those of the other do not, and within a byte of 2 GiB
    edge = min(2**31, n // 2)
    if way == "send":
        if comm.rank == 0:
            comm.send(buf, other)
        else:
            assert comm.recv(buf, other) == n
    elif way == "lists":
        if comm.rank == 0:
            comm.send(cut(buf, n, [1, edge - 1, edge + 1]), other)
        else:
            assert comm.recv(cut(buf, n, [edge // 2 + 1, edge]), other) == n
    elif way in ("write", "read"):
        owner = 1 if way == "write" else 0
        if comm.rank == owner:
            with comm.register(buf, "rw") as region:
                comm.send(region.descriptor(), other)
                comm.recv(bytearray(0), other)
        else:
            descriptor = bytearray(64)
            comm.recv(descriptor, other)
            remote = comm.open(bytes(descriptor))
            move = comm.write if way == "write" else comm.read
            assert move(buf[:n], remote) == n
            comm.send(b"", other)
    if comm.rank == 1:
        holds_marks(buf, n)
    comm.barrier()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["send", "lists", "write", "read"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 4096], ids=str)
def test_around_two_and_four_gigabytes(world, scale, size, way):
    world(2, huge, size if scale.share == 1 else min(size, scale.bytes), way, timeout=150)


def huge_and_late(comm, n, busy):
    """One message of 2 GiB, for a receiver that sleeps or computes and is in no call."""
    if comm.rank == 0:
        buf = marked(n)
        request = comm.isend(buf, 1)
        small = [comm.isend(np.int64([i]), 1, tag=1) for i in range(100)]
        comm.wait_all(small)                # the large one holds nobody up
        assert request.wait() == n
    else:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            if not busy:
                time.sleep(3)
        got = np.empty(1, "i8")
        for i in range(100):
            comm.recv(got, 0, tag=1)
            assert got[0] == i
        buf = np.zeros(n + 64, "u1")
        assert comm.recv(buf, 0) == n
        holds_marks(buf, n)
    comm.barrier()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("busy", [False, True], ids=["asleep", "busy"])
def test_two_gigabytes_at_once_to_a_rank_that_is_in_no_call(world, scale, busy):
    world(2, huge_and_late, 2**31 if scale.share == 1 else scale.bytes, busy, timeout=150)


# -------------------------------------------------------------------------------- the most, C6

def posted_before(comm, n):
    """50,000 receives are there before the first message is sent; each takes the one that is its own."""
    rng = random.Random(6)
    tags = [rng.randrange(100) for _ in range(n)]
    if comm.rank == 0:
        out = np.full(n, -1, "i8")
        wild = [rng.random() for _ in range(n)]
        # those with wildcards come last, so what they take is known: nothing else is left
        exact = [comm.irecv(out[i:i + 1], 1, tag=tags[i]) for i in range(n // 2)]
        any_ = [comm.irecv(out[i:i + 1], ANY_SOURCE if wild[i] < 0.5 else 1, ANY_TAG)
                for i in range(n // 2, n)]
        comm.barrier()
        for requests in (any_[::-1], exact):
            comm.wait_all(requests, timeout=120)
        assert (out == np.arange(n)).all()
        comm.barrier()
        return
    comm.barrier()
    # in another order than they were posted in; within one tag that order counts
    first = sorted(range(n // 2), key=lambda i: (tags[i] % 7, i))
    for i in (*first, *range(n // 2, n)):
        comm.send(np.int64([i]), 0, tag=tags[i] if i < n // 2 else 1000 + i)
    comm.barrier()


@pytest.mark.timeout(200)
def test_fifty_thousand_receives_are_posted_before(world, scale):
    world(2, posted_before, scale.rounds(50_000, 500), timeout=150)


def flood_of_sixty_four(comm, each, kind):
    """All senders at once; the receiver takes any message, or one sender after the other."""
    if comm.rank:
        values = np.stack([np.full(each, comm.rank), np.arange(each)], axis=1)
        if kind == "isend":
            comm.wait_all([comm.isend(values[i], 0) for i in range(each)], timeout=200)
        else:
            for i in range(each):
                comm.send(values[i], 0)
        comm.recv(bytearray(1), 0)          # still usable
        return
    got, seen = np.zeros(2, int), np.zeros(comm.size, int)
    if kind == "one by one":
        for source in range(comm.size - 1, 0, -1):
            for i in range(each):
                assert comm.recv(got, source) == 16 and got.tolist() == [source, i]
    else:
        for _ in range(each * (comm.size - 1)):
            comm.recv(got, ANY_SOURCE)
            assert got[1] == seen[got[0]], got
            seen[got[0]] += 1
        assert (seen[1:] == each).all()
    for rank in range(1, comm.size):
        comm.send(b"x", rank)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["isend", "one by one"])
def test_sixty_four_senders_in_other_ways(world, scale, kind):
    ranks = 65 if scale.share == 1 else scale.ranks
    world(ranks, flood_of_sixty_four, scale.rounds(1000, 20), kind, timeout=250)


# ----------------------------------------------------------------------- sixty-four ranks, who with whom

def exchange(comm, to, sources, size, round_):
    """One message to each of `to` and from each of `sources`; all bytes are looked at."""
    into = {r: np.zeros(size + 1, "u1") for r in sources}
    receives = [comm.irecv(into[r], r, tag=round_) for r in sources]
    sends = [comm.isend(pattern(size, comm.rank * 1000 + r + round_), r, tag=round_) for r in to]
    comm.wait_all(receives + sends, timeout=200)
    for r in sources:
        assert (into[r][:size] == pattern(size, r * 1000 + comm.rank + round_)).all(), (r, round_)
        assert into[r][size] == 0


def all_patterns(comm, sizes):
    me, n = comm.rank, comm.size
    everyone = [r for r in range(n) if r != me]
    times, round_ = {}, 0

    def timed(name, *peers):
        nonlocal round_
        comm.barrier()
        start = time.monotonic()
        for size in sizes:
            exchange(comm, *peers, size, round_)
            round_ += 1
        comm.barrier()
        times[name] = time.monotonic() - start

    timed("all to all", everyone, everyone)
    timed("all to one", [0] if me else [], [] if me else everyone)
    timed("one to all", [] if me else everyone, [0] if me else [])
    timed("ring", [(me + 1) % n], [(me - 1) % n])
    timed("to oneself", [me], [me])
    order = random.Random(64).sample(range(n), n)
    timed("a random permutation", [order[me]], [order.index(me)])
    timed("halves", [(me + n // 2) % n], [(me - n // 2) % n])
    start = time.monotonic()
    for distance in (1, 2, 4, 8, 16, 32):       # a hypercube of blocking exchanges
        other = me ^ distance
        if other < n:
            got = np.zeros(3000)
            comm.sendrecv(np.full(3000, me, "f8"), other, got, other, timeout=100)
            assert (got == other).all()
    comm.barrier()
    times["pairs"] = time.monotonic() - start
    return times


@pytest.mark.timeout(400)
def test_sixty_four_ranks_in_every_pattern(world, scale):
    sizes = [8, 5000, 20_000] if scale.share == 1 else [8, 5000]
    ranks = 64 if scale.share == 1 else scale.ranks
    for times in world(ranks, all_patterns, sizes, timeout=300):
        assert max(times.values()) < 60 * scale.time, times


# ------------------------------------------------------------------------------- death, F3 F4

def until_a_death(comm, victims, seed, folder, threads):
    """Messages, one-sided operations and collectives among all, until somebody is gone."""
    me, rng = comm.rank, random.Random(seed)
    memory = np.zeros(4096 + comm.size * 70_000, "u1")
    region = comm.register(memory, "rwa")
    everyone = [r for r in range(comm.size) if r != me]
    found = {r: bytearray(64) for r in everyone}
    comm.wait_all([comm.irecv(found[r], r) for r in everyone]
                  + [comm.isend(region.descriptor(), r) for r in everyone])
    remote = {r: comm.open(bytes(found[r])) for r in everyone}
    comm.barrier()
    if me in victims:
        def die(*_):
            with open(os.path.join(folder, f"died-{me}"), "w") as f:
                f.write(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, die)
        signal.setitimer(signal.ITIMER_REAL, 0.02 + random.Random(seed * 100 + victims[0]).random() * 0.4)
    errors, over = [], threading.Event()

    def each(size, tag):
        """With everybody; ends with the first that fails, since others may have given up, too, without
        having sent. So a receive of which nothing comes watches every rank."""
        pending, watch = [], [comm.irecv(bytearray(1), r, 99) for r in everyone]
        try:
            pending += [comm.irecv(np.empty(size, "u1"), r, tag) for r in everyone]
            pending += [comm.isend(np.empty(size, "u1"), r, tag) for r in everyone]
            while pending:
                first = comm.wait_any(pending + watch, timeout=30)
                (pending.pop(first) if first < len(pending) else watch[first - len(pending)]).wait(0)
        finally:
            for request in pending + watch:
                request.cancel()

    def messages(number):
        sizes = [8, 3000, 50_000, 300_000]
        for i in range(10**9):
            each(sizes[i % 4], number)

    def one_sided(_):
        data = np.empty(70_000, "u1")
        while True:
            for r in everyone:
                kind = rng.randrange(4)
                if kind == 0:
                    comm.write(data, remote[r], 4096 + me * 70_000, timeout=30)
                elif kind == 1:
                    comm.read(data, remote[r], 4096 + me * 70_000, timeout=30)
                elif kind == 2:
                    comm.fetch_add(remote[r], 0, 1, timeout=30)
                else:
                    at = np.arange(300) * 64
                    comm.readv(data, remote[r], at, at + 4096, np.full(300, 64), timeout=30)

    def collectives(_):
        arrays = [np.ones(n) for n in (10, 5000, 100_000)]
        for i in range(10**9):
            comm.all_reduce(arrays[i % 3], timeout=30)
            comm.barrier(timeout=30)

    def go(work, number):
        try:
            work(number)
        except RocecommError as error:
            errors.append((work.__name__, time.monotonic(), f"{type(error).__name__}: {error}"))
            over.set()

    if threads:
        works = [messages, one_sided, collectives]
        crowd = [threading.Thread(target=go, args=(work, i)) for i, work in enumerate(works)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
    else:
        def mixed(_):
            steps = random.Random(seed)
            for i in range(10**9):
                kind = steps.randrange(3)
                if kind == 0:
                    size = (8, 3000, 50_000, 300_000)[i % 4]
                    each(size, 0)
                elif kind == 1:
                    for r in everyone:
                        comm.write(memory[:4096], remote[r], 4096 + me * 70_000, timeout=30)
                        comm.fetch_add(remote[r], 0, 1, timeout=30)
                else:
                    comm.all_reduce(np.ones((10, 5000)[i % 2]), timeout=30)
        go(mixed, 0)
    again = []
    gone = next((v for v in victims if any(f"rank {v}" in text for *_, text in errors)), victims[0])
    # the receive first: who heard of the death through a collective learns there that it is so
    for call in (lambda r: comm.recv(bytearray(1), r, tag=98), lambda r: comm.send(b"x", r),
                 lambda r: comm.write(memory[:8], remote[r], 4096), lambda r: comm.barrier()):
        start = time.monotonic()
        try:
            call(gone)
            again.append((0.0, "no error"))
        except RocecommError as error:
            again.append((time.monotonic() - start, str(error)))
    # the others are to find the death, not this rank's leaving
    end = time.monotonic() + 60
    with open(os.path.join(folder, f"knows-{me}"), "w"):
        pass
    while time.monotonic() < end and not all(
            os.path.exists(os.path.join(folder, f"knows-{r}")) for r in everyone if r not in victims):
        comm.progress()
        time.sleep(0.005)
    start = time.monotonic()
    region.close()
    comm.close()
    return errors, again, time.monotonic() - start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "three threads"])
def test_ranks_are_killed_in_the_middle_of_everything(world, scale, tmp_path, threads):
    for seed in range(scale.rounds(25, 2)):
        rng = random.Random(seed)
        ranks = min(rng.choice((2, 3, 4, 6)), scale.ranks)
        victims = sorted(rng.sample(range(ranks), 2 if ranks > 3 and seed % 4 == 3 else 1))
        folder = tmp_path / str(seed)
        folder.mkdir()
        results = world(ranks, until_a_death, victims, seed, str(folder), threads, timeout=60, mortal=victims,
                        options={"progress": "thread"} if seed % 3 == 2 else {})
        # a second victim that heard of the first may have left in time
        died = {v: float((folder / f"died-{v}").read_text()) for v in victims
                if (folder / f"died-{v}").exists()}
        assert died and all(isinstance(results[v], Died) for v in died), results
        for rank in set(range(ranks)) - set(victims):
            errors, again, closing = results[rank]
            assert len(errors) == (3 if threads else 1), errors
            for what, when, text in errors:
                assert any(f"rank {v}" in text for v in died), (seed, rank, what, text)
                assert when - max(died.values()) < 5 * scale.time, (seed, rank, what, text)
            for took, text in again:
                assert took < 1 * scale.time, (seed, rank, again)
                assert any(f"rank {v}" in text for v in victims), (seed, rank, again)
            assert closing < 5 * scale.time
