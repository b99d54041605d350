# cython: language_level=3
"""Requests: transfers in flight, and what holds their memory meanwhile."""
cimport cython
from rocecomm.link.base cimport Base, hold, mem_t
from rocecomm.link.core cimport (
    F_ANYTAG, F_COLL, F_OWN_MR, K_RECV, K_SEND, S_DONE, S_PULLING, R_CANCELLED,
    find_group, group_t, pthread_mutex_lock, pthread_mutex_unlock, req_end, req_free, req_new,
    req_t, sig_t)
from rocecomm.link.match cimport unpost_receive
from rocecomm.link.progress cimport W_TIMEOUT, poll_once
from rocecomm.link.region cimport covering
from rocecomm.link.rendezvous cimport start_receive, start_send, withdraw
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr

from ..config import USE_CONFIG


@cython.auto_pickle(False)
cdef class Request:
    """A send or receive in flight. It holds the buffer until the transfer has ended.

    Made by ``isend`` and ``irecv``. Dropping it does not cancel it: the communicator keeps
    buffer and transfer until the end.
    """

    def __init__(self):
        raise TypeError("a Request is made by isend() or irecv()")

    def __dealloc__(self):
        if self.r != NULL and self.engine is not None and not self.engine.foreign:
            self.engine.release(self.r, (self.buffer, self.entry))
            self.r = NULL

    def __reduce__(self):
        raise TypeError("a Request cannot be copied or pickled: it stands for a transfer of this "
                        "process; send the data it received instead")

    cdef bint is_over(self) noexcept:
        """Whether the transfer has ended, or its collective failed."""
        cdef group_t *g
        if self.ended or self.r.state == S_DONE:
            return True
        if self.r.flags & F_COLL and self.r.state != S_PULLING:
            g = find_group(self.engine.e, self.r.group, False)
            return g != NULL and g.aborted
        return False

    cdef bint collect(self) noexcept:
        """Takes over the result of an ended transfer and lets the buffer go. False: not over."""
        if self.ended:
            return True
        if not self.is_over():
            return False
        try:
            self.failure = self.engine.error_of(self.r, self.what)
        except BaseException as error:
            self.failure = error
        self.count = self.r.got
        self.other = self.r.source if self.r.kind == K_RECV else self.r.peer
        self.number = self.r.tag
        self.ended = True
        if self.waiters == 0:
            self.let_go()
        return True

    cdef void let_go(self) noexcept:
        if self.r != NULL:
            self.engine.release(self.r, (self.buffer, self.entry))
            self.r = NULL
            self.buffer = None
            self.entry = None

    def wait(self, timeout=USE_CONFIG):
        """Waits; returns the bytes sent or received. See the class's stub for the rules."""
        cdef int result = 0
        cdef int peer
        cdef Base engine = self.engine
        if not self.ended:
            deadline = engine.until(timeout)
            if not self.is_over():
                self.waiters += 1
                try:
                    result = engine.wait_reqs(&self.r, 1, False, deadline)
                finally:
                    self.waiters -= 1
                    if self.ended and self.waiters == 0:
                        self.let_go()
            if not self.ended and not self.collect():
                if result != W_TIMEOUT:
                    raise engine.closed_error(self.what)
                peer = self.r.source if self.r.source >= 0 else self.r.peer
                error = engine.timeout_error(self.what, peer, timeout)
                if not self.collect():      # it may have ended while we asked
                    raise error
        if self.failure is not None:
            raise self.failure
        return self.count

    def test(self):
        """Moves traffic once; whether the request has ended (also with an error)."""
        if not self.ended and not self.collect():
            if self.engine.is_open:
                self.engine.enter()
                with nogil:
                    poll_once(self.engine.e, True)
                self.engine.leave()
            self.collect()
        return self.ended

    def cancel(self):
        """Whether the transfer was withdrawn. True: a receive that had not matched, or a send that
        had not left; ``wait()`` raises then. False for a send means that the receiver was
        asked to forget it: ``wait()`` tells how that ended."""
        cdef bint done = False
        if self.ended or self.collect():
            return False
        self.engine.enter()
        if self.r.kind == K_RECV:
            if unpost_receive(self.engine.e, self.r):
                req_end(self.engine.e, self.r, R_CANCELLED)
                done = True
        else:
            withdraw(self.engine.e, self.r)
            done = self.r.state == S_DONE
        self.engine.leave()
        self.collect()
        return bool(done)

    @property
    def done(self):
        """Whether the transfer has ended, without moving any traffic."""
        return self.collect()

    @property
    def nbytes(self):
        """Bytes transferred; 0 before the end."""
        return self.count if self.collect() else 0

    @property
    def source(self):
        """The other rank; -1 while a receive from ANY_SOURCE has not matched."""
        self.collect()
        if self.ended:
            return self.other
        return self.r.source if self.r.kind == K_RECV else self.r.peer

    @property
    def tag(self):
        """The message's tag (of a receive with ANY_TAG: once it matched)."""
        return self.number if self.collect() else self.r.tag

    @property
    def error(self):
        """The exception that ``wait()`` raises, None if there is none (yet)."""
        return self.failure if self.collect() else None

    def __repr__(self):
        state = "in flight" if not self.collect() else "failed" if self.failure is not None else \
            f"done, {self.count} bytes"
        return f"<Request {self.what}, {state}>"


cdef Request start(Base engine, bint receiving, object buf, int peer, uint64_t tag, bint any_tag,
                   uint32_t group, const sig_t *sig, Py_ssize_t offset, Py_ssize_t nbytes):
    """Starts a transfer of part of `buf`; `peer` is -1 for any source."""
    cdef Request q = Request.__new__(Request)
    cdef mem_t m
    cdef req_t *r
    q.engine = engine
    q.what = "irecv" if receiving else "isend"
    q.buffer = hold(buf, receiving, &m)
    if offset < 0 or <uint64_t>offset > m.n or (nbytes >= 0 and <uint64_t>(offset + nbytes) > m.n):
        raise ValueError(f"{q.what}: bytes {offset} to {offset + nbytes} do not lie in a buffer of "
                         f"{m.n} bytes")
    if nbytes < 0:
        nbytes = m.n - offset
    if <uint64_t>nbytes > engine.e.eager_limit:
        q.entry = covering(engine, buf, q.buffer,
                           IBV_ACCESS_LOCAL_WRITE if receiving else IBV_ACCESS_REMOTE_READ)
    engine.enter()
    r = req_new(engine.e)
    if r == NULL:
        engine.leave()
        raise MemoryError(f"{q.what}: no memory for another request")
    r.kind = K_RECV if receiving else K_SEND
    r.buf = m.ptr + offset if m.ptr != NULL else NULL
    r.size = nbytes
    r.dtype = m.dtype
    r.peer = peer
    r.source = -1 if receiving else engine.rank
    r.tag = tag
    r.group = group
    if any_tag:
        r.flags |= F_ANYTAG
    if sig != NULL:
        r.flags |= F_COLL
        r.sig = sig[0]
    if q.entry is not None:
        r.lkey, r.rkey = q.entry.lkey, q.entry.rkey
        r.mr = <ibv_mr *><size_t>q.entry.handle
    q.r = r
    if receiving:
        start_receive(engine.e, r, False)
    else:
        start_send(engine.e, &engine.e.peers[peer], r)
    poll_once(engine.e, False)
    if engine.e.more:
        with nogil:                     # long reads: soft0 copies within the post
            poll_once(engine.e, True)
    engine.leave()
    return q
