# cython: language_level=3
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from rocecomm.link.base cimport Base, mem_t
from rocecomm.link.core cimport req_t
from rocecomm.link.wire cimport sig_t

cdef class Request:
    cdef Base engine
    cdef req_t *r
    cdef object buffer          # holds the memory until the transfer has ended
    cdef object entry           # of the registration cache, or None
    cdef object failure
    cdef str what
    cdef bint ended
    cdef int waiters            # threads that look at `r`: it is not let go meanwhile
    cdef int awaiters           # tasks that sleep for it
    cdef uint64_t count
    cdef int other
    cdef uint64_t number
    cdef object __weakref__

    cdef bint collect(self) noexcept
    cdef bint is_over(self) noexcept
    cdef void let_go(self) noexcept
    cdef void unpin(self) noexcept
    cdef void look(self) noexcept
    cdef int other_rank(self) noexcept
    cdef object outcome(self)   # of an ended request: what wait() returns

cdef Request start(Base engine, bint receiving, object buf, int peer, uint64_t tag, bint any_tag,
                   uint32_t group, const sig_t *sig, Py_ssize_t offset, Py_ssize_t nbytes)
