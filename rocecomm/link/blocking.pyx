# cython: language_level=3
"""Blocking send and receive: the common case straight to the post, the rest waits.

The GIL stays held until there is something to wait for, so an ordinary array needs no
export up to then.
"""
from libc.stdint cimport int64_t, uint64_t
from rocecomm.link.base cimport Base, hold, mem_t, plain_array
from rocecomm.link.lists cimport PieceList, hold_any
from rocecomm.link.core cimport (
    F_ANYTAG, F_BLOCKING, F_OWN_MR, F_WAITS, K_RECV, K_SEND, R_CANCELLED, R_OK, S_ANNOUNCED,
    S_DONE, ended, engine_t, pthread_mutex_lock, pthread_mutex_unlock, rc_get, rc_now, req_end, req_free,
    req_new, req_t, req_unregister, unlink)
from rocecomm.link.match cimport unpost_receive
from rocecomm.link.peer cimport send_now
from rocecomm.link.progress cimport W_TIMEOUT, poll_once
from rocecomm.link.region cimport covering, lend_read_only
from rocecomm.link.rendezvous cimport start_receive, start_send, withdraw
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr

from ..config import USE_CONFIG

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int) noexcept

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    ctypedef struct PyInterpreterState:
        pass
    PyThreadState *PyThreadState_Get() noexcept
    PyInterpreterState *PyThreadState_GetInterpreter(PyThreadState *) noexcept
    PyThreadState *PyInterpreterState_ThreadHead(PyInterpreterState *) noexcept
    PyThreadState *PyThreadState_Next(PyThreadState *) noexcept

cdef enum:
    # Polls with the GIL and the mutex held before a receive prepares to wait: about 2 microseconds;
    # where nobody else can want either or the CPU, for so long: a message and its answer take less.
    QUICK_POLLS = 100
    QUICK_NS = 20000

cdef int64_t WITHDRAW_GRACE = 1000000000


cdef inline bint only_thread() noexcept:
    """Whether no other Python thread exists that could receive what this one waits for."""
    cdef PyThreadState *first = PyInterpreterState_ThreadHead(
        PyThreadState_GetInterpreter(PyThreadState_Get()))
    return PyThreadState_Next(first) == NULL


cdef void poll_quickly(engine_t *e, req_t *r) noexcept:
    """The common case: what is waited for comes in a few microseconds."""
    cdef int i = 0
    cdef int64_t until = 0
    while r.state != S_DONE and not e.more:
        poll_once(e, False)
        i += 1
        if i >= QUICK_POLLS and i & 15 == 0:
            if until == 0:
                if e.spin_turns < 200 or rc_now() < e.crowded or not only_thread():
                    return
                until = rc_now() + QUICK_NS
            elif rc_get(&e.want) or rc_now() > until:
                return


cdef int send(Base g, object buf, int peer, uint64_t tag, object timeout) except -1:
    """What `Communicator.send` does: a small message goes straight to the post."""
    cdef engine_t *e = g.e
    cdef mem_t m
    cdef object held = None
    if not plain_array(buf, False, &m):
        held = hold_any(g, buf, False, &m)
        if type(held) is PieceList:
            send_slowly(g, buf, held, peer, tag, timeout)
            return 0
    if timeout is not USE_CONFIG:
        g.until(timeout)
    if held is None:
        g.enter_plain("send", buf)
    else:
        g.enter("send")
    if send_now(e, &e.peers[peer], m.dtype, m.ptr, m.n, tag):
        poll_once(e, False)
        g.leave()
        return 0
    g.leave()
    send_slowly(g, buf, held, peer, tag, timeout)


cdef object send_slowly(Base g, object buf, object held, int peer, uint64_t tag, object timeout):
    """A large message, or one that has to wait."""
    cdef engine_t *e = g.e
    cdef mem_t m
    cdef req_t *r
    cdef int64_t deadline = g.until(timeout)
    cdef int result
    cdef object entry = None
    cdef bint plain = held is None and plain_array(buf, False, &m)
    cdef bint many = type(held) is PieceList
    if many:
        (<PieceList>held).measure(&m)
    elif not plain or ((g.cache is not None or not g.reg_free) and m.n > e.eager_limit):
        plain = False
        held = hold(buf if held is None else held, False, &m)
        if m.n > e.eager_limit:
            entry = covering(g, buf, held, IBV_ACCESS_REMOTE_READ)
            if (entry is None and not g.reg_free and peer != e.rank
                    and (<Buffer>held).readonly):
                held, entry = lend_read_only(g, held, 0, m.n)
                m.ptr = (<Buffer>held).ptr
    if plain:
        g.enter_plain("send", buf)
    else:
        g.enter("send")
    r = req_new(e)
    if r == NULL:
        g.leave()
        raise MemoryError("send: no memory for another message")
    r.kind = K_SEND
    r.buf = m.ptr
    r.size = m.n
    r.dtype = m.dtype
    r.peer = peer
    r.source = e.rank
    r.tag = tag
    r.flags = F_WAITS | F_BLOCKING if only_thread() else F_WAITS
    if many:
        (<PieceList>held).give(r)
    if entry is not None:
        r.lkey, r.rkey = entry.lkey, entry.rkey
        r.mr = <ibv_mr *><size_t>entry.handle
    start_send(e, &e.peers[peer], r)
    g.leave()
    try:
        if plain:
            held = hold(buf, False, &m)     # while the announcement travels; the GIL was held
        if not ended(r):
            result = g.wait_reqs(&r, 1, False, deadline)
            if result == W_TIMEOUT and not take_back(g, r):
                raise g.timeout_error("send", peer, timeout)
        error = g.error_of(r, "send")
        if error is not None:
            if ended(r) and r.status == R_CANCELLED:
                error = g.timeout_error("send", peer, timeout)
            raise error
    except BaseException:
        if not ended(r):                # a signal's handler raised
            take_back(g, r)
        raise
    finally:
        g.release(r, (held, entry))


cdef bint take_back(Base g, req_t *r):
    """Withdraws a send; True if it is over: withdrawn, or after all received.

    A receiver that is not in a call cannot answer. Then the registration goes, so nothing
    reads the buffer that the caller is about to get back.
    """
    cdef engine_t *e = g.e
    cdef int64_t limit = rc_now() + WITHDRAW_GRACE
    cdef bint over
    with nogil:
        pthread_mutex_lock(&e.mutex)
        if not e.closing:
            poll_once(e, True)
            if r.state != S_DONE:
                withdraw(e, r)
        while r.state != S_DONE and rc_now() < limit and not e.closing:
            poll_once(e, True)
            pthread_mutex_unlock(&e.mutex)
            usleep(200)
            pthread_mutex_lock(&e.mutex)
        if r.state == S_ANNOUNCED and r.flags & F_OWN_MR and req_unregister(e, r):
            unlink(&e.peers[r.peer].announced, r)
            req_end(e, r, R_CANCELLED)
        over = r.state == S_DONE
        pthread_mutex_unlock(&e.mutex)
    return over


cdef Py_ssize_t receive(Base g, object buf, int peer, uint64_t tag, bint any_tag,
                        object timeout, str what) except -1:
    cdef engine_t *e = g.e
    cdef mem_t m
    cdef object held = None
    cdef req_t *r
    cdef int64_t deadline
    cdef int result
    cdef Py_ssize_t got
    cdef object entry = None
    if not plain_array(buf, True, &m):
        held = hold_any(g, buf, True, &m)
    if timeout is not USE_CONFIG:
        g.until(timeout)
    if (g.cache is not None or held is not None) and m.n > e.eager_limit and type(held) is not PieceList:
        held = hold(buf if held is None else held, True, &m)
        entry = covering(g, buf, held, IBV_ACCESS_LOCAL_WRITE)
    if held is None:
        g.enter_plain(what, buf)
    else:
        g.enter(what)
    r = req_new(e)
    if r == NULL:
        g.leave()
        raise MemoryError("recv: no memory for another message")
    r.kind = K_RECV
    r.buf = m.ptr
    r.size = m.n
    r.dtype = m.dtype
    r.peer = peer
    r.source = -1
    r.tag = tag
    if any_tag:
        r.flags |= F_ANYTAG
    if entry is not None:
        r.lkey, r.rkey = entry.lkey, entry.rkey
        r.mr = <ibv_mr *><size_t>entry.handle
    if held is not None and type(held) is PieceList:
        (<PieceList>held).give(r)
    start_receive(e, r, False)
    poll_quickly(e, r)                  # with the GIL, so without an export
    if r.state == S_DONE and r.status == R_OK:
        got = r.got
        req_free(e, r)
        g.leave()
        return got
    g.leave()
    try:
        if not ended(r):
            if held is None:
                held = hold(buf, True, &m)      # from here on others may run
            deadline = g.until(timeout)
            result = g.wait_reqs(&r, 1, False, deadline)
            if result == W_TIMEOUT and not give_up(g, r):
                raise g.timeout_error(what, r.source if r.source >= 0 else peer, timeout)
        error = g.error_of(r, what)
        if error is not None:
            if ended(r) and r.status == R_CANCELLED:
                error = g.timeout_error(what, peer, timeout)
            raise error
        return r.got
    except BaseException:
        if not ended(r):
            give_up(g, r)
        raise
    finally:
        g.release(r, (held, entry))


cdef bint give_up(Base g, req_t *r):
    """Withdraws a receive; True if it is over. One whose read was posted ends first: that
    is bounded by the transport's deadline."""
    cdef engine_t *e = g.e
    cdef int64_t limit = rc_now() + <int64_t>(g.config.dead_after * 2e9)
    cdef bint over
    with nogil:
        pthread_mutex_lock(&e.mutex)
        if not e.closing:
            poll_once(e, True)
        if unpost_receive(e, r):
            req_end(e, r, R_CANCELLED)
        while r.state != S_DONE and rc_now() < limit and not e.closing:
            if poll_once(e, True) == 0 and not e.more:
                pthread_mutex_unlock(&e.mutex)
                usleep(50)
                pthread_mutex_lock(&e.mutex)
        over = r.state == S_DONE
        pthread_mutex_unlock(&e.mutex)
    return over
