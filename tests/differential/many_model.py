"""What the specification says that programs of many queue pairs do, as a pure state machine.

Like `model`, for `many_steps`: a work request is carried out when it is posted, or when what it
waits for is there. What depends on time raises Undetermined, or is kept out by the planner.
"""

from collections import deque
from typing import NamedTuple

from differential.many_steps import AREA, BINDS, GRH, OPS, QKEY, TAKES_RECEIVE, World, initial
from differential.model import FLUSH, OK, Done, Rules, Undetermined
from differential.steps import ATOMIC, INBOUND, LOCAL, READ, WRITE

from rocecomm import verbs as v

RTS, SQD, ERR = "RTS", "SQD", "ERR"
M64 = 2**64 - 1
LOST = ((None, None), 0, 0, 0)      # a window whose queue pair was reset: bound or not, who knows
NEEDS = {"write": int(WRITE), "write_imm": int(WRITE), "read": int(READ), "add": int(ATOMIC),
         "swap": int(ATOMIC)}


class More(NamedTuple):
    """Answers of a device where devices differ, beside those of Rules; defaults: the specification's.

    `many_departures` has the reasons and finds out by trying which of them hold for a device.
    """

    send_error_event: bool = True       # a bad completion of a send is an event for "solicited only"
    responder_event: bool = True        # a refused request is told to the responder's program
    last_wqe_event: bool = True         # a queue pair with an SRQ that fails says so
    resumes: bool = True                # what waited in SQD goes on in RTS without a further post
    invalidated_told: bool = True       # a receive says which window its message took back


class Completion(NamedTuple):
    """What is compared. Of a bad completion only wr_id and status are defined."""

    wr_id: int
    status: v.WCStatus
    opcode: v.WCOpcode | None = None
    byte_len: int | None = None     # receives, reads and atomics
    imm: int | None = None          # receives
    source: tuple | None = None     # datagrams: (side, number) of the sender
    taken_back: int | None = None   # the window that the message invalidated

    def __repr__(self):
        text = f"{self.wr_id:#x}: {self.status.name.removeprefix('IBV_WC_')}"
        if self.status == OK:
            text += f" {self.opcode.name.removeprefix('IBV_WC_')}"
            text += "" if self.byte_len is None else f" {self.byte_len} bytes"
            text += "" if self.imm is None else f" imm {self.imm:#x}"
            text += "" if self.taken_back is None else f" takes back window {self.taken_back}"
            text += "" if self.source is None else f" from {self.source}"
        return f"<{text}>"


class End:
    """A queue pair of one side."""

    def __init__(self, state=RTS):
        self.state = state
        self.sq = deque()           # (Send, data): posted, not executed
        self.rq = deque()
        self.idle = False           # in RTS again, and nobody has told it to go on

    def copy(self):
        other = End(self.state)
        other.sq, other.rq, other.idle = deque(self.sq), deque(self.rq), self.idle
        return other


class Many:
    """Everything connected, nothing posted, one region of each side."""

    def __init__(self, world: World, rules=Rules(), more=More()):
        self.world, self.rules, self.more = world, rules, more
        self.memory = [bytearray(initial(0)), bytearray(initial(1))]
        self.open = [[], []]        # ranges that an error left undefined
        self.regions = {(side, 0): ~0 for side in (0, 1)}       # rights, None: deregistered
        self.ends = {(side, i): End() for side in (0, 1) for i in range(len(world.queues))}
        self.shared = {(side, k): deque() for side in (0, 1) for k in range(world.srqs[side])}
        self.windows = {}           # (side, window): (end that bound it, low, high, rights), while bound
        self.limits = {}
        self.armed = {}             # (side, cq): is only what is solicited asked for?
        self.completed = {(side, i, q): [] for side, i in self.ends for q in ("send", "recv")}
        self.events, self.asyncs = [], []       # due, not taken
        self.dropped = False        # something was, since this was last cleared
        self.retried = False        # a request gave up waiting for a receive

    def copy(self):
        other = Many.__new__(Many)
        other.__dict__.update(self.__dict__)
        other.memory = [bytearray(m) for m in self.memory]
        other.open = [list(o) for o in self.open]
        other.regions, other.limits, other.armed = dict(self.regions), dict(self.limits), dict(self.armed)
        other.windows = dict(self.windows)
        other.ends = {k: e.copy() for k, e in self.ends.items()}
        other.shared = {k: deque(q) for k, q in self.shared.items()}
        other.completed = {k: list(c) for k, c in self.completed.items()}
        other.events, other.asyncs = list(self.events), list(self.asyncs)
        return other

    # -------------------------------------------------------------- helpers
    def queue(self, i):
        return self.world.queues[i]

    def rq_of(self, side, i):
        """(what names the receive queue, its receives)"""
        srq = self.queue(i).srq[side]
        return ((side, "srq", srq), self.shared[side, srq]) if srq is not None else \
            ((side, "qp", i), self.ends[side, i].rq)

    def waiting(self):
        """Ends whose head waits for a receive."""
        return [key for key, e in self.ends.items() if e.sq and e.state == RTS and not e.idle]

    def _get(self, side, place):
        return bytes(self.memory[side][place.offset:place.offset + place.length])

    def _put(self, side, places, data):
        for p in places:
            part, data = data[:p.length], data[p.length:]
            self.memory[side][p.offset:p.offset + len(part)] = part
        assert not data

    def _allowed(self, side, place, need, end=None):
        if place.window is not None:
            at = self.windows.get((side, place.window))
            return at is not None and not place.wrong and at[0] == end and not need & ~at[3] and \
                at[1] <= place.offset and place.offset + place.length <= at[2]
        rights = self.regions[side, place.region]
        return not place.wrong and rights is not None and not need & ~rights and \
            0 <= place.offset and place.offset + place.length <= AREA

    def _complete(self, side, i, queue, completion, solicited):
        self.completed[side, i, queue].append(completion)
        cq = (self.queue(i).send_cq if queue == "send" else self.queue(i).recv_cq)[side]
        if (side, cq) in self.armed:
            bad = completion.status != OK and (queue == "recv" or self.more.send_error_event)
            if not self.armed[side, cq] or solicited or bad:
                del self.armed[side, cq]
                if self.world.channels[side]:
                    self.events.append((side, cq))

    def _sent(self, side, i, step, status):
        if status == OK and not step.signaled and not self.queue(i).sig_all[side]:
            return
        done = Completion(step.wr_id, status) if status != OK else \
            Completion(step.wr_id, OK, OPS[step.op][1], step.length if step.op in INBOUND else None)
        self._complete(side, i, "send", done, False)

    def _fail(self, side, i):
        end = self.ends[side, i]
        if end.state == ERR:
            return
        end.state = ERR
        if self.queue(i).srq[side] is not None:
            if self.more.last_wqe_event:
                self.asyncs.append((side, "IBV_EVENT_QP_LAST_WQE_REACHED", i))
        else:
            while end.rq:
                self._complete(side, i, "recv", Completion(end.rq.popleft().wr_id, FLUSH), True)
        self._flush(side, i)

    def _flush(self, side, i):
        end = self.ends[side, i]
        while end.sq:
            step, _ = end.sq.popleft()
            if step.op == "write_imm":      # it may have been written all but the end
                self.open[1 - side].append((step.far.offset, step.far.offset + step.length))
            self._sent(side, i, step, FLUSH)

    # -------------------------------------------------------------- steps
    def apply(self, step):
        getattr(self, "_" + type(step).__name__.lower())(step)

    def _recv(self, step):
        if step.shared:
            self.shared[step.side, step.to].append(step)
            ends = [(1 - step.side, i) for i, q in enumerate(self.world.queues)
                    if q.srq[step.side] == step.to and q.kind == "RC"]
        else:
            end = self.ends[step.side, step.to]
            if end.state == ERR:
                raise Undetermined("a receive posted in the error state")
            end.rq.append(step)
            ends = [(1 - step.side, step.to)]
        waiting = [k for k in ends if k in self.waiting()]
        if len(waiting) > 1:
            raise Undetermined("two senders wait for one receive")
        for key in waiting:
            self._drive(*key)

    def _send(self, step):
        if self.rules.unaligned_atomic == "refused" and step.op in ("add", "swap") and step.far.offset % 8:
            raise Undetermined("refused when it is posted")
        data = b"".join(self._get(step.side, p) for p in step.places) if step.inline else None
        if step.op in ("bind", "local_inv") and self.ends[step.side, step.qp].sq:
            raise Undetermined("a window changes behind something that waits")
        end = self.ends[step.side, step.qp]
        end.sq.append((step, data))
        end.idle = False
        self._drive(step.side, step.qp)

    def _sync(self, step):
        pass

    def _arm(self, step):
        self.armed[step.side, step.cq] = self.armed.get((step.side, step.cq), True) and step.solicited

    def _events(self, step):
        self.events.clear()

    def _asyncs(self, step):
        self.asyncs.clear()

    def _resize(self, step):
        pass

    def _limit(self, step):
        self.limits[step.side, step.srq] = step.entries

    def _err(self, step):
        self._fail(step.side, step.qp)
        if self.queue(step.qp).kind == "RC":
            self._drive(1 - step.side, step.qp)

    def _drain(self, step):
        self.ends[step.side, step.qp].state = SQD

    def _resume(self, step):
        end = self.ends[step.side, step.qp]
        end.state = RTS
        end.idle = not self.more.resumes and bool(end.sq)
        self._drive(step.side, step.qp)

    def _again(self, step):
        for side in (0, 1):
            for send, _ in self.ends[side, step.qp].sq:
                if send.op == "write_imm":
                    self.open[1 - side].append((send.far.offset, send.far.offset + send.length))
            self.ends[side, step.qp] = End()
            for key, at in self.windows.items():
                if at[0] == (side, step.qp):
                    self.windows[key] = LOST

    def _reg(self, step):
        self.regions[step.side, step.region] = int(step.access)

    def _dereg(self, step):
        self.regions[step.side, step.region] = None

    # -------------------------------------------------------------- execution
    def _drive(self, side, i):
        end = self.ends[side, i]
        if end.state == ERR:
            self._flush(side, i)
        while end.sq and end.state == RTS and not end.idle:
            step, data = end.sq[0]
            result = self._execute(side, i, step, data)
            if result is None:
                return
            status, far_fails = result
            end.sq.popleft()
            self._sent(side, i, step, status)
            if status != OK:
                self._fail(side, i)
                if far_fails:
                    self._fail(1 - side, i)
                if self.queue(i).kind == "RC":
                    self._drive(1 - side, i)

    def _execute(self, side, i, step, data):
        """None: it waits. Else (status, does the far end fail as well)."""
        kind = self.queue(i).kind
        inbound = step.op in INBOUND
        if step.op in ("bind", "local_inv"):
            return self._window(side, i, step), False
        if not step.inline:
            for p in step.places:
                if p.length and not self._allowed(side, p, int(LOCAL) if inbound else 0):
                    key = p.wrong or self.regions[side, p.region] is None
                    return (self.rules.gather_key if key and not inbound else v.IBV_WC_LOC_PROT_ERR), False
            data = b"".join(self._get(side, p) for p in step.places)
        if kind == "UD":
            self._datagram(side, i, step, data)
            return OK, False
        far = self.ends[1 - side, i]
        if far.state == ERR:
            if kind == "UC":
                return OK, False
            if step.op == "write_imm":
                self.open[1 - side].append((step.far.offset, step.far.offset + step.length))
            return v.IBV_WC_RETRY_EXC_ERR, False
        name, rq = self.rq_of(1 - side, i)
        refused = self._refusal(side, i, step)
        if refused is not None:
            if kind == "UC":
                self.dropped = True
                return OK, False
            if step.op == "write_imm" and not rq:
                raise Undetermined("a bad write with immediate data finds no receive")
            if step.op == "write_imm" and self.rules.refused_immediate != FLUSH:
                raise Undetermined("devices differ in what becomes of the receive")
            if self.more.responder_event:
                self.asyncs.append((1 - side, "IBV_EVENT_QP_REQ_ERR" if refused == v.IBV_WC_REM_INV_REQ_ERR
                                    else "IBV_EVENT_QP_ACCESS_ERR", i))
            return refused, True
        if step.op in TAKES_RECEIVE and not rq:
            return self._nothing_there(side, i, step)
        what = step.op.removesuffix("_imm").removesuffix("_inv")
        return getattr(self, "_do_" + what)(side, i, step, data, name)

    def _nothing_there(self, side, i, step):
        if step.op == "write_imm" and step.length:      # all but the end may be written
            self.open[1 - side].append((step.far.offset, step.far.offset + step.length))
        if self.queue(i).kind == "UC":
            self.dropped = True
            return OK, False
        if self.queue(i).rnr_retry[side] < 7:
            self.retried = True
            return v.IBV_WC_RNR_RETRY_EXC_ERR, False
        return None

    def _window(self, side, i, step):
        key = (side, step.window)
        if step.op == "local_inv":
            if key not in self.windows:
                raise Undetermined("nothing to invalidate")
            del self.windows[key]
            return OK
        place = step.places[0]
        if self.windows.get(key) == LOST:
            raise Undetermined("bound, or not any more")
        if key in self.windows or not self._allowed(side, place, BINDS):
            return v.IBV_WC_MW_BIND_ERR
        self.windows[key] = ((side, i), place.offset, place.offset + place.length, step.rights)
        return OK

    def _refusal(self, side, i, step):
        if step.op not in NEEDS or not step.length:
            return None
        if not self._allowed(1 - side, step.far._replace(length=step.length), NEEDS[step.op], (1 - side, i)):
            return v.IBV_WC_REM_ACCESS_ERR
        if step.op in ("add", "swap") and step.far.offset % 8:
            return v.IBV_WC_REM_INV_REQ_ERR
        return None

    def _take(self, side, i):
        """The next receive of a side; a shared queue may say that it runs low."""
        _, rq = self.rq_of(side, i)
        recv = rq.popleft()
        srq = self.queue(i).srq[side]
        if srq is not None and len(rq) < self.limits.get((side, srq), 0):
            self.limits[side, srq] = 0
            self.asyncs.append((side, "IBV_EVENT_SRQ_LIMIT_REACHED", srq))
        return recv

    def _do_send(self, side, i, step, data, name):
        recv = self._take(1 - side, i)
        room = sum(p.length for p in recv.places)
        if room < len(data):
            self.open[1 - side] += [(p.offset, p.offset + p.length) for p in recv.places]
            if self.queue(i).kind == "UC":
                raise Undetermined("a message that does not fit, unreliable")
            mine, theirs = self.rules.short_receive
            self._complete(1 - side, i, "recv", Completion(recv.wr_id, theirs), True)
            return mine, True
        self._put(1 - side, recv.places, data)
        if step.op == "send_inv" and self.windows.pop((1 - side, step.window), (None,))[0] != (1 - side, i):
            raise Undetermined("nothing to invalidate")
        self._complete(1 - side, i, "recv",
                       Completion(recv.wr_id, OK, v.IBV_WC_RECV, len(data),
                                  step.imm if step.op == "send_imm" else None,
                                  taken_back=self._told(step)), step.solicited)
        return OK, False

    def _told(self, step):
        return step.window if step.op == "send_inv" and self.more.invalidated_told else None

    def _do_write(self, side, i, step, data, name):
        if data:
            self._put(1 - side, [step.far._replace(length=len(data))], data)
        whole = (step.far.offset, step.far.offset + len(data))     # it may have waited, open: no more
        self.open[1 - side] = [r for r in self.open[1 - side] if r != whole]
        if step.op == "write_imm":
            recv = self._take(1 - side, i)
            self._complete(1 - side, i, "recv",
                           Completion(recv.wr_id, OK, v.IBV_WC_RECV_RDMA_WITH_IMM, len(data), step.imm),
                           step.solicited)
        return OK, False

    def _do_read(self, side, i, step, data, name):
        self._put(side, step.places, self._get(1 - side, step.far._replace(length=step.length)))
        return OK, False

    def _atomic(self, side, step, change):
        place = step.far._replace(length=8)
        old = int.from_bytes(self._get(1 - side, place), "little")
        self._put(1 - side, [place], (change(old) & M64).to_bytes(8, "little"))
        self._put(side, step.places, old.to_bytes(8, "little"))
        return OK, False

    def _do_add(self, side, i, step, data, name):
        return self._atomic(side, step, lambda old: old + step.compare_add)

    def _do_swap(self, side, i, step, data, name):
        return self._atomic(side, step, lambda old: step.swap if old == step.compare_add else old)

    def _datagram(self, side, i, step, data):
        to, number = step.to
        end = self.ends[to, number]
        _, rq = self.rq_of(to, number)
        if end.state == ERR or step.qkey != QKEY or not rq:
            self.dropped = True
            return
        if sum(p.length for p in rq[0].places) < GRH + len(data):
            raise Undetermined("a message that does not fit, unreliable")
        recv = self._take(to, number)
        # the header is for the device to choose
        self._put(to, recv.places, bytes(GRH) + data)
        left = GRH
        for p in recv.places:
            self.open[to].append((p.offset, p.offset + min(left, p.length)))
            left -= min(left, p.length)
        self._complete(to, number, "recv",
                       Completion(recv.wr_id, OK, v.IBV_WC_RECV, GRH + len(data),
                                  step.imm if step.op == "send_imm" else None, (side, i)), step.solicited)


def run(world, program, rules=Rules(), more=More()):
    """The model after all steps."""
    model = Many(world, rules, more)
    for step in program:
        model.apply(step)
    return model


__all__ = ["Completion", "Done", "ERR", "Many", "More", "RTS", "SQD", "run"]
