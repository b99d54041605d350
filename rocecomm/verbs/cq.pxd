# cython: language_level=3
from rocecomm.verbs.context cimport Context
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_comp_channel, ibv_cq, ibv_wc

cdef class CompChannel(Handle):
    cdef ibv_comp_channel *channel
    cdef readonly Context context


cdef class CQ(Handle):
    cdef ibv_cq *cq
    cdef readonly Context context
    cdef readonly CompChannel channel       # or None
    cdef ibv_wc *scratch                    # for poll(n); taken by one thread at a time
    cdef int scratch_len
    cdef bint scratch_busy
    cdef ibv_wc *take_scratch(self, int n) except NULL


cdef class WC:
    cdef ibv_wc wc
