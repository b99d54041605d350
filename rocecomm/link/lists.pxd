# cython: language_level=3
from libc.stdint cimport uint64_t, uint16_t
from rocecomm.link.base cimport Base, mem_t
from rocecomm.link.core cimport req_t
from rocecomm.link.pieces cimport pieces_t

cdef class PieceList:
    cdef pieces_t *s            # until a request takes it
    cdef list buffers           # what holds each piece
    cdef list entries           # of the registration cache
    cdef bint own               # the request registers all of it

    cdef uint64_t nbytes
    cdef uint16_t dtype

    cdef void measure(self, mem_t *m) noexcept
    cdef void give(self, req_t *r) noexcept

cdef object hold_any(Base g, object obj, bint writable, mem_t *m)
