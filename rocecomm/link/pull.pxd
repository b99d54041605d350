# cython: language_level=3
from rocecomm.link.core cimport engine_t, peer_t, req_t, unx_t
from rocecomm.link.wire cimport rc_header

cdef int post_gathered(engine_t *e, peer_t *p, rc_header *h, req_t *r) noexcept nogil
cdef int post_table(engine_t *e, peer_t *p, rc_header *h, req_t *r) noexcept nogil
cdef bint keep_table(engine_t *e, unx_t *u, const rc_header *h) noexcept nogil
cdef bint learn(engine_t *e, req_t *r, const rc_header *h, const char *table) noexcept nogil
cdef void unlearn(engine_t *e, req_t *r) noexcept nogil
cdef bint pull_pieces(engine_t *e, peer_t *p, req_t *r, bint heavy) noexcept nogil
cdef void copy_self(req_t *to, req_t *r) noexcept nogil
