# cython: language_level=3
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_mw
from rocecomm.verbs.pd cimport PD

cdef class MW(Handle):
    cdef ibv_mw *mw
    cdef readonly PD pd
