"""The differential test of many queue pairs itself: that it can fail, and what its programs reach."""

import collections
import random

import pytest
from differential.many_execute import ManyDriver
from differential.many_known import KNOWN, complete, find_more, outcome
from differential.many_model import More
from differential.many_plan import make_world, plan
from differential.model import Rules


@pytest.fixture(autouse=True)
def once(scale):
    if scale.share < 1:
        pytest.skip("the same on every device: run where the machine is fast")


@pytest.fixture(scope="module")
def soft():
    driver = ManyDriver("soft0")
    driver.patience = 0.5
    yield driver
    driver.close()


@pytest.mark.parametrize("name", KNOWN)
def test_the_model_by_hand(name):
    """A model that agrees with a device could share its errors: these were worked out by hand."""
    case = KNOWN[name]
    assert outcome(case) == (case.expected, case.events, case.asyncs)


def test_soft0_follows_the_specification(soft):
    assert find_more(soft, Rules()) == More()


@pytest.mark.parametrize("field", More._fields)
def test_a_wrong_model_is_caught(soft, field):
    """The known programs tell a device from a model that is wrong in one point, or random ones do."""
    wrong = More()._replace(**{field: False})

    def differ(world, steps):
        return soft.differences(world, steps, Rules(), wrong)

    if any(differ(c.world, complete(c.world, c.steps, Rules(), wrong)) for c in KNOWN.values()):
        return
    assert any(differ(world, plan(world, raw, Rules(), wrong)[0]) for world, raw in programs(200))


def programs(n):
    for number in range(n):
        rng = random.Random(f"many {number}")
        yield make_world(rng), [rng.getrandbits(48) for _ in range(60)]


def test_programs_are_varied():
    """The generator reaches what it is there for; else agreement would mean little."""
    seen = collections.Counter()
    for world, raw in programs(300):
        steps, model = plan(world, raw)
        for step in steps:
            name = type(step).__name__
            seen[name] += 1
            if name == "Send":
                kind = world.queues[step.qp].kind
                seen[kind, step.op] += 1
                for what in ("inline", "fence", "solicited"):
                    seen[what] += getattr(step, what)
                seen["through a window"] += step.far is not None and step.far.window is not None
                seen["unsignaled"] += not step.signaled
                seen["nothing in an element"] += any(not p.length for p in step.places)
            elif name in ("Events", "Asyncs"):
                for due in step.due:
                    seen["event" if name == "Events" else due[1]] += 1
            elif name == "Sync":
                seen["dropped"] += step.pause
        for (_, _, queue), completions in model.completed.items():
            for c in completions:
                seen[queue, c.status.name.removeprefix("IBV_WC_")] += 1
    few = {key for key, least in {
        **{("RC", op): 20 for op in ("send", "send_imm", "write", "write_imm", "read", "add", "swap")},
        ("RC", "bind"): 50, ("RC", "local_inv"): 10, ("RC", "send_inv"): 10, "through a window": 10,
        **{("UC", op): 20 for op in ("send", "send_imm", "write", "write_imm")},
        ("UD", "send"): 100, ("UD", "send_imm"): 50, "inline": 200, "fence": 50, "solicited": 300,
        "unsignaled": 300, "nothing in an element": 200, "dropped": 50, "event": 150, "Arm": 200, "Limit": 40,
        "Again": 50, "Drain": 50, "Resume": 30, "Resize": 100, "Reg": 50, "Dereg": 3,
        "IBV_EVENT_SRQ_LIMIT_REACHED": 5, "IBV_EVENT_QP_LAST_WQE_REACHED": 100, "IBV_EVENT_QP_ACCESS_ERR": 5,
        ("send", "RNR_RETRY_EXC_ERR"): 10, ("send", "REM_ACCESS_ERR"): 5, ("send", "LOC_PROT_ERR"): 5,
        ("send", "RETRY_EXC_ERR"): 5, ("recv", "WR_FLUSH_ERR"): 200, ("recv", "LOC_LEN_ERR"): 2,
        ("recv", "SUCCESS"): 1000}.items() if seen[key] < least}
    assert not few, {key: seen[key] for key in few}


@pytest.mark.parametrize("at", [0, -1])
def test_a_wrong_byte_is_caught(soft, monkeypatch, at):
    case = KNOWN["all signaled"]
    steps = complete(case.world, case.steps, Rules(), More())
    assert not soft.differences(case.world, steps, Rules(), More())
    original = soft.sides[1].memory

    def altered():
        data = bytearray(original())
        data[at] ^= 1
        return bytes(data)

    monkeypatch.setattr(soft.sides[1], "memory", altered)
    found = soft.differences(case.world, steps, Rules(), More())
    assert found and "memory differ" in found[-1]
