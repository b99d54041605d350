# cython: language_level=3
from rocecomm.verbs.context cimport Context
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_pd

cdef class PD(Handle):
    cdef ibv_pd *pd
    cdef readonly Context context
