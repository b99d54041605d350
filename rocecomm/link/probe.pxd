# cython: language_level=3
from libc.stdint cimport uint64_t
from rocecomm.link.base cimport Base

cdef object probe(Base g, int peer, uint64_t tag, bint any_tag, object timeout)
cdef object iprobe(Base g, int peer, uint64_t tag, bint any_tag)
