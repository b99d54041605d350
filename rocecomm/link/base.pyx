# cython: language_level=3
"""The engine's Python side: entering and leaving it, waiting, errors, arguments."""
cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdlib cimport calloc, free
from rocecomm.link.core cimport (
    F_ANYTAG, F_COLL, F_ORPHAN, F_ZOMBIE, K_RECV, K_SEND, P_BROKEN, P_JOINING, P_LEFT, P_NONE, P_READY, P_SELF,
    R_ABORTED, R_BROKEN, R_CANCELLED, R_CLOSED, R_CYCLE, R_DTYPE, R_NOMEM, R_OK, R_ONE, R_REGISTER,
    R_SIGNATURE, R_TRUNCATED, S_ANNOUNCED, S_DONE, S_PULLING, S_QUEUED, collective, ended, find_group,
    free_all, group_t, pthread_cond_destroy, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_trylock, pthread_mutex_unlock, rc_cond_init, rc_get, rc_get8, rc_get_ptr, rc_lock, rc_now,
    rc_set_ptr, rc_stamp, req_end, req_free, sig_t, status_t, uint32_t, unlink)
from rocecomm.link.peer cimport beat
from rocecomm.link.progress cimport (
    W_CLOSED, W_DONE, W_SIGNALS, W_TIMEOUT, heartbeats, leave_call, poll_once, wait_turn)
from rocecomm.link.wire cimport code_of, describe_sig
from rocecomm.verbs.buffer cimport Buffer, acquire, acquire_plain
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ

import numbers
import os
import threading
import time
import weakref

from ..config import USE_CONFIG, as_integer, check_timeout
from ..errors import ClosedError, brief
from ..verbs.mr import registration_hint
from . import failure, wireup
from .wire import OPERATIONS, dtype_name

cnp.import_array()

# dtype.kind by numpy's type number, '.' for what needs a closer look
cdef const char *KINDS = "biuiuiuiuiufffccc......f"
cdef int64_t FOREVER = 0x3FFFFFFFFFFFFFFF
cdef object _engines = weakref.WeakSet()
cdef bint _fork_hook = False


cdef bint plain_array(object obj, bint writable, mem_t *m) except -1:
    """The common case without an export: an ordinary, dense, numeric ndarray. The caller
    holds the GIL and a reference for as long as it uses the address, or calls `hold`."""
    cdef cnp.ndarray a
    cdef int flags
    cdef int number
    if type(obj) is not cnp.ndarray:
        return False
    a = <cnp.ndarray>obj
    flags = cnp.PyArray_FLAGS(a)
    if not flags & cnp.NPY_ARRAY_C_CONTIGUOUS or (writable and not flags & cnp.NPY_ARRAY_WRITEABLE):
        return False
    number = cnp.PyArray_TYPE(a)
    if number < 0 or number > 23 or KINDS[number] == c"." or not cnp.PyArray_ISNOTSWAPPED(a):
        return False
    m.ptr = <char *>cnp.PyArray_DATA(a)
    m.n = cnp.PyArray_NBYTES(a)
    m.dtype = <uint16_t>(<int>KINDS[number] << 8 | (cnp.PyArray_ITEMSIZE(a) & 0xFF))
    return True


cdef Buffer hold(object obj, bint writable, mem_t *m):
    """The general case: an export that is held until the Buffer goes."""
    cdef Buffer b
    if plain_array(obj, writable, m):
        return acquire_plain(obj)
    b = <Buffer>obj if type(obj) is Buffer and not (writable and (<Buffer>obj).readonly) \
        else acquire(obj, writable)
    m.ptr = b.ptr
    m.n = b.nbytes
    m.dtype = code_of(b.dtype)
    return b


def _after_fork():
    """In the child: the queue pairs and all memory under DMA belong to the parent."""
    cdef Base engine
    for engine in list(_engines):
        engine.is_open = False
        engine.foreign = True


cdef bint abandoned() except -1:
    """Whether this is a daemon thread, and the interpreter is ending: nobody waits for what it does any
    more, and it has nothing to report. Whoever is joined, and atexit handlers, are told as always."""
    return threading.current_thread().daemon and not threading.main_thread().is_alive()


cdef bint drop(engine_t *e, req_t *r, PyObject *owner) noexcept nogil:
    """Nobody looks at `r` any more. With the mutex held, which it gives back. True: `r` goes on, or its
    memory is still under DMA, and `owner` stays with it."""
    cdef bint over = r.state == S_DONE and not r.flags & F_ZOMBIE
    if over:
        req_free(e, r)
    else:
        r.flags |= F_ORPHAN
        r.owner = owner
    pthread_mutex_unlock(&e.mutex)
    return not over


cdef class Base:
    """State of a communicator and the ways in and out; see `engine.Engine`."""

    def __cinit__(self, *args, **kwargs):
        global _fork_hook
        self.e = <engine_t *>calloc(1, sizeof(engine_t))
        if self.e == NULL:
            raise MemoryError()
        self.e.wake_fd = self.e.channel_fd = self.e.worker_fd = -1
        self.watchers = []
        pthread_mutex_init(&self.e.mutex, NULL)
        rc_cond_init(&self.e.cond)
        if not _fork_hook:
            os.register_at_fork(after_in_child=_after_fork)
            _fork_hook = True
        _engines.add(self)

    def __dealloc__(self):
        # close() has freed what is in it; a forked child leaves its copy alone
        if self.e != NULL and not self.foreign and not self.is_open:
            pthread_cond_destroy(&self.e.cond)
            pthread_mutex_destroy(&self.e.mutex)
            free_all(self.e)
            free(self.e)
        self.e = NULL

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it stands for "
                        "connections of this process")

    # ------------------------------------------------------------------ in and out
    cdef int ensure(self, str what) except -1:
        if self.is_open:
            return 0
        raise self.closed_error(what)

    cdef int enter(self, str what) except -1:
        """Takes the mutex. Whoever holds it never waits for the GIL, so this cannot deadlock."""
        if not self.is_open:
            raise self.closed_error(what)
        if pthread_mutex_trylock(&self.e.mutex) != 0:
            with nogil:
                rc_lock(&self.e.mutex, &self.e.want)
            if not self.is_open:
                pthread_mutex_unlock(&self.e.mutex)
                raise self.closed_error(what)
        if self.e.fatal:
            pthread_mutex_unlock(&self.e.mutex)
            raise self.fatal_error(what)
        return 0

    cdef int enter_plain(self, str what, object array) except -1:
        """`enter`, with what `plain_array` accepted: where the mutex must be waited for, without the GIL,
        no other thread can resize the array meanwhile."""
        cdef Buffer held
        if self.is_open and pthread_mutex_trylock(&self.e.mutex) == 0:
            if not self.e.fatal:
                return 0
            pthread_mutex_unlock(&self.e.mutex)
        held = acquire_plain(array)
        return self.enter(what)

    cdef void leave(self) noexcept:
        if leave_call(self.e):
            self.reap()

    cdef int poll_and_leave(self) noexcept:
        """One heavy poll (soft0 copies in it) without the GIL, then `leave`: the mutex is free
        before the GIL is waited for. How many completions there were."""
        cdef int n
        cdef bint owned
        with nogil:
            n = poll_once(self.e, True)
            if n == 0:
                heartbeats(self.e, rc_now())    # a program that only polls finds the dead, too
            owned = leave_call(self.e)
        if owned:
            self.reap()
        return n

    cdef void reap(self) noexcept:
        """Lets go of the buffers of requests that ended with nobody waiting for them."""
        cdef req_t *r
        cdef req_t *after
        cdef req_t *first
        cdef list owners = []
        with nogil:
            rc_lock(&self.e.mutex, &self.e.want)
            first = self.e.done_owned
            rc_set_ptr(&self.e.done_owned, NULL)
            pthread_mutex_unlock(&self.e.mutex)
        r = first                           # a list of our own now
        while r != NULL:
            owners.append(<object>r.owner)
            Py_DECREF(<object>r.owner)
            r = r.next
        with nogil:
            rc_lock(&self.e.mutex, &self.e.want)
            while first != NULL:
                after = first.next
                req_free(self.e, first)
                first = after
            pthread_mutex_unlock(&self.e.mutex)
        # the exports go now, without the mutex: their owners may run any code

    # ------------------------------------------------------------------- arguments
    cdef int peer_arg(self, object rank, str what) except -1:
        cdef long n
        cdef int overflow = 0
        if PyLong_CheckExact(rank):
            n = PyLong_AsLongAndOverflow(rank, &overflow)
            if overflow:
                n = -1
        else:
            number = as_integer(rank)
            if number is None:
                raise TypeError(f"{what} must be a rank, an integer from 0 to {self.size - 1}, not "
                                f"{brief(rank)} of type {type(rank).__name__}")
            return self.peer_arg(number, what)
        if n < 0 or n >= self.size:
            raise ValueError(f"{what} must be a rank from 0 to {self.size - 1}, not {rank}")
        return <int>n

    cdef uint64_t tag_arg(self, object tag) except? 0xFFFFFFFFFFFFFFFF:
        cdef int overflow = 0
        cdef long n
        if PyLong_CheckExact(tag):
            n = PyLong_AsLongAndOverflow(tag, &overflow)
            if n >= 0 and not overflow:
                return <uint64_t>n
            raise ValueError(f"tag must lie between 0 and 2**63 - 1, not {tag}")
        number = as_integer(tag)
        if number is None:
            raise TypeError(f"tag must be an integer, not {brief(tag)} of type {type(tag).__name__}")
        return self.tag_arg(number)

    cdef int64_t until(self, object timeout) except? -1:
        """The deadline in rc_now's nanoseconds."""
        if timeout is USE_CONFIG:
            timeout = self.default_timeout
        else:
            timeout = check_timeout(timeout)
        if timeout is None:
            return FOREVER
        return rc_now() + <int64_t>(timeout * 1e9)

    # --------------------------------------------------------------------- waiting
    cdef int wait_reqs(self, req_t **reqs, int n, bint any_, int64_t deadline) except -1:
        """W_DONE, W_TIMEOUT or W_CLOSED; raises what a signal handler raises."""
        cdef int result
        cdef int64_t start = rc_now()
        try:
            while True:
                with nogil:
                    result = wait_turn(self.e, reqs, n, any_, deadline)
                if rc_get_ptr(&self.e.done_owned) != NULL:
                    self.reap()
                if result != W_SIGNALS:
                    return result
                PyErr_CheckSignals()
        finally:
            self.seconds += (rc_now() - start) * 1e-9

    cdef void release(self, req_t *r, object owner) noexcept:
        """The caller is through with `r`. What is still under DMA keeps `owner` alive."""
        cdef PyObject *held = NULL
        cdef bint kept
        if owner is not None:
            Py_INCREF(owner)
            held = <PyObject *>owner
        if pthread_mutex_trylock(&self.e.mutex) == 0:
            kept = drop(self.e, r, held)
        else:
            with nogil:
                rc_lock(&self.e.mutex, &self.e.want)
                kept = drop(self.e, r, held)
        if held != NULL and not kept:
            Py_DECREF(owner)

    # ---------------------------------------------------------------------- errors
    cdef object closed_error(self, str what):
        if self.foreign:
            return ClosedError(
                f"{what}: this communicator belongs to the parent process; a forked child must "
                "call rocecomm.init() itself")
        if self.e != NULL and rc_get(&self.e.fatal):
            return self.fatal_error(what)
        if abandoned():
            return SystemExit()         # threads end with it in silence; locks and files are let go of
        return failure.engine_closed(what, self.device)

    cdef object fatal_error(self, str what):
        return failure.fatal(what, self.e.fatal, self.device, self.e.fatal_verb.decode())

    cdef object peer_error(self, int rank, str what):
        cdef peer_t p
        with nogil:
            rc_lock(&self.e.mutex, &self.e.want)
            p = self.e.peers[rank]
            if self.e.untold == rank + 1:
                self.e.untold = 0
            pthread_mutex_unlock(&self.e.mutex)
        return failure.lost_peer(
            what, rank, self.device, status=p.cause_status, opcode=p.cause_opcode,
            vendor=p.cause_vendor, err=p.cause_errno, nbytes=p.cause_bytes, left=bool(p.left),
            dead_after=self.config.dead_after)

    cdef list ranks_gone(self):
        return [i for i in range(self.size) if rc_get8(&self.e.peers[i].state) in (P_BROKEN, P_LEFT)]

    cdef object error_of(self, req_t *r, str what):
        """The exception for a request that has ended, None if it went well."""
        cdef int other
        cdef group_t *g
        if collective(r) and r.sig.op < len(OPERATIONS):
            what = OPERATIONS[r.sig.op]         # what the user called
        if not ended(r):
            g = find_group(self.e, r.group, False) if collective(r) else NULL
            if g != NULL and rc_get(<int *>&g.aborted):
                return self.group_error(r.group, what)
            return self.closed_error(what)
        if r.status == R_OK:
            return None
        other = r.source if r.kind == K_RECV else r.peer
        if r.status == R_TRUNCATED:
            return failure.truncated(what, other, r.other_size, r.size)
        if r.status == R_DTYPE:
            return failure.dtype(what, other, dtype_name(r.other_dtype), dtype_name(r.dtype),
                                 r.other_size)
        if r.status == R_SIGNATURE:
            return failure.aborted(what, 1, self.rank, self.device, describe_sig(&r.sig),
                                   describe_sig(&r.other_sig), other, "")
        if r.status == R_BROKEN:
            if r.peer < 0:
                return failure.from_any(self.peer_error(r.source, f"{what} from any rank"),
                                        len(self.ranks_gone()) < self.size - 1)
            return self.peer_error(r.peer, what)
        if r.status == R_CANCELLED:
            return failure.cancelled(what)
        if r.status == R_REGISTER:
            return failure.registration(
                what, r.err, r.size, self.device,
                registration_hint(self.context, r.err, r.size, IBV_ACCESS_LOCAL_WRITE
                                  if r.kind == K_RECV else IBV_ACCESS_REMOTE_READ))
        if r.status == R_NOMEM:
            return failure.no_memory(what)
        if r.status == R_ABORTED:
            return self.group_error(r.group, what)
        if r.status == R_ONE:
            return failure.one_sided(what, r.peer, self.device, r.one.op, r.size, r.one.nbytes,
                                     r.one.status, r.one.vendor, bool(r.one.doubtful))
        if r.status == R_CYCLE:
            if r.peer == self.rank:
                return failure.self_cycle(what, r.size)
            return failure.cycle(what, r.peer, self.device, r.size, r.other_size,
                                 r.other_sig.count, r.other_sig.root)
        return self.closed_error(what)

    def group_error(self, uint32_t group, what="the collective"):
        """The exception with which a group failed; None if it has not."""
        cdef group_t *g = find_group(self.e, group, False)
        if g == NULL or not rc_get(<int *>&g.aborted):
            return None
        if g.abort_class == 1:
            return failure.aborted(what, 1, g.why.rank_a, self.device, describe_sig(&g.why.sig_a),
                                   describe_sig(&g.why.sig_b), g.why.rank_b, "")
        return failure.aborted(what, g.abort_class, g.abort_rank, self.device, "", "", -1,
                               g.why.text.decode("utf-8", "replace"))

    cdef void look_at(self, int rank, bint ask, bint heavy, view_t *view) noexcept:
        """What is known of a peer right now; `ask`: its device is asked for its status first."""
        cdef peer_t *p = &self.e.peers[rank]
        with nogil:
            rc_lock(&self.e.mutex, &self.e.want)
            view.closing = self.e.closing       # then the queues and the mirror are close()'s
            if not view.closing:
                if ask:
                    beat(self.e, p, True)
                else:
                    poll_once(self.e, heavy)
                view.status = self.e.mirror[rank]
            view.ready = p.state == P_READY
            view.answers = p.status_n
            pthread_mutex_unlock(&self.e.mutex)

    cdef Inquiry inquire(self, str what, int rank, object timeout):
        cdef Inquiry q = Inquiry.__new__(Inquiry)
        q.engine, q.what, q.rank = self, what, rank
        q.timeout = self.default_timeout if timeout is USE_CONFIG else timeout
        return q

    cdef object timeout_error(self, str what, int rank, object timeout):
        """Asks the peer's device for its status, then says what is known."""
        cdef Inquiry q = self.inquire(what, rank, timeout)
        error = q.step(True)
        while error is None:
            time.sleep(0.001)
            error = q.step(True)
        return error


@cython.auto_pickle(False)
cdef class Inquiry:
    """What a TimeoutError says of the peer: its device is asked for the peer's status, twice, an interval
    apart that a waiting rank never lets pass. `step` never waits, so an event loop can take the steps."""

    def __init__(self):
        raise TypeError("made where a deadline has passed")

    cdef object say(self, str state, str detail):
        return failure.timed_out(self.what, self.rank, self.engine.device, self.timeout, state, detail)

    cdef object known(self):
        """What can be said without asking the peer's device; or None."""
        cdef Base g = self.engine
        if self.rank < 0 or g.size == 1 or self.rank == g.rank:
            return self.say("unknown", failure.nothing_came(g.ranks_gone()) if self.rank < 0 else
                            "no other thread of this rank sent or received it")
        if self.timeout == 0:
            return self.say("unknown", "it was only asked once, as timeout=0 says")
        if wireup.stopped(g.info[self.rank].process):
            return self.say("stopped", "the peer's process is stopped (SIGSTOP, a debugger); let it "
                            "continue, with kill -CONT")
        if rc_get8(&g.e.peers[self.rank].state) in (P_JOINING, P_NONE):
            return failure.not_connected(self.what, self.rank, g.device, self.timeout,
                                         wireup.alive(g.info[self.rank].process))
        return None

    cdef object step(self, bint heavy):
        """The exception, or None: it is not known yet, ask again in a millisecond or so."""
        cdef Base g = self.engine
        cdef view_t view
        cdef int64_t now = rc_now()
        if self.looks == 0:
            error = self.known()
            if error is not None:
                return error
        if not self.asked:
            if now < self.due:
                return None
            g.look_at(self.rank, True, heavy, &view)
            self.answers = view.answers
            self.asked = True
            self.looks += 1
            self.due = now + 250000000
        else:
            g.look_at(self.rank, False, heavy, &view)
        if view.closing:
            return g.closed_error(self.what)
        if not view.ready:
            return g.peer_error(self.rank, self.what)
        if view.answers == self.answers:
            if now < self.due:
                return None
            return self.say("unknown", "its device has not answered yet; it is dead or its network is "
                            "down, unless it answers within the next seconds")
        if not view.status.in_call:
            age = max(0.0, (rc_stamp() - view.status.stamp) * 1e-9) if view.status.stamp else 0.0
            return self.say("busy", f"the peer is alive but not in a rocecomm call (for {age:.1f} s): it "
                            "computes, or is stopped on another host; let it call, or raise the timeout")
        if self.looks == 1:
            self.beats = view.status.beats
            self.asked = False
            self.due = now + 200000000
            return None
        if view.status.beats == self.beats:
            return self.say("stopped", "the peer's process is stopped (SIGSTOP, a debugger, or starved of "
                            "CPU) inside a rocecomm call; let it continue, with kill -CONT if it is stopped")
        return self.say("waiting", "the peer is alive and itself waiting in a rocecomm call, for something "
                        "else; check that sends and receives pair up")
