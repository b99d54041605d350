# cython: language_level=3
from libc.stdint cimport uint64_t
from rocecomm.link.base cimport Base
from rocecomm.link.request cimport Request

cdef class AtomicRequest(Request):
    pass

cdef Request start_transfer(Base g, bint reading, object local, object remote, object offset,
                            object notify, str what)
cdef Request start_pieces(Base g, bint reading, object local, object remote, object local_offsets,
                          object remote_offsets, object lengths, str what)
cdef Request start_atomic(Base g, bint swap, object remote, object offset, object value,
                          object compare, str what)
cdef object finish(Base g, Request q, object timeout)
cdef class NoteRequest(Request):
    cdef uint64_t n
    cdef bint with_source
    cdef object room            # told_t for each

cdef Request start_notify(Base g, int source, object count, bint with_source, str what)
cdef list wait_notify(Base g, int source, object count, object timeout, bint with_source)
