"""The worker's side: push gradients, pull values."""

import threading

import numpy as np

from ..config import USE_CONFIG, check_timeout
from ..errors import ClosedError, PeerDeadError, RocecommError, TimeoutError
from ..link.memory import acquire
from . import protocol
from .protocol import DATA, HEADER, HEADER_LIMIT, REPLY
from .sharding import roles, server_of

#: Seconds that a server may take to answer beyond the time it was given.
_GRACE = 5.0


class Worker:
    """A worker of a parameter server; arguments as for :class:`Server`.

    Arrays are any dense numeric buffers: numpy arrays, torch tensors. A key is a text or an
    integer; it lives on the server that its hash chooses. Calls block until done, one
    thread at a time. ``timeout`` in seconds, None for ever, default the communicator's.

    Errors: UnknownKeyError, MismatchError (both shapes and dtypes in the text; nothing was
    sent or stored), BufferError and TypeError for arrays that cannot be sent, TimeoutError
    and PeerDeadError naming the rank that is late or gone. Keys on other servers can still
    be used after that.
    """

    def __init__(self, comm, servers=(0,), workers=None, space=0):
        self.servers, self.workers = roles(comm.size, servers, workers)
        if comm.rank not in self.workers:
            raise ValueError(f"rank {comm.rank} is no worker; the workers are {self.workers}")
        self._engine, self._space = comm.engine, protocol.SPACE + space
        self._timeout = comm.config.timeout
        self._known = {}                  # key -> (dtype, shape)
        self._reply = np.empty(HEADER_LIMIT, np.uint8)
        self._lock = threading.Lock()
        self._broken = {}                 # server -> the error after which it is of no use
        self._open = True

    def init(self, key, array, timeout=USE_CONFIG):
        """Give ``key`` its first value; returns when all workers have called it. The value
        of the lowest worker rank counts. A key that exists already keeps its value, but
        dtype and shape must be its own."""
        key = protocol.check_key(key)
        with self._lock:
            buffer = self._buffer(key, array, False)
            _check_numeric(key, buffer.dtype)
            self._ask("init", key, timeout, buffer, send=buffer)
            self._known[key] = buffer.dtype, buffer.shape

    def push(self, key, array, timeout=USE_CONFIG):
        """Add ``array`` to this round of ``key``. The array is free again on return."""
        key = protocol.check_key(key)
        with self._lock:
            buffer = self._checked("push", key, array, False, timeout)
            self._ask("push", key, timeout, buffer, send=buffer)

    def pull(self, key, out, timeout=USE_CONFIG):
        """Fill ``out`` with the value of ``key``, once every worker has pushed as often as
        this one. Returns ``out``."""
        key = protocol.check_key(key)
        with self._lock:
            buffer = self._checked("pull", key, out, True, timeout)
            self._ask("pull", key, timeout, buffer, recv=buffer)
        return out

    def push_pull(self, key, array, out=None, timeout=USE_CONFIG):
        """Push ``array`` and pull the result into ``out`` (default: ``array`` itself) in one
        request. Returns the array that was filled."""
        key = protocol.check_key(key)
        with self._lock:
            source = self._checked("push_pull", key, array, out is None, timeout)
            target = source if out is None else self._checked("push_pull", key, out, True,
                                                              timeout)
            self._ask("push_pull", key, timeout, source, send=source, recv=target)
        return array if out is None else out

    def close(self, timeout=USE_CONFIG):
        """Tell the servers that this worker is done. Twice is fine."""
        with self._lock:
            if not self._open:
                return
            try:
                for server in self.servers:
                    if server in self._broken:
                        continue
                    self._exchange(server, protocol.pack(op="bye"), self._limit(timeout), None,
                                   None, None)
            finally:
                self._open = False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
        else:                             # do not hide the error behind one of ours
            try:
                self.close(1.0)
            except RocecommError:
                self._open = False

    # --- inside

    def _buffer(self, key, array, writable):
        if not self._open:
            raise ClosedError(f"the worker was closed, so key {key!r} cannot be used")
        server = server_of(key, self.servers)
        cause = self._broken.get(server)
        if cause is not None:
            kind = PeerDeadError if isinstance(cause, PeerDeadError) else RocecommError
            raise kind(f"key {key!r} is on server rank {server}, which cannot be used any more "
                       f"since an earlier request failed: {cause}") from cause
        return acquire(array, writable)

    def _checked(self, what, key, array, writable, timeout):
        buffer = self._buffer(key, array, writable)
        if key not in self._known:
            fields = self._ask("describe", key, timeout, purpose=what)
            self._known[key] = fields["dtype"], tuple(fields["shape"])
        protocol.check_same(key, buffer.dtype, buffer.shape, *self._known[key], what)
        return buffer

    def _limit(self, timeout):
        return self._timeout if timeout is USE_CONFIG else check_timeout(timeout)

    def _ask(self, op, key, timeout, array=None, send=None, recv=None, purpose=None):
        limit = self._limit(timeout)
        fields = {"op": op, "for": purpose or op, "key": key, "timeout": limit}
        if array is not None:
            fields.update(dtype=array.dtype, shape=list(array.shape))
        return self._exchange(server_of(key, self.servers), protocol.pack(**fields), limit,
                              send, recv, key)

    def _exchange(self, server, header, limit, send, recv, key):
        engine, space = self._engine, self._space
        wait = None if limit is None else limit + _GRACE
        receives, sends = [], []
        try:
            receives.append(engine.irecv(self._reply, server, REPLY, space))
            if recv is not None:
                # Where one array goes out and comes back, the server answers only after it
                # has taken it, so posting the receive now is safe.
                receives.append(engine.irecv(recv, server, DATA, space))
            sends.append(engine.isend(header, server, HEADER, space))
            if send is not None:
                sends.append(engine.isend(send, server, DATA, space))
            fields = protocol.unpack(self._reply[:receives[0].wait(wait)])
            if "error" in fields:
                for request in receives[1:]:
                    request.cancel()
                receives = receives[:1]
            engine.wait_all([*sends, *receives], wait)
        except BaseException as error:
            # Request and answer are out of step now.
            self._broken[server] = error
            for request in receives:
                request.cancel()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"server rank {server} did not answer: {error}",
                                   peer=server) from error
            raise
        protocol.raise_error(fields, key)
        return fields


def _check_numeric(key, dtype):
    try:
        known = np.dtype(dtype).kind in "iufc"
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"key {key!r} cannot hold elements of dtype {dtype}, only numpy's "
                        "numbers: convert the array first")
