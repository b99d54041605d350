# cython: language_level=3
"""Which message goes to which receive: pure list work, no verbs.

A receive matches a message of the same group whose tag is equal (or ANY_TAG) and whose
sender is the one asked for (or ANY_SOURCE). Among the receives that match the one posted
first wins, among the messages of one sender the one sent first, and among senders the one
whose message arrived first. A probe sees what a receive of its kind would take.
"""
from rocecomm.link.core cimport (
    F_ANYTAG, R_OK, S_QUEUED, engine_t, list_t, peer_t, push, rc_set8, req_end, req_t, uint64_t, unlink,
    unx_list_t, unx_t)
from rocecomm.link.wire cimport ANNOUNCE, FLAG_BLOCKING, rc_header


cdef inline bint fits(const req_t *r, const rc_header *h) noexcept nogil:
    return r.group == h.group and (r.tag == h.tag or r.flags & F_ANYTAG != 0)


cdef inline req_t *first(list_t *l, const rc_header *h) noexcept nogil:
    cdef req_t *r = l.head
    while r != NULL and not fits(r, h):
        r = r.next
    return r


cdef req_t *match_posted(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """Takes the receive for an arriving message off its list; NULL if there is none."""
    cdef req_t *r = first(&p.posted, h)
    cdef req_t *other
    if e.any_posted.head != NULL:
        other = first(&e.any_posted, h)
        if other != NULL and (r == NULL or other.order < r.order):
            unlink(&e.any_posted, other)
            return other
    if r != NULL:
        unlink(&p.posted, r)
    return r


cdef void post_receive(engine_t *e, req_t *r) noexcept nogil:
    """Appends a new receive to the list of its source."""
    r.order = e.order
    e.order += 1
    rc_set8(&r.state, S_QUEUED)
    push(&e.any_posted if r.peer < 0 else &e.peers[r.peer].posted, r)


cdef void repost_receive(engine_t *e, req_t *r) noexcept nogil:
    """Puts a receive back in its old place: its message was withdrawn by the sender."""
    cdef list_t *l = &e.any_posted if r.peer < 0 else &e.peers[r.peer].posted
    cdef req_t *at = l.head
    rc_set8(&r.state, S_QUEUED)
    while at != NULL and at.order < r.order:
        at = at.next
    if at == NULL:
        push(l, r)
        return
    r.next = at
    r.prev = at.prev
    if at.prev != NULL:
        at.prev.next = r
    else:
        l.head = r
    at.prev = r
    l.n += 1


cdef bint unpost_receive(engine_t *e, req_t *r) noexcept nogil:
    """Withdraws a receive that has not matched; False if it has."""
    if r.state != S_QUEUED:
        return False
    unlink(&e.any_posted if r.peer < 0 else &e.peers[r.peer].posted, r)
    return True


cdef inline unx_t *first_stored(unx_list_t *l, req_t *r) noexcept nogil:
    cdef unx_t *u = l.head
    while u != NULL and not fits(r, &u.h):
        u = u.next
    return u


cdef unx_t *find_unexpected(engine_t *e, req_t *r, peer_t **owner) noexcept nogil:
    """The stored message for a new receive; NULL if there is none."""
    cdef unx_t *best = NULL
    cdef unx_t *u
    cdef int i
    if e.unexpected == 0:
        return NULL
    if r.peer >= 0:
        owner[0] = &e.peers[r.peer]
        best = first_stored(&owner[0].unexpected, r)
    else:
        for i in range(e.size):
            u = first_stored(&e.peers[i].unexpected, r)
            if u != NULL and (best == NULL or u.order < best.order):
                best = u
                owner[0] = &e.peers[i]
    return best


cdef unx_t *match_unexpected(engine_t *e, req_t *r, peer_t **owner) noexcept nogil:
    """Takes the stored message for a new receive off its list; NULL if there is none."""
    cdef unx_t *best = find_unexpected(e, r, owner)
    if best != NULL:
        drop_unexpected(e, owner[0], best)
    return best


cdef inline bint blocking(const unx_t *u) noexcept nogil:
    """Whether its sender does nothing else until it is taken."""
    return u.h.kind == ANNOUNCE and u.h.flags & FLAG_BLOCKING != 0


cdef void store_unexpected(engine_t *e, peer_t *p, unx_t *u) noexcept nogil:
    """Appends a message that no receive waits for. Its header is filled in."""
    u.order = e.arrivals
    e.arrivals += 1
    u.next = NULL
    u.prev = p.unexpected.tail
    if u.prev != NULL:
        u.prev.next = u
    else:
        p.unexpected.head = u
    p.unexpected.tail = u
    p.unexpected.n += 1
    e.unexpected += 1
    e.blocking_stored += blocking(u)
    if e.probes.head != NULL:
        answer_probes(e, &u.h)


cdef void drop_unexpected(engine_t *e, peer_t *p, unx_t *u) noexcept nogil:
    """Takes a stored message off its list; the caller frees it."""
    if u.prev != NULL:
        u.prev.next = u.next
    else:
        p.unexpected.head = u.next
    if u.next != NULL:
        u.next.prev = u.prev
    else:
        p.unexpected.tail = u.prev
    u.next = u.prev = NULL
    p.unexpected.n -= 1
    e.unexpected -= 1
    e.blocking_stored -= blocking(u)


# ------------------------------------------------------------------------------ probes

cdef void answer(req_t *r, const rc_header *h) noexcept nogil:
    """What a probe tells of a message."""
    r.source = <int>h.source
    r.tag = h.tag
    r.other_size = r.got = h.size
    r.other_dtype = h.dtype


cdef bint probe_now(engine_t *e, req_t *r) noexcept nogil:
    """Whether a message for the probe `r` is stored; if so `r` tells of it."""
    cdef peer_t *p = NULL
    cdef unx_t *u = find_unexpected(e, r, &p)
    if u == NULL:
        return False
    answer(r, &u.h)
    return True


cdef void answer_probes(engine_t *e, const rc_header *h) noexcept nogil:
    """A message has just been stored."""
    cdef req_t *r = e.probes.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if (r.peer < 0 or r.peer == <int>h.source) and fits(r, h):
            unlink(&e.probes, r)
            answer(r, h)
            req_end(e, r, R_OK)
        r = after


cdef void end_probes(engine_t *e, int peer, int status) noexcept nogil:
    """Ends the probes that wait for `peer` (-1: those for any source)."""
    cdef req_t *r = e.probes.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if r.peer == peer:
            unlink(&e.probes, r)
            req_end(e, r, status)
        r = after
