# cython: language_level=3
from libc.stdint cimport int32_t, uint32_t
from rocecomm.link.core cimport engine_t, peer_t, req_t
from rocecomm.link.wire cimport rc_header
from rocecomm.verbs.libibverbs cimport ibv_wc

# What a waiter gets: values in order of arrival, and who sent them.
ctypedef struct told_t:
    uint32_t value
    int32_t source

cdef bint on_lane_message(engine_t *e, ibv_wc *wc, uint32_t slot) noexcept nogil
cdef void on_noted(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef void start_wait(engine_t *e, req_t *r) noexcept nogil
