# cython: language_level=3
from libc.stdint cimport int64_t
from rocecomm.link.base cimport Base, Inquiry
from rocecomm.link.core cimport loop_t

cdef class Watcher:
    cdef Base engine
    cdef readonly object loop
    cdef loop_t l
    cdef int channel            # a duplicate of the completion channel's descriptor
    cdef list sleepers          # Awaiters
    cdef object timer
    cdef object asking          # a third: what a TimeoutError says of the peer is being found out
    cdef object soon            # a second, shorter timer: a queued send that is to be announced
    cdef double due             # when `timer` fires, in the loop's time
    cdef bint used              # something was awaited since the last tick
    cdef bint watching          # the loop has our readers
    cdef object __weakref__

    cdef void count(self, int n) noexcept
    cdef object add(self, Awaiter a)
    cdef int look(self, bint event) except -1
    cdef int resolve(self) except -1
    cdef int give_up(self) except -1
    cdef bint give_up_one(self, Awaiter a) except -1
    cdef int stop(self) except -1
    cdef int start_watching(self) except -1
    cdef int set_timer(self, double seconds) except -1

cdef class Awaiter:
    cdef Base engine
    cdef Watcher watcher
    cdef object future
    cdef object error
    cdef Inquiry inquiry        # its time is over
    cdef int64_t start
    cdef int64_t deadline
    cdef bint gave_way
    cdef bint draining

    cdef bint over(self) noexcept
    cdef bint mark(self) noexcept
    cdef void unmark(self) noexcept
    cdef object result(self)
    cdef Inquiry late(self)
    cdef bint withdraw(self)
    cdef bint spin(self) except -1
    cdef object suspend(self)
    cdef int leave(self) except -1
