# cython: language_level=3
from libc.stdint cimport int32_t
from rocecomm.link.core cimport engine_t, peer_t, req_t

cdef int32_t to_tell(engine_t *e) noexcept nogil
cdef void end_any(engine_t *e, peer_t *p) noexcept nogil
