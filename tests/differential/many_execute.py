"""Carries programs of many queue pairs out on a device and compares with `many_model`."""

import time

import numpy as np
from differential import many_steps as s
from differential.execute import RETRIES, RNR_TIMER, TIMEOUT, Far, Mismatch, listing
from differential.many_model import Completion, Many
from differential.model import OK
from verbs.pair import gid_of

from rocecomm import verbs as v

KINDS = {"RC": v.IBV_QPT_RC, "UC": v.IBV_QPT_UC, "UD": v.IBV_QPT_UD}
ENTRIES = 600           # of a completion queue: more than a program leaves in it
# asynchronous events that may come or not: see device-differences.md
UNASKED = (v.IBV_EVENT_COMM_EST, v.IBV_EVENT_SQ_DRAINED)
# those that concern a shared receive queue, not a queue pair
SHARED = ("IBV_EVENT_SRQ_LIMIT_REACHED", "IBV_EVENT_SRQ_ERR")


class ManySide:
    """One end: a context with memory, and for each program queues of all kinds."""

    def __init__(self, device, number):
        self.number = number
        self.ctx = v.open_device(device)
        self.pd = v.PD(self.ctx)
        self.arenas = [np.zeros(s.AREA, "u1"), np.frombuffer(self.ctx.alloc(s.AREA), "u1")]
        self.gid = gid_of(self.ctx)
        limits = self.ctx.query_device()
        self.reads = min(4, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom or 4)
        self.qps = None

    def begin(self, world):
        """New queues, fresh memory; returns ([QP number], gid, address, rkey)."""
        k = self.number
        self.world = world
        self.arena = self.arenas[world.mapped[k]]
        self.arena[:] = np.frombuffer(s.initial(k), "u1")
        self.channels = {c: v.CompChannel(self.ctx) for c in set(world.channels[k])}
        channels = [self.channels[c] for c in world.channels[k]] or [None] * world.cqs[k]
        self.cqs = [v.CQ(self.ctx, ENTRIES, channel) for channel in channels]
        self.srqs = [v.SRQ(self.pd, s.DEPTH, 3) for _ in range(world.srqs[k])]
        self.qps = []
        for i in range(len(world.queues)):
            self.qps.append(self._create(i))
        self.taken = {(i, q): [] for i in range(len(world.queues)) for q in ("send", "recv")}
        self.mrs = {0: v.MR(self.pd, self.arena, s.ALL | (s.BINDS if world.windows[k] else 0))}
        self.given = {}         # key: window
        self.windows = [v.MW(self.pd) for _ in range(world.windows[k])]
        self.base = self.mrs[0].addr
        while self.ctx.get_async_event(0):      # of the program before
            pass
        return [qp.qp_num for qp in self.qps], self.gid.gid, self.key(0)

    def _create(self, i):
        q, k = self.world.queues[i], self.number
        srq = None if q.srq[k] is None else self.srqs[q.srq[k]]
        return v.QP(self.pd, self.cqs[q.send_cq[k]], self.cqs[q.recv_cq[k]], KINDS[q.kind], srq=srq,
                    max_send_wr=s.DEPTH, max_recv_wr=s.DEPTH, max_send_sge=3, max_recv_sge=3,
                    max_inline_data=64, sq_sig_all=q.sig_all[k])

    def key(self, region):
        mr = self.mrs[region]
        return mr.addr, mr.lkey, mr.rkey

    def connect(self, i, numbers, gid):
        """`numbers`: {QP number: (side, number)} of all; towards our peer, if we have one."""
        q, qp = self.world.queues[i], self.qps[i]
        self.names = numbers
        far = v.AHAttr(dgid=gid, sgid_index=self.gid.index)
        if q.kind == "UD":
            qp.to_init(qkey=s.QKEY)
            qp.to_rtr()
            qp.to_rts()
            self.ahs = [v.AH(self.pd, far._replace(dgid=self.gid.gid)), v.AH(self.pd, far)]
            return
        peer = next(n for n, name in numbers.items() if name == (1 - self.number, i))
        qp.to_init(qp_access_flags=s.ALL)
        more = dict(max_dest_rd_atomic=self.reads, min_rnr_timer=RNR_TIMER) if q.kind == "RC" else {}
        qp.to_rtr(peer, far, path_mtu=v.MTU.of(1024), **more)
        qp.to_rts(**(dict(timeout=TIMEOUT, retry_cnt=RETRIES, rnr_retry=q.rnr_retry[self.number],
                          max_rd_atomic=self.reads) if q.kind == "RC" else {}))

    # -------------------------------------------------------------- steps
    def _sges(self, step, keys):
        out = []
        for p in step.places:
            if getattr(step, "inline", False):
                out.append(v.SGE(self.base + p.offset, p.length, 0xBAD))
            else:
                addr, lkey, _ = keys[self.number, p.region]
                out.append(v.SGE(addr + p.offset, p.length, lkey ^ (0x55 if p.wrong else 0)))
        return out

    def recv(self, step, keys):
        queue = self.srqs[step.to] if step.shared else self.qps[step.to]
        queue.post_recv(self._sges(step, keys), wr_id=step.wr_id)

    def send(self, step, keys):
        flags = (v.IBV_SEND_SIGNALED if step.signaled else 0) | (v.IBV_SEND_FENCE if step.fence else 0) | \
            (v.IBV_SEND_INLINE if step.inline else 0) | (v.IBV_SEND_SOLICITED if step.solicited else 0)
        more = {}
        if step.op == "bind":
            place = step.places[0]
            key = self.windows[step.window].bind(self.qps[step.qp], self.mrs[place.region], place.offset,
                                                 place.length, step.rights, wr_id=step.wr_id, flags=flags)
            self.given[key] = step.window
            return key
        if step.op.endswith("inv"):
            of = self.number if step.op == "local_inv" else 1 - self.number
            more["invalidate_rkey"] = keys[of, "window", step.window]
        if step.far is not None:
            addr, _, rkey = keys[1 - self.number, step.far.region]
            if step.far.window is not None:
                rkey = keys[1 - self.number, "window", step.far.window]
            more = dict(remote_addr=addr + step.far.offset, rkey=rkey ^ (0x55 if step.far.wrong else 0))
        if step.op.endswith("imm"):
            more["imm_data"] = step.imm
        if step.op in ("add", "swap"):
            more.update(compare_add=step.compare_add, swap=step.swap)
        if step.to is not None:
            number = next(n for n, name in self.names.items() if name == step.to)
            more.update(ah=self.ahs[step.to[0] != self.number], remote_qpn=number, remote_qkey=step.qkey)
        self.qps[step.qp].post_send(s.OPS[step.op][0], self._sges(step, keys), wr_id=step.wr_id, flags=flags,
                                    **more)

    def arm(self, step):
        self.cqs[step.cq].req_notify(step.solicited)

    def resize(self, step):
        self.cqs[step.cq].resize(step.entries)
        assert self.cqs[step.cq].capacity >= step.entries

    def limit(self, step):
        self.srqs[step.srq].modify(srq_limit=step.entries)
        assert self.srqs[step.srq].query().srq_limit == step.entries

    def err(self, step):
        self.qps[step.qp].modify(v.IBV_QPS_ERR)

    def drain(self, step):
        self.qps[step.qp].modify(v.IBV_QPS_SQD)

    def resume(self, step):
        self.qps[step.qp].modify(v.IBV_QPS_RTS)

    def reset(self, i, fresh):
        """The queue pair as new, not connected; returns its number."""
        if fresh:
            self.qps[i].close()
            self.qps[i] = self._create(i)
        else:
            self.qps[i].modify(v.IBV_QPS_RESET)
        return self.qps[i].qp_num

    def reg(self, step):
        self.mrs[step.region] = v.MR(self.pd, self.arena, step.access)
        return self.key(step.region)

    def dereg(self, step):
        self.mrs.pop(step.region).close()

    # -------------------------------------------------------------- what comes
    def _take(self):
        for cq_number, cq in enumerate(self.cqs):
            for w in cq.poll(16):
                side, i = self.names[w.qp_num]
                queue = "recv" if w.wr_id & s.RECV_ID else "send"
                q = self.world.queues[i]
                assert side == self.number, w
                assert cq_number == (q.recv_cq if queue == "recv" else q.send_cq)[side], (w, cq_number)
                if w.status != OK:
                    found = Completion(w.wr_id, w.status)
                elif queue == "recv":
                    ud = q.kind == "UD"
                    assert not ud or w.wc_flags & v.IBV_WC_GRH
                    found = Completion(w.wr_id, OK, w.opcode, w.byte_len, w.imm_data,
                                       self.names[w.src_qp] if ud else None,
                                       self._window(w.invalidated_rkey))
                else:
                    inbound = w.opcode in (v.IBV_WC_RDMA_READ, v.IBV_WC_COMP_SWAP, v.IBV_WC_FETCH_ADD)
                    found = Completion(w.wr_id, OK, w.opcode, w.byte_len if inbound else None)
                self.taken[i, queue].append(found)

    def _window(self, rkey):
        return None if rkey is None else self.given[rkey]

    def wait(self, due, seconds):
        """Takes completions until there are `due` of each queue, at most for so long."""
        end = time.monotonic() + seconds
        while True:
            self._take()
            if all(len(self.taken[key]) >= n for key, n in due.items()) or time.monotonic() >= end:
                return self.taken

    def events(self, n, seconds):
        """The numbers of the CQs that n events were for, and of those that came too many."""
        out, end = [], time.monotonic() + seconds
        while True:
            left = end - time.monotonic() if len(out) < n else 0
            found = None
            for channel in self.channels.values():
                found = channel.get_event(0)
                if found is not None:
                    out.append(self.cqs.index(found))
                    break
            if found is None:
                if left <= 0:
                    return sorted(out)
                time.sleep(0.0005)

    def asyncs(self, n, seconds):
        """(name, number of the object) of n asynchronous events, and of those too many."""
        out, end = [], time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic()) if len(out) < n else 0
            e = self.ctx.get_async_event(left)
            if e is None:
                return sorted(out)
            if e.event_type not in UNASKED and e.element is not None:
                objects = self.srqs if e.event_type.name in SHARED else self.qps
                out.append((e.event_type.name, objects.index(e.element) if e.element in objects else -1))

    def memory(self):
        return self.arena.tobytes()

    def end(self):
        if self.qps is not None:
            for kind in (self.windows, self.qps, self.srqs, self.cqs, self.channels.values(),
                         self.mrs.values()):
                for item in kind:
                    item.close()
            self.ahs = None
            self.qps = None

    def close(self):
        self.end()
        self.arenas = self.arena = None
        self.ctx.close()


class ManyDriver:
    """Two sides on a device; `run` carries out one program after the other."""

    def __init__(self, device, apart=False, slow=1.0):
        self.patience = 10 * slow
        self.pause = 0.001 if slow == 1 else 0.01 * slow        # until a dropped message is no more
        self.sides = [ManySide(device, 0)]
        self.windows = self.sides[0].ctx.query_device().max_mw > 0
        self.sides.append(Far(device, 1, 60 * slow, ManySide) if apart else ManySide(device, 1))

    def close(self):
        for side in self.sides:
            side.close()

    def run(self, world, program, rules, more):
        """Raises Mismatch where the device does something else than the model."""
        found = self.differences(world, program, rules, more)
        if found:
            raise Mismatch("\n".join((*found, "", listing(world, program))))

    def differences(self, world, program, rules, more, quiet=0.0):
        """Lines of text, none if all agrees and nothing more comes for `quiet` seconds."""
        try:
            self.world = world
            self.numbers, self.gids, keys = {}, [], {}
            for k, side in enumerate(self.sides):
                numbers, gid, keys[k, 0] = side.begin(world)
                self.numbers.update({n: (k, i) for i, n in enumerate(numbers)})
                self.gids.append(gid)
            for i in range(len(world.queues)):
                self._connect(i)
            return self._steps(world, program, rules, more, keys) or self._more(quiet)
        finally:
            for side in self.sides:
                side.end()

    def _connect(self, i):
        for k, side in enumerate(self.sides):
            side.connect(i, self.numbers, self.gids[1 - k])

    def _steps(self, world, program, rules, more, keys):
        expected = self.expected = Many(world, rules, more)
        for number, step in enumerate(program):
            name = type(step).__name__.lower()
            found = []
            if name in ("events", "asyncs"):
                found = getattr(self, "_" + name)(step)
                expected.apply(step)
            else:
                bound = dict(expected.windows)
                expected.apply(step)
                if name == "sync":
                    found = self._sync(step, expected)
                elif name == "again":
                    for k, side in enumerate(self.sides):
                        self.numbers = {n: who for n, who in self.numbers.items() if who != (k, step.qp)}
                        self.numbers[side.reset(step.qp, step.fresh)] = k, step.qp
                    self._connect(step.qp)
                elif name in ("send", "recv"):
                    key = getattr(self.sides[step.side], name)(step, keys)
                    if key is not None and (step.side, step.window) not in bound:     # else it is refused
                        keys[step.side, "window", step.window] = key
                else:
                    got = getattr(self.sides[step.side], name)(step)
                    if name == "reg":
                        keys[step.side, step.region] = got
            if found:
                return [f"after step {number}, {step}:", *found]
        return []

    def _more(self, seconds):
        """Whatever comes when all is over."""
        if not seconds:
            return []
        time.sleep(seconds)
        return self._sync(s.Sync({}, True, False), self.expected) + self._events(s.Events([])) + \
            self._asyncs(s.Asyncs([]))

    def _sync(self, step, expected):
        out, taken = [], [{}, {}]
        due = [{(i, q): n for (of, i, q), n in step.due.items() if of == k} for k in (0, 1)]
        end, late = time.monotonic() + self.patience, {0, 1}
        while late and time.monotonic() < end:      # both in turn: what one waits for may be up to the other
            for k in sorted(late):
                taken[k] = self.sides[k].wait(due[k], self.patience / 5000) if due[k] else {}
                if all(len(taken[k][key]) >= n for key, n in due[k].items()):
                    late.remove(k)
        for k in (0, 1):
            for key in taken[k]:
                out += compare((k, *key), taken[k][key], expected.completed[(k, *key)], due[k].get(key, 0))
        if step.pause:
            time.sleep(self.pause)
            for k, side in enumerate(self.sides):
                for key, taken in side.wait({}, 0).items():
                    out += compare((k, *key), taken, expected.completed[(k, *key)], 0)
        if step.whole and not out:
            out = self._memory(expected)
        return out

    def _events(self, step):
        out = []
        for k, side in enumerate(self.sides):
            due = sorted(cq for of, cq in step.due if of == k)
            got = side.events(len(due), self.patience)
            if got != due:
                out.append(f"side {k}: events of the CQs {got}, expected {due}")
        return out

    def _asyncs(self, step):
        out = []
        for k, side in enumerate(self.sides):
            due = sorted((name, number) for of, name, number in step.due if of == k)
            got = side.asyncs(len(due), self.patience)
            if got != due:
                out.append(f"side {k}: asynchronous events {got}, expected {due}")
        return out

    def _memory(self, expected):
        out = []
        for k, side in enumerate(self.sides):
            bad = np.frombuffer(side.memory(), "u1") != np.frombuffer(bytes(expected.memory[k]), "u1")
            for low, high in expected.open[k]:
                bad[low:high] = False
            if bad.any():
                at = np.flatnonzero(bad)
                out.append(f"side {k}: {len(at)} bytes of memory differ, from {at[0]} to {at[-1]}")
        return out


def compare(key, taken, want, due):
    """Lines that say where the completions of a queue differ."""
    if taken == want[:len(taken)] and len(taken) >= due:
        return []
    for n in range(max(len(taken), len(want))):
        if n >= len(taken):
            return [f"{key}: {n} of {due} completions came in time; the next would be {want[n]}"]
        if n >= len(want):
            return [f"{key}: a completion too many, {taken[n]}, after {n}"]
        if taken[n] != want[n]:
            return [f"{key}: completion {n} is {taken[n]}, expected {want[n]}"]
    raise AssertionError("no difference")
