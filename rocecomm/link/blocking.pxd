# cython: language_level=3
from libc.stdint cimport uint64_t
from rocecomm.link.base cimport Base

cdef int send(Base g, object buf, int peer, uint64_t tag, object timeout) except -1
cdef Py_ssize_t receive(Base g, object buf, int peer, uint64_t tag, bint any_tag, object timeout,
                        str what) except -1
