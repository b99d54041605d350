# cython: language_level=3
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.link.core cimport engine_t, peer_t, req_t

cdef void start_one(engine_t *e, peer_t *p, req_t *r) noexcept nogil
cdef void drain_lane(engine_t *e, peer_t *p, bint heavy) noexcept nogil
cdef bint unpost_one(engine_t *e, req_t *r) noexcept nogil
cdef void lose_lane(engine_t *e, peer_t *p, int status, int opcode, uint32_t vendor, int err,
                    uint64_t nbytes) noexcept nogil
