"""Carries a program out on a device, with bounded waits, and compares with the model.

A side is a context, its memory and one queue pair; it lives in this process (`Side`) or in
another one (`Far`), where the software device moves bytes in other ways. One driver tells
both sides what to do, step by step.
"""

import multiprocessing
import time
import traceback

import numpy as np
from differential import steps as s
from differential.model import OK, Completion, run
from verbs.pair import gid_of

from rocecomm import verbs as v
from rocecomm.errors import VerbsError

DEPTH = 64              # of each queue
# A dead peer is noticed after (RETRIES + 1) * 268 ms; 7 retries would be "for ever" on some devices.
# Not shorter: a request that is sent again for nothing costs time on a slow machine.
TIMEOUT, RETRIES = 16, 2
RNR_TIMER = 1           # 10 us


class Mismatch(AssertionError):
    """Device and model disagree."""


class Side:
    """One end. `number` is the side it is in the program."""

    def __init__(self, device, number):
        self.number = number
        self.ctx = v.open_device(device)
        self.pds = [v.PD(self.ctx), v.PD(self.ctx)]
        size = s.ARENA + 2 * s.GUARD
        self.arenas = [np.zeros(size, "u1"), np.frombuffer(self.ctx.alloc(size), "u1")]
        for arena in self.arenas:
            assert arena.__array_interface__["data"][0] % 8 == 0
        self.gid = gid_of(self.ctx)
        limits = self.ctx.query_device()
        self.reads = min(4, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom or 4)
        self.qp = None

    def begin(self, config):
        """A new queue pair, fresh memory; returns (number, gid)."""
        self.arena = self.arenas[config.mapped[self.number]]
        self.arena[:] = np.frombuffer(s.initial(self.number), "u1")
        self.base = self.arena.__array_interface__["data"][0] + s.GUARD
        self.config = config
        self.cqs = {q: v.CQ(self.ctx, 2 * DEPTH) for q in ("send", "recv")}
        self.qp = v.QP(self.pds[0], self.cqs["send"], self.cqs["recv"], max_send_wr=DEPTH,
                       max_recv_wr=DEPTH, max_send_sge=3, max_recv_sge=3, max_inline_data=64)
        self.taken = {"send": [], "recv": []}
        self.refused = []
        self.mrs = {}
        return self.qp.qp_num, self.gid.gid

    def connect(self, peer):
        number, gid = peer
        self.qp.to_init(qp_access_flags=self.config.access[self.number])
        self.qp.to_rtr(number, v.AHAttr(dgid=gid, sgid_index=self.gid.index),
                       path_mtu=v.MTU.of(self.config.mtu), max_dest_rd_atomic=self.reads,
                       min_rnr_timer=RNR_TIMER)
        self.qp.to_rts(timeout=TIMEOUT, retry_cnt=RETRIES, rnr_retry=7, max_rd_atomic=self.reads)

    # -------------------------------------------------------------- steps
    def reg(self, step):
        """Registers; returns (address, lkey, rkey), which stay known when it is gone."""
        low = s.GUARD + step.low
        mr = v.MR(self.pds[step.pd], self.arena[low:low + step.length], step.access)
        self.mrs[step.region] = mr
        return mr.addr, mr.lkey, mr.rkey

    def dereg(self, step):
        self.mrs.pop(step.region).close()

    def _sges(self, step, keys):
        if getattr(step, "inline", False):
            return [v.SGE(self.base + g.offset, g.length, 0xBAD) for g in step.sges]
        return [v.SGE(keys[g.region][0] + g.offset, g.length,
                      keys[g.region][1] ^ (s.WRONG_TAG if g.wrong_key else 0)) for g in step.sges]

    def send(self, step, keys):
        flags = (v.IBV_SEND_SIGNALED if step.signaled else 0) | (v.IBV_SEND_FENCE if step.fence else 0) | \
            (v.IBV_SEND_INLINE if step.inline else 0) | (v.IBV_SEND_SOLICITED if step.solicited else 0)
        more = {}
        if step.remote is not None:
            addr, _, rkey = keys[step.remote.region]
            more = dict(remote_addr=(addr + step.remote.offset) % 2**64,
                        rkey=rkey ^ (s.WRONG_TAG if step.remote.wrong_key else 0))
        if step.op.endswith("imm"):
            more["imm_data"] = step.imm
        if step.op in ("add", "swap"):
            more.update(compare_add=step.compare_add, swap=step.swap)
        try:
            self.qp.post_send(s.OPS[step.op][0], self._sges(step, keys), wr_id=step.wr_id, flags=flags,
                              **more)
        except VerbsError:
            self.refused.append(step.wr_id)

    def recv(self, step, keys):
        self.qp.post_recv(self._sges(step, keys), wr_id=step.wr_id)

    def poll(self, step):
        self._take(step.queue, step.n)

    def scribble(self, step):
        low = s.GUARD + step.low
        self.arena[low:low + step.length] = np.frombuffer(s.pattern(step.length, step.seed), "u1")

    def err(self, step):
        self.qp.modify(v.IBV_QPS_ERR)

    # -------------------------------------------------------------- completions
    def _take(self, queue, n):
        got = self.cqs[queue].poll(n)
        for w in got:
            assert w.qp_num == self.qp.qp_num, w
            if w.status != OK:
                self.taken[queue].append(Completion(w.wr_id, w.status))
            elif queue == "recv":
                self.taken[queue].append(Completion(w.wr_id, OK, w.opcode, w.byte_len, w.imm_data))
            else:
                inbound = w.opcode in (v.IBV_WC_RDMA_READ, v.IBV_WC_COMP_SWAP, v.IBV_WC_FETCH_ADD)
                self.taken[queue].append(Completion(w.wr_id, OK, w.opcode, w.byte_len if inbound else None))
        return len(got)

    def wait(self, due, seconds):
        """Takes completions until each queue of `due` has so many, at most for so long;
        everything that came so far."""
        end = time.monotonic() + seconds
        while any(len(self.taken[q]) < n for q, n in due.items()) and time.monotonic() < end:
            for queue in due:
                self._take(queue, 16)
        return self.taken

    def quiet(self, seconds):
        """What still comes within some time, with all that came; and what posts refused."""
        end = time.monotonic() + seconds
        while True:
            for queue in self.cqs:
                self._take(queue, 16)
            if time.monotonic() >= end:
                return self.taken, self.refused

    def memory(self):
        return self.arena.tobytes()

    def end(self):
        if self.qp is not None:
            self.qp.close()
            for cq in self.cqs.values():
                cq.close()
            for mr in self.mrs.values():
                mr.close()
            self.qp = None

    def close(self):
        self.end()
        self.arenas = self.arena = None
        self.ctx.close()


# ------------------------------------------------------------------ another process
def serve(pipe, kind, device, number):
    """Main function of a process that is one side."""
    side = kind(device, number)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(side, name)(*args)))
        except BaseException as error:
            pipe.send((False, (repr(error), traceback.format_exc())))
        if name == "close":
            return


class Far:
    """A Side in another process."""

    def __init__(self, device, number, patience=60.0, kind=Side):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.patience = patience
        self.process = context.Process(target=serve, args=(theirs, kind, device, number), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name):
        def call(*args):
            self.pipe.send((name, args))
            if not self.pipe.poll(self.patience):
                raise Mismatch(f"the process of one side gave no answer to {name} within "
                               f"{self.patience} s")
            good, result = self.pipe.recv()
            if not good:
                raise Mismatch(f"{name} failed in the other process: {result[0]}\n{result[1]}")
            return result
        return call

    def close(self):
        try:
            self.__getattr__("close")()
            self.process.join(self.patience)
        finally:
            self.process.kill()
            self.process.join()
            self.pipe.close()


# ------------------------------------------------------------------ driver
class Driver:
    """Two sides on a device; `run` carries out one program after the other."""

    def __init__(self, device, apart=False, slow=1.0):
        self.patience = 10 * slow        # seconds for what is due
        self.sides = [Side(device, 0)]
        self.sides.append(Far(device, 1, 60 * slow) if apart else Side(device, 1))

    def close(self):
        for side in self.sides:
            side.close()

    def run(self, config, program, rules):
        """Raises Mismatch where the device does something else than a model with `rules`."""
        differences = self.differences(config, program, rules)
        if differences:
            raise Mismatch("\n".join((*differences, "", listing(config, program))))

    def differences(self, config, program, rules, quiet=0.0005):
        """Lines of text, none if all agrees and nothing more comes for `quiet` seconds."""
        sides = self.sides
        try:
            addresses = [side.begin(config) for side in sides]
            for side, other in zip(sides, reversed(addresses), strict=True):
                side.connect(other)
            return self._steps(config, program, rules, quiet)
        finally:
            for side in sides:
                side.end()

    def _steps(self, config, program, rules, quiet):
        sides, keys, expected = self.sides, {}, run(config, [], rules)
        for number, step in enumerate(program):
            expected.apply(step)
            name = type(step).__name__.lower()
            if name == "reg":
                keys[step.region] = sides[step.side].reg(step)
            elif name in ("send", "recv"):
                getattr(sides[step.side], name)(step, keys)
            elif name != "sync":
                getattr(sides[step.side], name)(step)
            else:
                found = self._sync(step, expected)
                if found:
                    return [f"after step {number}, {step}:", *found]
        return self._end(expected, quiet)

    def _sync(self, step, expected):
        out = []
        for i, side in enumerate(self.sides):
            due = {q: n for (k, q), n in step.due.items() if k == i}
            if due:
                taken = side.wait(due, self.patience)
                out += [line for q in due for line in compare_queue(i, q, taken[q], expected, due[q])]
        if not out and len(step.due) == 4:
            out = self._memory(expected)
        return out

    def _end(self, expected, quiet):
        out = []
        for i, side in enumerate(self.sides):
            taken, refused = side.quiet(quiet if i == 0 else 0.0)
            for queue in ("send", "recv"):
                out += compare_queue(i, queue, taken[queue], expected, expected.due(i, queue))
            if refused != expected.qps[i].refused:
                out.append(f"side {i}: posts refused {refused}, expected {expected.qps[i].refused}")
        return out + self._memory(expected)

    def _memory(self, expected):
        out = []
        for i, side in enumerate(self.sides):
            is_ = np.frombuffer(side.memory(), "u1")
            bad = is_ != np.frombuffer(bytes(expected.memory[i]), "u1")
            undefined = expected.open[i] + [r for _, ranges in expected.begun(1 - i) for r in ranges]
            for low, high in undefined:
                bad[s.GUARD + low:s.GUARD + high] = False
            if bad.any():
                at = np.flatnonzero(bad)
                k = int(at[0])
                out.append(f"side {i}: {len(at)} bytes of memory differ, from {k - s.GUARD} to "
                           f"{int(at[-1]) - s.GUARD}; the first is {is_[k]:#04x}, not "
                           f"{expected.memory[i][k]:#04x}")
        return out


def compare_queue(side, queue, taken, expected, due):
    """Lines that say where the completions of a queue differ."""
    want = expected.completions(side, queue)
    if taken == want[:len(taken)] and len(taken) >= due:
        return []
    for k in range(max(len(taken), len(want))):
        if k >= len(taken):
            return [f"side {side} {queue}: {len(taken)} of {due} completions came in time; "
                    f"the next would be {want[k]}"]
        if k >= len(want):
            return [f"side {side} {queue}: a completion too many, {taken[k]}, after {k}"]
        if taken[k] != want[k]:
            return [f"side {side} {queue}: completion {k} is {taken[k]}, expected {want[k]}"]
    raise AssertionError("no difference")


def listing(config, program):
    """The program as Python."""
    lines = ",\n    ".join(repr(step) for step in program)
    return f"config = {config}\nprogram = [\n    {lines}]"
