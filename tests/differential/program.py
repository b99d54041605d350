"""Random programs whose outcome the specification determines.

Hypothesis draws plain data (`raw`); `plan` turns it into steps. It runs the model
beside and puts in what a correct program needs, or leaves a step out:

* a request that overlaps with a read or atomic before it on the same queue gets a fence;
* before one that touches memory that the other queue's requests may still use, or that ends
  a queue pair, all that is due is waited for, since the order of two send queues is free;
* the program writes its own memory, and deregisters it, only when no request can still use
  it. "Can" is meant strictly: a completion that lies unpolled is enough (for a receive: the
  sender's completion; for the source of a send: the receiver's), so "deregistered before it
  was polled" is part of the programs;
* what raises Undetermined in the model is left out.

At the end both queue pairs are moved to the error state, so that every request has its
completion.
"""

from differential.model import ERR, OK, Model, Rules, Undetermined
from differential.raw import RawPart, RawRecv
from differential.steps import (
    ARENA,
    INBOUND,
    LOCAL,
    NEEDS,
    QUEUES,
    TAKES_RECEIVE,
    Dereg,
    Err,
    Poll,
    Recv,
    Reg,
    Remote,
    Scribble,
    Send,
    Sge,
    Sync,
)

MAX_POSTS = 60          # work requests of one queue; the device's queues hold more
MAX_SGE = 3
MAX_INLINE = 64


class Skip(Exception):
    """This step has no place here."""


def overlap(a, b):
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def footprint(side, op, local, far):
    """{memory of side: [(range, written?)]}"""
    inbound = op in INBOUND
    return {side: [(r, inbound) for r in local], 1 - side: [(r, op != "read") for r in far]}


def clash(one, two):
    """Do two footprints share memory that one of them writes?"""
    return any(overlap([a], [b]) and (w or x)
               for side in (0, 1) for a, w in one[side] for b, x in two[side])


class Planner:
    def __init__(self, config, rules=Rules()):
        self.model = Model(config, rules)
        self.program = []
        self.ids = 100
        self.posts = {}
        self.known = [0, 0]             # of `sent`: known to be done by their own completions
        self.polled = [0, 0]            # of `received`: taken
        self.settled = [0, 0]           # of `sent`: done at a point where everything was taken
        self.failing = None             # side whose request has ended a queue pair just now
        for side in (0, 1):
            self.push(Reg(side, side, 0, ARENA))
        self.next_region = 2

    # -------------------------------------------------------------- adding steps
    def sync(self, queues=QUEUES):
        due = {}
        for side, queue in queues:
            qp = self.model.qps[side]
            if queue == "send":
                if qp.sent and not qp.sent[-1].completes:
                    qp.sent[-1].step.signaled = True    # else nobody sees that it is done
                self.known[side] = len(qp.sent)
            else:
                self.polled[side] = len(qp.received)
            due[side, queue] = self.model.due(side, queue)
        if tuple(queues) == QUEUES:
            self.settled = [len(q.sent) for q in self.model.qps]
            self.failing = None
        self.program.append(Sync(due))

    def push(self, step):
        if self.failing is not None and not isinstance(step, Poll) and \
                not (isinstance(step, Send) and step.side == self.failing):
            self.sync()
        if isinstance(step, Send) and step.op not in INBOUND:
            self.wait_for_data(step)
        model = self.model.copy()
        try:
            model.apply(step)
        except Undetermined as why:
            raise Skip from why
        new = model.events[len(self.model.events):]
        ended = any(model.qps[s].state != self.model.qps[s].state for s in (0, 1))
        for event in new:
            mine = footprint(event.side, event.step.op, event.local, event.far)
            for pending, _ in model.qps[1 - event.side].sq:
                if pending.op == "write_imm" and \
                        clash(mine, footprint(pending.side, pending.op, [], self.target(pending))):
                    raise Skip          # it may have written in part already
                # the device may have fetched its data already, or not
                if pending.op not in INBOUND and not pending.inline and \
                        clash(mine, footprint(pending.side, pending.op, self.local(pending), [])):
                    raise Skip
        if (ended and self.known != [len(q.sent) for q in self.model.qps]) or \
                any(self.meets_the_other_side(e) for e in new):
            self.sync()
        self.model = model
        self.program.append(step)
        if ended:
            self.failing = next((e.side for e in new if e.status != OK), getattr(step, "side", None))
        if any(e.status != OK and e.step.op in INBOUND for e in new):
            self.sync()         # found when the answer comes: what is behind may have run

    def wait_for_data(self, step):
        """A device may fetch what is sent when it is posted, and does so if it is inline."""
        side, own = step.side, []
        if step.inline:
            mine = [(g.offset, g.offset + g.length) for g in step.sges if g.length]
            own = self.unsettled(side)
            for s, _ in self.model.qps[side].sq:
                if s.op in INBOUND and overlap(mine, self.local(s)):
                    raise Skip
        else:
            mine = self.local(step)
        if any(s.op == "write_imm" and overlap(mine, self.target(s)) for s, _ in self.model.qps[1 - side].sq):
            raise Skip                  # it may have written in part already
        reading = footprint(side, step.op, mine, [])
        if any(clash(reading, footprint(e.side, e.step.op, e.local, e.far))
               for e in own + self.unsettled(1 - side)):
            self.sync()

    def unsettled(self, side):
        return [e for e in self.model.events if e.side == side and e.index >= self.settled[side]]

    def meets_the_other_side(self, event):
        mine = footprint(event.side, event.step.op, event.local, event.far)
        return any(clash(mine, footprint(e.side, e.step.op, e.local, e.far))
                   for e in self.unsettled(1 - event.side))

    def local(self, step):
        """Ranges of the poster's arena that a request or receive names."""
        regions = self.model.regions
        return [(regions[s.region].low + s.offset, regions[s.region].low + s.offset + s.length)
                for s in step.sges if s.length and not getattr(step, "inline", False)]

    def target(self, step):
        """Range of the far arena that a request names."""
        if step.remote is None or not step.length:
            return []
        low = self.model.regions[step.remote.region].low + step.remote.offset
        return [(low, low + step.length)]

    def needs_fence(self, step):
        mine = footprint(step.side, step.op, self.local(step), self.target(step))
        before = [e.step for e in self.unsettled(step.side)] + \
            [s for s, _ in self.model.qps[step.side].sq]
        for other in before:
            if other.op in INBOUND and (
                    clash(mine, footprint(other.side, other.op, self.local(other), self.target(other)))
                    or step.op in ("send", "send_imm") and step.length):    # into a receive we do not know
                return True
        return False

    # -------------------------------------------------------------- choosing memory
    def regions(self, side, need=0, length=0, alive=True, pd=0, lacks=0):
        return [(k, r) for k, r in self.model.regions.items()
                if r.side == side and r.alive == alive and r.pd == pd and r.access & need == need
                and not r.access & lacks and r.length >= length]

    @staticmethod
    def pick(candidates, choice):
        if not candidates:
            raise Skip
        return candidates[choice % len(candidates)]

    def part(self, side, raw, need, fault=""):
        """One Sge, with the fault if there is one."""
        length = raw.length
        if fault == "wrong lkey":
            k, r = self.pick(self.regions(side, need, 1), raw.region)
        elif fault == "dead lkey":
            k, r = self.pick(self.regions(side, need, 1, alive=False), raw.region)
        elif fault == "local right":
            k, r = self.pick(self.regions(side, 0, 1, lacks=int(LOCAL)), raw.region)
        elif fault == "local domain":
            k, r = self.pick(self.regions(side, need, 1, pd=1), raw.region)
        else:
            k, r = self.pick(self.regions(side, need), raw.region)
        if fault:
            length = max(1, length)
        length = min(length, r.length)
        offset = raw.offset % (r.length - length + 1)
        if fault == "local end":
            offset = r.length - length + 1
        return Sge(k, offset, length, fault == "wrong lkey")

    def parts(self, side, raws, need, fault):
        """The Sges of a request; a fault goes into the last one."""
        out = []
        for i, raw in enumerate(raws):
            out.append(self.part(side, raw, need, fault if i == len(raws) - 1 else ""))
        if fault.startswith(("wrong l", "dead l", "local")) and not out:
            raise Skip
        return out

    def remote(self, side, raw, need, length, fault, atomic):
        if fault == "dead rkey":
            found = self.regions(side, need, length, alive=False)
        elif fault == "far right":
            found = self.regions(side, 0, length, lacks=need)
        elif fault == "far domain":
            found = self.regions(side, need, length, pd=1)
        else:
            found = self.regions(side, need, length)
        if atomic:
            found = [(k, r) for k, r in found if r.length >= 16]
        k, r = self.pick(found, raw.region)
        offset = raw.offset % (r.length - length + 1)
        if atomic:
            offset = -r.low % 8 + raw.offset % ((r.length - 16) // 8 + 1) * 8
        if fault == "unaligned":
            offset += 1 + raw.length % 7
        elif fault == "far end":
            offset = r.length - length + 1
            if atomic:
                offset += -(r.low + offset) % 8
        elif fault == "far start":
            offset = -8 if atomic else -1
            if atomic:
                offset = -(r.low % 8) or -8
        return Remote(k, offset, fault == "wrong rkey")

    # -------------------------------------------------------------- raw operations
    def add(self, raw):
        try:
            getattr(self, "_" + type(raw).__name__[3:].lower())(raw)
        except Skip:
            pass

    def count(self, side, queue):
        self.posts[side, queue] = self.posts.get((side, queue), 0) + 1
        if self.posts[side, queue] > MAX_POSTS:
            raise Skip
        self.ids += 1
        return self.ids

    def _send(self, raw):
        side, op, fault = raw.side, raw.op, raw.fault
        atomic = op in ("add", "swap")
        inbound = op in INBOUND
        local_fault = fault.startswith(("wrong l", "dead l", "local"))
        if fault == "too long" and op not in ("send", "send_imm") or \
                fault == "unaligned" and not atomic or fault == "local right" and not inbound or \
                not local_fault and fault not in ("", "too long", "unaligned") and op not in NEEDS:
            fault, local_fault = "", False
        raws = raw.parts
        if atomic:
            raws = (raws[0] if raws else RawPart(0, 0, 8),)
            raws = (raws[0]._replace(length=8),)
        need = int(LOCAL) if inbound else 0
        if atomic and not any(r.length >= 8 for _, r in self.regions(side, need)):
            raise Skip
        inline = raw.inline and not inbound and not local_fault and fault != "too long"
        if inline:
            sges = [Sge(0, p.offset % (ARENA - MAX_INLINE), p.length % (MAX_INLINE // MAX_SGE + 1))
                    for p in raws]
        else:
            sges = self.parts(side, raws, need, fault if local_fault else "")
        if atomic and sges[0].length != 8:
            raise Skip
        if op in ("send", "send_imm") and fault != "too long":
            sges = self.fit(1 - side, side, sges)
        length = sum(s.length for s in sges)
        far = None
        if op in NEEDS:
            if fault and not local_fault and not length:
                raise Skip              # nothing is touched: it would be no fault
            far = self.remote(1 - side, raw.far, NEEDS[op], length, "" if local_fault else fault, atomic)
        step = Send(side, 0, op, tuple(sges), far, raw.signaled, raw.fence, inline, raw.solicited,
                    raw.number if op.endswith("imm") else 0)
        if atomic:
            step.compare_add = raw.number * 0x100000001
            step.swap = raw.number ^ 0xF0F0
            if op == "swap" and raw.number % 2:     # one that matches, as far as can be told now
                low = self.model.regions[far.region].low + far.offset
                if 0 <= low <= ARENA - 8:
                    step.compare_add = int.from_bytes(self.model._get(1 - side, low, 8), "little")
        if not self.model.rules.fault_behind_waiting and not inbound and \
                self.model._gather(side, step)[0] != OK:
            if self.model.qps[side].sq:
                raise Skip
            self.sync()
        if inbound and any(overlap([a], [b]) for i, a in enumerate(self.local(step))
                           for b in self.local(step)[:i]):
            raise Skip
        # behind a read that will fail for its own memory, nothing is determined
        if any(s.op in INBOUND and self.model._gather(side, s)[0] != OK
               for s, _ in self.model.qps[side].sq):
            raise Skip
        needed = self.needs_fence(step)
        if not self.model.rules.fence_sent_again and not self.may_be_sent_again(step, needed):
            step.fence = False
        step.fence = step.fence or needed
        step.wr_id = self.count(side, "send")
        self.push(step)

    def may_be_sent_again(self, step, needed):
        """For a device that stands still when a request with a fence is sent again and a read
        or atomic, itself or behind it, is under way: keeps the two apart. False: no fence."""
        side = step.side
        if self.model.qps[1 - side].state == ERR and step.fence and not needed:
            return False
        inbound, asks, fenced, waiting = step.op in INBOUND, False, step.fence or needed, False
        for other in [e.step for e in self.unsettled(side)] + [s for s, _ in self.model.qps[side].sq]:
            asks = asks or other.op in TAKES_RECEIVE        # it may be sent again, and all behind it
            waiting = waiting or asks and other.fence
        if inbound and (waiting or asks and fenced):
            if self.model.qps[side].sq:
                if waiting or needed:
                    raise Skip
                return False
            self.sync()
        return True

    def fit(self, side, sender, sges):
        """Shortens a message so that the receive that it will meet can hold it."""
        ahead = sum(s.op in TAKES_RECEIVE for s, _ in self.model.qps[sender].sq)
        rq = self.model.qps[side].rq
        if len(rq) <= ahead:
            return sges
        room = sum(s.length for s in rq[ahead].sges)
        out = []
        for s in sges:
            out.append(s._replace(length=min(s.length, room)))
            room -= out[-1].length
        return out

    def _recv(self, raw):
        side, fault = raw.side, raw.fault
        if self.model.rules.late_receive == "stays" and self.model.qps[side].state == ERR:
            raise Skip                  # or goes, when something wakes the device up
        raws = list(raw.parts)
        qp, sender = self.model.qps[side], self.model.qps[1 - side]
        waiting = [s for s, _ in sender.sq if s.op in TAKES_RECEIVE][len(qp.rq):]
        length = waiting[0].length if waiting and waiting[0].op != "write_imm" else 0
        if fault != "too short" and length:
            room = sum(p.length for p in raws)
            if not raws:
                raws.append(RawPart(0, 0, length))
            elif room < length:
                raws[-1] = raws[-1]._replace(length=raws[-1].length + length - room)
        sges = self.parts(side, raws, int(LOCAL), "" if fault == "too short" else fault)
        if fault != "too short" and sum(s.length for s in sges) < length:
            raise Skip
        step = Recv(side, 0, tuple(sges))
        ranges = self.local(step)
        if any(overlap([a], [b]) for i, a in enumerate(ranges) for b in ranges[:i]):
            raise Skip
        step.wr_id = self.count(side, "recv")
        self.push(step)

    def _reg(self, raw):
        length = min(raw.length, ARENA - raw.low)
        self.push(Reg(raw.side, self.next_region, raw.low, length, raw.access, raw.pd))
        self.next_region += 1

    def _dereg(self, raw):
        if self.failing is not None:
            self.sync()
        k, _ = self.pick([(k, r) for k, r in self.model.regions.items()
                          if r.side == raw.side and r.alive and (k > 1 or raw.region == 7)], raw.region)
        pending = [s for q in self.model.qps for s, _ in q.sq]
        receives = [r for q in self.model.qps for r in q.rq]
        if any(self.names(s, k) for s in pending + receives):
            raise Skip
        self.wait_for(raw.side, k, raw.early)
        self.push(Dereg(raw.side, k))
        if raw.early and raw.region % 2:
            self.reuse(raw.side, k)

    def reuse(self, side, region):
        """The program writes at once where a region was that is gone, its completions unpolled."""
        r = self.model.regions[region]
        mine = [(r.low, r.low + min(r.length, 300))]
        for q in self.model.qps:
            for s, _ in q.sq:
                if overlap(mine, self.local(s) if s.side == side else self.target(s)):
                    return
        if any(overlap(mine, self.local(q)) for q in self.model.qps[side].rq):
            return
        for e in self.unsettled(0) + self.unsettled(1):
            touched = e.local if e.side == side else e.far
            by_this = self.names(e.step, region) or e.recv is not None and self.names(e.recv, region)
            if overlap(mine, touched) and not by_this:
                return
        self.push(Scribble(side, mine[0][0], mine[0][1] - mine[0][0], region))

    @staticmethod
    def names(step, region):
        return any(s.region == region for s in step.sges) and not getattr(step, "inline", False) or \
            (getattr(step, "remote", None) is not None and step.remote.region == region)

    def delivered_at(self, event):
        """How many receives of the far side show that this request has been carried out there."""
        took = 0
        for e in self.model.events:
            if e.side == event.side:
                took += e.recv is not None
                if e.index >= event.index and e.recv is not None:
                    return took
        return None

    def wait_for(self, side, region, early):
        """Waits until no executed request can still use a region of `side`."""
        queues = set()
        for e in self.model.events:
            if not (self.names(e.step, region) or e.recv is not None and self.names(e.recv, region)):
                continue
            if e.index < self.known[e.side]:
                continue
            outbound = e.step.op not in INBOUND
            seen = self.delivered_at(e) if outbound or e.side != side else None
            if seen is not None and seen <= self.polled[1 - e.side]:
                continue
            # rather the queue that is not the region's owner's: its own completion stays unpolled
            if early and e.side == side and seen is not None:
                queues.add((1 - e.side, "recv"))
            elif early:
                queues.add((e.side, "send"))
            else:
                queues.update(QUEUES)
        if queues:
            self.sync(tuple(q for q in QUEUES if q in queues))

    def _poll(self, raw):
        self.push(Poll(*raw))

    def _sync(self, raw):
        self.sync(raw.queues)

    def _scribble(self, raw):
        if self.failing is not None:
            self.sync()
        length = min(raw.length, ARENA - raw.low)
        mine = [(raw.low, raw.low + length)]
        for q in self.model.qps:
            for s, _ in q.sq:
                if overlap(mine, self.local(s) if s.side == raw.side else self.target(s)):
                    raise Skip
        if any(overlap(mine, self.local(r)) for r in self.model.qps[raw.side].rq):
            raise Skip
        for s in (0, 1):
            if any(overlap(mine, e.local if s == raw.side else e.far) for e in self.unsettled(s)):
                self.sync()
                break
        self.push(Scribble(raw.side, raw.low, length, raw.seed))

    def _err(self, raw):
        if self.model.qps[raw.side].state != ERR:
            self.push(Err(raw.side))

    def serve(self):
        """Receives for all that waits."""
        for side in (0, 1):
            for _ in range(len(self.model.qps[1 - side].sq)):
                self.add(RawRecv(side, (), ""))

    def finish(self):
        # first the side whose sends wait: else they would wait for the other's death
        self.sync()
        for side in sorted((0, 1), key=lambda s: not self.model.qps[s].sq):
            if self.model.qps[side].state != ERR:
                self.push(Err(side))
            self.sync()
        for qp in self.model.qps:
            assert not qp.sq and not qp.rq


def plan(config, raw, rules=Rules()):
    """(steps, the model after them)"""
    planner = Planner(config, rules)
    for operation in raw:
        planner.add(operation)
    if len(raw) % 3:
        planner.serve()
    planner.finish()
    return planner.program, planner.model
