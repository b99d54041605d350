# cython: language_level=3
from rocecomm.link.core cimport engine_t, peer_t, req_t, unx_t, unx_list_t
from rocecomm.link.wire cimport rc_header

cdef req_t *match_posted(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil
cdef void post_receive(engine_t *e, req_t *r) noexcept nogil
cdef void repost_receive(engine_t *e, req_t *r) noexcept nogil
cdef bint unpost_receive(engine_t *e, req_t *r) noexcept nogil
cdef unx_t *match_unexpected(engine_t *e, req_t *r, peer_t **owner) noexcept nogil
cdef void store_unexpected(engine_t *e, peer_t *p, unx_t *u) noexcept nogil
cdef void drop_unexpected(engine_t *e, peer_t *p, unx_t *u) noexcept nogil
cdef bint probe_now(engine_t *e, req_t *r) noexcept nogil
cdef void end_probes(engine_t *e, int peer, int status) noexcept nogil
