# cython: language_level=3
"""The progress thread of ``init(progress="thread")``: moves traffic while no call does.

A C thread that never needs the GIL and takes no signals. It leads only while no Python thread is
in a call: then it polls, arms the completion queue and sleeps on the channel. While calls come it
stands by, looking once a millisecond (without the mutex) whether they still do, so that they
are as fast as without it; while a Python thread sleeps on the channel it is parked.
"""
from rocecomm.link.core cimport (
    engine_t, int64_t, pthread_cond_broadcast, poke_worker, pthread_mutex_unlock, rc_counted, rc_get,
    rc_let_others, rc_lock, rc_now, rc_set, tell_loops, uint64_t)
from rocecomm.link.progress cimport arm, heartbeats, lingers, poll_once, take_event, wake

cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <pthread.h>
    #include <signal.h>
    #include <sys/eventfd.h>
    #include <unistd.h>

    /* The thread starts with every signal blocked: they are for Python's threads. */
    static int rc_thread(pthread_t *t, void *(*run)(void *), void *arg) {
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        int rc = pthread_create(t, NULL, run, arg);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        return rc;
    }
    /* Waits until a descriptor is readable or `ms` have passed; which one was. */
    static int rc_readable(int a, int b, int ms) {
        struct pollfd fds[2] = { { a, POLLIN, 0 }, { b, POLLIN, 0 } };
        if (poll(fds, 2, ms) <= 0)
            return 0;
        uint64_t drop;
        if (fds[0].revents && read(a, &drop, sizeof(drop)) < 0) { }
        return fds[1].revents != 0;
    }
    """
    int rc_thread(void *, void *(*)(void *) noexcept nogil, void *) noexcept nogil
    int rc_readable(int, int, int) noexcept nogil
    int pthread_join(unsigned long, void **) noexcept nogil
    int eventfd(unsigned int, int) noexcept nogil
    int c_close "close"(int) noexcept nogil
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef enum:
    STAND_BY_MS = 1
    PARKED_MS = 1000


cdef bint stand_by(engine_t *e, uint64_t *seen) noexcept nogil:
    """Waits while calls are made, without the mutex. False: nobody calls."""
    cdef uint64_t calls = rc_counted(&e.status.beats)
    cdef bint parked
    if calls == seen[0] and not rc_get(<int *>&e.leader):
        return False
    seen[0] = calls
    if rc_get(<int *>&e.asleep):
        rc_lock(&e.mutex, &e.want)
        parked = e.worker_parked = e.leader and e.asleep and not e.worker_stop
        pthread_mutex_unlock(&e.mutex)
        if parked:                      # who wakes us from now on has written to the eventfd
            rc_readable(e.worker_fd, -1, PARKED_MS)
            return True
    rc_readable(e.worker_fd, -1, STAND_BY_MS)
    return True


cdef void sleep_on_channel(engine_t *e, int64_t beat_ms) noexcept nogil:
    """Called and left with the mutex held."""
    cdef int ms = <int>beat_ms
    cdef bint taken
    if arm(e) != 0:
        ms = 1
    if poll_once(e, True) > 0 or e.more:        # came in before the arming
        return
    if lingers(e):
        ms = 1
    e.worker_asleep = True
    pthread_mutex_unlock(&e.mutex)
    taken = rc_readable(e.worker_fd, e.channel_fd, ms)
    if taken:
        take_event(e)
    rc_lock(&e.mutex, &e.want)
    e.worker_asleep = False
    if taken and e.asleep:      # a call came meanwhile, and sleeps on the event that is gone now
        wake(e)


cdef void *run(void *argument) noexcept nogil:
    cdef engine_t *e = <engine_t *>argument
    cdef uint64_t seen = 0
    cdef uint64_t ended
    cdef int64_t now
    cdef int64_t beat_ms = min(<int64_t>1000, e.beat_every // 1000000)
    cdef int64_t beat_at = 0
    while not rc_get(<int *>&e.worker_stop):
        if stand_by(e, &seen):
            continue
        rc_lock(&e.mutex, &e.want)
        ended = e.ended
        # a call that comes takes the mutex between two turns, and leads
        while not (e.leader or e.worker_stop or e.closing or e.fatal
                   or rc_counted(&e.status.beats) != seen):
            now = rc_now()
            if now - beat_at >= beat_ms * 1000000:
                beat_at = now
                heartbeats(e, now)
            if poll_once(e, True) == 0 and not e.more:
                sleep_on_channel(e, beat_ms)
            else:
                rc_let_others(&e.mutex, &e.want, False)
            if e.ended != ended:
                ended = e.ended
                if e.followers:
                    pthread_cond_broadcast(&e.cond)
        if e.closing or e.fatal:
            if e.loops != NULL:
                tell_loops(e)
            pthread_mutex_unlock(&e.mutex)
            break
        pthread_mutex_unlock(&e.mutex)
    return NULL


cdef int start_worker(engine_t *e) noexcept nogil:
    """0, or an errno."""
    cdef int rc
    e.worker_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    if e.worker_fd < 0:
        return 24                       # EMFILE
    rc = rc_thread(&e.worker, run, e)
    if rc != 0:
        c_close(e.worker_fd)
        e.worker_fd = -1
        return rc
    e.worker_on = True
    return 0


cdef void stop_worker(engine_t *e) noexcept nogil:
    """Without the mutex. Does nothing if there is none."""
    if not e.worker_on:
        return
    rc_lock(&e.mutex, &e.want)
    rc_set(<int *>&e.worker_stop, True)
    poke_worker(e)
    pthread_mutex_unlock(&e.mutex)
    pthread_join(e.worker, NULL)
    e.worker_on = False
    c_close(e.worker_fd)
    e.worker_fd = -1
