# cython: language_level=3
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.link.core cimport engine_t, peer_t

cdef void wants_more(engine_t *e, peer_t *p) noexcept nogil
cdef void give_back(engine_t *e, peer_t *p) noexcept nogil
cdef void reclaim(engine_t *e, peer_t *p) noexcept nogil
cdef uint64_t on_recall(peer_t *p, uint64_t wanted) noexcept nogil
cdef void on_return(engine_t *e, peer_t *p, uint64_t n) noexcept nogil

cdef inline void count_payload(engine_t *e, peer_t *p) noexcept nogil:
    """A payload has come. A sender that has used most of what it was told of gets more."""
    p.eager_got += 1
    if (e.eager_grant + p.eager_told - p.eager_got) * 4 <= p.grant and p.grant < e.max_grant:
        wants_more(e, p)
