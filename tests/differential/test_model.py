"""The differential test itself: that it can fail, and that its programs reach something."""

import pytest
from differential.departures import complete, find_rules
from differential.execute import Driver
from differential.known import KNOWN
from differential.model import OK, Rules, run
from differential.program import plan
from differential.search import search
from differential.steps import ARENA, OPS, QUEUES, Config, Dereg, Recv, Send

from rocecomm import verbs as v


@pytest.fixture(autouse=True)
def once(scale):
    if scale.share < 1:
        pytest.skip("the same on every device: run where the machine is fast")


@pytest.fixture(scope="module")
def soft():
    driver = Driver("soft0")
    yield driver
    driver.close()


def test_soft0_follows_the_specification(soft):
    assert find_rules(soft) == (Rules(), [])


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
            count("inline", e.step.inline and e.step.length > 0)
            count("unsignaled", not e.step.signaled)
            count("fence", e.step.fence)
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
    for what in ("inline", "unsignaled", "fence"):
        assert min(seen.get((what, flag), 0) for flag in (True, False)) >= 100, (what, seen)
    for n in (0, 1, 2, 3):
        assert seen.get(("elements", n), 0) >= 50, (n, seen)
    assert seen.get(("dereg",), 0) >= 50


@pytest.mark.parametrize("wrong", [
    dict(gather_key=v.IBV_WC_LOC_QP_OP_ERR), dict(short_receive=(v.IBV_WC_REM_OP_ERR, v.IBV_WC_LOC_LEN_ERR)),
    dict(late_receive="stays"), dict(bad_receive=v.IBV_WC_LOC_QP_OP_ERR)])
def test_a_wrong_model_is_caught(soft, wrong):
    """The known programs tell a device from a model that is wrong in one point."""
    bad = Rules()._replace(**wrong)
    assert any(soft.differences(c.config, complete(c.steps, bad, c.config), bad) for c in KNOWN.values())


@pytest.mark.parametrize("at", [0, ARENA // 2, -1])
def test_a_wrong_byte_is_caught(soft, monkeypatch, at):
    """One byte of memory that is not what the model says, within the arena or in its guard."""
    steps = complete(KNOWN["write"].steps, Rules())
    assert not soft.differences(Config(), steps, Rules())
    original = soft.sides[1].memory

    def altered():
        data = bytearray(original())
        data[at] ^= 1
        return bytes(data)

    monkeypatch.setattr(soft.sides[1], "memory", altered)
    found = soft.differences(Config(), steps, Rules())
    assert found and "memory differ" in found[-1]


def test_the_model_by_hand():
    """A model that agrees with a device could share its errors: these were worked out by hand."""
    for name, case in KNOWN.items():
        model = run(case.config, complete(case.steps, Rules(), case.config))
        found = {f"{side} {queue}": [(c.wr_id, c.status.name.removeprefix("IBV_WC_"))
                                     for c in model.completions(side, queue)]
                 for side, queue in QUEUES if model.completions(side, queue)}
        assert found == case.expected, name
