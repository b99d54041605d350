# cython: language_level=3
"""Answers to announcements that need no credit.

A receiver says DONE in a short message, for which it needs a credit of the sender. A sender that
computes gives none back, and the receiver may well be outside any call when credits come:
then nobody would send the answer. So without a credit the answer is an RDMA write of eight
bytes into the cell of the sender's request, and another one to its bell, which it looks at
whenever it polls. Neither needs the sender's CPU.

The cells lie behind the status that peers read, for the first ANSWER_CELLS requests; beyond
that many in flight answers wait for credits.
"""
from libc.string cimport memset
from rocecomm.link.core cimport (
    P_READY, Q_INLINE, R_OK, engine_t, int32_t, peer_t, rc_get64, rc_set64, req_end, req_t,
    sqe_t, uint32_t, uint64_t, unlink)
from rocecomm.verbs.libibverbs cimport (
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, ibv_post_send, ibv_send_wr, ibv_sge)

cdef enum:
    ANSWERED = 0x100        # beside the answer itself, which may be 0


cdef bint put(engine_t *e, peer_t *p, uint64_t at, uint64_t value) noexcept nogil:
    """Writes eight bytes at the peer's. The caller has checked for room."""
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad = NULL
    cdef ibv_sge sge
    cdef uint32_t position = p.sq_head
    cdef sqe_t *entry = &p.sq[position & (p.sq_depth - 1)]
    memset(&wr, 0, sizeof(wr))
    wr.wr_id = <uint64_t>p.rank << 32 | position
    wr.opcode = IBV_WR_RDMA_WRITE
    wr.send_flags = IBV_SEND_INLINE
    wr.sg_list = &sge
    wr.num_sge = 1
    sge.addr = <uint64_t>&value
    sge.length = 8
    sge.lkey = 0
    wr.wr.rdma.remote_addr = at
    wr.wr.rdma.rkey = p.status_rkey
    memset(entry, 0, sizeof(sqe_t))
    entry.type = Q_INLINE
    entry.length = 8
    if position - p.sq_signal >= p.sq_depth // 4:
        wr.send_flags |= IBV_SEND_SIGNALED
        p.sq_signal = position
    p.sq_head = position + 1
    if ibv_post_send(p.qp, &wr, &bad) != 0:
        p.sq_head = position            # the message that is sent instead will say why
        return False
    return True


cdef bint answer_in_place(engine_t *e, peer_t *p, uint64_t req, uint32_t gen,
                          uint64_t answer) noexcept nogil:
    """False: not possible, the answer must go as a message."""
    cdef uint64_t cells = p.status_addr + (1 + e.size) * 64
    if (req >= ANSWER_CELLS or p.state != P_READY or p.max_inline < 8
            or p.sq_depth - (p.sq_head - p.sq_tail) < 2):
        return False
    # the bell behind the cell: a queue pair's writes land in order
    return (put(e, p, cells + 8 + req * 8, <uint64_t>gen << 32 | ANSWERED | answer)
            and put(e, p, cells, 1))


cdef void take_answers(engine_t *e) noexcept nogil:
    """The bell has rung: ends the announced sends whose cells are filled."""
    cdef int32_t i
    cdef req_t *r
    cdef req_t *after
    cdef peer_t *p
    cdef uint64_t cell
    rc_set64(e.bell, 0)                 # first: who rings from now on is seen next time
    for i in range(e.size):
        p = &e.peers[i]
        r = p.announced.head
        while r != NULL:
            after = r.next
            if r.id < ANSWER_CELLS:
                cell = rc_get64(&e.bell[1 + r.id])
                if cell >> 32 == r.gen and cell & ANSWERED:
                    unlink(&p.announced, r)
                    r.got = r.size
                    req_end(e, r, R_OK)
            r = after
