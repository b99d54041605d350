"""Random verb programs on the device under test and on a model of the specification.

Every completion of every queue, in its order, and both sides' memory must agree. A failure
shows the program, as short as could be found, as Python, and the seed: ROCECOMM_TEST_SEED
replays it, on this or another device. ROCECOMM_TEST_PROGRAMS is the number of programs.
"""

import os
import random
import time

import pytest
from differential.departures import DEPARTURES, complete, find_rules
from differential.execute import Driver, Mismatch
from differential.known import KNOWN
from differential.model import OK, Rules, run
from differential.program import plan
from differential.raw import configs, raw_programs
from differential.steps import ARENA, OPS, QUEUES, Config, Dereg, Recv, Reg, Send, Sge
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from rocecomm import verbs as v

SEED = int(os.environ.get("ROCECOMM_TEST_SEED") or random.SystemRandom().randrange(2**32))


@pytest.fixture(scope="module", params=["one process", "two processes"])
def driver(request, device, scale):
    d = Driver(device, apart=request.param == "two processes", slow=scale.time)
    yield d
    d.close()


@pytest.fixture(scope="module")
def rules(driver):
    """What this device does where devices differ; found out by trying."""
    return find_rules(driver)[0]


def test_the_device_is_one_that_we_know(driver, rules):
    """Each departure is either there or not, and nothing else happens."""
    found = [d.name for d in DEPARTURES if getattr(rules, d.field) == d.value]
    assert rules == Rules() or found


def test_soft0_follows_the_specification(scale):
    driver = Driver("soft0", slow=scale.time)
    try:
        assert find_rules(driver) == (Rules(), [])
    finally:
        driver.close()


@pytest.mark.parametrize("name", KNOWN)
def test_known_program(driver, rules, name):
    case = KNOWN[name]
    if case.unless and getattr(rules, case.unless) != getattr(Rules(), case.unless):
        pytest.skip(f"the device departs in {case.unless}: see device-differences.md")
    driver.run(case.config, complete(case.steps, rules, case.config), rules)


def shortened(config, raw, one, seconds):
    """The shortest failing program that leaving out raw operations gives within a time, as text."""
    text, end, size = None, time.monotonic() + seconds, len(raw)
    while size:
        at = 0
        while at < len(raw) and (text is None or time.monotonic() < end):
            fewer = raw[:at] + raw[at + size:] if text else raw
            try:
                one(config, fewer)
                at += size
            except Mismatch as error:
                text, raw = str(error), fewer
        size = min(size, len(raw)) // 2
    return text


def search(examples, one, shorten_for=0.0, seed=SEED):
    """Runs one(config, raw) on that many random programs."""
    failed = []

    @hypothesis_seed(seed)
    @settings(max_examples=examples, database=None, deadline=None, print_blob=False,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(configs, raw_programs)
    def check(config, raw):
        if not failed:
            try:
                one(config, raw)
                return
            except Mismatch as error:
                failed.append((config, raw, error))
        raise failed[0][2]

    try:
        check()
    except Mismatch as error:
        text = shortened(*failed[0][:2], one, shorten_for) or f"{error}\n(it did not happen again)"
        raise Mismatch(f"{text}\n\nreplay with ROCECOMM_TEST_SEED={seed} "
                       f"ROCECOMM_TEST_PROGRAMS={examples}") from None


@pytest.mark.timeout(200)
def test_random_programs(driver, rules, scale):
    def one(config, raw):
        program, _ = plan(config, raw, rules)
        driver.run(config, program, rules)

    examples = int(os.environ.get("ROCECOMM_TEST_PROGRAMS") or scale.rounds(140, 14))
    search(examples, one, shorten_for=10 * scale.time)


# ------------------------------------------------------------------ the test itself
def test_programs_are_varied():
    """The generator reaches what it is there for; else agreement would mean little."""
    seen = {}

    def count(*what):
        seen[what] = seen.get(what, 0) + 1

    def one(config, raw):
        program, model = plan(config, raw)
        assert all(not q.sq and not q.rq for q in model.qps)
        for side, queue in QUEUES:      # every request that was posted has one completion
            qp = model.qps[side]
            posts = [s.wr_id for s in program if type(s) is (Send if queue == "send" else Recv)
                     and s.side == side]
            ended = [d.step.wr_id for d in qp.sent] if queue == "send" else [c.wr_id for c in qp.received]
            assert posts == ended
        for e in model.events:
            count(e.step.op if e.status == OK else e.status.name)
            count("inline", e.step.inline, "unsignaled", not e.step.signaled, "fence", e.step.fence)
            count("elements", len(e.step.sges))
            if e.step.op in ("send", "write", "read") and e.step.length > config.mtu:
                count("long", e.step.op)
        for q in model.qps:
            for c in q.received:
                count("receive", c.status.name)
        seen["dereg",] = seen.get(("dereg",), 0) + sum(isinstance(s, Dereg) for s in program)

    search(200, one, seed=7)
    for op in OPS:
        assert seen.get((op,), 0) >= 40, (op, seen)
    for status in ("LOC_PROT_ERR", "REM_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_OP_ERR", "RETRY_EXC_ERR"):
        assert seen.get((f"IBV_WC_{status}",), 0) >= 2, (status, seen)
    for status in ("SUCCESS", "WR_FLUSH_ERR", "LOC_LEN_ERR", "LOC_PROT_ERR"):
        assert seen.get(("receive", f"IBV_WC_{status}"), 0) >= 1, (status, seen)
    for op in ("send", "write", "read"):
        assert seen.get(("long", op), 0) >= 5, (op, seen)
    for flag in (True, False):
        assert sum(n for k, n in seen.items() if k[0] == "inline" and k[1] is flag) >= 10
        assert sum(n for k, n in seen.items() if k[0] == "inline" and k[3] is flag) >= 10
        assert sum(n for k, n in seen.items() if k[0] == "inline" and k[5] is flag) >= 10
    assert seen.get(("dereg",), 0) >= 20


@pytest.mark.parametrize("wrong", [
    dict(gather_key=v.IBV_WC_LOC_QP_OP_ERR), dict(short_receive=(v.IBV_WC_REM_OP_ERR, v.IBV_WC_LOC_LEN_ERR)),
    dict(late_receive="stays"), dict(bad_receive=v.IBV_WC_LOC_QP_OP_ERR)])
def test_a_wrong_model_is_caught(scale, wrong):
    """The known programs tell a device from a model that is wrong in one point."""
    driver = Driver("soft0", slow=scale.time)
    try:
        bad = Rules()._replace(**wrong)
        assert any(driver.differences(c.config, complete(c.steps, bad, c.config), bad)
                   for c in KNOWN.values())
    finally:
        driver.close()


def test_a_wrong_byte_is_caught(scale):
    """One byte of memory that is not what the model says, within the arena or in its guard."""
    driver = Driver("soft0", slow=scale.time)
    steps = complete((Send(0, 1, "write", (Sge(0, 0, 100),), KNOWN["write"].steps[0].remote),), Rules())
    try:
        assert not driver.differences(Config(), steps, Rules())
        for at in (0, ARENA // 2, -1):
            original = driver.sides[1].memory

            def altered(at=at, original=original):
                data = bytearray(original())
                data[at] ^= 1
                return bytes(data)

            driver.sides[1].memory = altered
            found = driver.differences(Config(), steps, Rules())
            driver.sides[1].memory = original
            assert found and "memory differ" in found[-1]
    finally:
        driver.close()


def test_the_model_by_hand():
    """A model that agrees with a device could share its errors: these were worked out by hand."""
    for name, case in KNOWN.items():
        model = run(case.config, complete(case.steps, Rules(), case.config))
        found = {f"{side} {queue}": [(c.wr_id, c.status.name.removeprefix("IBV_WC_"))
                                     for c in model.completions(side, queue)]
                 for side, queue in QUEUES if model.completions(side, queue)}
        assert found == case.expected, name


def test_regions_and_reg_are_as_the_model_thinks():
    model = run(Config(), [Reg(0, 5, 10, 20), Dereg(0, 5)])
    assert not model.regions[5].alive and model.clean
