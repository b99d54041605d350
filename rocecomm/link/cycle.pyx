# cython: language_level=3
"""Two ranks that block in large sends to each other.

A blocking send that waits while a blocking one of the peer is stored here asks the peer:
"yours is stored here; is mine stored there, and do you still wait?" The question comes behind
the announcement, so the peer knows. If so both sends fail, and each side forgets the other's
announcement. A peer that had posted a receive before says nothing: it is reading already.
"""
from rocecomm.link.core cimport (
    F_BLOCKING, F_WITHDRAWING, R_CYCLE, S_ANNOUNCED, engine_t, peer_t, req_end, req_find, req_t,
    uint32_t, uint64_t, unlink, unx_free, unx_t)
from rocecomm.link.match cimport drop_unexpected
from rocecomm.link.peer cimport queue_cycle
from rocecomm.link.wire cimport ANNOUNCE, CYCLE, CYCLE_YES, FLAG_BLOCKING, rc_header


cdef void ask_cycle(engine_t *e, peer_t *p, req_t *mine) noexcept nogil:
    """`mine`, a blocking send, has just been announced."""
    cdef unx_t *u = p.unexpected.head
    while u != NULL:
        if u.h.kind == ANNOUNCE and u.h.flags & FLAG_BLOCKING:
            queue_cycle(e, p, CYCLE, u.h.req, u.h.gen, mine)
            return
        u = u.next


cdef void ask_cycle_back(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """A blocking announcement has just been stored."""
    cdef req_t *r = p.announced.head
    while r != NULL:
        if r.flags & F_BLOCKING and not r.flags & F_WITHDRAWING:
            queue_cycle(e, p, CYCLE, h.req, h.gen, r)
            return
        r = r.next


cdef bint forget(engine_t *e, peer_t *p, uint64_t req, uint32_t gen) noexcept nogil:
    cdef unx_t *u = p.unexpected.head
    while u != NULL:
        if u.h.kind == ANNOUNCE and u.h.req == req and u.h.gen == gen:
            drop_unexpected(e, p, u)
            unx_free(e, u)
            return True
        u = u.next
    return False


cdef void on_cycle(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """CYCLE or CYCLE_YES; `req`/`gen` is our send, `tag`/`seq` the peer's."""
    cdef req_t *r = req_find(e, h.req, h.gen)
    if r != NULL and (r.state != S_ANNOUNCED or not r.flags & F_BLOCKING or r.peer != p.rank):
        r = NULL
    if h.kind == CYCLE and r == NULL:
        return                          # ours has ended meanwhile
    if not forget(e, p, h.tag, <uint32_t>h.seq) and h.kind == CYCLE:
        return                          # matched already: no cycle
    if r == NULL:
        return
    if h.kind == CYCLE:
        queue_cycle(e, p, CYCLE_YES, h.tag, <uint32_t>h.seq, r)
    unlink(&p.announced, r)
    r.other_size = h.size
    req_end(e, r, R_CYCLE)
