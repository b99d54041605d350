"""The model of random programs says no where it must, and the generator makes what it is there for."""

import collections

import pytest
from property.model import DRAIN, Outcome, check
from property.program import Program, generate


def program(*messages, **more):
    """Messages (src, dst, tag, size); what is sent and received is in the outcomes."""
    fields = {"seed": 0, "ranks": 3, "threads": 1, "wild": True, "cancels": True, "one_sided": False}
    return Program(**{**fields, **more}, messages=list(messages), ops=[])


def sent(at, number, end="sent", thread=0):
    return Outcome(at, "send", end, number, thread=thread)


def got(at, number, src=0, tag=0, size=0, end="got", **more):
    more = {"capacity": 100, "nbytes": size, **more}
    return Outcome(at, "receive", end, number, 1, src=src, tag=tag, **more)


TWO = program((0, 1, 0, 10), (0, 1, 0, 20))
OTHERS = program((0, 1, 0, 10), (2, 1, 5, 20))

RIGHT = {
    "in order": (TWO, [sent(0, 0), sent(1, 1), got(2, 0, size=10), got(3, 1, size=20)]),
    "emptied at the end": (TWO, [sent(0, 0), sent(1, 1), got(2, 0, size=10), got(DRAIN, 1, size=20)]),
    "two senders in any order": (OTHERS, [sent(0, 0), sent(1, 1), got(2, 1, None, None, 20),
                                          got(3, 0, None, None, 10)]),
    "sent by two threads": (TWO, [sent(0, 0), sent(1, 1, thread=1), got(2, 1, size=20), got(3, 0, size=10)]),
    "withdrawn": (TWO, [sent(0, 0, "withdrawn"), sent(1, 1), got(2, 1, size=20)]),
    "a receive that gave up in between": (TWO, [sent(0, 0), sent(1, 1), got(2, -1, end="timeout"),
                                                got(3, 0, size=10), got(4, 1, size=20)]),
    "seen while a receive before had met one that was withdrawn": (TWO, [
        sent(0, 0, "withdrawn"), sent(1, 1), got(2, 1, size=20),
        Outcome(3, "probe", "seen", rank=1, source=0, told_tag=0, nbytes=20)]),
    "too large": (program((0, 1, 0, 200)), [sent(0, 0), got(1, 0, end="truncated")]),
}

WRONG = {
    "overtaken": (TWO, [sent(0, 0), sent(1, 1), got(2, 1, size=20), got(3, 0, size=10)]),
    "passed an earlier receive": (TWO, [sent(0, 0), sent(1, 1), got(2, -1, end="left"), got(3, 0, size=10),
                                        got(4, 1, size=20)]),
    "never received": (TWO, [sent(0, 0), sent(1, 1), got(2, 0, size=10)]),
    "received twice": (TWO, [sent(0, 0), sent(1, 1), got(2, 0, size=10), got(3, 0, size=10),
                             got(4, 1, size=20)]),
    "withdrawn and received all the same": (TWO, [sent(0, 0, "withdrawn"), sent(1, 1), got(2, 0, size=10),
                                                  got(3, 1, size=20)]),
    "does not fit": (OTHERS, [sent(0, 0), sent(1, 1), got(2, 0, size=10), got(3, 1, 2, 0, 20)]),
    "the wrong source or tag": (program((0, 1, 0, 10)), [sent(0, 0), got(1, 0, size=10, told_tag=1)]),
    "bytes told": (program((0, 1, 0, 10)), [sent(0, 0), got(1, 0, size=9)]),
    "message 0": (program((0, 1, 0, 200)), [sent(0, 0), got(1, 0, size=200)]),      # more than fits
    "had to succeed": (program((0, 1, 0, 10), wild=False, cancels=False),
                       [sent(0, 0), got(1, -1, end="timeout"), got(2, 0, size=10)]),
    "bytes differ": (program((0, 1, 0, 10)), [sent(0, 0), got(1, 0, size=10, faults=("bytes differ",))]),
    "that nobody sent": (program(), [Outcome(0, "probe", "seen", rank=1, source=0, told_tag=0, nbytes=3)]),
    "spoken for": (program((0, 1, 0, 10)), [sent(0, 0), got(1, 0, size=10), Outcome(
        2, "probe", "seen", rank=1, source=0, told_tag=0, nbytes=10)]),
    "an addition found": (program(), [Outcome(0, "total", "got", rank=1, value=(8, 0)), *[
        Outcome(i, "atomic", "", thread=i, target=1, value=4, old=0) for i in range(2)]]),
    "two swaps": (program(), [Outcome(0, "total", "got", rank=1, value=(0, 7)), *[
        Outcome(i, "atomic", "", target=1, word=8, value=7 + i, compare=0, old=0) for i in range(2)]]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    assert check(*RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name):
    assert any(name in text for text in check(*WRONG[name])), check(*WRONG[name])


def test_the_generator_makes_everything():
    made, flags = collections.Counter(), collections.Counter()
    for seed in range(120):
        p = generate(seed, 2 + seed % 4)
        assert Program.from_json(p.to_json()) == p == generate(seed, 2 + seed % 4)
        made.update(op.do for op in p.ops)
        made.update("list" for op in p.ops if op.cut)
        flags.update([("wild", p.wild), ("cancels", p.cancels), ("one-sided", p.one_sided), p.threads,
                      ("certain", p.certain)])
        for dst in range(p.ranks):
            sizes = [m[3] for m in p.messages if m[1] == dst]
            assert len(set(sizes)) == len(sizes)
    assert len(made) == 33 and min(made.values()) >= 10, made
    assert len(flags) == 11 and min(flags.values()) >= 10, flags
