"""One collective in flight: its buffers, its signature, its deadline, its clean-up."""

import time

from ..errors import MismatchError, TimeoutError
from . import kernels

#: Address alignment of scratch memory and of the pieces it is cut into.
ALIGN = 64


class Operation:
    """What the algorithms work on.

    ``source`` and ``target`` are Buffers, the same one for in-place calls; ``source`` is
    only read. ``send``, ``recv`` and ``wait`` talk to the engine; offsets are in elements.
    """

    def __init__(self, engine, sig, name, source, target, dtype, op, itemsize, count,
                 timeout, scratch):
        self.engine, self.sig, self.name = engine, sig, name
        self.source, self.target = source, target
        self.dtype, self.op, self.itemsize, self.count = dtype, op, itemsize, count
        self.timeout = timeout
        self.end = None if timeout is None else time.monotonic() + timeout
        self._scratch_of = scratch
        self.scratch = None
        self._requests = []

    def take_scratch(self, nbytes):
        """Scratch memory of at least ``nbytes``, as ``self.scratch``; its address."""
        self.scratch = self._scratch_of(nbytes)
        return self.scratch.address

    def send(self, buffer, dst, step, start, stop):
        request = self.engine.coll_isend(self.sig, buffer, dst, step, start * self.itemsize,
                                         (stop - start) * self.itemsize)
        self._requests.append(request)
        return request

    def recv(self, buffer, src, step, start, stop):
        return self.recv_bytes(buffer, src, step, start * self.itemsize,
                               (stop - start) * self.itemsize)

    def recv_bytes(self, buffer, src, step, offset, nbytes):
        request = self.engine.coll_irecv(self.sig, buffer, src, step, offset, nbytes)
        self._requests.append(request)
        return request

    def wait(self, requests):
        if self.end is None:
            self.engine.wait_all(requests, None)
        else:
            self.engine.wait_all(requests, max(0.0, self.end - time.monotonic()))

    def reduce(self, out, a, b, count):
        """``out = a op b`` at three addresses."""
        kernels.reduce(self.dtype, self.op, out, a, b, count)

    def give_up(self, error):
        """After an error in the middle: tell the others, who would wait for this rank in
        vain, and take back what is under way, so that nothing late lands in the user's
        memory and closing need not wait for it."""
        for request in self._requests:
            if not request.done:
                request.cancel()
        if not isinstance(error, MismatchError):        # a death, too: it may have been found elsewhere
            self.engine.abort(self.sig, self._reason(error), error)

    def _reason(self, error):
        if isinstance(error, TimeoutError):
            what = f"did not end within {self.timeout:g} s: {error}"
        elif isinstance(error, KeyboardInterrupt):
            what = "was interrupted"
        else:
            what = f"failed with {type(error).__name__}: {error}"
        return f"{self.name} {what}, on rank {self.engine.rank}"
