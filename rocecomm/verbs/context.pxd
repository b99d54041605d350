# cython: language_level=3
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_context
from rocecomm.verbs.provider cimport Provider

cdef class Context(Handle):
    cdef ibv_context *ctx
    cdef readonly Provider provider
    cdef readonly str name          # device name
    cdef Py_ssize_t memories        # live Memory objects: the device stays open for them
    cdef dict by_pointer            # C pointer -> weakref of CQ, QP, SRQ (for events)
    cdef int release_memory(self, void *addr, size_t length) except -1


cdef class Memory(Handle):
    cdef Context context
    cdef void *addr
    cdef readonly size_t nbytes
    cdef Py_ssize_t exports
