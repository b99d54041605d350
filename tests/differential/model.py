"""What the InfiniBand specification says a program does, as a pure state machine.

It carries out a program step by step: work requests of a send queue in order and at once,
one that finds no receive waits at the head until there is one, errors end queue pairs and
flush what is left. A device does the same later and in parallel; the programs that
`program` makes are those whose outcome does not depend on when. Where the outcome is open,
`apply` raises Undetermined and the program does not contain that step.

`Rules` are the points where a device may differ; the defaults are the specification's.
"""

import dataclasses
from collections import deque
from typing import NamedTuple

from differential.steps import (
    ARENA,
    GUARD,
    INBOUND,
    LOCAL,
    NEEDS,
    OPS,
    TAKES_RECEIVE,
    Config,
    Dereg,
    Err,
    Poll,
    Recv,
    Reg,
    Scribble,
    Send,
    Sync,
    initial,
    pattern,
)

from rocecomm import verbs as v

OK = v.IBV_WC_SUCCESS
FLUSH = v.IBV_WC_WR_FLUSH_ERR
RTS, ERR = "RTS", "ERR"
M64 = 2**64 - 1


class Undetermined(Exception):
    """The specification leaves open what happens."""


class Rules(NamedTuple):
    """Answers of a device where devices differ; defaults: what the specification says.

    `departures` has the reasons and finds out by trying which of them hold for a device.
    """

    gather_key: v.WCStatus = v.IBV_WC_LOC_PROT_ERR      # a send or write from under a bad lkey
    bad_receive: v.WCStatus = v.IBV_WC_LOC_PROT_ERR     # a message for a receive that is no good
    short_receive: tuple = (v.IBV_WC_REM_INV_REQ_ERR, v.IBV_WC_LOC_LEN_ERR)     # at sender, receiver
    refused_immediate: v.WCStatus = FLUSH   # a receive, when a one-packet write is refused its key
    unaligned_atomic: str = "fails"         # or "refused", when it is posted
    late_receive: str = "flushed"           # or "stays": a receive posted in the error state
    fault_behind_waiting: bool = True       # may a local fault follow on a request that waits?
    fence_sent_again: bool = True           # may a request with a fence be sent again?


class Completion(NamedTuple):
    """What is compared. Of a bad completion only wr_id and status are defined."""

    wr_id: int
    status: v.WCStatus
    opcode: v.WCOpcode | None = None
    byte_len: int | None = None      # receives, reads and atomics
    imm: int | None = None           # receives

    def __repr__(self):
        text = f"{self.wr_id}: {self.status.name.removeprefix('IBV_WC_')}"
        if self.status == OK:
            text += f" {self.opcode.name.removeprefix('IBV_WC_')}"
            text += "" if self.byte_len is None else f" {self.byte_len} bytes"
            text += "" if self.imm is None else f" imm {self.imm:#x}"
        return f"<{text}>"


class Region(NamedTuple):
    side: int
    low: int
    length: int
    access: int
    pd: int
    alive: bool


class Event(NamedTuple):
    """One executed work request: which memory it touched. For the planner."""

    side: int           # of the requester
    index: int          # its place in that side's `sent`
    step: Send
    local: tuple        # ranges (low, high) of the requester's arena
    far: tuple          # and of the responder's
    recv: Recv | None    # the receive that it consumed
    status: v.WCStatus


@dataclasses.dataclass
class Done:
    """A finished work request of a send queue."""

    step: Send
    status: v.WCStatus

    @property
    def completes(self):
        return self.step.signaled or self.status != OK


class QueuePair:
    def __init__(self, access):
        self.state = RTS
        self.access = access
        self.sq = deque()       # (Send, inline data or None): posted, not executed
        self.rq = deque()       # Recv: posted, not consumed
        self.sent = []          # Done, in order
        self.received = []      # Completion, in order
        self.refused = []       # wr_ids that a post refused
        self.stuck = False      # nothing completes any more
        self.never = None       # or nothing from this step on

    def copy(self):
        other = QueuePair(self.access)
        other.state = self.state
        other.sq, other.rq = deque(self.sq), deque(self.rq)
        other.sent, other.received = list(self.sent), list(self.received)
        other.refused = list(self.refused)
        other.stuck, other.never = self.stuck, self.never
        return other


class Model:
    """Two queue pairs in RTS, connected, nothing registered, nothing posted."""

    def __init__(self, config=Config(), rules=Rules()):
        self.config = config
        self.rules = rules
        self.memory = [bytearray(initial(0)), bytearray(initial(1))]
        self.open = [[], []]        # ranges of each arena that an error left undefined
        self.regions = {}
        self.qps = [QueuePair(config.access[0]), QueuePair(config.access[1])]
        self.events = []

    def copy(self):
        other = Model.__new__(Model)
        other.config, other.rules = self.config, self.rules
        other.memory = [bytearray(m) for m in self.memory]
        other.open = [list(o) for o in self.open]
        other.regions = dict(self.regions)
        other.qps = [q.copy() for q in self.qps]
        other.events = list(self.events)
        return other

    # -------------------------------------------------------------- results
    def completions(self, side, queue):
        """Everything that this completion queue gets, in order."""
        qp = self.qps[side]
        if queue == "recv":
            return list(qp.received)
        out = []
        for done in qp.sent:
            if not done.completes:
                continue
            if done.status == OK:
                op = done.step.op
                out.append(Completion(done.step.wr_id, OK, OPS[op][1],
                                      done.step.length if op in INBOUND else None))
            else:
                out.append(Completion(done.step.wr_id, done.status))
        return out

    def due(self, side, queue):
        """How many completions that is."""
        qp = self.qps[side]
        return len(qp.received) if queue == "recv" else sum(d.completes for d in qp.sent)

    @property
    def clean(self):
        """True while every status was success."""
        return not any(d.status for q in self.qps for d in q.sent) and \
            not any(c.status for q in self.qps for c in q.received)

    def begun(self, side):
        """[(side, ranges)] that a write which waits at the head may have written in part: its
        receive is only asked for with the last packet."""
        sq = self.qps[side].sq
        if sq and sq[0][0].op == "write_imm" and sq[0][0].length:
            return [(1 - side, [self._far_range(sq[0][0])])]
        return []

    # -------------------------------------------------------------- steps
    def apply(self, step):
        getattr(self, "_" + type(step).__name__.lower())(step)

    def _reg(self, step):
        self.regions[step.region] = Region(step.side, step.low, step.length, int(step.access),
                                           step.pd, True)

    def _dereg(self, step):
        self.regions[step.region] = self.regions[step.region]._replace(alive=False)

    def _recv(self, step):
        qp = self.qps[step.side]
        if qp.state == ERR:
            if self.rules.late_receive == "flushed":
                qp.received.append(Completion(step.wr_id, FLUSH))
            return
        qp.rq.append(step)
        self._drive(1 - step.side)

    def _send(self, step):
        if self.rules.unaligned_atomic == "refused" and self._unaligned(step):
            self.qps[step.side].refused.append(step.wr_id)
            return
        if not self.rules.fault_behind_waiting and self.qps[step.side].sq and \
                step.op not in INBOUND and self._gather(step.side, step)[0] != OK:
            self.qps[step.side].stuck = True
        if not self.rules.fence_sent_again and self.qps[step.side].sq and step.fence and \
                step.op in INBOUND:
            self.qps[step.side].never = step
        data = None
        if step.inline:                 # copied when it is posted
            data = b"".join(self._get(step.side, s.offset, s.length) for s in step.sges)
        self.qps[step.side].sq.append((step, data))
        self._drive(step.side)

    def _poll(self, step):
        pass

    def _sync(self, step):
        pass

    def _scribble(self, step):
        self._put(step.side, step.low, pattern(step.length, step.seed))

    def _err(self, step):
        self._fail(step.side)
        self._drive(1 - step.side)

    # -------------------------------------------------------------- memory
    def _get(self, side, low, length):
        return bytes(self.memory[side][GUARD + low:GUARD + low + length])

    def _put(self, side, low, data):
        self.memory[side][GUARD + low:GUARD + low + len(data)] = data

    def _check(self, side, sge, need, base=None):
        """The range (low, high) of the arena, or None if the access is not allowed."""
        region = self.regions[sge.region]
        low = region.low + sge.offset
        length = sge.length if base is None else base
        if sge.wrong_key or not region.alive or region.side != side or region.pd != 0 or \
                need & ~region.access or sge.offset < 0 or sge.offset + length > region.length:
            return None
        return low, low + length

    def _valid_part(self, side, sge):
        """What of an element lies in memory that is registered at all."""
        region = self.regions[sge.region]
        low, high = region.low + max(0, sge.offset), region.low + sge.offset + sge.length
        return low, max(low, min(high, region.low + region.length))

    # -------------------------------------------------------------- execution
    def _drive(self, side):
        qp = self.qps[side]
        while qp.sq and not qp.stuck:
            step, inline = qp.sq[0]
            if step is qp.never:
                return
            if qp.state == ERR:
                qp.sq.popleft()
                qp.sent.append(Done(step, FLUSH))
                continue
            head = self.qps[1 - side].rq[0] if self.qps[1 - side].rq else None
            result = self._execute(side, step, inline)
            if result is None:
                return                  # no receive: it waits, and all behind it
            status, local, far, took, far_fails = result
            qp.sq.popleft()
            qp.sent.append(Done(step, status))
            self.events.append(Event(side, len(qp.sent) - 1, step, tuple(local), tuple(far),
                                     head if took else None, status))
            if status != OK:
                self._fail(side)
                if far_fails:
                    self._fail(1 - side)
                self._drive(1 - side)

    def _fail(self, side):
        qp = self.qps[side]
        if qp.state == ERR:
            return
        qp.state = ERR
        # the receive at the head may have been filled by the part of a message that came
        if qp.rq:
            self.open[side] += [self._valid_part(side, s) for s in qp.rq[0].sges]
        for s, ranges in self.begun(side):
            self.open[s] += ranges
        while qp.rq:
            qp.received.append(Completion(qp.rq.popleft().wr_id, FLUSH))
        while qp.sq:
            qp.sent.append(Done(qp.sq.popleft()[0], FLUSH))

    def _execute(self, side, step, inline):
        """None: it has to wait. Else (status, local ranges, far ranges, took a receive,
        does the far queue pair fail as well)."""
        far = self.qps[1 - side]
        status, local = self._gather(side, step)
        fault = self._far_fault(side, step)
        if status != OK:
            if fault is not None or far.state == ERR:
                raise Undetermined("faults on both sides")
            # what was sent before the fault was met may lie in the receive at the far head
            if step.op in ("send", "send_imm") and far.rq:
                self.open[1 - side] += [self._valid_part(1 - side, s) for s in far.rq[0].sges]
            elif step.op in ("write", "write_imm") and step.length:
                self.open[1 - side].append(self._far_range(step))
            if step.op in INBOUND:
                self.open[side] += [self._valid_part(side, s) for s in step.sges]
                if step.op != "read":
                    self.open[1 - side].append(self._far_range(step))
            return status, local, [], False, False
        if far.state == ERR:
            if step.op == "write_imm" and step.length:      # it may have begun before, see there
                self.open[1 - side].append(self._far_range(step))
            return v.IBV_WC_RETRY_EXC_ERR, local, [], False, False
        if fault is not None:
            if step.op in TAKES_RECEIVE and not far.rq:
                raise Undetermined("a bad write with immediate data finds no receive")
            took = step.op in TAKES_RECEIVE and fault == v.IBV_WC_REM_ACCESS_ERR and \
                self.rules.refused_immediate != FLUSH and step.length <= self.config.mtu
            if took:
                far.received.append(Completion(far.rq.popleft().wr_id, self.rules.refused_immediate))
            return fault, local, [], took, True
        if step.op in TAKES_RECEIVE and not far.rq:
            return None
        return getattr(self, "_do_" + step.op.partition("_")[0])(side, step, local, inline)

    def _gather(self, side, step):
        if step.inline:
            return OK, []
        inbound = step.op in INBOUND
        ranges = []
        for s in step.sges:
            if not s.length:
                continue
            found = self._check(side, s, int(LOCAL) if inbound else 0)
            if found is None:
                region = self.regions[s.region]
                key = s.wrong_key or not region.alive or region.pd != 0
                return self.rules.gather_key if key and not inbound else v.IBV_WC_LOC_PROT_ERR, ranges
            ranges.append(found)
        return OK, ranges

    def _far_range(self, step):
        low = self.regions[step.remote.region].low + step.remote.offset
        return max(0, low), max(0, min(ARENA, low + (step.length or 8)))

    def _far_fault(self, side, step):
        """The status with which the far side refuses a write, read or atomic; None: it does not."""
        if step.op not in NEEDS:
            return None
        need = NEEDS[step.op]
        if not self.qps[1 - side].access & need:
            return v.IBV_WC_REM_INV_REQ_ERR
        if not step.length:
            return None                 # nothing is touched: no key is looked at
        bad = self._check(1 - side, step.remote, need, step.length) is None
        unaligned = self._unaligned(step)
        if bad and unaligned:
            raise Undetermined("two faults")
        if unaligned:
            return v.IBV_WC_REM_INV_REQ_ERR
        return v.IBV_WC_REM_ACCESS_ERR if bad else None

    def _unaligned(self, step):
        return step.op in ("add", "swap") and \
            (self.regions[step.remote.region].low + step.remote.offset) % 8 != 0

    def _data(self, side, step, inline):
        if step.inline:
            return inline
        return b"".join(self._get(side, self.regions[s.region].low + s.offset, s.length)
                        for s in step.sges)

    def _spread(self, side, sges, data):
        """Writes data into the elements; the ranges that it touched."""
        ranges = []
        for s in sges:
            part, data = data[:s.length], data[s.length:]
            if part:
                low = self.regions[s.region].low + s.offset
                self._put(side, low, part)
                ranges.append((low, low + len(part)))
        assert not data
        return ranges

    def _do_send(self, side, step, local, inline):
        far = self.qps[1 - side]
        recv = far.rq[0]
        left, used, bad = step.length, [], False
        for s in recv.sges:
            part = min(left, s.length)
            if part:
                used.append(s)
                whole = self._check(1 - side, s, int(LOCAL)) is not None
                if not whole:
                    if part < s.length:
                        raise Undetermined("a bad element of a receive is used in part")
                    bad = True
            left -= part
        if left and bad:
            raise Undetermined("a receive that is both bad and too short")
        far.rq.popleft()
        if left or bad:
            self.open[1 - side] += [self._valid_part(1 - side, s) for s in recv.sges]
            mine, theirs = self.rules.short_receive if left else \
                (v.IBV_WC_REM_OP_ERR, self.rules.bad_receive)
            far.received.append(Completion(recv.wr_id, theirs))
            return mine, local, [], True, True
        ranges = self._spread(1 - side, recv.sges, self._data(side, step, inline))
        far.received.append(Completion(recv.wr_id, OK, v.IBV_WC_RECV, step.length,
                                       step.imm if step.op == "send_imm" else None))
        return OK, local, ranges, True, False

    def _do_write(self, side, step, local, inline):
        low = self.regions[step.remote.region].low + step.remote.offset
        data = self._data(side, step, inline)
        self._put(1 - side, low, data)
        took = step.op == "write_imm"
        if took:
            far = self.qps[1 - side]
            far.received.append(Completion(far.rq.popleft().wr_id, OK, v.IBV_WC_RECV_RDMA_WITH_IMM,
                                           step.length, step.imm))
        return OK, local, [(low, low + len(data))] if data else [], took, False

    def _do_read(self, side, step, local, inline):
        low = self.regions[step.remote.region].low + step.remote.offset
        self._spread(side, step.sges, self._get(1 - side, low, step.length))
        return OK, local, [(low, low + step.length)] if step.length else [], False, False

    def _atomic(self, side, step, local, change):
        low = self.regions[step.remote.region].low + step.remote.offset
        old = int.from_bytes(self._get(1 - side, low, 8), "little")
        self._put(1 - side, low, (change(old) & M64).to_bytes(8, "little"))
        self._spread(side, step.sges, old.to_bytes(8, "little"))
        return OK, local, [(low, low + 8)], False, False

    def _do_add(self, side, step, local, inline):
        return self._atomic(side, step, local, lambda old: old + step.compare_add)

    def _do_swap(self, side, step, local, inline):
        return self._atomic(side, step, local,
                            lambda old: step.swap if old == step.compare_add else old)


def run(config, program, rules=Rules()):
    """The model after all steps."""
    model = Model(config, rules)
    for step in program:
        model.apply(step)
    return model


_STEPS = (Reg, Dereg, Recv, Send, Poll, Sync, Scribble, Err)
assert all(hasattr(Model, "_" + s.__name__.lower()) for s in _STEPS)
