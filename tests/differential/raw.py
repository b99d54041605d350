"""Raw programs: plain data that hypothesis draws and `program.plan` turns into steps."""

from typing import NamedTuple

from differential.steps import ALL, ARENA, ATOMIC, LOCAL, OPS, QUEUES, READ, WRITE, Config
from hypothesis import strategies as st

LENGTHS = (0, 1, 7, 8, 63, 64, 65, 200, 255, 256, 257, 511, 700, 1024, 1025, 2048, 3000)
SEND_FAULTS = ("wrong lkey", "dead lkey", "local end", "local right", "local domain", "wrong rkey",
               "dead rkey", "far end", "far start", "far right", "far domain", "unaligned", "too long")
RECV_FAULTS = ("wrong lkey", "dead lkey", "local end", "local right", "local domain", "too short")


class RawPart(NamedTuple):
    region: int
    offset: int
    length: int


class RawSend(NamedTuple):
    side: int
    op: str
    parts: tuple
    far: RawPart
    signaled: bool
    fence: bool
    inline: bool
    solicited: bool
    number: int         # immediate data, operand
    fault: str


class RawRecv(NamedTuple):
    side: int
    parts: tuple
    fault: str


class RawReg(NamedTuple):
    side: int
    low: int
    length: int
    access: int
    pd: int


class RawDereg(NamedTuple):
    side: int
    region: int
    early: bool         # rather before its completion is polled


class RawPoll(NamedTuple):
    side: int
    queue: str
    n: int


class RawSync(NamedTuple):
    queues: tuple


class RawScribble(NamedTuple):
    side: int
    low: int
    length: int
    seed: int


class RawErr(NamedTuple):
    side: int


PLACES = (0, 0, 8, 64, 100, 256, 1000, 4096)
RIGHTS = (ALL, ALL, int(LOCAL), int(LOCAL | WRITE), int(LOCAL | READ), int(LOCAL | ATOMIC),
          int(READ), 0)
GRANTS = (ALL,) * 36 + (int(LOCAL | WRITE), int(READ | WRITE), int(ATOMIC | READ), 0)
KINDS = ("nothing",) + ("send",) * 20 + ("recv",) * 17 + ("scribble", "poll", "sync", "reg", "dereg") * 2
WORD = 32               # bytes that make one operation


class Digits:
    """Small numbers out of a string of bytes. Zeros give the simplest ones, which is what
    hypothesis shrinks to; one draw per operation is an order of magnitude faster than one
    per number."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def below(self, n):
        size = 1 if n <= 256 else 2 if n <= 65536 else 4
        self.at += size
        assert self.at <= len(self.data)
        return int.from_bytes(self.data[self.at - size:self.at], "big") % n

    def of(self, items):
        return items[self.below(len(items))]

    def place(self):
        """An offset; most often one where others are as well, so that memory overlaps."""
        return self.of(PLACES) if self.below(8) < 5 else self.below(ARENA)

    def part(self):
        return RawPart(self.below(8), self.place(),
                       self.of(LENGTHS) if self.below(2) else self.below(3000))


def decode(data, faults):
    """WORD bytes as a raw operation."""
    d = Digits(data)
    kind = d.of(KINDS if not faults else KINDS + ("err",))
    if kind == "nothing":
        return None
    side = d.below(2)
    if kind == "send":
        op = d.of(("send", "write", *OPS))
        fault = d.of(("",) * 4 * len(SEND_FAULTS) + SEND_FAULTS)
        parts = tuple(d.part() for _ in range(d.of((1, 1, 2, 3, 0))))
        d.at = WORD - 13
        flags = d.below(256)
        return RawSend(side, op, parts, RawPart(d.below(8), d.place(), d.below(8)), flags % 3 < 2,
                       bool(flags & 16), bool(flags & 32), bool(flags & 64), d.below(2**32),
                       fault if faults else "")
    if kind == "recv":
        fault = d.of(("",) * 2 * len(RECV_FAULTS) + RECV_FAULTS)
        return RawRecv(side, tuple(d.part() for _ in range(d.of((1, 1, 2, 3, 0)))), fault if faults else "")
    if kind == "reg":
        return RawReg(side, d.place(), 1 + d.below(6000), d.of(RIGHTS), d.of((0, 0, 0, 1)))
    if kind == "dereg":
        return RawDereg(side, d.below(8), bool(d.below(4)))
    if kind == "poll":
        return RawPoll(side, d.of(("send", "recv")), 1 + d.below(4))
    if kind == "sync":
        return RawSync(d.of((QUEUES, *((q,) for q in QUEUES))))
    if kind == "scribble":
        return RawScribble(side, d.place(), 1 + d.below(2000), d.below(256))
    return RawErr(side)


# what faults need: regions of few rights, of another domain, and one that is gone
STAGE = tuple(r for side in (0, 1) for r in (
    RawReg(side, 1000, 6000, int(LOCAL), 0), RawReg(side, 64, 5000, int(READ), 0),
    RawReg(side, 0, 6000, ALL, 1), RawReg(side, 8, 6000, ALL, 0), RawDereg(side, 3, True)))


def _raw(pair):
    words, faults = pair
    return [*(STAGE if faults else ()), *(r for w in words if (r := decode(w, faults)) is not None)]


configs = st.builds(Config, st.sampled_from((1024, 256, 4096)),
                    st.tuples(st.sampled_from(GRANTS), st.sampled_from(GRANTS)),
                    st.tuples(st.booleans(), st.booleans()))
# Programs in which nothing goes wrong on purpose, and others. They are long, since short ones
# end before anything meets; what is not needed shrinks to None. A tuple, since hypothesis
# draws once more for each element of a list.
_word = st.binary(min_size=WORD, max_size=WORD)
raw_programs = st.tuples(st.integers(20, 80).flatmap(lambda n: st.tuples(*[_word] * n)),
                         st.booleans()).map(_raw)
