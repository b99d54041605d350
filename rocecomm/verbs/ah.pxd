# cython: language_level=3
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_ah, ibv_ah_attr
from rocecomm.verbs.pd cimport PD

cdef class AH(Handle):
    cdef ibv_ah *ah
    cdef readonly PD pd


cdef int fill_ah_attr(ibv_ah_attr *out, object attr) except -1     # from an AHAttr
cdef object read_ah_attr(const ibv_ah_attr *attr)                   # to an AHAttr
