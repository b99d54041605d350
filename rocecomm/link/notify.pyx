# cython: language_level=3
"""Notifications: the 32 bits that come with a write, stored until somebody waits for them.

A write with notification (IBV_WR_RDMA_WRITE_WITH_IMM) takes a receive slot of its target, so
it takes a short-message credit of the sender. The credit goes back at once; what is
stored is bounded by a window of NOTE_WINDOW unread notifications per peer, about which the
target tells (NOTED) when half of it has been taken. A full window holds the next notified
write back at its sender, and all that is behind it there.
"""
from libc.stdlib cimport realloc
from rocecomm.link.anyone cimport to_tell
from rocecomm.link.core cimport (
    K_NOTE, NOTE_WINDOW, P_SELF, R_BROKEN, R_OK, S_DONE, S_QUEUED, engine_t, int32_t,
    lane_t, mark_dirty, peer_t, push, reach, req_end, req_t, uint32_t, uint64_t, unlink)
from rocecomm.link.one cimport note_t
from rocecomm.link.lane_post cimport lose_lane
from rocecomm.link.peer cimport free_slot, queue_ctl, repost_slot
from rocecomm.link.wire cimport NOTED, rc_header
from rocecomm.verbs.libibverbs cimport (
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS, ibv_wc, ntohl)


cdef bint on_lane_message(engine_t *e, ibv_wc *wc, uint32_t slot) noexcept nogil:
    """A receive that completed on some lane. False: no lane has that number."""
    cdef int32_t i
    cdef peer_t *p
    for i in range(e.size):
        p = &e.peers[i]
        if p.lane.inward != NULL and p.lane.inward_qpn == wc.qp_num:
            break
    else:
        return False
    if wc.status != IBV_WC_SUCCESS:     # a write that was refused; its sender gets to know
        repost_slot(e, slot)
    elif wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM:
        e.strangers += 1
        repost_slot(e, slot)
    else:
        free_slot(e, p, slot, NOTED)
        if p.state == P_SELF:
            p.ctrl_acked = p.ctrl_freed
            mark_dirty(e, p)
        store(e, p, ntohl(wc.imm_data))
    return True


cdef void store(engine_t *e, peer_t *p, uint32_t value) noexcept nogil:
    cdef lane_t *l = &p.lane
    cdef note_t *notes
    cdef uint32_t room = l.notes_room
    cdef uint32_t i
    if l.notes_n == room:
        if room >= NOTE_WINDOW:
            return                      # it ignores the window
        room = 64 if room == 0 else 2 * room
        notes = <note_t *>realloc(l.notes, room * sizeof(note_t))
        if notes == NULL:
            lose_lane(e, p, -1, -1, 0, 12, 0)       # ENOMEM
            return
        # the part before the head moves behind what was the end
        for i in range(l.notes_head):
            notes[l.notes_room + i] = notes[i]
        l.notes = notes
        l.notes_room = room
    i = (l.notes_head + l.notes_n) & (room - 1)
    e.notes += 1
    l.notes[i].order = e.notes
    l.notes[i].value = value
    l.notes_n += 1
    serve(e)


cdef peer_t *oldest(engine_t *e) noexcept nogil:
    cdef peer_t *best = NULL
    cdef lane_t *l
    cdef uint64_t order = 0
    cdef int32_t i
    for i in range(e.size):
        l = &e.peers[i].lane
        if l.notes_n and (best == NULL or l.notes[l.notes_head].order < order):
            best = &e.peers[i]
            order = l.notes[l.notes_head].order
    return best


cdef bint satisfy(engine_t *e, req_t *r) noexcept nogil:
    """Gives a waiter its notifications if all are there, and takes it off the list. `r.size` counts
    them."""
    cdef told_t *out = <told_t *>r.buf
    cdef uint64_t there = 0
    cdef uint64_t i
    cdef int32_t k
    cdef peer_t *p
    cdef lane_t *l
    if r.peer >= 0:
        there = e.peers[r.peer].lane.notes_n
    else:
        for k in range(e.size):
            there += e.peers[k].lane.notes_n
    if there < r.size:
        return False
    unlink(&e.note_waits, r)            # first: telling the peer may break the connection
    for i in range(r.size):
        p = &e.peers[r.peer] if r.peer >= 0 else oldest(e)
        l = &p.lane
        out[i].value = l.notes[l.notes_head].value
        out[i].source = p.rank
        l.notes_head = (l.notes_head + 1) & (l.notes_room - 1)
        l.notes_n -= 1
        l.notes_taken += 1
        if (l.notes_taken - l.notes_told) * 2 >= NOTE_WINDOW:
            l.notes_told = l.notes_taken
            if p.state == P_SELF:
                l.notes_acked = l.notes_taken
                mark_dirty(e, p)
            else:
                queue_ctl(e, p, NOTED, 0, 0, l.notes_taken)
    return True


cdef void serve(engine_t *e) noexcept nogil:
    """Waiters in the order in which they came; one that still has too few lets others pass."""
    cdef req_t *r = e.note_waits.head
    while r != NULL:
        if satisfy(e, r):
            req_end(e, r, R_OK)
            r = e.note_waits.head       # the list may be another one now
        else:
            r = r.next


cdef void start_wait(engine_t *e, req_t *r) noexcept nogil:
    r.kind = K_NOTE
    r.state = S_QUEUED
    push(&e.note_waits, r)
    serve(e)
    if r.state == S_DONE:
        return
    if r.peer < 0:
        r.source = to_tell(e)
    if r.source >= 0 or (r.peer >= 0 and not reach(e, &e.peers[r.peer])):
        unlink(&e.note_waits, r)
        req_end(e, r, R_BROKEN)


cdef void on_noted(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    p.lane.notes_acked = h.size
    mark_dirty(e, p)
