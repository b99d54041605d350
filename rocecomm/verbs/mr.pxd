# cython: language_level=3
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_mr, ibv_sge
from rocecomm.verbs.pd cimport PD

cdef class MR(Handle):
    cdef ibv_mr *mr
    cdef readonly PD pd
    cdef readonly Buffer buffer     # the export, held until ibv_dereg_mr has succeeded
    cdef readonly int access_bits
    cdef char *mr_addr              # of the first byte, also once the buffer was given back


cdef class SGE:
    cdef ibv_sge sge
