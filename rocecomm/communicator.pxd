# cython: language_level=3
from rocecomm.link.engine cimport Engine

cdef class Communicator:
    cdef readonly Engine engine
    cdef object coll
    cdef readonly object group
    cdef object __weakref__
