"""The steps of a verb program on two connected RC queue pairs.

Sides are 0 and 1. A *program* is a list of steps, carried out one after the other by one
driver. ``repr`` of a step is Python that makes it again, so a printed program can be
pasted into a test. Memory of a side is one arena; a *region* is a registration of a part
of it, named by a number that is never used again, also after its deregistration.
"""

import dataclasses
import functools
from typing import NamedTuple

from rocecomm import verbs as v

ARENA = 24576           # bytes of a side's memory
GUARD = 64              # further bytes before and after, which nothing may touch
LOCAL = v.IBV_ACCESS_LOCAL_WRITE
WRITE = v.IBV_ACCESS_REMOTE_WRITE
READ = v.IBV_ACCESS_REMOTE_READ
ATOMIC = v.IBV_ACCESS_REMOTE_ATOMIC
ALL = int(LOCAL | WRITE | READ | ATOMIC)

# operations: name -> (WROpcode, WCOpcode of the sender's completion)
OPS = {
    "send": (v.IBV_WR_SEND, v.IBV_WC_SEND),
    "send_imm": (v.IBV_WR_SEND_WITH_IMM, v.IBV_WC_SEND),
    "write": (v.IBV_WR_RDMA_WRITE, v.IBV_WC_RDMA_WRITE),
    "write_imm": (v.IBV_WR_RDMA_WRITE_WITH_IMM, v.IBV_WC_RDMA_WRITE),
    "read": (v.IBV_WR_RDMA_READ, v.IBV_WC_RDMA_READ),
    "add": (v.IBV_WR_ATOMIC_FETCH_AND_ADD, v.IBV_WC_FETCH_ADD),
    "swap": (v.IBV_WR_ATOMIC_CMP_AND_SWP, v.IBV_WC_COMP_SWAP),
}
INBOUND = ("read", "add", "swap")           # the result is written into the poster's memory
TAKES_RECEIVE = ("send", "send_imm", "write_imm")
NEEDS = {"write": int(WRITE), "write_imm": int(WRITE), "read": int(READ), "add": int(ATOMIC),
         "swap": int(ATOMIC)}
WRONG_TAG = 0x55        # a key with these bits flipped names no region


class Config(NamedTuple):
    """What is fixed for one program."""

    mtu: int = 1024                 # bytes
    access: tuple = (ALL, ALL)      # rights that each side's queue pair grants the other
    mapped: tuple = (False, False)  # is the arena memory that the device allocated?


class Sge(NamedTuple):
    """`length` bytes at `offset` of a region (of the arena, for inline data)."""

    region: int
    offset: int
    length: int
    wrong_key: bool = False


class Remote(NamedTuple):
    """The peer's memory from `offset` of a region on."""

    region: int
    offset: int
    wrong_key: bool = False


@dataclasses.dataclass
class Reg:
    """Registers [low, low + length) of the arena; `pd` 1 is not the queue pair's."""

    side: int
    region: int
    low: int
    length: int
    access: int = ALL
    pd: int = 0


@dataclasses.dataclass
class Dereg:
    side: int
    region: int


@dataclasses.dataclass
class Recv:
    side: int
    wr_id: int
    sges: tuple = ()


@dataclasses.dataclass
class Send:
    """A work request for the send queue; `op` is a key of OPS."""

    side: int
    wr_id: int
    op: str
    sges: tuple = ()
    remote: Remote | None = None
    signaled: bool = True
    fence: bool = False
    inline: bool = False
    solicited: bool = False
    imm: int = 0
    compare_add: int = 0
    swap: int = 0

    @property
    def length(self):
        return sum(s.length for s in self.sges)


@dataclasses.dataclass
class Poll:
    """Takes up to `n` completions of a queue, "send" or "recv", if they are there."""

    side: int
    queue: str
    n: int = 1


@dataclasses.dataclass
class Sync:
    """Waits until `due` completions of each named queue were taken: {(side, queue): total}.

    With all four queues named, memory is determined afterwards and is compared.
    """

    due: dict


@dataclasses.dataclass
class Scribble:
    """The program itself writes a pattern into its memory."""

    side: int
    low: int
    length: int
    seed: int


@dataclasses.dataclass
class Err:
    """Moves the queue pair to the error state."""

    side: int


QUEUES = ((0, "send"), (0, "recv"), (1, "send"), (1, "recv"))


@functools.lru_cache(maxsize=128)
def pattern(length, seed):
    """Bytes that differ from place to place and from seed to seed."""
    return bytes((i * 167 + (i >> 8) * 59 + seed * 101 + 13) & 0xFF for i in range(length))


def initial(side):
    """What lies in a side's arena, guards included, when a program begins."""
    return pattern(ARENA + 2 * GUARD, 1000 + side)
