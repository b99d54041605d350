# cython: language_level=3
"""A lane: the one-sided traffic of one pair of ranks, apart from posting and repair.

Each rank has two queue pairs per peer for it: `out` carries its own operations, `inward`
serves the peer's. A request whose remote access fails breaks `out` here and `inward`
there; both carry operations of one rank only, the failed one is the first that was not
carried out, and none behind it was, so those are posted again and nothing, an atomic
above all, happens twice. (One queue pair for both directions could not promise that: the
peer's requests in flight would be cut off without anybody knowing which were carried out.)

Messages to a peer wait for the writes and atomics that were started before them
(`peer_t.fences`): they travel on another queue pair and could overtake.
"""
from libc.string cimport memset
from rocecomm.link.core cimport (
    K_ONE, L_DEAD, NO_SLOT, R_BROKEN, R_OK, R_ONE, WR_LANE, engine_t, int32_t,
    lane_t, list_t, lsqe_t, mark_dirty, peer_t, req_end, req_t, uint32_t, uint64_t, unlink)
from rocecomm.link.one cimport one_t
from rocecomm.verbs.libibverbs cimport (
    IBV_QPS_ERR, IBV_QP_STATE, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, ibv_post_send, ibv_qp_attr,
    ibv_send_wr)


cdef void end_request(engine_t *e, peer_t *p, req_t *r, int status) noexcept nogil:
    """Ends a one-sided request that is in no list."""
    if changes(r.one):
        p.fences -= 1
        if p.fences == 0:
            mark_dirty(e, p)
    if status == R_OK:
        r.got = r.size
        e.one_requests += 1
    req_end(e, r, status)


cdef void take_entry(engine_t *e, peer_t *p, bint good) noexcept nogil:
    """The device is done with the oldest work request; `good`: it was carried out."""
    cdef lane_t *l = &p.lane
    cdef lsqe_t *entry = &l.sq[l.tail & (l.depth - 1)]
    cdef req_t *r = entry.req
    cdef one_t *o
    l.tail += 1
    if r == NULL:                       # only there to be flushed
        return
    o = r.one
    o.out -= 1
    if entry.cell != <uint32_t>NO_SLOT:
        if good:
            r.tag = e.cells[entry.cell]
        e.cell_free[e.n_cell_free] = entry.cell
        e.n_cell_free += 1
    if good:
        advance(o, &o.done, entry.length)
        e.one_bytes += entry.length
        if o.finished and o.out == 0:
            unlink(&l.flying, r)
            end_request(e, p, r, R_OK)
            return
    elif entry.notify:                  # it never arrived
        p.ctrl_sent -= 1
        l.notes_sent -= 1
    if o.out == 0 and (o.failed or l.state == L_DEAD):
        unlink(&l.flying if o.finished else &l.pending, r)
        end_request(e, p, r, R_ONE if o.failed else R_BROKEN)


cdef void take_back(engine_t *e, peer_t *p, uint32_t position) noexcept nogil:
    """Everything up to `position` was carried out: a queue pair completes in order."""
    cdef lane_t *l = &p.lane
    while l.tail != position + 1:
        take_entry(e, p, True)
    if l.pending.head != NULL:
        mark_dirty(e, p)


# ------------------------------------------------------------------------------- end

cdef void end_idle(engine_t *e, peer_t *p, int status, bint force) noexcept nogil:
    """Ends the requests that the device does not touch any more (`force`: all)."""
    cdef list_t *lists[2]
    cdef req_t *r
    cdef req_t *after
    cdef int i
    lists[0] = &p.lane.flying
    lists[1] = &p.lane.pending
    for i in range(2):
        r = lists[i].head
        while r != NULL:
            after = r.next
            if force or r.one.out == 0:
                unlink(lists[i], r)
                end_request(e, p, r, R_ONE if r.one.failed else status)
            r = after


cdef void post_marker(peer_t *p) noexcept nogil:
    """What is behind the last signalled entry would never be reported as flushed by a device
    that had carried it out before: a last entry with a signal is."""
    cdef lane_t *l = &p.lane
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad = NULL
    if l.head == l.tail or l.signalled == l.head or l.head - l.tail >= l.depth:
        return
    memset(&wr, 0, sizeof(wr))
    wr.wr_id = <uint64_t>(p.rank | <uint32_t>WR_LANE) << 32 | l.head
    wr.opcode = IBV_WR_RDMA_WRITE
    wr.send_flags = IBV_SEND_SIGNALED
    l.sq[l.head & (l.depth - 1)].req = NULL
    if ibv_post_send(l.out, &wr, &bad) == 0:
        l.head += 1
        l.signalled = l.head


cdef void end_lane(engine_t *e, peer_t *p) noexcept nogil:
    """The peer is gone, or closed. Revokes its access over the lane; requests end as soon as the
    device has let go of their memory."""
    cdef lane_t *l = &p.lane
    cdef ibv_qp_attr attr
    if l.state == L_DEAD:
        return
    l.state = L_DEAD
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_ERR
    if l.out != NULL:                   # else it never was connected
        e.ops.modify_qp(l.out, &attr, IBV_QP_STATE)
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_ERR
    if l.inward != NULL:
        e.ops.modify_qp(l.inward, &attr, IBV_QP_STATE)
    post_marker(p)
    end_idle(e, p, R_BROKEN, False)
    end_waits(e, p)


cdef void end_waits(engine_t *e, peer_t *p) noexcept nogil:
    """Whoever waits for notifications of a lost peer."""
    cdef req_t *r = e.note_waits.head
    cdef req_t *after
    while r != NULL:
        after = r.next
        if r.peer == p.rank:
            unlink(&e.note_waits, r)
            req_end(e, r, R_BROKEN)
        r = after
