# cython: language_level=3
"""One-sided operations as Python calls them: what was asked is checked here, before anything
is posted, and becomes a request on the peer's lane."""
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t, uint64_t
from rocecomm.link.base cimport Base, hold, mem_t
from rocecomm.link.core cimport (
    K_NOTE, K_ONE, NOTE_WINDOW, P_SELF, R_CANCELLED, S_DONE, ended, engine_t, one_new, peer_t,
    pthread_mutex_unlock, rc_let_others, rc_lock, req_end, req_free, req_new,
    req_t, tell_loops, unlink)
from rocecomm.link.one cimport O_ADD, O_READ, O_SWAP, O_WRITE, one_t
from rocecomm.link.lane_post cimport start_one
from rocecomm.link.notify cimport start_wait, told_t
from rocecomm.link.progress cimport leave_call, poll_once
from rocecomm.link.region cimport RemoteBuffer, covering, remote_arg
from rocecomm.link.request cimport Request
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, ibv_mr)


import numpy as np

from ..config import USE_CONFIG, as_integer
from ..errors import TimeoutError, brief

cnp.import_array()

cdef enum:
    # Turns of progress that starting a request may take: 64 MiB on a device that copies itself.
    START_TURNS = 8
    # Polls with the GIL held before a call prepares to wait.
    QUICK_POLLS = 50


@cython.auto_pickle(False)
cdef class AtomicRequest(Request):
    """A ``fetch_add`` or ``compare_swap`` in flight; ``wait()`` and ``await`` return what the cell
    held before, an int."""

    cdef object outcome(self):
        return self.number

    @property
    def value(self):
        """The value that the cell had before; None before the end, or if it failed."""
        return self.number if self.collect() and self.failure is None else None


# -------------------------------------------------------------------------- arguments

cdef uint64_t number_arg(object value, str what, str name, int bits) except? 0xFFFFFFFFFFFFFFFF:
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{what}: {name} must be an integer, not {brief(value)} of type "
                        f"{type(value).__name__}")
    value = number
    if value < 0 or value >> bits:
        hint = "; to subtract n, add 2**64 - n" if bits == 64 and value < 0 else ""
        raise ValueError(f"{what}: {name} must lie between 0 and 2**{bits} - 1, not {value}{hint}")
    return value


cdef cnp.ndarray column(object values, str what, str name):
    """A list of numbers as int64 of this request's own: nobody can change it in flight."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise TypeError(f"{what}: {name} must be a one-dimensional array of integers, not "
                        f"{given.ndim}-dimensional of {given.dtype}")
    if given.dtype.kind == "u" and given.itemsize == 8 and given.size and given.max() > 2**63 - 1:
        raise ValueError(f"{what}: {name}[{int(given.argmax())}] is {given.max()}, beyond any buffer")
    return np.array(given, np.int64, order="C", copy=True)


cdef int check_inside(object offsets, object lengths, uint64_t size, str what, str name,
                      str where) except -1:
    """All pieces lie in a buffer of `size` bytes. No sum can overflow."""
    if size > 0x7FFFFFFFFFFFFFFF:
        size = 0x7FFFFFFFFFFFFFFF
    bad = (offsets < 0) | (offsets > size) | (lengths > size - offsets)
    if bad.any():
        i = int(bad.argmax())
        length = int(lengths if np.ndim(lengths) == 0 else lengths[i])
        raise ValueError(f"{what}: piece {i}, {length} bytes at {name}[{i}] = {int(offsets[i])}, does not "
                         f"lie in {where} of {size} bytes; nothing was transferred")
    return 0


# ----------------------------------------------------------------------------- start

cdef req_t *new_request(Base g, int op, RemoteBuffer remote, str what) except NULL:
    """With the mutex taken; `launch` leaves."""
    cdef req_t *r
    cdef one_t *o
    g.enter(what)
    r = req_new(g.e)
    o = one_new(g.e) if r != NULL else NULL
    if o == NULL:
        if r != NULL:
            req_free(g.e, r)
        g.leave()
        raise MemoryError(f"{what}: no memory for another request")
    r.kind = K_ONE
    r.one = o
    r.peer = remote.rank
    r.source = g.rank
    o.op = op
    o.rkey = remote.rkey
    o.n = 1
    return r


cdef void launch(Base g, Request q, req_t *r) noexcept:
    """Posts what can be posted; operations on oneself are carried out."""
    cdef engine_t *e = g.e
    cdef peer_t *p = &e.peers[r.peer]
    cdef int turn = 0
    cdef bint owned
    q.r = r
    start_one(e, p, r)
    poll_once(e, False)
    if e.loops != NULL and r.state != S_DONE and p.lane.pending.head != NULL:
        tell_loops(e)                   # a credit, or an answer, may be theirs to see to
    if r.state != S_DONE and (p.state == P_SELF or (e.more and p.lane.pending.head != NULL)):
        with nogil:
            while r.state != S_DONE and e.more and turn < START_TURNS:
                poll_once(e, True)
                turn += 1
            # nobody but this rank is needed: its own device answers
            while (r.state != S_DONE and p.state == P_SELF and not e.fatal
                   and (p.lane.head != p.lane.tail or e.more)):
                poll_once(e, True)
                rc_let_others(&e.mutex, &e.want, False)
            owned = leave_call(e)
        if owned:
            g.reap()
        return
    g.leave()


cdef void take_local(Request q, req_t *r, mem_t *m):
    r.buf = m.ptr
    r.dtype = m.dtype
    r.one.extent = m.n
    if q.entry is not None:
        r.lkey = q.entry.lkey
        r.mr = <ibv_mr *><size_t>q.entry.handle
        r.one.known = True


cdef Request start_transfer(Base g, bint reading, object local, object remote, object offset,
                            object notify, str what):
    """A write from, or a read into, the whole of `local`."""
    cdef Request q = Request.__new__(Request)
    cdef RemoteBuffer there = remote_arg(g, remote, what)
    cdef Buffer held
    cdef mem_t m
    cdef req_t *r
    cdef uint64_t address
    cdef uint32_t imm = 0
    if notify is not None:
        imm = <uint32_t>number_arg(notify, what, "notify", 32)
    held = hold(local, reading, &m)
    address = there.at(offset, m.n, IBV_ACCESS_REMOTE_READ if reading else IBV_ACCESS_REMOTE_WRITE,
                       what)
    q.engine, q.what, q.buffer = g, what, held
    q.entry = covering(g, local, held, IBV_ACCESS_LOCAL_WRITE if reading else -1) if m.n else None
    r = new_request(g, O_READ if reading else O_WRITE, there, what)
    take_local(q, r, &m)
    r.size = r.one.length = m.n
    r.one.remote = address
    r.one.notify = notify is not None
    r.one.imm = imm
    launch(g, q, r)
    return q


cdef Request start_pieces(Base g, bint reading, object local, object remote, object local_offsets,
                          object remote_offsets, object lengths, str what):
    """Many pieces of `local`, each to or from a place of its own."""
    cdef Request q = Request.__new__(Request)
    cdef RemoteBuffer there = remote_arg(g, remote, what)
    cdef cnp.ndarray here_at = column(local_offsets, what, "local_offsets")
    cdef cnp.ndarray there_at = column(remote_offsets, what, "remote_offsets")
    cdef cnp.ndarray sizes = None
    cdef Buffer held = None
    cdef mem_t m
    cdef req_t *r
    cdef one_t *o
    cdef int64_t n = len(here_at)
    cdef int64_t each = 0
    cdef uint64_t address
    cdef uint64_t total = 0
    if hasattr(type(lengths), "__index__") and not isinstance(lengths, (bool, np.ndarray)):
        each = number_arg(lengths, what, "lengths", 62)
        total = <uint64_t>(int(each) * n & 0xFFFFFFFFFFFFFFFF)
    else:
        sizes = column(lengths, what, "lengths")
        if len(sizes) and sizes.min() < 0:
            raise ValueError(f"{what}: lengths[{int(sizes.argmin())}] is {sizes.min()}, a piece cannot "
                             "be shorter than nothing")
    if len(there_at) != n or (sizes is not None and len(sizes) != n):
        counts = f"{n} local_offsets, {len(there_at)} remote_offsets" + (
            f", {len(sizes)} lengths" if sizes is not None else "")
        raise ValueError(f"{what}: the arrays must be of the same length, not {counts}")
    held = hold(local, reading, &m)
    # access rights, and that it is open for us; the pieces are looked at next
    address = there.at(0, 0, IBV_ACCESS_REMOTE_READ if reading else IBV_ACCESS_REMOTE_WRITE, what)
    if n:
        lengths_or_each = each if sizes is None else sizes
        check_inside(here_at, lengths_or_each, m.n, what, "local_offsets", "the local buffer")
        check_inside(there_at, lengths_or_each, there.length, what, "remote_offsets",
                     f"the region of rank {there.rank},")
    if sizes is not None:
        total = sizes.sum() if n else 0
    q.engine, q.what = g, what
    q.buffer = (held, here_at, there_at, sizes)
    q.entry = covering(g, local, held, IBV_ACCESS_LOCAL_WRITE if reading else -1) if total else None
    r = new_request(g, O_READ if reading else O_WRITE, there, what)
    take_local(q, r, &m)
    o = r.one
    r.size = total
    o.remote = address
    if total:
        o.n = n
        o.local_at = <const int64_t *>cnp.PyArray_DATA(here_at)
        o.remote_at = <const int64_t *>cnp.PyArray_DATA(there_at)
        o.length = each
        if sizes is not None:
            o.lengths = <const int64_t *>cnp.PyArray_DATA(sizes)
    launch(g, q, r)
    return q


cdef Request start_atomic(Base g, bint swap, object remote, object offset, object value,
                          object compare, str what):
    """An operation on 8 aligned bytes, native unsigned 64 bit."""
    cdef AtomicRequest q = AtomicRequest.__new__(AtomicRequest)
    cdef RemoteBuffer there = remote_arg(g, remote, what)
    cdef req_t *r
    cdef uint64_t operand = number_arg(value, what, "swap" if swap else "value", 64)
    cdef uint64_t other = number_arg(compare, what, "compare", 64) if swap else 0
    cdef uint64_t address = there.at(offset, 8, IBV_ACCESS_REMOTE_ATOMIC, what)
    if address & 7:
        raise ValueError(f"{what}: offset {offset} is at address {address:#x} of rank {there.rank}, which "
                         "is no multiple of 8; atomic operations need 8 aligned bytes")
    q.engine, q.what = g, what
    r = new_request(g, O_SWAP if swap else O_ADD, there, what)
    r.size = r.one.length = 8
    r.one.remote = address
    r.one.operand = operand
    r.one.compare = other
    launch(g, q, r)
    return q


cdef object finish(Base g, Request q, object timeout):
    """Waits for a request of a blocking call; its result."""
    cdef int i = 0
    if timeout is not USE_CONFIG:
        g.until(timeout)
    # the common case in a few microseconds, without a wait
    if q.r != NULL and not ended(q.r):
        g.enter(q.what)
        while q.r.state != S_DONE and i < QUICK_POLLS and not g.e.more:
            poll_once(g.e, False)
            i += 1
        g.leave()
    return q.wait(timeout)


# --------------------------------------------------------------------- notifications

@cython.auto_pickle(False)
cdef class NoteRequest(Request):
    """Waits for notifications; ``wait()`` and ``await`` return their numbers, as ``wait_notify`` does.
    It takes none before all are there; dropped, it takes none at all."""

    cdef void let_go(self) noexcept:
        if self.r != NULL:
            take_off(self.engine, self.r)
        Request.let_go(self)

    cdef object outcome(self):
        cdef told_t *told = <told_t *>cnp.PyArray_DATA(<cnp.ndarray>self.room)
        cdef uint64_t i
        if self.with_source:
            return [(told[i].source, told[i].value) for i in range(self.n)]
        return [told[i].value for i in range(self.n)]


cdef Request start_notify(Base g, int source, object count, bint with_source, str what):
    """Takes the next `count` notifications of `source` (-1: of any rank)."""
    cdef NoteRequest q = NoteRequest.__new__(NoteRequest)
    cdef req_t *r
    q.n = number_arg(count, what, "count", 32)
    if q.n == 0 or q.n > NOTE_WINDOW:
        raise ValueError(f"{what}: count must lie between 1 and {NOTE_WINDOW}, not {q.n}")
    q.engine, q.what, q.with_source = g, what, with_source
    q.buffer = q.room = np.empty(q.n, np.uint64)
    g.enter(what)
    r = req_new(g.e)
    if r == NULL:
        g.leave()
        raise MemoryError(f"{what}: no memory for another request")
    r.kind = K_NOTE
    r.peer = source
    r.source = -1
    r.size = q.n
    r.buf = <char *>cnp.PyArray_DATA(<cnp.ndarray>q.room)
    q.r = r
    start_wait(g.e, r)
    if r.state != S_DONE:
        poll_once(g.e, False)
    g.leave()
    return q


cdef list wait_notify(Base g, int source, object count, object timeout, bint with_source):
    """The same at once; nothing is taken if the time passes."""
    cdef Request q
    if timeout is not USE_CONFIG:
        g.until(timeout)
    q = start_notify(g, source, count, with_source, "wait_notify")
    try:
        return q.wait(timeout)
    except TimeoutError:
        if q.r != NULL and take_off(g, q.r):
            raise
        return q.wait(0)                # they came just now: nothing is lost
    finally:
        q.let_go()


cdef bint take_off(Base g, req_t *r):
    """Whether a wait for notifications had to be given up: it had not ended."""
    cdef bint waiting
    with nogil:
        rc_lock(&g.e.mutex, &g.e.want)
        waiting = r.state != S_DONE
        if waiting:
            unlink(&g.e.note_waits, r)
            req_end(g.e, r, R_CANCELLED)
        pthread_mutex_unlock(&g.e.mutex)
    return waiting
