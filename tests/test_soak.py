"""Soak: messages of mixed sizes in every style, for long; memory, mappings and descriptors stay flat."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

BLOCK = 1000            # messages of one style in a row
SAMPLES = 40
POOL = 1009             # different messages; a prime, so that styles and sizes meet in every combination
RSS_SLACK = 1 << 20     # bytes: at 10 million messages a leak of a byte for every ninth is found
MAPS_SLACK = 4          # lines: the allocator's own coming and going


def pool(largest):
    """What both ranks know: views of one array, most of them small, some up to ``largest`` bytes."""
    rng = random.Random(4)
    limits = [256] * 90 + [8192] * 8 + [65536] + [largest]
    data = np.random.default_rng(4).integers(0, 256, largest, np.uint8)
    views = []
    for i in range(POOL):
        size = rng.randint(0, min(limits[i % 100], largest))
        start = rng.randint(0, largest - size)
        views.append(data[start:start + size])
    views[99] = data                # one message of the largest size is among them
    return views


def usage():
    """(resident bytes, lines of maps, open descriptors) of this process."""
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps").read_text().count("\n")
    return rss, maps, len(os.listdir("/proc/self/fd"))


def soak(comm, messages, largest):
    """``messages`` between two ranks, in four styles in turn; returns samples of :func:`usage`.

    Every message's length is checked, and the bytes of every seventh.
    """
    me, other = comm.rank, 1 - comm.rank
    views = pool(largest)
    # a byte more: what comes is shorter than its buffer; ones: their pages are there from the start
    into, *window = (np.ones(largest + 1, np.uint8) for _ in range(9))
    send, recv = comm.send, comm.recv

    def check(i, got, where):
        want = views[i % POOL]
        assert got == want.nbytes, (i, got, want.nbytes)
        if i % 7 == 0:
            assert np.array_equal(where[:got], want), i

    comm.barrier()                                  # what a first one sets up is there now
    samples, done, style = [], 0, 0
    while done < messages:
        n = min(BLOCK, messages - done)
        if style == 0:                              # ping-pong
            for i in range(done, done + n):
                if i % 2 == me:
                    send(views[i % POOL], other, i % 5)
                else:
                    check(i, recv(into, other, i % 5), into)
        elif style in (1, 2):                       # a stream one way
            if me == style - 1:
                for i in range(done, done + n):
                    send(views[i % POOL], other)
            else:
                for i in range(done, done + n):
                    check(i, recv(into, other), into)
        else:                                       # both ways at once: even numbers are rank 0's
            for first in range(done, done + n, 16):
                end = min(first + 16, done + n)
                mine = range(first + (first + me) % 2, end, 2)
                theirs = range(first + (first + other) % 2, end, 2)
                receives = [comm.irecv(where, other, 9) for _, where in zip(theirs, window, strict=False)]
                sends = [comm.isend(views[i % POOL], other, 9) for i in mine]
                for i, got, where in zip(theirs, comm.wait_all(receives), window, strict=False):
                    check(i, got, where)
                comm.wait_all(sends)
        if done // BLOCK % max(1, messages // BLOCK // SAMPLES) == 0:
            samples.append(usage())
        done += n
        style = (style + 1) % 4
    comm.barrier()
    samples.append(usage())
    return samples


def assert_flat(samples):
    rss, maps, fds = zip(*samples, strict=True)
    warm = len(samples) // 4                # all styles and sizes have been used by then
    assert max(fds[warm:]) == min(fds[warm:]), f"descriptors: {fds}"
    assert max(maps[warm:]) - maps[warm] <= MAPS_SLACK, f"lines of /proc/self/maps: {maps}"
    assert max(rss[warm:]) - rss[warm] <= RSS_SLACK, f"resident set: {rss}"


def test_flat_checks_see_growth():
    """The checks themselves: one more descriptor, mapping by mapping, 128 KiB a sample."""
    assert_flat([(10 << 20, 300, 20)] * 20)
    for step in ((0, 0, 1), (0, 1, 0), (1 << 17, 0, 0)):
        with pytest.raises(AssertionError):
            assert_flat([tuple(a + i * b for a, b in zip((10 << 20, 300, 20), step, strict=True))
                         for i in range(21)])


#: Small slots have all been touched soon: what grows after that is a leak.
SLOTS = {"ROCECOMM_EAGER_LIMIT": "8K"}


def test_soak_short(world, scale):
    for samples in world(2, soak, scale.rounds(40 * BLOCK, 4 * BLOCK), scale.bytes // 8 if scale.share < 1
                         else 1 << 20, env=SLOTS):
        assert len(samples) > 1
        assert_flat(samples)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_soak(world, scale):
    """10 million messages. ROCECOMM_TEST_MESSAGES sets another number."""
    messages = int(os.environ.get("ROCECOMM_TEST_MESSAGES", scale.rounds(10_000_000)))
    for rank, samples in enumerate(world(2, soak, messages, 1 << 20, timeout=1700, env=SLOTS)):
        rss, maps, fds = zip(*samples, strict=True)
        print(f"rank {rank}: {messages} messages, resident {rss[0] >> 10} -> {rss[len(rss) // 4] >> 10} -> "
              f"{rss[-1] >> 10} KiB, maps {maps[0]} -> {maps[-1]} lines, {fds[0]} -> {fds[-1]} descriptors")
        assert_flat(samples)
