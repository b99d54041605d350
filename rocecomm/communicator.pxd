# cython: language_level=3
from rocecomm.link.core cimport req_t
from rocecomm.link.engine cimport Engine
from rocecomm.verbs.buffer cimport Buffer

cdef class Communicator:
    cdef readonly Engine engine
    cdef object coll
    cdef readonly object group
    cdef object __weakref__

    cdef Py_ssize_t receive(self, object buf, int peer, unsigned long long tag, bint any_tag,
                            object timeout, str what) except -1
    cdef object send_slowly(self, object buf, Buffer held, int peer, unsigned long long tag,
                            object timeout)
    cdef bint take_back(self, req_t *r)
    cdef bint give_up(self, req_t *r)
