"""Collective operations over an engine's messages; names no device.

``plan`` says who sends what to whom (pure arithmetic), ``ring`` and ``doubling`` carry it
out, ``kernels`` adds the numbers. :class:`Collectives` is what a communicator holds.
"""

import threading

from ..config import USE_CONFIG, check_timeout
from ..errors import PeerDeadError, TimeoutError, brief
from ..link.memory import acquire
from . import doubling, kernels, plan, ring
from .operation import Operation

__all__ = ["Collectives"]


class Collectives:
    """The collectives of one group of ranks. Every rank calls the same ones in the same
    order; ranks that disagree get MismatchError.

    One thread at a time: a second call while one runs raises RuntimeError.
    """

    def __init__(self, engine, config=None, group=1):
        self._engine, self._group = engine, group
        self._config = engine.config if config is None else config
        self._lock = threading.Lock()
        self._memory = None

    def all_reduce(self, array, op="sum", *, out=None, timeout=USE_CONFIG):
        """Reduce ``array`` over all ranks, element by element; everybody gets the result.

        ``array`` and ``out``: buffers of the same dtype (float32, float64, int32, int64) and
        number of elements; without ``out`` the result replaces ``array``, otherwise
        ``array`` is only read and may be read-only. Every rank gets the same bits; integers
        wrap on overflow. Returns ``out`` or ``array``.

        Raises BufferError, TypeError or ValueError for arguments that cannot be used,
        before anything is sent, so that the call can be repeated; MismatchError on all
        ranks if they disagree about the operation, dtype or count; PeerDeadError,
        TimeoutError. After an error in the middle the contents of the result are undefined
        and the group is of no further use.
        """
        timeout = self._timeout(timeout)
        in_place = out is None or out is array
        # Not closed here: a request that is late after an error still needs the memory.
        # The last reference gives it back.
        source = acquire(array, in_place)
        target = source if in_place else acquire(out, True)
        dtype, count = self._check(source, target, op)
        self._enter("all_reduce")
        try:
            sig = self._engine.coll_begin("all_reduce", dtype, count, op, -1, self._group)
            operation = Operation(
                self._engine, sig, f"all_reduce({op}) of {count} {dtype}", source, target,
                dtype, op, source.itemsize, count, timeout, self._scratch)
            try:
                self._all_reduce(operation)
            except BaseException as error:
                self._failed(operation, error)
                raise
        finally:
            self._lock.release()
        return array if out is None else out

    def barrier(self, timeout=USE_CONFIG):
        """Return when all ranks have called it. Raises as :meth:`all_reduce` does."""
        timeout = self._timeout(timeout)
        self._enter("barrier")
        try:
            sig = self._engine.coll_begin("barrier", "", 0, "none", -1, self._group)
            empty = self._scratch(1)
            operation = Operation(self._engine, sig, "barrier", empty, empty, "", "none", 1, 0,
                                  timeout, self._scratch)
            try:
                rounds = plan.dissemination(self._engine.rank, self._engine.size)
                for step, (to, source) in enumerate(rounds):
                    operation.wait([operation.recv(empty, source, step, 0, 0),
                                    operation.send(empty, to, step, 0, 0)])
            except BaseException as error:
                self._failed(operation, error)
                raise
        finally:
            self._lock.release()

    # --- inside

    def _all_reduce(self, operation):
        size = self._engine.size
        if size == 1:
            if operation.target is not operation.source:
                memoryview(operation.target)[:] = memoryview(operation.source)
            return
        choice = plan.choose(operation.count * operation.itemsize, operation.count, size,
                             self._config.algorithm, self._config.doubling_limit)
        if choice == plan.RING:
            ring.all_reduce(operation, self._config.segment)
        else:
            doubling.all_reduce(operation)

    def _timeout(self, timeout):
        return self._config.timeout if timeout is USE_CONFIG else check_timeout(timeout)

    def _enter(self, name):
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{name} was called while another thread is in a collective of this "
                "communicator: their order would differ between ranks; use one thread, or a "
                "communicator for each")

    def _failed(self, operation, error):
        """After ``error`` in the middle: clean up; raises it with the collective's name where
        the text speaks of a single message only."""
        self._memory = None                # a late message may still write into it
        told = self._engine.group_error(self._group)    # another rank failed before, and said how
        operation.give_up(error)
        if told is not None:
            return
        if isinstance(error, TimeoutError):
            raise TimeoutError(
                f"{operation.name} did not end within {operation.timeout:g} s on rank "
                f"{self._engine.rank}: {error}", peer=error.peer,
                peer_state=error.peer_state) from error
        if isinstance(error, PeerDeadError):
            text = str(error).partition(": ")[2]            # without the plain name
            raise PeerDeadError(f"{operation.name} on rank {self._engine.rank}: {text}",
                                peer=error.peer) from error

    def _scratch(self, nbytes):
        """Reused between calls: with a NIC, registering costs more than reducing."""
        if self._memory is None or self._memory.nbytes < nbytes:
            import numpy
            self._memory = acquire(numpy.empty(max(nbytes, 4096), numpy.uint8), True)
        return self._memory

    def _check(self, source, target, op):
        if not isinstance(op, str) or op not in kernels.OPERATIONS:
            raise ValueError(f"all_reduce has no reduction {brief(op)}, only "
                             f"{', '.join(map(repr, kernels.OPERATIONS))}")
        dtype, item = source.dtype, source.itemsize
        if not kernels.supported(dtype, op):
            raise TypeError(f"all_reduce cannot {op} elements of dtype {dtype}, only "
                            f"{', '.join(kernels.DTYPES)}; convert the array first")
        count = source.nbytes // item
        if target is source:
            return dtype, count
        if (target.dtype, target.nbytes) != (dtype, source.nbytes):
            raise ValueError(
                f"all_reduce needs an out of the same dtype and size as its input: that has "
                f"{count} elements of {dtype}, out has {target.nbytes // target.itemsize} of "
                f"{target.dtype}")
        apart = abs(source.address - target.address)
        if 0 < apart < source.nbytes:
            raise ValueError(f"all_reduce's out overlaps its input by "
                             f"{source.nbytes - apart} of {source.nbytes} bytes: use the same "
                             "array for both, or separate ones")
        return dtype, count
