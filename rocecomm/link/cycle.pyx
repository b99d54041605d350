# cython: language_level=3
"""Ranks that block in large sends to each other, in a ring of two or more.

A rank that blocks in a send does nothing else, so it waits for one rank only, and the ranks
wait for each other in a ring exactly if a question comes back that travels along their sends
(edge chasing: Chandy, Misra, Haas, "Distributed deadlock detection", 1983, for requests of
one resource). CYCLE is that question. It travels behind the announcement that it is about, so
whoever gets it knows whether that announcement is stored, that is: not received, and passes
it on along its own blocking send. The rank that asked last of the ring gets its own back.

That rank drops the announcement through which it came back and tells its sender, CYCLE_YES.
The sender drops in turn the one through which the question had come to it, tells that one's
sender, and fails its own send; and so round the ring, backwards. So a send fails only once its
receiver has dropped it and nobody reads its memory, and only if it was not received; if one
of the ranks has withdrawn its send at that very moment (a timeout), the others go on.
"""
from libc.string cimport memset
from rocecomm.link.core cimport (
    CYCLE_LOG, F_BLOCKING, F_WITHDRAWING, R_CYCLE, S_ANNOUNCED, asked_t, ctl_t, engine_t, int32_t,
    peer_t, req_end, req_find, req_t, uint32_t, uint64_t, unlink, unx_free, unx_t)
from rocecomm.link.match cimport drop_unexpected
from rocecomm.link.peer cimport queue_cycle
from rocecomm.link.wire cimport ANNOUNCE, CYCLE, CYCLE_YES, rc_header


cdef inline req_t *blocked(engine_t *e) noexcept nogil:
    """The send in which this rank blocks, NULL if it does not."""
    cdef req_t *r = req_find(e, e.blocked_id, e.blocked_gen)
    if r == NULL or r.state != S_ANNOUNCED or r.flags & F_WITHDRAWING or not r.flags & F_BLOCKING:
        return NULL
    return r


cdef void ask(engine_t *e, req_t *mine, int32_t rank, uint64_t req, uint32_t gen,
              uint32_t hops) noexcept nogil:
    """Sends the question of `req` of `rank` along our own send."""
    cdef ctl_t c
    memset(&c, 0, sizeof(c))
    c.kind = CYCLE
    c.req = mine.id
    c.gen = mine.gen
    c.size = mine.size
    c.rank = rank
    c.other_req = req
    c.other_gen = gen
    c.hops = hops
    queue_cycle(e, &e.peers[mine.peer], &c)


cdef void ask_cycle(engine_t *e) noexcept nogil:
    """A blocking send has just been announced, or a blocking announcement been stored: of a
    ring the rank asks last to which both applies last, and its question gets round."""
    cdef req_t *mine
    if e.blocking_stored == 0:
        return
    mine = blocked(e)
    if mine != NULL:
        ask(e, mine, e.rank, mine.id, mine.gen, 1)


cdef unx_t *stored(peer_t *p, uint64_t req, uint32_t gen) noexcept nogil:
    cdef unx_t *u = p.unexpected.head
    while u != NULL and not (u.h.kind == ANNOUNCE and u.h.req == req and u.h.gen == gen):
        u = u.next
    return u


cdef bint forget(engine_t *e, peer_t *p, uint64_t req, uint32_t gen) noexcept nogil:
    """Drops a stored announcement; False if there is none, or it is being received."""
    cdef unx_t *u = stored(p, req, gen)
    if u == NULL:
        return False
    drop_unexpected(e, p, u)
    unx_free(e, u)
    return True


cdef void fail_back(engine_t *e, peer_t *p, uint64_t req, uint32_t gen, req_t *mine,
                    const rc_header *h) noexcept nogil:
    """Drops the announcement of `p` that keeps it waiting for us, and tells it."""
    cdef ctl_t c
    if not forget(e, p, req, gen):
        return
    memset(&c, 0, sizeof(c))
    c.kind = CYCLE_YES
    c.req = req
    c.gen = gen
    c.size = mine.size
    c.where = <uint64_t>mine.peer
    c.rank = <int32_t>h.root
    c.other_req = h.tag
    c.other_gen = <uint32_t>h.seq
    c.hops = <uint32_t>h.count
    queue_cycle(e, p, &c)


cdef void on_question(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """`req`, `gen`: the send of `p`; `root`, `tag`, `seq`: the send that asked first."""
    cdef req_t *mine = blocked(e)
    cdef asked_t *log
    if mine == NULL or stored(p, h.req, h.gen) == NULL:
        return
    if <int32_t>h.root == e.rank:
        if h.tag == mine.id and h.seq == mine.gen:
            fail_back(e, p, h.req, h.gen, mine, h)
        return
    if h.count >= <uint64_t>e.size:
        return                          # of a rank outside of a ring it has gone round
    log = &e.asked[e.n_asked % CYCLE_LOG]
    e.n_asked += 1
    log.first_rank = <int32_t>h.root
    log.first_req = h.tag
    log.first_gen = <uint32_t>h.seq
    log.rank = p.rank
    log.req = h.req
    log.gen = h.gen
    ask(e, mine, <int32_t>h.root, h.tag, <uint32_t>h.seq, <uint32_t>h.count + 1)


cdef void on_answer(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """Our send is part of a ring and `p` has dropped it: `size` and `addr` say in which send
    `p` itself blocks, `count` how long the ring is."""
    cdef req_t *mine = req_find(e, h.req, h.gen)
    cdef asked_t *log
    cdef uint32_t i
    if mine == NULL or mine.state != S_ANNOUNCED or mine.peer != p.rank:
        return
    if <int32_t>h.root != e.rank:
        for i in range(CYCLE_LOG):
            log = &e.asked[(e.n_asked - 1 - i) % CYCLE_LOG]
            if (log.first_rank == <int32_t>h.root and log.first_req == h.tag
                    and log.first_gen == <uint32_t>h.seq):
                fail_back(e, &e.peers[log.rank], log.req, log.gen, mine, h)
                break
        if mine.state != S_ANNOUNCED:
            return                      # telling broke the connection: that has ended it
    unlink(&p.announced, mine)
    mine.other_size = h.size
    mine.other_sig.count = h.count
    mine.other_sig.root = <uint32_t>h.addr
    req_end(e, mine, R_CYCLE)


cdef void on_cycle(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    if h.kind == CYCLE:
        on_question(e, p, h)
    else:
        on_answer(e, p, h)
