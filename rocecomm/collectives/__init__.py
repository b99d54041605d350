"""Collective operations over an engine's messages; names no device.

``plan`` says who sends what to whom (pure arithmetic), ``ring`` and ``doubling`` carry it
out, ``kernels`` adds the numbers. :class:`Collectives` is what a communicator holds.
"""

import contextlib
import threading

from ..config import USE_CONFIG, check_timeout
from ..errors import TimeoutError
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
        with self._alone("all_reduce"):
            sig = self._engine.coll_begin("all_reduce", dtype, count, op, -1, self._group)
            self._run(Operation(
                self._engine, sig, f"all_reduce({op}) of {count} {dtype}", source, target,
                dtype, op, source.itemsize, count, timeout, self._scratch))
        return array if out is None else out

    def barrier(self, timeout=USE_CONFIG):
        """Return when all ranks have called it. Raises as :meth:`all_reduce` does."""
        timeout = self._timeout(timeout)
        with self._alone("barrier"):
            sig = self._engine.coll_begin("barrier", "", 0, "none", -1, self._group)
            scratch = self._scratch(1)
            operation = Operation(self._engine, sig, "barrier", scratch, scratch, "", "none",
                                  1, 0, timeout, self._scratch)
            with self._guard(operation):
                rounds = plan.dissemination(self._engine.rank, self._engine.size)
                for step, (to, source) in enumerate(rounds):
                    operation.wait([operation.recv(scratch, source, step, 0, 0),
                                    operation.send(scratch, to, step, 0, 0)])

    # --- inside

    def _run(self, operation):
        with self._guard(operation):
            if self._engine.size == 1:
                if operation.target is not operation.source:
                    memoryview(operation.target)[:] = memoryview(operation.source)
                return
            choice = plan.choose(operation.count * operation.itemsize, operation.count,
                                 self._engine.size, self._config.algorithm,
                                 self._config.doubling_limit)
            if choice == plan.RING:
                ring.all_reduce(operation, self._config.segment)
            else:
                doubling.all_reduce(operation)

    def _timeout(self, timeout):
        return self._config.timeout if timeout is USE_CONFIG else check_timeout(timeout)

    @contextlib.contextmanager
    def _alone(self, name):
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{name} was called while another thread is in a collective of this "
                "communicator: their order would differ between ranks; use one thread, or a "
                "communicator for each")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _guard(self, operation):
        try:
            yield
        except BaseException as error:
            self._memory = None            # a late message may still write into it
            operation.give_up(error)
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"{operation.name} did not end within {operation.timeout:g} s on rank "
                    f"{self._engine.rank}: {error}", peer=error.peer,
                    peer_state=error.peer_state) from error
            raise

    def _scratch(self, nbytes):
        """Reused between calls: with a NIC, registering costs more than reducing."""
        if self._memory is None or self._memory.nbytes < nbytes:
            import numpy
            self._memory = acquire(numpy.empty(max(nbytes, 4096), numpy.uint8), True)
        return self._memory

    def _check(self, source, target, op):
        if op not in kernels.OPERATIONS:
            raise ValueError(f"all_reduce has no reduction {op!r}, only "
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
