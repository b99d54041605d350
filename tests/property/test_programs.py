"""Random programs on several ranks against a pure model (docs/design/property.md).

ROCECOMM_TEST_SEED=N runs the program with that seed alone; it is printed when one fails.
"""

import os
import random

import pytest
from property.execute import run
from property.model import check
from property.program import Program, generate

SEED = os.environ.get("ROCECOMM_TEST_SEED")


def run_many(comm, seeds, options):
    results = []
    for seed in seeds:
        try:
            results.append((seed, run(comm, generate(seed, comm.size, **options))))
        except BaseException as error:
            raise AssertionError(f"{advice(seed, comm.size, options)}: {error!r}") from error
    return results


def run_one(comm, text):
    return run(comm, Program.from_json(text))


def advice(seed, ranks, options):
    return f"program {seed} of {ranks} ranks, ROCECOMM_TEST_SEED={seed} runs it again, {options}"


def programs(world, ranks, seeds, env=None, timeout=50, **options):
    """Runs the programs in one world and checks them; a failure shows the program, shortened."""
    if SEED:
        seeds = [int(SEED)]
    logs = world(ranks, run_many, list(seeds), options, env=env, timeout=timeout)
    for parts in zip(*logs, strict=True):
        seed = parts[0][0]
        program = generate(seed, ranks, **options)
        wrong = check(program, [o for _, outcomes in parts for o in outcomes])
        if wrong:
            pytest.fail("\n".join([advice(seed, ranks, options), *wrong[:5],
                                   str(shorten(world, env, program))]))


def shorten(world, env, program, attempts=40):
    """A program that still fails, with fewer operations."""
    step = max(1, len(program.ops) // 4)
    while step and attempts:
        done = True
        for at in range(0, len(program.ops), step):
            attempts -= 1
            if not attempts:
                break
            smaller = program.without({op.at for op in program.ops[at:at + step]})
            try:
                logs = world(program.ranks, run_one, smaller.to_json(), env=env, timeout=15)
            except AssertionError:
                continue                # waits for what is not sent any more
            if check(smaller, [o for outcomes in logs for o in outcomes]):
                program, done = smaller, False
                break
        if done:
            step //= 2
    return program


LIMITS = {
    "usual": {},
    "few credits": {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16", "ROCECOMM_EAGER_LIMIT": "1024"},
    "all announced": {"ROCECOMM_EAGER_LIMIT": "0"},
    "nothing stored": {"ROCECOMM_UNEXPECTED_LIMIT": "0", "ROCECOMM_EAGER_LIMIT": "65536"},
    "short messages": {"ROCECOMM_SOFT_MAX_MSG": "4096"},
    "a progress thread": {"ROCECOMM_PROGRESS": "thread"},
    "hardly anything": {"ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16",
                        "ROCECOMM_EAGER_LIMIT": "100", "ROCECOMM_UNEXPECTED_LIMIT": "4096",
                        "ROCECOMM_PROGRESS": "thread"},
    # from here on in `make stress` alone
    "large slots": {"ROCECOMM_EAGER_LIMIT": "1M", "ROCECOMM_RECV_POOL": "16", "ROCECOMM_PEER_CREDITS": "2"},
    "little stored": {"ROCECOMM_UNEXPECTED_LIMIT": "20000", "ROCECOMM_SPIN": "0"},
    "staging": {"ROCECOMM_SOFT_STAGING": "1"},
    "registrations kept": {"ROCECOMM_REG_CACHE_MODE": "always", "ROCECOMM_REG_CACHE": "300000"},
}
QUICK = list(LIMITS)[1:7]
STORED = ("usual", "short messages", "a progress thread", "large slots", "staging", "registrations kept")


def options(name, scale):
    return {"length": 60 if scale.share == 1 else 25, "largest": min(scale.bytes, 1 << 20) >> (
        0 if scale.share == 1 else 3), "stored": name in STORED}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_random_programs(world, scale, ranks):
    programs(world, min(ranks, scale.ranks), range(1000 * ranks, 1000 * ranks + scale.rounds(8, 1)),
             **options("usual", scale))


@pytest.mark.parametrize("name", QUICK)
def test_random_programs_at_the_limits(world, scale, name):
    first = 100 * list(LIMITS).index(name)
    programs(world, 3, range(first, first + scale.rounds(4, 1)), LIMITS[name], **options(name, scale))


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LIMITS)
def test_a_thousand_random_programs(world, scale, name):
    """25 programs for each number of ranks, so 1100 in all. ROCECOMM_TEST_PROGRAMS sets another number."""
    first = random.randrange(10**6)
    each = int(os.environ.get("ROCECOMM_TEST_PROGRAMS", scale.rounds(25)))
    for ranks in (2, 3, 4, 5):
        for start in range(first, first + each, 25):
            seeds = range(start, min(start + 25, first + each))
            programs(world, min(ranks, scale.ranks), seeds, LIMITS[name], timeout=200,
                     **options(name, scale))
