# cython: language_level=3
"""Requests: transfers in flight, and what holds their memory meanwhile."""
cimport cython
from rocecomm.link.aio cimport Awaiter
from rocecomm.link.base cimport Base, Inquiry, mem_t, plain_array
from rocecomm.link.lists cimport PieceList, hold_any
from rocecomm.link.core cimport (
    F_ANYTAG, F_AWAITED, F_COLL, K_NOTE, K_ONE, K_RECV, K_SEND, S_DONE, S_PULLING, S_QUEUED, R_CANCELLED,
    collective, ended, engine_t, find_group, group_t, pthread_mutex_unlock, rc_get, rc_get8, rc_lock, req_end,
    req_new, req_t, sig_t, tell_loops, unlink)
from rocecomm.link.lane_post cimport unpost_one
from rocecomm.link.match cimport unpost_receive
from rocecomm.link.peer cimport send_now
from rocecomm.link.progress cimport W_TIMEOUT, poll_once
from rocecomm.link.region cimport covering, lend_read_only
from rocecomm.link.rendezvous cimport start_receive, start_send, withdraw
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr

from ..config import USE_CONFIG
from ..errors import ClosedError


cdef inline int other_of(const req_t *r) noexcept nogil:
    """Whom it goes to or comes from; -1 while a receive from any source has not matched."""
    return r.source if r.kind == K_RECV and r.source >= 0 else r.peer


@cython.auto_pickle(False)
cdef class Request:
    """A send or receive in flight. It holds the buffer until the transfer has ended.

    Made by ``isend`` and ``irecv``. Dropping it does not cancel it: the communicator keeps
    buffer and transfer until the end.
    """

    def __init__(self):
        raise TypeError("a Request is made by isend() or irecv()")

    # Not __dealloc__: the cycle collector takes a Request's attributes away before that, and the
    # memory would go while the transfer still uses it.
    def __del__(self):
        if self.r == NULL or self.engine.foreign or self.collect():
            return
        # other finalizers of the same garbage may still call us
        self.failure = ClosedError(f"{self.what}: this Request was dropped; the transfer goes on without it")
        self.ended = True
        self.let_go()

    def __reduce__(self):
        raise TypeError("a Request cannot be copied or pickled: it stands for a transfer of this "
                        "process; send the data it received instead")

    cdef bint is_over(self) noexcept:
        """Whether the transfer has ended, or its collective failed. Needs no mutex."""
        cdef group_t *g
        if self.ended or ended(self.r):
            return True
        if collective(self.r):
            # In this order: what is not being read once its group has failed never is, and what is
            # being read is waited for.
            g = find_group(self.engine.e, self.r.group, False)
            return g != NULL and rc_get(<int *>&g.aborted) and rc_get8(&self.r.state) != S_PULLING
        return False

    cdef bint collect(self) noexcept:
        """Takes over the result of an ended transfer and lets the buffer go. False: not over."""
        if self.ended:
            return True
        if not self.is_over():
            return False
        self.waiters += 1           # other threads may run while the error is made
        try:
            failure = self.engine.error_of(self.r, self.what)
        except BaseException as error:
            failure = error
        if not self.ended:
            self.failure = failure
            if ended(self.r):
                self.count = self.r.got
            self.other, self.number = other_of(self.r), self.r.tag
            self.ended = True
        self.unpin()
        return True

    cdef void unpin(self) noexcept:
        """One thread less looks at the C part."""
        self.waiters -= 1
        if self.ended and self.waiters == 0:
            self.let_go()

    cdef void let_go(self) noexcept:
        cdef req_t *r = self.r
        if r != NULL:
            self.r = NULL           # `release` may wait without the GIL
            buffer, self.buffer = self.buffer, None
            entry, self.entry = self.entry, None
            self.engine.release(r, (buffer, entry))

    cdef void look(self) noexcept:
        """Updates `other` and `number` while the transfer goes on."""
        cdef engine_t *e = self.engine.e
        cdef req_t *r = self.r
        cdef int other
        cdef uint64_t number
        if self.ended:
            return
        self.waiters += 1
        with nogil:
            rc_lock(&e.mutex, &e.want)
            other, number = other_of(r), r.tag
            pthread_mutex_unlock(&e.mutex)
        if not self.ended:
            self.other, self.number = other, number
        self.unpin()

    cdef int other_rank(self) noexcept:
        """The other rank; -1 while a receive from any source has not matched."""
        self.look()
        return self.other

    cdef object outcome(self):
        return self.count

    def wait(self, timeout=USE_CONFIG):
        """Waits; returns the bytes sent or received. See the class's stub for the rules."""
        cdef int result
        cdef Base engine = self.engine
        deadline = engine.until(timeout)
        self.waiters += 1
        try:
            if not self.collect():
                result = engine.wait_reqs(&self.r, 1, False, deadline)
                if not self.collect():
                    if result != W_TIMEOUT:
                        raise engine.closed_error(self.what)
                    error = engine.timeout_error(self.what, self.other_rank(), timeout)
                    if not self.collect():      # it may have ended while we asked
                        raise error
        finally:
            self.unpin()
        if self.failure is not None:
            raise self.failure
        return self.outcome()

    def __await__(self):
        """In a coroutine of an asyncio event loop: waits; see the class's stub for the rules."""
        cdef RequestAwaiter a = RequestAwaiter.__new__(RequestAwaiter)
        a.engine = self.engine
        a.q = self
        return a

    def test(self):
        """Moves traffic once; whether the request has ended (also with an error)."""
        if not self.ended and not self.collect():
            if self.engine.is_open:
                self.engine.enter(self.what)
                self.engine.poll_and_leave()
            self.collect()
        return self.ended

    def cancel(self):
        """Whether the transfer was withdrawn. True: a receive that had not matched, or a send that
        had not left, or a one-sided operation of which nothing was posted; ``wait()`` raises then.
        False for a send means that the receiver was asked to forget it: ``wait()`` tells how
        that ended."""
        cdef bint done = False
        self.waiters += 1
        try:
            if self.collect():
                return False
            self.engine.enter(self.what)
            if self.r.state != S_DONE:
                if self.r.kind == K_ONE:
                    done = unpost_one(self.engine.e, self.r)
                elif self.r.kind == K_NOTE:
                    unlink(&self.engine.e.note_waits, self.r)
                    req_end(self.engine.e, self.r, R_CANCELLED)
                    done = True
                elif self.r.kind != K_RECV:
                    withdraw(self.engine.e, self.r)
                    done = self.r.state == S_DONE
                elif unpost_receive(self.engine.e, self.r):
                    req_end(self.engine.e, self.r, R_CANCELLED)
                    done = True
            self.engine.leave()
            self.collect()
        finally:
            self.unpin()
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
        return self.other_rank()

    @property
    def tag(self):
        """The message's tag (of a receive with ANY_TAG: once it matched)."""
        if not self.collect():
            self.look()
        return self.number

    @property
    def error(self):
        """The exception that ``wait()`` raises, None if there is none (yet)."""
        return self.failure if self.collect() else None

    def __repr__(self):
        state = "in flight" if not self.collect() else "failed" if self.failure is not None else \
            f"done, {self.count} bytes"
        return f"<Request {self.what}, {state}>"


@cython.auto_pickle(False)
@cython.freelist(16)
@cython.internal
cdef class RequestAwaiter(Awaiter):
    """One `await` of a request."""
    cdef Request q
    cdef bint pinned

    cdef bint over(self) noexcept:
        return self.q.is_over()

    cdef bint mark(self) noexcept:
        if self.q.ended or self.q.r.state == S_DONE:
            return False
        self.q.r.flags |= F_AWAITED
        self.q.awaiters += 1
        self.pinned = True
        return True

    cdef void unmark(self) noexcept:
        if self.pinned:
            self.pinned = False
            self.q.awaiters -= 1

    cdef object result(self):
        if not self.q.collect():
            raise self.engine.closed_error(self.q.what)
        if self.q.failure is not None:
            raise self.q.failure
        return self.q.outcome()

    cdef Inquiry late(self):
        return self.engine.inquire(self.q.what, self.q.other_rank(), USE_CONFIG)

    cdef bint withdraw(self):
        """Cancels the request unless others await it; whether it goes on all the same."""
        if self.q.awaiters == 0 and not self.q.ended:
            self.q.cancel()
        return not self.q.collect()


cdef Request start(Base engine, bint receiving, object buf, int peer, uint64_t tag, bint any_tag,
                   uint32_t group, const sig_t *sig, Py_ssize_t offset, Py_ssize_t nbytes):
    """Starts a transfer of part of `buf`; `peer` is -1 for any source."""
    cdef Request q = Request.__new__(Request)
    cdef mem_t m
    cdef req_t *r
    q.engine = engine
    q.what = "irecv" if receiving else "isend"
    if not receiving and sig == NULL and group == 0 and offset == 0 and nbytes < 0 and plain_array(buf, False, &m):
        # The common case, as in `send`: it has left before anybody could touch the array.
        engine.enter_plain("isend", buf)
        if send_now(engine.e, &engine.e.peers[peer], m.dtype, m.ptr, m.n, tag):
            q.count = m.n
            q.other = peer
            q.number = tag
            q.ended = True
            poll_once(engine.e, False)
            engine.leave()
            return q
        engine.leave()
    q.buffer = hold_any(engine, buf, receiving, &m)
    if offset < 0 or <uint64_t>offset > m.n or (nbytes >= 0 and <uint64_t>(offset + nbytes) > m.n):
        raise ValueError(f"{q.what}: bytes {offset} to {offset + nbytes} do not lie in a buffer of "
                         f"{m.n} bytes")
    if nbytes < 0:
        nbytes = m.n - offset
    if type(q.buffer) is PieceList:
        if <uint64_t>nbytes != m.n:
            raise TypeError(f"{q.what}: a list of buffers goes whole")
    elif <uint64_t>nbytes > engine.e.eager_limit:
        q.entry = covering(engine, buf, q.buffer,
                           IBV_ACCESS_LOCAL_WRITE if receiving else IBV_ACCESS_REMOTE_READ)
        if (q.entry is None and not receiving and not engine.reg_free and peer != engine.rank
                and (<Buffer>q.buffer).readonly):
            lent = q.buffer
            q.buffer, q.entry = lend_read_only(engine, lent, offset, nbytes)
            if q.buffer is not lent:
                m.ptr, offset = (<Buffer>q.buffer).ptr, 0
    engine.enter(q.what)
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
    if type(q.buffer) is PieceList:
        (<PieceList>q.buffer).give(r)
    q.r = r
    if receiving:
        start_receive(engine.e, r, False)
    else:
        start_send(engine.e, &engine.e.peers[peer], r)
    poll_once(engine.e, False)
    if engine.e.loops != NULL and r.state == S_QUEUED and not receiving:
        tell_loops(engine.e)            # its credit, or its announcement, may be theirs to see to
    if engine.e.more:
        engine.poll_and_leave()         # long reads: soft0 copies within the post
    else:
        engine.leave()
    return q
