# cython: language_level=3
from rocecomm.link.setup cimport Links
from rocecomm.link.wire cimport sig_t

cdef class Signature:
    cdef sig_t s

cdef class Engine(Links):
    pass
