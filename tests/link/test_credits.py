"""Receive slots: a reserve for each peer, and a pool that is lent to those who send."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rocecomm.config import Config
from rocecomm.errors import ConfigError, PeerDeadError
from rocecomm.link.credits import MAX_GRANT, plan_credits

SLOT = 8320


@pytest.mark.parametrize("others", [1, 2, 4, 8, 9, 31, 63, 500])
@pytest.mark.parametrize("options", [{}, {"peer_credits": 2, "recv_pool": 16}, {"recv_pool": 100000},
                                     {"unexpected_limit": 0}, {"peer_credits": 100}])
def test_plan(others, options):
    config = Config(**options)
    plan = plan_credits(config, SLOT, others, 16384, "soft0")
    assert 2 <= plan.reserve <= max(2, config.peer_credits) and plan.reserve <= plan.grant <= plan.most
    assert plan.ctrl >= 4 and plan.pool <= config.recv_pool
    assert plan.pool >= others * (plan.grant - plan.reserve), "more is lent than there is"
    assert plan.slots(others) <= 16384
    assert plan.most == max(MAX_GRANT, plan.reserve)


def test_plan_alone_and_too_many():
    assert plan_credits(Config(), SLOT, 0, 100, "soft0").slots(0) == 0
    with pytest.raises(ConfigError, match="too few for 500 peers"):
        plan_credits(Config(), SLOT, 500, 1000, "soft0")


def test_memory_per_peer_is_small_in_large_worlds():
    few = plan_credits(Config(), SLOT, 31, 1 << 20, "soft0").slots(31)
    many = plan_credits(Config(), SLOT, 63, 1 << 20, "soft0").slots(63)
    assert (many - few) / 32 <= 20


def held(comm):
    """Grants and pool of this rank; their sum never changes."""
    peers = comm._engine.peers()
    grants = {p["rank"]: p["grant"] for p in peers if p["rank"] != comm.rank}
    return grants, peers[0]["pool"]


def use_up(comm, folder, values, tag):
    """Sends to rank 0 so that it finds all at once, and lends: it is in no call before the file is there.
    A message could not say so, since it would wait for a credit like all others."""
    sends = [comm.isend(np.array([value]), 0, tag=tag) for value in values]
    (Path(folder) / "used up").touch()
    comm.wait_all(sends)


def take_all(comm, folder, sender, values, tag):
    used_up, got = Path(folder) / "used up", np.empty(1, "i8")
    while not used_up.exists():
        time.sleep(0.001)
    used_up.unlink()
    for value in values:
        assert comm.recv(got, sender, tag=tag) == 8 and got[0] == value
        yield held(comm)


def flood(comm, count, rounds, folder):
    """Rank 0 receives from one rank at a time, and only when all its credits are used up."""
    enough = np.empty(1, "u1")
    total = None
    for phase in range(rounds):
        sender = 1 + phase % (comm.size - 1)
        values = range(phase * count, (phase + 1) * count)
        deadline = time.monotonic() + 20
        enough[0] = False
        while not enough[0] and comm.rank in (0, sender):
            if comm.rank == sender:
                use_up(comm, folder, values, 5)
                comm.recv(enough, 0, tag=6)
                continue
            for grants, pool in take_all(comm, folder, sender, values, 5):
                if total is None:
                    total = sum(grants.values()) + pool
                assert sum(grants.values()) + pool == total, (grants, pool)
                assert min(grants.values()) >= 2, (phase, grants)
            # others answer a RECALL when they next look, so more than one round may be needed
            enough[0] = grants[sender] > 12 and grants[sender] == max(grants.values())
            if not enough[0]:
                assert time.monotonic() < deadline, (phase, grants, pool)
            comm.send(enough, sender, tag=6)
        comm.barrier()


def test_slots_are_lent_to_whoever_sends(world, scale, tmp_path):
    """Case C6: each sender in turn gets more than its reserve, also after others had all of it."""
    world(4, flood, scale.rounds(200, 60), 6, str(tmp_path),
          env={"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "32"})


def everybody(comm, count):
    """All flood rank 0 at once: each keeps its reserve at least, and nothing is lost."""
    if comm.rank:
        comm.wait_all([comm.isend(np.full(300, i, "i4"), 0, tag=i % 3) for i in range(count)])
        comm.barrier()                  # who leaves gives up its reserve
        return None
    time.sleep(0.05)
    into = np.empty(300, "i4")
    sums = []
    for source in range(1, comm.size):
        total = 0
        for tag in range(3):
            for i in range(tag, count, 3):
                comm.recv(into, source, tag=tag)
                assert (into == i).all()
                total += i
        sums.append(total)
    grants, pool = held(comm)
    assert min(grants.values()) >= 2
    comm.barrier()
    return sums


def test_all_flood_one(world, scale):
    count = scale.rounds(900, 90)
    env = {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16"}
    ranks = min(6, scale.ranks)
    sums = world(ranks, everybody, count, env=env)[0]
    assert sums == [sum(range(count))] * (ranks - 1)


NOTHING_STORED = {"ROCECOMM_UNEXPECTED_LIMIT": "0", "ROCECOMM_PEER_CREDITS": "2"}


def past_the_bound(comm, matched):
    """Rank 1 holds as many messages of rank 0 as it may, and then gets one more with a later tag."""
    one, got = np.zeros(1, "i8"), np.zeros(1, "i8")
    engine = comm._engine
    if comm.rank == 0:
        comm.recv(one, 1, tag=1)            # its receive is posted by now, if it is going to be
        filled = 0
        while True:
            sent, acked, credits = engine.peers()[1]["eager"]
            if (sent - acked) % (1 << 32) == credits:
                break
            comm.send(np.array([filled]), 1, tag=2)
            filled += 1
        comm.send(np.array([filled]), 1, tag=3)
        comm.send(np.array([7]), 1, tag=4)
        return engine.counters()["announced_small"], filled
    request = comm.irecv(got, 0, tag=3) if matched == "first" else None
    comm.send(one, 0, tag=1)
    if matched == "first":
        request.wait()
    else:
        comm.probe(0, tag=3)
        if matched == "next":
            comm.recv(got, 0, tag=3)
    if matched != "last":
        for i in range(got[0]):
            assert comm.recv(one, 0, tag=2) == 8 and one[0] == i
        comm.recv(one, 0, tag=4)
        return None
    i = 0
    while comm.iprobe(0, tag=2) is not None:
        comm.recv(one, 0, tag=2)
        assert one[0] == i
        i += 1
    comm.recv(one, 0, tag=4)                # sent after the one with tag 3
    assert one[0] == 7
    comm.recv(got, 0, tag=3)
    assert got[0] == i
    return None


@pytest.mark.parametrize("matched", ["first", "next", "last"])
def test_a_small_send_past_the_bound(world, matched):
    """It is announced, so that its receive can match; when slots come free instead, it is sent
    after all and does not wait for its receive."""
    announced, filled = world(2, past_the_bound, matched, env=NOTHING_STORED)[0]
    assert filled >= 2 and announced >= 1


def both_send_first(comm, count):
    """Below the bound small sends never wait for each other, however late credits come."""
    other = 1 - comm.rank
    for i in range(count):
        comm.send(np.array([i]), other, tag=i % 2)
    got = np.empty(1, "i8")
    for tag in range(2):
        for i in range(tag, count, 2):
            comm.recv(got, other, tag=tag)
            assert got[0] == i


def test_small_sends_to_each_other(world, scale):
    env = {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16"}
    world(2, both_send_first, scale.rounds(3000, 200), env=env)


def gone(comm, dies, folder):
    """What was lent to rank 1 is rank 2's once rank 1 is gone, also what held its last messages."""
    last = [np.full(4, i, "i4") for i in range(3)]
    into = np.empty(4, "i4")
    if comm.rank == 1:
        for message in last:
            comm.send(message, 0, tag=1)
        comm.recv(into, 0, tag=2)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
    elif comm.rank == 2:
        comm.recv(into, 0, tag=2)
        use_up(comm, folder, range(60), 3)
    else:
        before, pool = held(comm)
        while comm._engine.peers()[1]["unexpected"] < 3:
            comm.progress()
        comm.send(into, 1, tag=2)
        with pytest.raises(PeerDeadError):
            comm.recv(into, 1, tag=4)
        comm.progress()
        comm.progress()
        grants, now = held(comm)
        assert grants[1] == 3 and now == pool + before[1] - 3, (before, pool, grants, now)
        for message in last:
            comm.recv(into, 1, tag=1)
            assert (into == message).all()
        grants, now = held(comm)
        assert grants[1] == 0 and now == pool + before[1], (before, pool, grants, now)
        comm.send(into, 2, tag=2)
        grants, _ = list(take_all(comm, folder, 2, range(60), 3))[-1]
        assert grants[2] > before[2], (before, grants)


def test_slots_of_a_rank_that_left_are_lent_to_others(world, tmp_path):
    world(3, gone, False, str(tmp_path), env={"ROCECOMM_RECV_POOL": "32"})


def test_slots_of_a_dead_rank_are_lent_to_others(soft_world, tmp_path):
    soft_world(3, gone, True, str(tmp_path), env={"ROCECOMM_RECV_POOL": "32"}, mortal=[1])


def recalled(comm, folder):
    """Rank 1 has been lent most and computes; rank 2 has been lent as much, and returns of it what rank 3
    lacks. Three quarters of the first grant, 80 / 5 + 4, make the receiver lend as much again."""
    first, then, go_on = range(15), range(60), Path(folder) / "go on"
    one = np.zeros(1, "i8")
    if comm.rank >= 4:
        return None
    if comm.rank == 3:
        comm.recv(one, 0, tag=1)
        while one[0] == 0:
            use_up(comm, folder, then, 5)
            comm.recv(one, 0, tag=1)
        return None
    if comm.rank:
        comm.recv(one, 0, tag=1)
        use_up(comm, folder, first, 2)
        if comm.rank == 1:
            while not go_on.exists():
                time.sleep(0.01)
        comm.recv(one, 0, tag=3)
        return None
    for rank in (4, 5):
        with pytest.raises(PeerDeadError):
            comm.recv(one, rank)
    comm.progress()
    comm.progress()
    for rank in (1, 2):
        comm.send(one, rank, tag=1)
        before, _ = list(take_all(comm, folder, rank, first, 2))[-1]
    assert before[1] == before[2] > before[3], before
    until = time.monotonic() + 20
    after = before
    while after[3] == before[3] and time.monotonic() < until:
        comm.send(np.array([0]), 3, tag=1)
        after, _ = list(take_all(comm, folder, 3, then, 5))[-1]
    go_on.touch()
    comm.send(np.array([1]), 3, tag=1)
    for rank in (1, 2):
        comm.send(one, rank, tag=3)
    return before, after


def test_another_is_asked_while_one_computes(soft_world, tmp_path):
    before, after = soft_world(6, recalled, str(tmp_path), env={"ROCECOMM_RECV_POOL": "80"})[0]
    assert after[3] > before[3] and after[2] < before[2], (before, after)
