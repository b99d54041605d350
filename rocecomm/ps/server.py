"""The server's side: keeps values, aggregates pushes, runs the optimizer.

One loop serves all workers. What it does for one worker is a generator that yields the
requests it waits for, or an ``_Until`` for what other workers have yet to do.
"""

import math
import time

import numpy as np

from ..errors import PeerDeadError, RocecommError, TimeoutError
from . import protocol
from .optimizers import Add
from .protocol import DATA, HEADER, HEADER_LIMIT, REPLY, Refused
from .sharding import roles


class _Until:
    """Wait until ``ready()``; at ``end`` the error that ``late()`` makes is thrown in."""

    def __init__(self, ready, end, late):
        self.ready, self.end, self.late = ready, end, late


class _Entry:
    """One key: its value, the pushes of the current round, who reads the value now."""

    def __init__(self, dtype, shape, value=None):
        self.dtype, self.shape = dtype, shape
        self.initial = {}                 # worker -> array, until all have called init
        self.value = value                # None until then
        self.state = None
        self.pushes = {}                  # worker -> array of this round
        self.rounds = {}                  # worker -> pushes taken so far
        self.version = 0                  # rounds applied
        self.readers = []                 # sends of the value that are under way

    def empty(self):
        return np.empty(self.shape, self.dtype)


class Server:
    """Serves keys to the workers until all have closed.

    ``comm``: a Communicator; ``servers``, ``workers``: ranks, the same on all ranks (by
    default rank 0 serves and the others work). ``optimizer``: ``SGD(...)`` or ``Add()``.
    ``aggregate``: ``"sum"`` or ``"mean"`` over the workers. Synchronous: a round of a key
    is applied when every worker has pushed it, in the order of ranks, so runs repeat
    bit by bit; a pull sees all of that worker's pushes.

    Call :meth:`run` on every server rank.
    """

    def __init__(self, comm, servers=(0,), workers=None, optimizer=None, aggregate="sum",
                 mode="sync", space=0):
        self.servers, self.workers = roles(comm.size, servers, workers)
        if aggregate not in ("sum", "mean"):
            raise ValueError(f"aggregate must be 'sum' or 'mean', not {aggregate!r}")
        if mode != "sync":
            raise ValueError(f"mode must be 'sync', not {mode!r}: other modes are not there yet")
        if comm.rank not in self.servers:
            raise ValueError(f"rank {comm.rank} is no server; the servers are {self.servers}")
        self._engine, self._space = comm.engine, protocol.SPACE + space
        self._optimizer = Add() if optimizer is None else optimizer
        self._mean = aggregate == "mean"
        self._entries, self._dead = {}, {}

    def run(self):
        """Serve until every worker has closed or died. Returns the values: key -> array.

        A worker's death is reported to the others in their next call that needs it.
        """
        waiting = {}                      # Request or _Until -> generator
        for worker in self.workers:
            self._step(self._serve(worker), None, None, waiting)
        while waiting:
            self._resume_ready(waiting)
            requests = [one for one in waiting if not isinstance(one, _Until)]
            if not requests:
                if waiting:
                    time.sleep(0.001)     # only deadlines are left
                continue
            end = min([one.end for one in waiting if isinstance(one, _Until)],
                      default=math.inf)
            try:
                index = self._engine.wait_any(
                    requests, None if end == math.inf else max(0.0, end - time.monotonic()))
            except TimeoutError:
                continue                  # a deadline of one of ours
            request = requests[index]
            task = waiting.pop(request)
            try:
                value, error = request.wait(0), None
            except RocecommError as problem:
                value, error = None, problem
            self._step(task, value, error, waiting)
        return {key: entry.value for key, entry in self._entries.items()
                if entry.value is not None}

    # --- the loop

    @staticmethod
    def _step(task, value, error, waiting):
        try:
            waits_for = task.send(value) if error is None else task.throw(error)
        except StopIteration:
            return
        waiting[waits_for] = task

    def _resume_ready(self, waiting):
        progress = True
        while progress:                   # one that goes on may free another
            progress = False
            now = time.monotonic()
            for one in [one for one in waiting if isinstance(one, _Until)]:
                if self._dead or one.ready():
                    error = None if one.ready() else Refused(self._death())
                elif one.end <= now:
                    error = Refused(one.late())
                else:
                    continue
                self._step(waiting.pop(one), None, error, waiting)
                progress = True

    def _death(self):
        rank, error = next(iter(self._dead.items()))
        return PeerDeadError(f"worker rank {rank} is gone, so no round can be completed any "
                             f"more: {error}", peer=rank)

    # --- one worker

    def _serve(self, worker):
        handlers = {"init": self._init, "describe": self._describe, "push": self._push,
                    "pull": self._pull, "push_pull": self._push_pull}
        header = np.empty(HEADER_LIMIT, np.uint8)
        try:
            while True:
                size = yield self._engine.irecv(header, worker, HEADER, self._space)
                fields = protocol.unpack(header[:size])
                if fields["op"] == "bye":
                    yield self._send(worker, protocol.pack(ok=True), REPLY)
                    return
                handler = handlers[fields["op"]]
                try:
                    yield from handler(worker, fields)
                except Refused as refused:
                    yield self._send(worker, protocol.pack_error(refused.error), REPLY)
        except RocecommError as error:
            self._dead[worker] = error

    def _send(self, worker, data, tag):
        return self._engine.isend(data, worker, tag, self._space)

    def _end(self, fields):
        timeout = fields["timeout"]
        return math.inf if timeout is None else time.monotonic() + timeout

    def _entry(self, fields, worker):
        """The key's entry, or Refused; a push that comes along is taken and dropped."""
        entry = self._entries.get(fields["key"])
        if entry is None or entry.value is None:
            error = protocol.UnknownKeyError(
                f"{fields['for']} of key {fields['key']!r}: no such key on server rank "
                f"{self._engine.rank}; every worker must call init for it first",
                key=fields["key"])
        else:
            try:
                if fields["op"] != "describe":
                    protocol.check_same(fields["key"], fields["dtype"], fields["shape"],
                                        entry.dtype, entry.shape, fields["op"])
                return entry
            except RocecommError as mismatch:
                error = mismatch
        if fields["op"] in ("push", "push_pull"):
            yield from self._drop_array(worker, fields)
        raise Refused(error)

    def _drop_array(self, worker, fields):
        yield self._engine.irecv(np.empty(fields["shape"], fields["dtype"]), worker, DATA,
                                 self._space)

    def _init(self, worker, fields):
        key, dtype, shape = fields["key"], fields["dtype"], tuple(fields["shape"])
        entry = self._entries.get(key)
        array = np.empty(shape, dtype)
        yield self._engine.irecv(array, worker, DATA, self._space)
        try:
            self._optimizer.check(dtype)
            if entry is not None:
                protocol.check_same(key, dtype, shape, entry.dtype, entry.shape, "init")
        except (TypeError, RocecommError) as error:
            raise Refused(error) from None
        entry = self._entries.setdefault(key, _Entry(dtype, shape))
        if entry.value is None:
            entry.initial[worker] = array
            if len(entry.initial) == len(self.workers):
                entry.value = entry.initial[min(self.workers)]
                entry.state = self._optimizer.state(entry.value)
                entry.initial = {}
            else:
                yield _Until(lambda: entry.value is not None, self._end(fields),
                             lambda: self._late(fields, entry.initial))
        yield self._send(worker, protocol.pack(ok=True), REPLY)

    def _describe(self, worker, fields):
        entry = yield from self._entry(fields, worker)
        yield self._send(worker, protocol.pack(dtype=entry.dtype, shape=entry.shape), REPLY)

    def _push(self, worker, fields):
        entry = yield from self._entry(fields, worker)
        yield from self._take(worker, fields, entry)
        yield self._send(worker, protocol.pack(ok=True), REPLY)

    def _pull(self, worker, fields):
        entry = yield from self._entry(fields, worker)
        yield from self._give(worker, fields, entry)

    def _push_pull(self, worker, fields):
        entry = yield from self._entry(fields, worker)
        yield from self._take(worker, fields, entry)
        yield from self._give(worker, fields, entry)

    def _take(self, worker, fields, entry):
        array = entry.empty()
        yield self._engine.irecv(array, worker, DATA, self._space)
        if worker in entry.pushes:        # it is a round ahead of the slowest worker
            yield _Until(lambda: worker not in entry.pushes, self._end(fields),
                         lambda: self._late(fields, entry.pushes))
        entry.pushes[worker] = array
        entry.rounds[worker] = entry.rounds.get(worker, 0) + 1
        if len(entry.pushes) == len(self.workers):
            self._apply(entry)

    def _give(self, worker, fields, entry):
        wanted = entry.rounds.get(worker, 0)
        if entry.version < wanted:
            yield _Until(lambda: entry.version >= wanted, self._end(fields),
                         lambda: self._late(fields, entry.pushes))
        yield self._send(worker, protocol.pack(ok=True), REPLY)
        sending = self._send(worker, entry.value, DATA)
        entry.readers.append(sending)
        try:
            yield sending
        finally:
            entry.readers.remove(sending)

    def _apply(self, entry):
        total = entry.pushes[self.workers[0]]
        for worker in self.workers[1:]:
            total += entry.pushes[worker]
        if self._mean:
            total = (total / len(self.workers)).astype(entry.dtype)
        if entry.readers:                 # a worker still reads the old value: leave it
            entry.value = entry.value.copy()
        entry.state = self._optimizer.update(entry.value, total, entry.state)
        entry.pushes = {}
        entry.version += 1

    def _late(self, fields, there):
        missing = [worker for worker in self.workers if worker not in there]
        return TimeoutError(
            f"{fields['op']} of key {fields['key']!r} did not end within "
            f"{fields['timeout']:g} s: worker rank{'s' if len(missing) > 1 else ''} "
            f"{', '.join(map(str, missing))} did not {'init' if fields['op'] == 'init' else 'push'} "
            "it in this round", peer=missing[0] if missing else None)
