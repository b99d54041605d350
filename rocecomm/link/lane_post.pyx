# cython: language_level=3
"""Posting one-sided requests: pieces become chains of work requests.

One post takes up to as many work requests as the lane's queue holds, linked to a chain,
with a signal at the end and four times per round of the queue. They are made from the
request's offsets in C, without memory or an object for each. How many reads and atomics
are in flight is the device's business: it was told the limit when the queue pair was
connected (`max_rd_atomic`) and holds those beyond it back (InfiniBand specification,
C9-137; kernel Soft-RoCE and softnic do so, too).
"""
from libc.string cimport memset
from rocecomm.link.core cimport (
    L_DEAD, L_UP, NOTE_WINDOW, NO_SLOT, P_SELF, R_BROKEN, R_CANCELLED, R_REGISTER, S_DONE,
    S_QUEUED, WR_LANE, engine_t, lane_t, lsqe_t, mark_dirty, peer_t, push, reach, req_end, req_register,
    req_t, uint32_t, uint64_t, unlink)
from rocecomm.link.one cimport O_ADD, O_READ, O_WRITE, cursor_t, one_t
from rocecomm.link.lane cimport (
    advance, changes, end_lane, end_request, piece_length, skip_empty)
from rocecomm.link.peer cimport break_peer, ctrl_credit
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    htonl, ibv_post_send, ibv_send_wr, ibv_sge)

cdef enum:
    # The largest work request, and what one post may move: other traffic goes in between.
    PIECE = 8 << 20
    # What may be posted while the GIL is held: soft0 copies within the post.
    LIGHT = 64 << 10


cdef void lose_lane(engine_t *e, peer_t *p, int status, int opcode, uint32_t vendor, int err,
                    uint64_t nbytes) noexcept nogil:
    """The lane cannot be saved, and with it the connection."""
    if p.state == P_SELF:
        p.cause_status = status
        p.cause_opcode = opcode
        p.cause_vendor = vendor
        p.cause_errno = err
        p.cause_bytes = nbytes
        end_lane(e, p)
    else:
        break_peer(e, p, status, opcode, vendor, err, nbytes)


cdef void start_one(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    """Posts a one-sided request, or queues it behind others. `r.one` says what to do."""
    cdef one_t *o = r.one
    if not reach(e, p) or p.lane.state == L_DEAD:
        req_end(e, r, R_BROKEN)
        return
    r.state = S_QUEUED
    skip_empty(o, &o.at)
    o.done = o.at
    if changes(o):
        p.fences += 1
    push(&p.lane.pending, r)
    drain_lane(e, p, False)


cdef bint unpost_one(engine_t *e, req_t *r) noexcept nogil:
    """Takes back a request of which nothing was posted. False: too late."""
    cdef peer_t *p = &e.peers[r.peer]
    cdef one_t *o = r.one
    if r.state == S_DONE or o.begun:
        return False
    unlink(&p.lane.pending, r)
    end_request(e, p, r, R_CANCELLED)
    return True


cdef bint make_known(engine_t *e, req_t *r) noexcept nogil:
    """Registers the local buffer if the operation needs it; False: that failed."""
    cdef one_t *o = r.one
    cdef uint64_t size = r.size
    cdef bint good = True
    if not o.known and o.op <= O_READ and size:
        r.size = o.extent
        good = req_register(e, r, IBV_ACCESS_LOCAL_WRITE if o.op == O_READ else 0)
        r.size = size
    o.known = True
    return good


cdef uint32_t fill_chain(engine_t *e, peer_t *p, bint heavy, bint *again) noexcept nogil:
    """Makes work requests of what is pending; returns how many. `again`: it ended because of
    something that no completion of this lane tells."""
    cdef lane_t *l = &p.lane
    cdef uint32_t room = l.depth - (l.head - l.tail)
    cdef uint32_t n = 0
    cdef uint64_t budget = PIECE if heavy else LIGHT
    cdef uint64_t size
    cdef uint64_t most = min(<uint64_t>PIECE, p.max_read)
    cdef req_t *r = l.pending.head
    cdef one_t *o
    cdef cursor_t after
    cdef lsqe_t *entry
    cdef ibv_send_wr *wr
    cdef ibv_sge *sge
    cdef bint last
    again[0] = False
    if room > e.chain_max:
        room = e.chain_max
    while r != NULL and n < room:
        o = r.one
        size = piece_length(o, o.at.piece) - o.at.offset
        if size > most:
            size = most
        if size > budget:
            again[0] = True
            break
        after = o.at
        advance(o, &after, size)
        last = after.piece >= o.n
        wr = &e.chain[n]
        sge = &e.chain_sge[n]
        entry = &l.sq[l.head & (l.depth - 1)]
        memset(wr, 0, sizeof(ibv_send_wr))
        entry.cell = <uint32_t>NO_SLOT
        entry.notify = False
        if o.op == O_WRITE and o.n == 1 and size <= l.max_inline and not o.known:
            wr.send_flags = IBV_SEND_INLINE
        elif not make_known(e, r):
            unlink(&l.pending, r)
            end_request(e, p, r, R_REGISTER)
            r = l.pending.head
            continue
        if o.op >= O_ADD:
            if e.n_cell_free == 0:
                again[0] = True         # other lanes have them
                break
            e.n_cell_free -= 1
            entry.cell = e.cell_free[e.n_cell_free]
            sge.addr = <uint64_t>&e.cells[entry.cell]
            sge.lkey = e.status_lkey
            wr.opcode = (IBV_WR_ATOMIC_FETCH_AND_ADD if o.op == O_ADD
                         else IBV_WR_ATOMIC_CMP_AND_SWP)
            wr.wr.atomic.remote_addr = o.remote
            wr.wr.atomic.rkey = o.rkey
            wr.wr.atomic.compare_add = o.operand if o.op == O_ADD else o.compare
            wr.wr.atomic.swap = o.operand
        else:
            sge.addr = <uint64_t>r.buf + o.at.offset
            sge.lkey = r.lkey
            wr.wr.rdma.remote_addr = o.remote + o.at.offset
            wr.wr.rdma.rkey = o.rkey
            if o.local_at != NULL:
                sge.addr += <uint64_t>o.local_at[o.at.piece]
                wr.wr.rdma.remote_addr += <uint64_t>o.remote_at[o.at.piece]
            wr.opcode = IBV_WR_RDMA_WRITE if o.op == O_WRITE else IBV_WR_RDMA_READ
            if o.notify and last:
                if not ctrl_credit(p) or l.notes_sent - l.notes_acked >= NOTE_WINDOW:
                    again[0] = True
                    break
                p.ctrl_sent += 1
                l.notes_sent += 1
                entry.notify = True
                wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM
                wr.imm_data = htonl(o.imm)
        sge.length = <uint32_t>size
        wr.sg_list = sge
        wr.num_sge = 1 if size else 0
        wr.wr_id = <uint64_t>(p.rank | <uint32_t>WR_LANE) << 32 | l.head
        wr.next = &e.chain[n + 1]
        entry.req = r
        entry.length = <uint32_t>size
        l.head += 1
        if l.head - l.signalled >= l.depth // 4:
            wr.send_flags |= IBV_SEND_SIGNALED
            l.signalled = l.head
        n += 1
        budget -= size
        o.begun = True
        o.out += 1
        o.at = after
        if last:
            o.finished = True
            unlink(&l.pending, r)
            push(&l.flying, r)
            r = l.pending.head
    if n:
        e.chain[n - 1].next = NULL
        e.chain[n - 1].send_flags |= IBV_SEND_SIGNALED
        l.signalled = l.head
    return n


cdef void undo(engine_t *e, peer_t *p, uint32_t position) noexcept nogil:
    """The device refused the entries from `position` on."""
    cdef lane_t *l = &p.lane
    cdef lsqe_t *entry
    while l.head != position:
        l.head -= 1
        entry = &l.sq[l.head & (l.depth - 1)]
        entry.req.one.out -= 1
        if entry.cell != <uint32_t>NO_SLOT:
            e.cell_free[e.n_cell_free] = entry.cell
            e.n_cell_free += 1
        if entry.notify:
            p.ctrl_sent -= 1
            l.notes_sent -= 1
    l.signalled = l.tail                # none that is certain


cdef void drain_lane(engine_t *e, peer_t *p, bint heavy) noexcept nogil:
    """Posts what is pending, one chain; then others have their turn. `heavy` is false while the
    GIL is held."""
    cdef lane_t *l = &p.lane
    cdef ibv_send_wr *bad = NULL
    cdef uint32_t n
    cdef int rc
    cdef bint again
    if l.state != L_UP or l.pending.head == NULL:
        return
    n = fill_chain(e, p, heavy, &again)
    if n:
        rc = ibv_post_send(l.out, e.chain, &bad)
        if rc != 0:
            undo(e, p, <uint32_t>bad.wr_id if bad != NULL else l.head - n)
            lose_lane(e, p, -1, -1, 0, rc, 0)
            return
    if l.pending.head == NULL:
        return
    if again:
        mark_dirty(e, p)                # a credit or the other kind of call
    if l.head - l.tail < l.depth and (n or not heavy):
        mark_dirty(e, p)
        e.more = True
