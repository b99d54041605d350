"""The words of programs of many queue pairs: RC, UC and UD, shared queues, events.

Both sides have the same queue pairs; number i of one side is connected with number i of the
other, or, for UD, sends to any. Memory is one region of each side, number 0, and further ones
over the same bytes. The arena begins with bytes that nothing ever writes; each receive, write
target and result has a place of its own behind, so that no two requests meet in memory, but
for words that atomics share. (What meets in memory is the matter of `steps` and `program`.)
"""

import dataclasses
from typing import NamedTuple

from differential.steps import ALL, pattern
from differential.steps import OPS as PAIR_OPS

from rocecomm import verbs as v

# operations: name -> (WROpcode, WCOpcode of the sender's completion)
OPS = {**PAIR_OPS, "bind": (v.IBV_WR_BIND_MW, v.IBV_WC_BIND_MW),
       "local_inv": (v.IBV_WR_LOCAL_INV, v.IBV_WC_LOCAL_INV),
       "send_inv": (v.IBV_WR_SEND_WITH_INV, v.IBV_WC_SEND)}
TAKES_RECEIVE = ("send", "send_imm", "send_inv", "write_imm")
BINDS = int(v.IBV_ACCESS_MW_BIND)

SOURCE = 4096           # bytes at the beginning of an arena that are only read
WORDS = 4               # words for atomics, behind them
AREA = 1 << 17          # bytes of an arena
DEPTH = 64              # work requests that a queue holds
GRH = 40                # bytes in front of a datagram
MOST = 1500             # bytes of a message
RECV_ID = 1 << 32       # wr_ids of receives have this bit
QKEY = 0x1234567


class Queue(NamedTuple):
    """A queue pair of each side; `cqs` and `srqs` are one number per side."""

    kind: str                       # "RC", "UC" or "UD"
    send_cq: tuple = (0, 0)
    recv_cq: tuple = (0, 0)
    srq: tuple = (None, None)
    sig_all: tuple = (False, False)
    rnr_retry: tuple = (7, 7)


class World(NamedTuple):
    """What is fixed for one program."""

    queues: tuple                   # of Queue
    cqs: tuple = (1, 1)             # completion queues of each side
    channels: tuple = ((), ())      # the completion channel of each CQ, per side; empty: none has
    srqs: tuple = (0, 0)            # shared receive queues of each side
    windows: tuple = (0, 0)         # memory windows (type 2) of each side
    mapped: tuple = (False, False)  # is the arena memory that the device allocated?


class Place(NamedTuple):
    """`length` bytes at `offset` of a region; `wrong`: under a key that names none; `window`: under
    that memory window's key."""

    offset: int
    length: int
    region: int = 0
    wrong: bool = False
    window: int | None = None

    def __repr__(self):
        more = [f"{name}={value!r}" for name, value in self._asdict().items()
                if value != self._field_defaults.get(name, 0) and name not in ("offset", "length")]
        return f"Place({', '.join((str(self.offset), str(self.length), *more))})"


class Step:
    """Printed as Python, without what has its default."""

    def __repr__(self):
        given = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)
                 if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclasses.dataclass(repr=False)
class Recv(Step):
    """Posts a receive to queue pair number `to`, or to shared queue number `to`."""

    side: int
    to: int
    wr_id: int
    places: tuple = ()
    shared: bool = False


@dataclasses.dataclass(repr=False)
class Send(Step):
    """Posts a work request; `op` is a key of OPS. `far`: the peer's memory. A datagram goes to queue
    pair `to` = (side, number). A bind gives `window` a place, and the peer `rights` there; what
    invalidates names a window of this side, or of the peer (send_inv)."""

    side: int
    qp: int
    wr_id: int
    op: str
    places: tuple = ()
    far: Place | None = None
    signaled: bool = True
    fence: bool = False
    inline: bool = False
    solicited: bool = False
    imm: int = 0
    compare_add: int = 0
    swap: int = 0
    to: tuple | None = None
    qkey: int = QKEY
    window: int | None = None
    rights: int = 0

    @property
    def length(self):
        return sum(p.length for p in self.places)


@dataclasses.dataclass(repr=False)
class Sync(Step):
    """Waits until `due` completions were taken: {(side, qp, "send" or "recv"): total}. `pause`:
    something was dropped, which nobody is told; gives it time."""

    due: dict
    pause: bool = False
    whole: bool = True      # everything is due: memory can be compared


@dataclasses.dataclass(repr=False)
class Arm(Step):
    """Asks for an event of a completion queue."""

    side: int
    cq: int
    solicited: bool


@dataclasses.dataclass(repr=False)
class Events(Step):
    """Takes the events that are due: [(side, cq)], of all channels, and sees that there are no more."""

    due: list


@dataclasses.dataclass(repr=False)
class Asyncs(Step):
    """Takes the asynchronous events that are due: [(side, name, number of the object)]."""

    due: list


@dataclasses.dataclass(repr=False)
class Resize(Step):
    side: int
    cq: int
    entries: int


@dataclasses.dataclass(repr=False)
class Limit(Step):
    """Arms a shared queue's event "fewer than `entries` receives are left"."""

    side: int
    srq: int
    entries: int


@dataclasses.dataclass(repr=False)
class Err(Step):
    side: int
    qp: int


@dataclasses.dataclass(repr=False)
class Drain(Step):
    """RTS to SQD: what is posted waits."""

    side: int
    qp: int


@dataclasses.dataclass(repr=False)
class Resume(Step):
    side: int
    qp: int


@dataclasses.dataclass(repr=False)
class Again(Step):
    """Both ends of a queue pair to RESET and to RTS again; `fresh`: destroyed, and new ones."""

    qp: int
    fresh: bool = False


@dataclasses.dataclass(repr=False)
class Reg(Step):
    """One more region over all of the arena."""

    side: int
    region: int
    access: int = ALL


@dataclasses.dataclass(repr=False)
class Dereg(Step):
    side: int
    region: int


def initial(side):
    """What lies in a side's arena when a program begins."""
    return pattern(AREA, 2000 + side)


def word(number):
    """Offset of a word for atomics."""
    return SOURCE + 8 * number
