# cython: language_level=3
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
cdef list wait_notify(Base g, int source, object count, object timeout, bint with_source)
