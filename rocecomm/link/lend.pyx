# cython: language_level=3
"""Payload slots beyond each peer's reserve are lent to those who send.

A sender that has used up three quarters of the credits it knows of is lent as many again
while the pool lasts. When it is empty, a peer with more than its fair share does not get its
slots back as it uses them, and one that does not send is asked to return what it does not
use (RECALL, RETURN), then another if it does not answer at once. What was lent to a rank that has left
or died comes back by itself. Both sides count a returned credit as a message that never was, so
the two counters in every header stay enough.

Invariant: the peers' grants and the pool add up to the payload slots that exist; and
grant = first grant + eager_given - eager_got + messages in slots.
"""
from rocecomm.link.core cimport (
    P_READY, engine_t, int32_t, int64_t, mark_dirty, peer_t, rc_now, uint32_t, uint64_t)

# A peer that had nothing to return is not asked again for a while; one that computes, and does not
# answer, keeps nobody else from being asked for longer.
cdef int64_t RECALL_EVERY = 10000000


cdef void lend(engine_t *e, peer_t *p) noexcept nogil:
    cdef uint32_t n = p.grant
    if n > e.max_grant - p.grant:
        n = e.max_grant - p.grant
    if n > e.pool:
        n = e.pool
    e.pool -= n
    p.grant += n
    p.eager_given += n
    p.credit_due = True             # sent if it is worth a message, else with the next one
    mark_dirty(e, p)
    if p.hungry:
        p.hungry = False
        e.n_hungry -= 1


cdef void wants_more(engine_t *e, peer_t *p) noexcept nogil:
    if p.state != P_READY or p.grant >= e.max_grant:
        return
    if e.pool > 0:
        lend(e, p)
        return
    if not p.hungry:
        p.hungry = True
        e.n_hungry += 1
    recall(e, p)


cdef void recall(engine_t *e, peer_t *hungry) noexcept nogil:
    """Asks whoever has been lent most."""
    cdef peer_t *p
    cdef peer_t *best = NULL
    cdef int32_t i
    cdef int64_t now = rc_now()
    for i in range(e.size):
        p = &e.peers[i]
        if p.state != P_READY:
            continue                    # who is gone answers no more
        if p.recall_out:
            if now - p.recalled_at < RECALL_EVERY:
                return                  # one at a time
            continue
        if (p != hungry and not p.hungry and p.grant > e.reserve
                and p.grant > hungry.grant and now - p.recalled_at > RECALL_EVERY
                and (best == NULL or p.grant > best.grant)):
            best = p
    if best != NULL:
        best.recall_due = best.recall_out = True
        best.recalled_at = now
        mark_dirty(e, best)


cdef void feed(engine_t *e) noexcept nogil:
    """The pool has grown: to those who want more, the poorest first."""
    cdef peer_t *p
    cdef peer_t *best
    cdef int32_t i
    while e.n_hungry and e.pool:
        best = NULL
        for i in range(e.size):
            p = &e.peers[i]
            if p.hungry and p.state != P_READY:
                p.hungry = False
                e.n_hungry -= 1
            if p.hungry and (best == NULL or p.grant < best.grant):
                best = p
        if best == NULL:
            return
        lend(e, best)


cdef void give_back(engine_t *e, peer_t *p) noexcept nogil:
    """A payload slot of `p` is free again."""
    if p.reclaimed == 2:
        if p.grant > p.in_slots:
            p.grant -= 1
            e.pool += 1
            feed(e)
        return
    if e.n_hungry and p.grant > e.fair:
        p.grant -= 1
        e.pool += 1
        feed(e)
        return
    p.eager_given += 1


cdef void reclaim(engine_t *e, peer_t *p) noexcept nogil:
    """Takes back what a peer that is gone may not fill any more. Its last messages may still lie in the
    completion queue: they have been handled when this is called again after a later poll."""
    if p.reclaimed == 0:
        p.reclaimed = 1
        mark_dirty(e, p)
    elif p.reclaimed == 1:
        p.reclaimed = 2
        if p.grant > p.in_slots:
            e.pool += p.grant - p.in_slots
            p.grant = p.in_slots
            feed(e)


cdef uint64_t on_recall(peer_t *p, uint64_t wanted) noexcept nogil:
    """How many of our credits at `p` we return: none while we need them ourselves."""
    cdef uint64_t unused = <uint32_t>(p.eager_credits + p.eager_acked - p.eager_sent)
    if p.sends.head != NULL:
        return 0
    if unused > wanted:
        unused = wanted
    p.eager_sent += <uint32_t>unused
    return unused


cdef void on_return(engine_t *e, peer_t *p, uint64_t n) noexcept nogil:
    cdef uint32_t back = p.grant - e.reserve
    p.recall_out = False
    if back > n:
        back = <uint32_t>n
    p.eager_got += <uint32_t>n
    p.eager_given += <uint32_t>n - back     # its grant has shrunk meanwhile: not below the reserve
    p.credit_due = True
    p.grant -= back
    e.pool += back
    feed(e)
