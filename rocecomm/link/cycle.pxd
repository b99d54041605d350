# cython: language_level=3
from rocecomm.link.core cimport engine_t, peer_t, uint32_t, uint64_t
from rocecomm.link.wire cimport rc_header

cdef void ask_cycle(engine_t *e) noexcept nogil
cdef void on_cycle(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef bint forget(engine_t *e, peer_t *p, uint64_t req, uint32_t gen) noexcept nogil
