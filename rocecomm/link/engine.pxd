# cython: language_level=3
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.link.base cimport Base
from rocecomm.link.request cimport Request
from rocecomm.link.wire cimport sig_t

cdef class Signature:
    cdef sig_t s

cdef class Engine(Base):
    cdef int local_ranks
    cdef void tear_down(self) noexcept
