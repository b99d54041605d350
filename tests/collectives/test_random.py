"""Random programs of collectives and messages against what they must give."""

import os
import random
import time

import numpy as np
import pytest

SMALL = os.environ.get("ROCECOMM_TEST_SIZES") == "small"       # a slow machine


def program(comm, seed, steps, largest):
    """The same random steps on all ranks; each rank also dawdles at its own random moments."""
    shared, own = random.Random(seed), random.Random((seed, comm.rank).__hash__())
    pending = []
    for step in range(steps):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)
        kind = shared.choice(["reduce", "reduce", "reduce", "barrier", "message", "shift"])
        count = int(largest ** shared.random()) - 1
        dtype = shared.choice(["float32", "float64", "int32", "int64"])
        rows = np.random.default_rng((seed, step)).integers(-1000, 1000, (comm.size, count))
        mine = rows[comm.rank].astype(dtype)
        where = (seed, step, kind, count, dtype)
        if kind == "barrier":
            comm.barrier()
        elif kind == "reduce":
            if shared.random() < 0.5:
                result = comm.all_reduce(mine)
            else:
                result = comm.all_reduce(mine, out=np.full(count, 5, dtype))
                assert np.array_equal(mine, rows[comm.rank].astype(dtype)), where
            assert np.array_equal(result, rows.sum(axis=0).astype(dtype)), where
        elif kind == "message":
            # A message that is under way during the collectives that follow.
            source, target = shared.randrange(comm.size), shared.randrange(comm.size)
            if comm.rank == source:
                pending.append((comm.isend(mine, target, tag=step), None, None))
            if comm.rank == target:
                buffer = np.empty(count, dtype)
                pending.append((comm.irecv(buffer, source, tag=step), buffer,
                                rows[source].astype(dtype)))
        else:
            buffer = np.empty(count, dtype)
            left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            comm.sendrecv(mine, right, buffer, left, sendtag=step, recvtag=step)
            assert np.array_equal(buffer, rows[left].astype(dtype)), where
        if len(pending) > 8 or step == steps - 1:
            for request, buffer, wanted in pending:
                request.wait(30)
                assert buffer is None or np.array_equal(buffer, wanted), where
            pending.clear()
    comm.barrier()
    return True


@pytest.mark.parametrize("size, seed", [(3, 2)] if SMALL else [(2, 1), (3, 2), (4, 3)])
def test_random_programs(world, scale, size, seed):
    largest = min(200_000, scale.bytes // 8)
    env = {"ROCECOMM_SEGMENT": "65536"}
    assert world(size, program, seed, scale.rounds(150, 20), largest, env=env) == [True] * size


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_many_random_programs(world, scale):
    for seed in range(1000, 1000 + scale.rounds(30, 3)):
        size = 2 + seed % 4
        env = {"ROCECOMM_SEGMENT": str(4096 << seed % 6),
               "ROCECOMM_EAGER_LIMIT": str([0, 512, 8192, 65536][seed % 4])}
        assert world(size, program, seed, 150, 200_000, env=env) == [True] * size, seed
