"""The schedules, as arithmetic."""

import pytest

from rocecomm.collectives import plan

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8, 1009, 1000003])
def test_chunks_cover_the_array_evenly(size, count):
    chunks = [plan.chunk(i, count, size) for i in range(size)]
    assert chunks[0][0] == 0 and chunks[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(chunks, chunks[1:], strict=False))
    sizes = [stop - start for start, stop in chunks]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("start, stop, length", [(0, 10, 3), (5, 6, 100), (7, 7, 4),
                                                 (3, 15, 4)])
def test_segments_cover_the_chunk(start, stop, length):
    parts = plan.segments(start, stop, length)
    assert [i for a, b in parts for i in range(a, b)] == list(range(start, stop))
    assert parts and all(b - a <= length for a, b in parts)


@pytest.mark.parametrize("size", WORLDS)
def test_ring_sums_every_share_once_and_gives_all_to_all(size):
    have = [[{rank} for _ in range(size)] for rank in range(size)]
    for phase in (plan.ring_reduce_scatter, plan.ring_all_gather):
        steps = [phase(rank, size) for rank in range(size)]
        for turn in range(size - 1):
            sent = [set(have[rank][steps[rank][turn][0]]) for rank in range(size)]
            for rank in range(size):
                left = (rank - 1) % size
                chunk = steps[rank][turn][1]
                assert chunk == steps[left][turn][0]
                if phase is plan.ring_reduce_scatter:
                    assert not have[rank][chunk] & sent[left]
                    have[rank][chunk] |= sent[left]
                else:
                    have[rank][chunk] = sent[left]
        if phase is plan.ring_reduce_scatter:
            assert all(len(have[r][(r + 1) % size]) == size for r in range(size))
    assert all(len(chunk) == size for rank in have for chunk in rank)


@pytest.mark.parametrize("size", WORLDS)
def test_doubling_sums_every_share_once(size):
    steps = [plan.doubling(rank, size) for rank in range(size)]
    have = [{rank} for rank in range(size)]
    position = [0] * size
    opposite = {plan.EXCHANGE: plan.EXCHANGE, plan.FOLD_SEND: plan.FOLD_RECV,
                plan.UNFOLD_SEND: plan.UNFOLD_RECV}
    while any(position[r] < len(steps[r]) for r in range(size)):
        moved = False
        for rank in range(size):
            if position[rank] == len(steps[rank]):
                continue
            kind, peer, number = steps[rank][position[rank]]
            if kind not in opposite or position[peer] == len(steps[peer]):
                continue
            if steps[peer][position[peer]] != (opposite[kind], rank, number):
                continue
            if kind == plan.EXCHANGE:
                assert not have[rank] & have[peer]
                have[rank] = have[peer] = have[rank] | have[peer]
            elif kind == plan.FOLD_SEND:
                have[peer] = have[peer] | have[rank]
            else:
                have[peer] = have[rank]
            position[rank] += 1
            position[peer] += 1
            moved = True
        assert moved, "ranks wait for each other"
    assert all(len(shares) == size for shares in have)


@pytest.mark.parametrize("size", WORLDS)
def test_after_dissemination_everyone_heard_from_everyone(size):
    heard = [{rank} for rank in range(size)]
    rounds = [plan.dissemination(rank, size) for rank in range(size)]
    for turn in range(len(rounds[0])):
        before = [set(h) for h in heard]
        for rank in range(size):
            to, source = rounds[rank][turn]
            assert rounds[source][turn][0] == rank and rounds[to][turn][1] == rank
            heard[rank] |= before[source]
    assert all(len(h) == size for h in heard)


def test_choice_is_a_function_of_what_ranks_share():
    assert plan.choose(32 << 10, 8192, 4) == plan.DOUBLING
    assert plan.choose((32 << 10) + 4, 8193, 4) == plan.RING
    assert plan.choose(8 << 20, 3, 4) == plan.DOUBLING
    assert plan.choose(4, 1, 4, "ring") == plan.RING
    assert plan.choose(64 << 20, 1 << 24, 4, "doubling") == plan.DOUBLING
