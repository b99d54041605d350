# cython: language_level=3
from libc.stdint cimport uint64_t
from rocecomm.link.core cimport engine_t, peer_t, req_t
from rocecomm.link.wire cimport rc_header

cdef void start_send(engine_t *e, peer_t *p, req_t *r) noexcept nogil
cdef void drain_sends(engine_t *e, peer_t *p) noexcept nogil
cdef void drain_pulls(engine_t *e, peer_t *p, bint heavy) noexcept nogil
cdef void deliver(engine_t *e, peer_t *p, req_t *r, const rc_header *h,
                  const char *payload) noexcept nogil
cdef void accept(engine_t *e, peer_t *p, req_t *r, const rc_header *h,
                 const char *table) noexcept nogil
cdef void withdraw(engine_t *e, req_t *r) noexcept nogil
cdef void on_done(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef void on_withdraw(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef void on_withdrawn(engine_t *e, const rc_header *h) noexcept nogil
cdef bint disagrees(engine_t *e, const rc_header *h) noexcept nogil
cdef void fill_message(req_t *r, rc_header *h) noexcept nogil
cdef void start_receive(engine_t *e, req_t *r, bint again) noexcept nogil
