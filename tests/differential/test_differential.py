"""Random verb programs on the device under test and on a model of the specification.

Every completion of every queue, in its order, and both sides' memory must agree. A failure
shows the program, as short as could be found, as Python, and the seed: ROCECOMM_TEST_SEED
replays it, on this or another device. ROCECOMM_TEST_PROGRAMS is the number of programs.
"""

import os

import pytest
from differential.departures import complete, find_rules
from differential.execute import Driver
from differential.known import KNOWN
from differential.model import Rules
from differential.program import plan
from differential.search import search


@pytest.fixture(scope="module", params=["one process", "two processes"])
def driver(request, device, scale):
    d = Driver(device, apart=request.param == "two processes", slow=scale.time)
    yield d
    d.close()


@pytest.fixture(scope="module")
def rules(driver):
    """What this device does where devices differ, found out by trying. Fails on a device that
    does neither what the specification says nor what is known."""
    return find_rules(driver)[0]


@pytest.mark.parametrize("name", KNOWN)
def test_known_program(driver, rules, name):
    case = KNOWN[name]
    if case.unless and getattr(rules, case.unless) != getattr(Rules(), case.unless):
        pytest.skip(f"the device departs in {case.unless}: see device-differences.md")
    driver.run(case.config, complete(case.steps, rules, case.config), rules)


@pytest.mark.timeout(200)
def test_random_programs(driver, rules, scale):
    def one(config, raw):
        program, _ = plan(config, raw, rules)
        driver.run(config, program, rules)

    examples = int(os.environ.get("ROCECOMM_TEST_PROGRAMS") or scale.rounds(140, 14))
    search(examples, one, shorten_for=10 * scale.time)


def test_the_device_departs_in_the_same_ways_again(driver, rules):
    """What was found by trying is no matter of chance."""
    assert find_rules(driver)[0] == rules
