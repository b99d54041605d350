# cython: language_level=3
"""Waits for any source (receives, probes, notifications), when a peer is gone.

A peer that closed in order is no reason to stop as long as another one can send. A death is told
once: to all that wait for any source when it is found, or else to the next that does. So nobody waits
in vain for what the dead rank was to send, and a server goes on with its other clients.
"""
from rocecomm.link.core cimport (
    P_BROKEN, P_LEFT, R_BROKEN, engine_t, int32_t, list_t, peer_t, req_end, req_t, unlink)


cdef inline bint gone(const peer_t *p) noexcept nogil:
    return p.state == P_BROKEN or p.state == P_LEFT


cdef int32_t nobody_left(engine_t *e) noexcept nogil:
    """-1 if somebody could still send (or there is no other rank); else a rank that is gone, a dead
    one if there is one."""
    cdef int32_t rank = -1
    cdef int32_t i
    for i in range(e.size):
        if i == e.rank:
            continue
        if not gone(&e.peers[i]):
            return -1
        if rank < 0 or not e.peers[i].left:
            rank = i
    return rank


cdef int32_t to_tell(engine_t *e) noexcept nogil:
    """The lost rank of which a new wait for any source has to be told; -1: it may wait."""
    cdef int32_t rank = e.untold - 1
    if rank < 0:
        return nobody_left(e)
    e.untold = 0
    return rank


cdef int end_some(engine_t *e, list_t *l, int32_t rank, bint users) noexcept nogil:
    """Ends what waits there for any source; `users`: only what is not of a group. How many."""
    cdef req_t *r = l.head
    cdef req_t *after
    cdef int n = 0
    while r != NULL:
        after = r.next
        if r.peer < 0 and not (users and r.group):
            unlink(l, r)
            r.source = rank
            req_end(e, r, R_BROKEN)
            n += 1
        r = after
    return n


cdef void end_any(engine_t *e, peer_t *p) noexcept nogil:
    """`p` is gone."""
    cdef int32_t alone = nobody_left(e)
    cdef bint died = not p.left and not e.closing
    cdef int n
    if not died and alone < 0:
        return
    n = end_some(e, &e.any_posted, p.rank, alone < 0)
    n += end_some(e, &e.probes, p.rank, alone < 0)
    n += end_some(e, &e.note_waits, p.rank, alone < 0)
    if died and n == 0:
        e.untold = p.rank + 1
