# cython: language_level=3
from libc.stdint cimport uint32_t
from rocecomm.link.core cimport engine_t, peer_t
from rocecomm.link.wire cimport rc_header
from rocecomm.verbs.libibverbs cimport ibv_wc

cdef int connect_lane(engine_t *e, peer_t *p, uint32_t psn) noexcept nogil
cdef void on_lane_sent(engine_t *e, ibv_wc *wc) noexcept nogil
cdef void on_lane_reset(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef void on_lane_ready(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
