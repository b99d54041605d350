# cython: language_level=3
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_ah, ibv_ah_attr
from rocecomm.verbs.pd cimport PD

cdef class AH(Handle):
    cdef ibv_ah *ah
    cdef readonly PD pd


cdef int fill_ah_attr(ibv_ah_attr *attr, int port_num, object gid, int sgid_index, int dlid,
                      int sl, int traffic_class, int hop_limit, unsigned int flow_label) except -1
