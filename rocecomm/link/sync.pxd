# cython: language_level=3
"""Clocks, the mutex and condition of an engine, and what is read without the mutex."""
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *) noexcept
    int pthread_mutex_destroy(pthread_mutex_t *) noexcept
    int pthread_mutex_lock(pthread_mutex_t *) noexcept
    int pthread_mutex_trylock(pthread_mutex_t *) noexcept
    int pthread_mutex_unlock(pthread_mutex_t *) noexcept

cdef extern from *:
    """
    #include <time.h>
    #include <errno.h>
    #include <pthread.h>
    #include <sched.h>
    #ifndef ROCECOMM_CLOCK
    #define ROCECOMM_CLOCK
    static inline int64_t rc_now(void) {
        struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline int64_t rc_cpu_now(void) {   /* CPU time of this thread; a system call */
        struct timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline uint64_t rc_stamp(void) {    /* wall clock, about 4 ms fine, cheap */
        struct timespec t; clock_gettime(CLOCK_REALTIME_COARSE, &t);
        return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
    }
    /* A mutex that is not fair alone: the leader takes it again the moment it has let go. Who
       wants it says so in `want`, and the leader waits until they had it. */
    static inline void rc_lock(pthread_mutex_t *m, int *want) {
        __atomic_add_fetch(want, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_lock(m);
        __atomic_sub_fetch(want, 1, __ATOMIC_SEQ_CST);
    }
    /* Whether another thread or process ran on this CPU meanwhile. */
    static inline int rc_let_others(pthread_mutex_t *m, int *want, int yield_) {
        int64_t start = 0;
        pthread_mutex_unlock(m);
        if (yield_) {
            start = rc_now();
            sched_yield();
            start = rc_now() - start;
        }
        for (int i = 0; i < 200 && __atomic_load_n(want, __ATOMIC_SEQ_CST) > 0; i++) sched_yield();
        pthread_mutex_lock(m);
        return start > 20000;
    }
    /* An end is seen by threads that do not hold the mutex: what was written before it, too. */
    static inline void rc_set8(uint8_t *p, uint8_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline uint8_t rc_get8(uint8_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void rc_set64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline uint64_t rc_get64(uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void rc_set(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline int rc_get(int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    /* What status_t shows: one thread at a time changes it (it holds the mutex); other threads, and peers
       by RDMA, read it at any time. */
    static inline void rc_show(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline void rc_count(uint64_t *p) { rc_show(p, __atomic_load_n(p, __ATOMIC_RELAXED) + 1); }
    static inline uint64_t rc_counted(uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void rc_set_ptr(void *p, void *v) { __atomic_store_n((void **)p, v, __ATOMIC_RELEASE); }
    static inline void *rc_get_ptr(void *p) { return __atomic_load_n((void **)p, __ATOMIC_ACQUIRE); }
    static inline int rc_cond_init(pthread_cond_t *c) {
        pthread_condattr_t a; pthread_condattr_init(&a);
        pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
        int r = pthread_cond_init(c, &a); pthread_condattr_destroy(&a); return r;
    }
    static inline int rc_cond_wait(pthread_cond_t *c, pthread_mutex_t *m, int64_t until) {
        struct timespec t = { until / 1000000000, until % 1000000000 };
        return pthread_cond_timedwait(c, m, &t);
    }
    #endif
    """
    int64_t rc_now() noexcept nogil
    int64_t rc_cpu_now() noexcept nogil
    uint64_t rc_stamp() noexcept nogil
    void rc_lock(pthread_mutex_t *, int *want) noexcept nogil
    bint rc_let_others(pthread_mutex_t *, int *want, bint yield_) noexcept nogil
    void rc_set8(uint8_t *, uint8_t) noexcept nogil
    uint8_t rc_get8(uint8_t *) noexcept nogil
    void rc_set64(uint64_t *, uint64_t) noexcept nogil
    uint64_t rc_get64(uint64_t *) noexcept nogil
    void rc_set(int *, int) noexcept nogil
    int rc_get(int *) noexcept nogil
    void rc_show(uint64_t *, uint64_t) noexcept nogil
    void rc_count(uint64_t *) noexcept nogil
    uint64_t rc_counted(uint64_t *) noexcept nogil
    void rc_set_ptr(void *, void *) noexcept nogil
    void *rc_get_ptr(void *) noexcept nogil
    int rc_cond_init(pthread_cond_t *) noexcept nogil
    int rc_cond_wait(pthread_cond_t *, pthread_mutex_t *, int64_t until) noexcept nogil
    int pthread_cond_broadcast(pthread_cond_t *) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t *) noexcept nogil
