# cython: language_level=3
from libc.stdint cimport uint32_t
from rocecomm.link.base cimport Base

cdef int count_calls(int size, object device) except -1
cdef tuple open_caller(Base g, int port, uint32_t depth, uint32_t lane, uint32_t max_inline, object device)
cdef int plan_peer(Base g, object mine, object other, object agreement, object config, int port) except -1
