# cython: language_level=3
from libc.stdint cimport int64_t, uint32_t
from rocecomm.link.core cimport engine_t, peer_t
from rocecomm.link.wire cimport rc_header
from rocecomm.verbs.libibverbs cimport ibv_wc

cdef void join_turn(engine_t *e, peer_t *p) noexcept nogil
cdef void on_call(engine_t *e, ibv_wc *wc) noexcept nogil
cdef void on_call_end(engine_t *e, ibv_wc *wc) noexcept nogil
cdef bint heard(engine_t *e, const rc_header *h, ibv_wc *wc) noexcept nogil
cdef void watch(engine_t *e, int64_t now) noexcept nogil
cdef bint say_left(engine_t *e) noexcept nogil
cdef void end_caller(engine_t *e) noexcept nogil
cdef void post_share(engine_t *e, uint32_t n) noexcept nogil
