"""Receive slots: a reserve for each peer, and a pool that is lent to those who send."""

import time
from pathlib import Path

import numpy as np
import pytest

from rocecomm.config import Config
from rocecomm.errors import ConfigError
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


def flood(comm, count, rounds, folder):
    """Rank 0 receives from one rank at a time, and only when all its credits are used up: the sender says
    so by a file, since a message of its own would wait for a credit like all others."""
    value = np.empty(1, "i8")
    used_up, enough = Path(folder) / "used up", np.empty(1, "u1")
    total = None
    for phase in range(rounds):
        sender = 1 + phase % (comm.size - 1)
        deadline = time.monotonic() + 20
        enough[0] = False
        while not enough[0] and comm.rank in (0, sender):
            if comm.rank == sender:
                sends = [comm.isend(np.array([phase * count + i]), 0, tag=5) for i in range(count)]
                used_up.touch()
                comm.wait_all(sends)
                comm.recv(enough, 0, tag=6)
                continue
            while not used_up.exists():
                time.sleep(0.001)
            used_up.unlink()
            for i in range(count):
                assert comm.recv(value, sender, tag=5) == 8
                assert value[0] == phase * count + i
                grants, pool = held(comm)
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
    return sums


def test_all_flood_one(world, scale):
    count = scale.rounds(900, 90)
    env = {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16"}
    ranks = min(6, scale.ranks)
    sums = world(ranks, everybody, count, env=env)[0]
    assert sums == [sum(range(count))] * (ranks - 1)
