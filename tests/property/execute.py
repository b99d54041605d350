"""Carries a program out on one rank and writes down what it saw."""

import asyncio
import contextlib
import threading
import time

import numpy as np
from property.model import DRAIN, Outcome
from property.one_sided import OneSided
from property.program import RECEIVING, SENDING

from rocecomm import ANY_SOURCE, ANY_TAG, MessageTruncatedError, RocecommError, TimeoutError

FILL = 99
SPACE = 2**31 + 77              # of the messages with which the ranks agree that all is over


def payload(seed, number, size):
    return np.random.default_rng([seed, number]).integers(0, 256, size, "u1")


def cut(array, seed):
    """The array, or a list of views that make it up."""
    if not seed:
        return array
    rng = np.random.default_rng(seed)
    at = sorted(rng.integers(0, len(array) + 1, rng.integers(0, 40 if seed % 5 == 0 else 5)).tolist())
    return [array[a:b] for a, b in zip([0, *at], [*at, len(array)], strict=True)]


class Rank(OneSided):
    def __init__(self, comm, program):
        self.comm, self.program, self.me = comm, program, comm.rank
        self.by_size = {m[3]: n for n, m in enumerate(program.messages) if m[1] == self.me}
        self.outcomes, self.requests = {}, {}
        self.kept = []                  # (buffer, copy): what must not change any more
        self.failures = []
        if program.one_sided:
            self.prepare()

    # ------------------------------------------------------------------------- operations
    def run_thread(self, number):
        try:
            for op in self.program.of(self.me, number):
                getattr(self, "do_" + op.do)(op)
        except BaseException as error:
            self.failures.append((number, error))
            raise

    def sends(self, op):
        array = payload(self.program.seed, op.message, self.program.messages[op.message][3])
        self.outcomes[op.at, "send"] = o = Outcome(op.at, "send", "", op.message, self.me, op.thread)
        return array, cut(array, op.cut), o

    def receives(self, op):
        buffer = np.full(op.capacity, FILL, "u1")
        self.outcomes[op.at, "receive"] = o = Outcome(
            op.at, "receive", "", -1, self.me, op.thread, op.src, op.tag, op.capacity)
        return buffer, cut(buffer, op.cut), o

    def names(self, op):
        return (ANY_SOURCE if op.src is None else op.src, ANY_TAG if op.tag is None else op.tag)

    def do_sleep(self, op):
        time.sleep(op.timeout)

    def do_progress(self, op):
        self.comm.progress()

    def do_send(self, op):
        array, buf, o = self.sends(op)
        _, dst, tag, _ = self.program.messages[op.message]
        try:
            self.comm.send(buf, dst, tag, timeout=op.timeout)
            o.end = "sent"
        except TimeoutError:
            o.end = "withdrawn"
        except RocecommError as error:
            o.end = "withdrawn"
            if "sendrecv" not in str(error):
                raise
        array[:] = 0xEE                 # it may be changed now

    def do_isend(self, op):
        array, buf, o = self.sends(op)
        _, dst, tag, _ = self.program.messages[op.message]
        self.requests[op.at] = self.comm.isend(buf, dst, tag), array, o

    def do_recv(self, op):
        buffer, buf, o = self.receives(op)
        self.into(o, buffer, lambda: self.comm.recv(buf, *self.names(op), timeout=op.timeout))

    def do_irecv(self, op):
        buffer, buf, o = self.receives(op)
        self.requests[op.at] = self.comm.irecv(buf, *self.names(op)), buffer, o

    def do_sendrecv(self, op):
        array, sendbuf, sent = self.sends(op)
        buffer, recvbuf, o = self.receives(op)
        _, dst, tag, _ = self.program.messages[op.message]
        self.into(o, buffer, lambda: self.comm.sendrecv(sendbuf, dst, recvbuf, op.src, tag, op.tag,
                                                        timeout=op.timeout))
        sent.end = "sent"
        array[:] = 0xEE

    def do_iprobe(self, op):
        status = self.comm.iprobe(*self.names(op))
        self.saw(op, status)

    def saw(self, op, status):
        self.outcomes[op.at, "probe"] = o = Outcome(
            op.at, "probe", "nothing", rank=self.me, thread=op.thread, src=op.src, tag=op.tag)
        if status is not None:
            o.end, o.source, o.told_tag, o.nbytes = "seen", *status[:3]

    def do_probe(self, op):
        with contextlib.suppress(TimeoutError):
            self.saw(op, self.comm.probe(*self.names(op), timeout=op.timeout))

    def do_probe_recv(self, op):
        buffer, buf, o = self.receives(op)
        try:
            status = self.comm.probe(*self.names(op), timeout=op.timeout)
        except TimeoutError:
            o.end = "timeout"
            return
        self.saw(op, status)
        self.into(o, buffer, lambda: self.comm.recv(buf, status.source, status.tag, timeout=op.timeout))
        if not self.program.cancels and o.end != "timeout" \
                and self.program.messages[o.number][2:] != (status.tag, status.nbytes):
            o.faults += (f"probe told of {status}, then came message {o.number}",)

    def do_wait(self, op):
        with contextlib.suppress(RocecommError):
            self.requests[op.of[0]][0].wait(op.timeout)

    def do_test(self, op):
        self.requests[op.of[0]][0].test()

    def do_wait_all(self, op):
        with contextlib.suppress(RocecommError):
            self.comm.wait_all([self.requests[at][0] for at in op.of], op.timeout)

    def do_wait_any(self, op):
        with contextlib.suppress(TimeoutError):
            i = self.comm.wait_any([self.requests[at][0] for at in op.of], op.timeout)
            assert self.requests[op.of[i]][0].done

    def do_cancel(self, op):
        request, _, o = self.requests[op.of[0]]
        o.cancelled_at = op.at
        if request.cancel():
            assert request.done and "cancelled" in str(request.error)

    def do_awaits(self, op):
        """Awaited together for a while; then the tasks are cancelled, and the requests with them."""
        async def of(request):
            with contextlib.suppress(RocecommError):
                await request

        async def some():
            tasks = {asyncio.ensure_future(of(self.requests[at][0])): at for at in op.of}
            _, pending = await asyncio.wait(tasks, timeout=op.timeout)
            for task in pending:
                self.requests[tasks[task]][2].cancelled_at = op.at
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        asyncio.run(some())

    # --------------------------------------------------------------------------- outcomes
    def into(self, o, buffer, call):
        """A receive that ends now, or has ended."""
        try:
            o.nbytes = call()
        except MessageTruncatedError as error:
            o.end, size = "truncated", error.sent
            if error.capacity != o.capacity:
                o.faults += (f"capacity {error.capacity} told",)
        except TimeoutError:
            o.end = "timeout"
        except RocecommError as error:
            if "cancelled" not in str(error):
                raise
            o.end = "cancelled"
        else:
            o.end, size = "got", o.nbytes
        expected = np.full(o.capacity, FILL, "u1")
        if o.end in ("got", "truncated"):
            o.number = self.by_size.get(size, -1)
            if o.number < 0:
                raise AssertionError(f"no message to rank {self.me} has {size} bytes: {o}")
        if o.end == "got":
            expected[:size] = payload(self.program.seed, o.number, size)
        if not np.array_equal(buffer, expected):
            at = int(np.argmax(buffer != expected))
            o.faults += (f"byte {at} is {buffer[at]}, not {expected[at]}",)
        self.check_mark(o)
        self.kept.append((buffer, expected, o))

    def settle(self, request, array, o):
        """A request that has ended."""
        if o.kind == "receive":
            o.source = o.told_tag = None
            self.into(o, array, lambda: request.wait(0))
            if o.end in ("got", "truncated"):
                o.source, o.told_tag = request.source, request.tag
            return
        try:
            if request.wait(0) != len(array):
                o.faults += (f"{request.nbytes} bytes told",)
            o.end = "sent"
        except RocecommError as error:
            if "cancelled" not in str(error):
                raise
            o.end = "withdrawn"
        array[:] = 0xEE

    def drain(self):
        """Receives what is stored and nobody waits for."""
        while (status := self.comm.iprobe(ANY_SOURCE, ANY_TAG)) is not None:
            at = DRAIN + self.drained
            self.drained += 1
            buffer = np.full(status.nbytes, FILL, "u1")
            self.outcomes[at, "receive"] = o = Outcome(
                at, "receive", "", -1, self.me, 0, status.source, status.tag, status.nbytes)
            self.into(o, buffer, lambda b=buffer, s=status: self.comm.recv(
                b, s.source, s.tag, timeout=5 if self.program.cancels else 30))
            if o.end == "timeout":      # its sender took it back
                del self.outcomes[at, "receive"]

    def finish(self):
        """All sends end, all messages are received, and what waits on is cancelled."""
        self.drained = 0
        sends = [r for r, _, o in self.requests.values() if o.kind == "send"]
        while not all([r.test() for r in sends]):
            self.drain()
        if self.program.one_sided:
            self.finish_one_sided()
        # nothing of a rank is under way behind this
        engine, others = self.comm._engine, [r for r in range(self.comm.size) if r != self.me]
        tokens = [engine.irecv(bytearray(1), r, 1, SPACE) for r in others]
        tokens += [engine.isend(b"x", r, 1, SPACE) for r in others]
        while not all([t.test() for t in tokens]):
            self.drain()
        self.drain()
        for request, array, o in self.requests.values():
            if not request.done and o.kind == "receive" and not request.cancel():
                request.wait(20)        # its message is being read
            cancelled_now = o.kind == "receive" and o.cancelled_at < 0
            self.settle(request, array, o)
            if cancelled_now and o.end == "cancelled":
                o.end = "left"
        for buffer, expected, o in self.kept:
            if not np.array_equal(buffer, expected) and not o.faults:
                o.faults += ("the buffer changed after the receive had ended",)
        for state in engine.peers():
            for what in ("sends", "announced", "posted", "pulls", "reading", "strangers"):
                if state[what]:
                    raise AssertionError(f"{what} is {state[what]} when all is over: {state}")


def run(comm, program):
    """The outcomes that this rank saw."""
    rank = Rank(comm, program)
    crowd = [threading.Thread(target=rank.run_thread, args=(i,), daemon=True)
             for i in range(1, program.threads)]
    for thread in crowd:
        thread.start()
    rank.run_thread(0)
    for thread in crowd:
        thread.join(60)
        assert not thread.is_alive(), "a thread of the program does not end"
    if rank.failures:
        raise rank.failures[0][1]
    rank.finish()
    comm.barrier()                      # programs do not run into each other
    if program.one_sided:
        rank.close_regions()
    return list(rank.outcomes.values())


assert set(RECEIVING) | set(SENDING) <= {name[3:] for name in dir(Rank) if name.startswith("do_")}
