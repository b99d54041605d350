# cython: language_level=3
"""One connection: its send queue, the credits of both sides, its end.

Every message except CREDIT and GOODBYE takes one of the slots that the receiver has set
aside for this sender, so a receive is always posted: `eager` slots for payloads, given
back when the message has been matched and lent where they are needed (lend.pyx), and
`ctrl` slots for short messages, given back as soon as they are read. CREDIT is sent when half of either kind is owed; since what is
unread of it holds at least half a grant each, no more than four can be under way, and
the receiver has room for them beyond the grants. So credits cannot deadlock.
"""
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset, strlen
from rocecomm.link.anyone cimport end_any
from rocecomm.link.answer cimport answer_in_place, take_answers
from rocecomm.link.core cimport (
    F_COLL, F_IN_PULLS, NO_SLOT, P_BROKEN, P_LEFT, P_READY, P_SELF, RECYCLE, Q_BEAT, Q_INLINE,
    Q_READ, Q_SLOT, Q_STATUS, R_ABORTED, R_BROKEN, R_OK, S_PULLING, TEXT_MAX, abort_t, ctl_t, device_failed,
    engine_t, find_group, group_t, int32_t, int64_t, list_t, mark_dirty, may_come, peer_t, push, rc_now, rc_set,
    rc_set8, req_end, req_t, slot_addr, sqe_t, status_t, tell_loops, uint8_t, uint16_t, uint32_t, uint64_t, unlink)
from rocecomm.link.lane cimport end_lane
from rocecomm.link.lend cimport give_back
from rocecomm.link.match cimport end_probes
from rocecomm.link.wire cimport (
    ABORT, CREDIT, DONE, EAGER, GOODBYE, RC_MAGIC, RC_VERSION, RECALL, ANSWER_OK, header_size, rc_header)
from rocecomm.verbs.libibverbs cimport (
    IBV_QPS_ERR, IBV_QP_STATE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WC_WR_FLUSH_ERR, ibv_post_send, ibv_post_srq_recv,
    ibv_qp_attr, ibv_recv_wr, ibv_send_wr, ibv_sge)

cdef enum:
    # requests of groups from here on belong to the parameter server: plain messages
    FIRST_PLAIN_GROUP = 0x80000000
    # A heartbeat that took less, in nanoseconds, costs next to nothing.
    NEAR = 100000


cdef int post_wr(engine_t *e, peer_t *p, ibv_send_wr *wr, uint8_t type, uint32_t slot,
                 uint32_t req, uint32_t length, bint signal) noexcept nogil:
    """Posts one work request; the caller has checked for room. 0, or -1: the peer is broken now."""
    cdef ibv_send_wr *bad = NULL
    cdef uint32_t at = p.sq_head
    cdef sqe_t *entry = &p.sq[at & (p.sq_depth - 1)]
    cdef int rc
    wr.wr_id = <uint64_t>p.rank << 32 | at
    wr.next = NULL
    entry.type = type
    entry.slot = slot
    entry.req = req
    entry.length = length
    # without a signal now and then the entries of inline sends would never be known as done
    if signal or at - p.sq_signal >= p.sq_depth // 4:
        wr.send_flags |= IBV_SEND_SIGNALED
        p.sq_signal = at
    p.sq_head = at + 1
    rc = ibv_post_send(p.qp, wr, &bad)
    if rc != 0:
        p.sq_head = at
        break_peer(e, p, -1, -1, 0, rc, length)
        return -1
    return 0


cdef inline void fill_header(engine_t *e, peer_t *p, rc_header *h) noexcept nogil:
    h.magic = RC_MAGIC
    h.version = RC_VERSION
    h.source = e.rank
    h.instance = p.instance
    h.eager_back = p.eager_told = p.eager_given
    h.ctrl_back = p.ctrl_told = p.ctrl_freed


cdef int post_message(engine_t *e, peer_t *p, rc_header *h, const char *payload,
                      size_t n) noexcept nogil:
    """Sends header and payload as one message. 1: posted, 0: no room now, -1: broken now.

    Small ones go inline, straight from the caller's memory; others are copied into a send
    slot. Either way the payload may be reused when this returns 1. Credits are the
    caller's business.
    """
    cdef ibv_sge sge[2]
    cdef ibv_send_wr wr
    cdef uint32_t slot = <uint32_t>NO_SLOT
    cdef char *place
    cdef uint32_t head = <uint32_t>header_size(h)
    cdef bint small = head + n <= p.max_inline
    if p.sq_head - p.sq_tail >= p.sq_depth or (not small and e.n_send_free == 0):
        return 0
    fill_header(e, p, h)
    wr.opcode = IBV_WR_SEND
    wr.sg_list = sge
    wr.num_sge = 1
    if small:
        wr.send_flags = IBV_SEND_INLINE
        sge[0].addr = <uint64_t>h
        sge[0].length = head
        sge[0].lkey = 0
        if n:
            sge[1].addr = <uint64_t>payload
            sge[1].length = <uint32_t>n
            sge[1].lkey = 0
            wr.num_sge = 2
    else:
        wr.send_flags = 0
        e.n_send_free -= 1
        slot = e.send_free[e.n_send_free]
        place = slot_addr(e, slot)
        memcpy(place, h, head)
        if n and payload != place + head:       # gathered there already
            memcpy(place + head, payload, n)
        sge[0].addr = <uint64_t>place
        sge[0].length = head + <uint32_t>n
        sge[0].lkey = e.slots_lkey
    if post_wr(e, p, &wr, Q_INLINE if small else Q_SLOT, slot, 0, <uint32_t>n, not small) != 0:
        if not small:
            e.send_free[e.n_send_free] = slot
            e.n_send_free += 1
        return -1
    return 1


# ------------------------------------------------------------------- short messages

cdef ctl_t *new_ctl(engine_t *e, peer_t *p, uint8_t kind) noexcept nogil:
    cdef ctl_t *c
    if p.state != P_READY:
        return NULL
    c = e.ctl_free
    if c != NULL:
        e.ctl_free = c.next
    else:
        c = <ctl_t *>malloc(sizeof(ctl_t))
        if c == NULL:
            break_peer(e, p, -1, -1, 0, 12, 0)      # ENOMEM: an answer that cannot be given
            return NULL
    memset(c, 0, sizeof(ctl_t))
    c.kind = kind
    if p.ctl_tail != NULL:
        p.ctl_tail.next = c
    else:
        p.ctl_head = c
    p.ctl_tail = c
    p.ctl_n += 1
    mark_dirty(e, p)
    return c


cdef void queue_ctl(engine_t *e, peer_t *p, uint8_t kind, uint64_t req, uint32_t gen,
                    uint64_t size) noexcept nogil:
    """Sends a short message as soon as credits and the send queue allow."""
    cdef ctl_t *c
    if (kind == DONE and (p.ctl_head != NULL or not ctrl_credit(p))
            and answer_in_place(e, p, req, gen, size)):
        return
    c = new_ctl(e, p, kind)
    if c != NULL:
        c.req = req
        c.gen = gen
        c.size = size
        drain_ctl(e, p)


cdef void queue_cycle(engine_t *e, peer_t *p, const ctl_t *what) noexcept nogil:
    cdef ctl_t *c = new_ctl(e, p, what.kind)
    if c != NULL:
        c.req = what.req
        c.gen = what.gen
        c.size = what.size
        c.other_req = what.other_req
        c.other_gen = what.other_gen
        c.rank = what.rank
        c.hops = what.hops
        c.where = what.where
        drain_ctl(e, p)


cdef void queue_abort(engine_t *e, peer_t *p, uint32_t group) noexcept nogil:
    cdef ctl_t *c = new_ctl(e, p, ABORT)
    if c != NULL:
        c.group = group
        drain_ctl(e, p)


cdef bint drain_ctl(engine_t *e, peer_t *p) noexcept nogil:
    """Posts the waiting short messages. True if none is left."""
    cdef rc_header h
    cdef ctl_t *c
    cdef group_t *g
    cdef const char *payload
    cdef size_t n
    cdef int rc
    while p.ctl_head != NULL and p.state == P_READY:
        c = p.ctl_head
        if p.ctrl_sent - p.ctrl_acked >= p.ctrl_credits:
            break
        memset(&h, 0, sizeof(h))
        h.kind = c.kind
        h.req = c.req
        h.gen = c.gen
        h.size = c.size
        h.tag = c.other_req
        h.seq = c.other_gen
        h.root = <uint32_t>c.rank
        h.count = c.hops
        h.addr = c.where
        payload = NULL
        n = 0
        if c.kind == ABORT:
            g = find_group(e, c.group, False)
            h.group = c.group
            if g != NULL:
                h.req = <uint64_t>g.abort_class
                h.root = <uint32_t>g.abort_rank
                payload = <const char *>&g.why
                n = sizeof(abort_t) - TEXT_MAX + strlen(g.why.text) + 1
                h.size = n
        rc = post_message(e, p, &h, payload, n)
        if rc <= 0:
            break
        p.ctrl_sent += 1
        p.ctl_head = c.next
        if p.ctl_head == NULL:
            p.ctl_tail = NULL
        p.ctl_n -= 1
        c.next = e.ctl_free
        e.ctl_free = c
    if p.state != P_READY:
        return True
    if p.recall_due and p.ctrl_sent - p.ctrl_acked < p.ctrl_credits:
        memset(&h, 0, sizeof(h))
        h.kind = RECALL
        h.size = (p.grant - e.reserve + 1) // 2
        if post_message(e, p, &h, NULL, 0) == 1:
            p.ctrl_sent += 1
            p.recall_due = False
    if p.credit_due:
        memset(&h, 0, sizeof(h))
        h.kind = CREDIT
        # another message may have told it meanwhile
        if not owes(e, p) or post_message(e, p, &h, NULL, 0) == 1:
            p.credit_due = False
    if p.goodbye_due and p.ctl_head == NULL:
        memset(&h, 0, sizeof(h))
        h.kind = GOODBYE
        if post_message(e, p, &h, NULL, 0) == 1:
            p.goodbye_due = False
    if p.ctl_head != NULL or p.credit_due or p.goodbye_due or p.recall_due:
        mark_dirty(e, p)
        return False
    return True


cdef inline bint owes(engine_t *e, peer_t *p) noexcept nogil:
    return ((p.eager_given - p.eager_told) * 2 >= p.grant
            or (p.ctrl_freed - p.ctrl_told) * 2 >= e.ctrl_grant)


cdef bint repost_slot(engine_t *e, uint32_t slot) noexcept nogil:
    """Posts a receive slot, together with others: there are RECYCLE slots more than the grants
    need, so it does not matter that up to RECYCLE - 1 are not posted at a time."""
    e.recycle[e.n_recycle] = slot
    e.n_recycle += 1
    return e.n_recycle < RECYCLE or post_slots(e)


cdef bint post_slots(engine_t *e) noexcept nogil:
    cdef ibv_recv_wr wr[RECYCLE]
    cdef ibv_sge sge[RECYCLE]
    cdef ibv_recv_wr *bad = NULL
    cdef uint32_t i
    cdef int rc
    if e.n_recycle == 0:
        return True
    for i in range(e.n_recycle):
        sge[i].addr = <uint64_t>slot_addr(e, e.recycle[i])
        sge[i].length = e.slot_size
        sge[i].lkey = e.slots_lkey
        wr[i].wr_id = <uint64_t>0xFFFFFFFF << 32 | e.recycle[i]
        wr[i].next = &wr[i + 1] if i + 1 < e.n_recycle else NULL
        wr[i].sg_list = &sge[i]
        wr[i].num_sge = 1
    e.n_recycle = 0
    rc = ibv_post_srq_recv(e.srq, &wr[0], &bad)
    if rc != 0:
        device_failed(e, rc, "ibv_post_srq_recv")
        return False
    return True


cdef void free_slot(engine_t *e, peer_t *p, uint32_t slot, uint8_t kind) noexcept nogil:
    """A receive slot has been read: posts it again and owes its sender the credit."""
    repost_slot(e, slot)
    if kind == EAGER:
        give_back(e, p)
    elif kind == CREDIT or kind == GOODBYE:
        return
    else:
        p.ctrl_freed += 1
    if owes(e, p) and p.state == P_READY:
        p.credit_due = True
        mark_dirty(e, p)


# ----------------------------------------------------------------------- completions

cdef void read_done(engine_t *e, peer_t *p, req_t *r, uint32_t length, bint good) noexcept nogil:
    r.reads_out -= 1
    p.reads_out -= 1
    if good:
        r.read_done += length
    # a peer that left takes no more reads; what was posted before may still be answered
    if p.state == P_BROKEN or (p.state == P_LEFT and r.flags & F_IN_PULLS):
        if r.reads_out == 0:            # the device writes nothing any more
            unlink(&p.pulls if r.flags & F_IN_PULLS else &p.reading, r)
            req_end(e, r, R_BROKEN)
    elif r.read_done == r.other_size and not r.flags & F_IN_PULLS:
        unlink(&p.reading, r)
        r.got = r.other_size
        e.bytes_received += r.got
        e.messages_received += 1
        queue_ctl(e, p, DONE, r.r_req, r.r_gen, ANSWER_OK)
        req_end(e, r, R_OK)
    elif r.flags & F_IN_PULLS:
        mark_dirty(e, p)


cdef void retire(engine_t *e, peer_t *p, uint32_t position, bint good) noexcept nogil:
    """The device is done with every entry up to `position`: a queue pair completes in order."""
    cdef sqe_t entry
    cdef uint32_t block
    if position - p.sq_tail >= p.sq_head - p.sq_tail:
        return                          # an entry that was retired before
    while p.sq_tail != position + 1:
        entry = p.sq[p.sq_tail & (p.sq_depth - 1)]
        p.sq_tail += 1
        if entry.type == Q_SLOT:
            e.send_free[e.n_send_free] = entry.slot
            e.n_send_free += 1
        elif entry.type == Q_READ:
            block = entry.req // 256
            read_done(e, p, &e.blocks[block][entry.req % 256], entry.length,
                      good or p.sq_tail != position + 1)
        elif entry.type == Q_BEAT:
            p.beat_out = False
            p.near = rc_now() - p.beat_at < NEAR
        elif entry.type == Q_STATUS:
            p.status_out = False
            if good:
                saw_status(e, p)
    if (p.sends.head != NULL or p.ctl_head != NULL or p.credit_due or p.goodbye_due
            or p.recall_due):
        mark_dirty(e, p)


# -------------------------------------------------------------------------- liveness

cdef void saw_status(engine_t *e, peer_t *p) noexcept nogil:
    cdef uint64_t beats = e.mirror[p.rank].beats
    if beats != p.seen_beats or p.status_n == 0:
        p.seen_beats = beats
        p.seen_since = rc_now()
    p.status_n += 1


cdef void beat(engine_t *e, peer_t *p, bint ask) noexcept nogil:
    """A zero-byte write, answered by the peer's device and not by its CPU; with `ask` also a
    read of the peer's status, from which a timeout's message is made."""
    cdef ibv_send_wr wr
    cdef ibv_sge sge
    if p.state != P_READY:
        return
    p.beat_at = rc_now()
    if not p.beat_out and p.sq_head - p.sq_tail < p.sq_depth:
        memset(&wr, 0, sizeof(wr))
        wr.opcode = IBV_WR_RDMA_WRITE
        wr.wr.rdma.remote_addr = p.status_addr
        wr.wr.rdma.rkey = p.status_rkey
        p.beat_out = True
        if post_wr(e, p, &wr, Q_BEAT, 0, 0, 0, True) != 0:
            return
    if ask and not p.status_out and p.sq_head - p.sq_tail < p.sq_depth:
        memset(&wr, 0, sizeof(wr))
        wr.opcode = IBV_WR_RDMA_READ
        wr.sg_list = &sge
        wr.num_sge = 1
        sge.addr = <uint64_t>&e.mirror[p.rank]
        sge.length = sizeof(status_t)
        sge.lkey = e.status_lkey
        wr.wr.rdma.remote_addr = p.status_addr
        wr.wr.rdma.rkey = p.status_rkey
        p.status_out = True
        post_wr(e, p, &wr, Q_STATUS, 0, 0, sizeof(status_t), True)


# ------------------------------------------------------------------------------- end

cdef void end_list(engine_t *e, list_t *l, int status) noexcept nogil:
    cdef req_t *r
    while l.head != NULL:
        r = l.head
        unlink(l, r)
        req_end(e, r, status)


cdef void end_pulls(engine_t *e, list_t *l) noexcept nogil:
    cdef req_t *r = l.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if r.reads_out == 0:
            unlink(l, r)
            req_end(e, r, R_BROKEN)
        r = after


cdef void drop_ctl(engine_t *e, peer_t *p) noexcept nogil:
    cdef ctl_t *c
    while p.ctl_head != NULL:
        c = p.ctl_head
        p.ctl_head = c.next
        c.next = e.ctl_free
        e.ctl_free = c
    p.ctl_tail = NULL
    p.ctl_n = 0
    p.credit_due = p.goodbye_due = p.recall_due = False


cdef void break_peer(engine_t *e, peer_t *p, int status, int opcode, uint32_t vendor,
                     int err, uint64_t nbytes) noexcept nogil:
    """The connection is gone for good. Keeps the first cause and ends everything that waits
    for this peer; reads end when the device has flushed them."""
    cdef ibv_qp_attr attr
    if p.state == P_BROKEN or p.state == P_SELF:
        return
    p.left = p.left or p.state == P_LEFT
    p.cause_status = status
    p.cause_opcode = opcode
    p.cause_vendor = vendor
    p.cause_errno = err
    p.cause_bytes = nbytes
    rc_set8(&p.state, P_BROKEN)         # others may look without the mutex: the cause is there
    # Revokes the peer's reads: only then may the buffers of announced sends go back.
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_ERR
    if p.qp != NULL:
        e.ops.modify_qp(p.qp, &attr, IBV_QP_STATE)
    take_answers(e)                     # what the peer had answered before
    end_lane(e, p)
    drop_ctl(e, p)
    tell_failure(e, p)
    end_list(e, &p.sends, R_BROKEN)
    end_list(e, &p.announced, R_BROKEN)
    end_list(e, &p.posted, R_BROKEN)
    end_probes(e, p.rank, R_BROKEN)
    end_pulls(e, &p.pulls)
    end_pulls(e, &p.reading)
    end_any(e, p)
    mark_dirty(e, p)                    # what it was lent is taken back


cdef void leave_peer(engine_t *e, peer_t *p) noexcept nogil:
    """The peer closed in order: all it sent has arrived, it takes nothing any more."""
    if not may_come(p):
        return
    take_answers(e)                     # given before it said goodbye
    p.left = True
    rc_set8(&p.state, P_LEFT)
    end_lane(e, p)
    drop_ctl(e, p)
    tell_failure(e, p)
    end_list(e, &p.sends, R_BROKEN)
    end_list(e, &p.announced, R_BROKEN)
    end_list(e, &p.posted, R_BROKEN)
    end_probes(e, p.rank, R_BROKEN)
    end_pulls(e, &p.pulls)
    end_any(e, p)
    mark_dirty(e, p)                    # what it was lent is taken back


cdef void tell_failure(engine_t *e, peer_t *p) noexcept nogil:
    """Ranks that are not neighbours of the lost one would wait for it for ever."""
    cdef req_t *r
    cdef list_t *lists[5]
    cdef int i
    lists[0] = &p.sends
    lists[1] = &p.announced
    lists[2] = &p.posted
    lists[3] = &p.pulls
    lists[4] = &p.reading
    for i in range(5):
        r = lists[i].head
        while r != NULL:
            if r.flags & F_COLL:
                fail_group(e, r.group, 3 if p.left else 2, p.rank, NULL, True)
            r = r.next


cdef void fail_collective(engine_t *e, list_t *l, uint32_t group) noexcept nogil:
    cdef req_t *r = l.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if r.flags & F_COLL and r.group == group:
            unlink(l, r)
            req_end(e, r, R_ABORTED)
        r = after


cdef void fail_group(engine_t *e, uint32_t group, int cls, int32_t rank, const abort_t *why,
                     bint tell) noexcept nogil:
    """A collective of the group failed: ends what waits, and tells every rank once.

    Class 1: the ranks disagree (`why` says how), 2: rank `rank` died, 3: it closed,
    4 and up: `why.text` says (`failure.abort_class`). Announced sends stay: the peer may be reading them. Their waiters look at the group.
    """
    cdef group_t *g = find_group(e, group, True)
    cdef int32_t i
    if g == NULL or g.aborted:
        return
    g.abort_class = cls
    g.abort_rank = rank
    if why != NULL:
        g.why = why[0]
        g.why.text[TEXT_MAX - 1] = 0
    rc_set(<int *>&g.aborted, True)            # others may look without the mutex: the reason is there
    e.ended += 1                        # waiters look
    tell_loops(e)
    for i in range(e.size):
        if i != rank or e.peers[i].state == P_READY:
            fail_collective(e, &e.peers[i].sends, group)
            fail_collective(e, &e.peers[i].posted, group)
    if tell:
        for i in range(e.size):
            if e.peers[i].state == P_READY:
                queue_abort(e, &e.peers[i], group)
