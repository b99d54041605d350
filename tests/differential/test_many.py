"""Random programs of many queue pairs on the device under test and on a model.

RC, UC and UD queue pairs that share completion queues, channels and receive queues: every
completion in the order of its queue, every event, the asynchronous ones too, and both sides'
memory must agree. ROCECOMM_TEST_SEED replays a failure; ROCECOMM_TEST_PROGRAMS is the number of programs.
"""

import os

import pytest
from differential.departures import find_rules
from differential.execute import Driver
from differential.many_execute import ManyDriver
from differential.many_known import KNOWN, complete, find_more
from differential.many_model import More
from differential.many_plan import make_world, plan
from differential.search import search_seeds


@pytest.fixture(scope="module")
def rules(device, scale):
    """What this device does where devices differ on one pair of queue pairs."""
    driver = Driver(device, slow=scale.time)
    yield find_rules(driver)[0]
    driver.close()


@pytest.fixture(scope="module", params=["one process", "two processes"])
def driver(request, device, scale):
    d = ManyDriver(device, apart=request.param == "two processes", slow=scale.time)
    yield d
    d.close()


@pytest.fixture(scope="module")
def more(driver, rules):
    return find_more(driver, rules)


@pytest.mark.parametrize("name", KNOWN)
def test_known_program(driver, rules, more, name):
    case = KNOWN[name]
    if case.world.windows != (0, 0) and not driver.windows:
        pytest.skip("the device has no memory windows")
    if case.unless and getattr(more, case.unless) != getattr(More(), case.unless):
        pytest.skip(f"the device departs in {case.unless}: see device-differences.md")
    driver.run(case.world, complete(case.world, case.steps, rules, more), rules, more)


def programs(driver, rules, more, examples, shorten_for):
    def one(world, raw):
        driver.run(world, plan(world, raw, rules, more)[0], rules, more)

    search_seeds(int(os.environ.get("ROCECOMM_TEST_PROGRAMS") or examples),
                 lambda rng: make_world(rng, driver.windows), one, shorten_for)


@pytest.mark.timeout(200)
def test_random_programs(driver, rules, more, scale):
    # several seconds each on a slow machine
    programs(driver, rules, more, 200 if scale.share == 1 else 3, 10 * scale.time)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_very_many_random_programs(driver, rules, more, scale):
    programs(driver, rules, more, scale.rounds(4000, 100), 30 * scale.time)
