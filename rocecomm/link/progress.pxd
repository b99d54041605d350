# cython: language_level=3
from libc.stdint cimport int64_t
from rocecomm.link.core cimport engine_t, pthread_mutex_unlock, rc_count, rc_show, rc_stamp, req_t

cdef enum:
    # what wait_turn answers
    W_DONE = 0
    W_TIMEOUT = 1
    W_SIGNALS = 2           # let Python look at signals, then come back
    W_CLOSED = 3

cdef int poll_once(engine_t *e, bint heavy) noexcept nogil
cdef int wait_turn(engine_t *e, req_t **reqs, int n, bint any_, int64_t deadline) noexcept nogil
cdef void wake(engine_t *e) noexcept nogil
cdef int arm(engine_t *e) noexcept nogil
cdef void take_event(engine_t *e) noexcept nogil
cdef void heartbeats(engine_t *e, int64_t now) noexcept nogil
cdef bint lingers(engine_t *e) noexcept nogil
cdef bint all_done(engine_t *e, req_t **reqs, int n, bint any_) noexcept nogil

cdef inline bint leave_call(engine_t *e) noexcept nogil:
    """The end of a call that holds the mutex: counts it, wakes who has to look, lets go. Whether
    `done_owned` has something to reap."""
    cdef inline bint owned = e.done_owned != NULL
    rc_count(&e.status.beats)
    rc_show(&e.status.stamp, rc_stamp())
    if e.followers or e.asleep or e.worker_asleep:
        wake(e)
    pthread_mutex_unlock(&e.mutex)
    return owned
