# cython: language_level=3
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_srq
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.work cimport RecvRoom

cdef class SRQ(Handle):
    cdef ibv_srq *srq
    cdef readonly PD pd
    cdef readonly int max_wr
    cdef readonly int max_sge
    cdef RecvRoom room              # work request array of post_recv_array
    cdef bint recv_busy             # a thread uses it
