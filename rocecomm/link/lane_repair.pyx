# cython: language_level=3
"""A lane's completions, and how it goes on after a request has failed.

    here (out)                                 the peer (inward)
    a request fails, those behind are flushed  its queue pair is in error
    empty: RESET, INIT  ----LANE_RESET-------> RESET, INIT, RTR at the new packet number
    RTR, RTS; all that    <---LANE_READY------
    was not carried out is posted again

Both messages travel on the message queue pair, which is in order and does not break, so
neither can be lost or late; the epoch in them is a second check. Each direction of a pair of
ranks has its own queue pairs and its own handshake: both may be under way at once.
"""
from libc.string cimport memset
from rocecomm.link.core cimport (
    L_DEAD, L_DRAINING, L_UP, L_WAITING, NO_SLOT, P_SELF, R_ONE, engine_t, lane_t, list_t, lsqe_t,
    mark_dirty, peer_t, rc_now, req_t, uint32_t, uint64_t, unlink)
from rocecomm.link.one cimport O_ADD
from rocecomm.link.lane cimport end_request, take_back, take_entry
from rocecomm.link.lane_post cimport lose_lane
from rocecomm.link.peer cimport queue_ctl
from rocecomm.link.wire cimport LANE_READY, LANE_RESET, rc_header
from rocecomm.verbs.libibverbs cimport (
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_SUCCESS, ibv_qp, ibv_qp_attr, ibv_wc)

cdef enum:
    # causes beyond completion statuses (failure.lost_peer)
    MODIFY_FAILED = -4


# ------------------------------------------------------------------------ queue pairs

cdef int to_init(engine_t *e, lane_t *l, ibv_qp *qp, bint reset) noexcept nogil:
    cdef ibv_qp_attr a
    cdef int rc
    if reset:
        memset(&a, 0, sizeof(a))
        a.qp_state = IBV_QPS_RESET
        rc = e.ops.modify_qp(qp, &a, IBV_QP_STATE)
        if rc != 0:
            return rc
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_INIT
    a.port_num = l.port
    a.qp_access_flags = l.access if qp == l.inward else 0
    return e.ops.modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT
                           | IBV_QP_ACCESS_FLAGS)


cdef int to_rtr(engine_t *e, lane_t *l, ibv_qp *qp, uint32_t psn) noexcept nogil:
    cdef ibv_qp_attr a
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_RTR
    a.ah_attr = l.ah
    a.path_mtu = l.path_mtu
    a.dest_qp_num = l.dest_inward if qp == l.inward else l.dest_out
    a.rq_psn = psn
    a.max_dest_rd_atomic = l.serves if qp == l.inward else 1
    a.min_rnr_timer = 1
    return e.ops.modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
                           | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)


cdef int to_rts(engine_t *e, lane_t *l) noexcept nogil:
    """`out` from INIT to ready. The peer's end never sends requests, so its first packet number
    does not matter."""
    cdef ibv_qp_attr a
    cdef int rc = to_rtr(e, l, l.out, 0)
    if rc != 0:
        return rc
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_RTS
    a.sq_psn = l.psn
    a.timeout = l.timeout
    a.retry_cnt = l.retry
    a.rnr_retry = 7
    a.max_rd_atomic = l.reads
    return e.ops.modify_qp(l.out, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT
                           | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)


cdef int connect_lane(engine_t *e, peer_t *p, uint32_t psn) noexcept nogil:
    """Connects both queue pairs for the first time; `psn`: first packet of the peer's. errno or 0."""
    cdef lane_t *l = &p.lane
    cdef int rc = to_init(e, l, l.inward, False)
    if rc == 0:
        rc = to_rtr(e, l, l.inward, psn)
    if rc == 0:
        rc = to_init(e, l, l.out, False)
    if rc == 0:
        rc = to_rts(e, l)
    if rc == 0:
        l.state = L_UP
    return rc


# ------------------------------------------------------------------------ completions

cdef inline bint fails_alone(int status) noexcept nogil:
    """Whether the peer (or this device) refused one request: the connection itself is sound."""
    return (status == IBV_WC_REM_ACCESS_ERR or status == IBV_WC_REM_INV_REQ_ERR
            or status == IBV_WC_REM_OP_ERR or status == IBV_WC_LOC_PROT_ERR
            or status == IBV_WC_LOC_LEN_ERR or status == IBV_WC_LOC_ACCESS_ERR
            or status == IBV_WC_LOC_QP_OP_ERR)


cdef inline bint refused_there(int status) noexcept nogil:
    """The peer's answer: it carried out nothing from this request on. After a local error those
    behind may have been on their way already."""
    return (status == IBV_WC_REM_ACCESS_ERR or status == IBV_WC_REM_INV_REQ_ERR
            or status == IBV_WC_REM_OP_ERR)


cdef void on_lane_sent(engine_t *e, ibv_wc *wc) noexcept nogil:
    """A completion of some lane's `out`."""
    cdef uint32_t rank = <uint32_t>(wc.wr_id >> 32) & 0x7FFFFFFF
    cdef uint32_t at = <uint32_t>wc.wr_id
    cdef peer_t *p
    cdef lane_t *l
    cdef lsqe_t *entry
    cdef ibv_qp_attr a
    if rank >= <uint32_t>e.size:
        return
    p = &e.peers[rank]
    l = &p.lane
    if at - l.tail >= l.head - l.tail:
        return                          # an entry that was taken back before
    if wc.status == IBV_WC_SUCCESS:
        take_back(e, p, at)
        return
    # what is before the first that failed was carried out
    while l.tail != at:
        take_entry(e, p, l.state == L_UP)
    entry = &l.sq[at & (l.depth - 1)]
    if l.state == L_UP and entry.req != NULL:
        entry.req.one.status = wc.status
        entry.req.one.vendor = wc.vendor_err
        entry.req.one.nbytes = entry.length
        if fails_alone(wc.status) or p.state == P_SELF:
            entry.req.one.failed = True
            l.state = L_DRAINING
            l.doubtful = not refused_there(wc.status)
            memset(&a, 0, sizeof(a))
            a.qp_state = IBV_QPS_ERR    # it is, on most devices
            e.ops.modify_qp(l.out, &a, IBV_QP_STATE)
        else:
            lose_lane(e, p, wc.status, 32 + entry.req.one.op, wc.vendor_err, 0, entry.length)
    take_entry(e, p, False)
    if l.state == L_DRAINING and l.tail == l.head:
        repair(e, p)


# ----------------------------------------------------------------------------- repair

cdef void rewind(engine_t *e, peer_t *p) noexcept nogil:
    """Nothing is in flight: what was posted and not carried out is pending again, in its order."""
    cdef lane_t *l = &p.lane
    cdef list_t all = l.flying
    cdef req_t *r
    cdef req_t *after
    if all.tail != NULL:                # all of `flying`, then `pending`
        all.tail.next = l.pending.head
        if l.pending.head != NULL:
            l.pending.head.prev = all.tail
            all.tail = l.pending.tail
        all.n += l.pending.n
        l.pending = all
        memset(&l.flying, 0, sizeof(list_t))
    r = l.pending.head
    while r != NULL:
        after = r.next
        if l.doubtful and r.one.finished and (r.one.op >= O_ADD or r.one.notify):
            r.one.failed = r.one.doubtful = True
            unlink(&l.pending, r)
            end_request(e, p, r, R_ONE)
        else:
            r.one.at = r.one.done
            r.one.finished = False
        r = after


cdef void repair(engine_t *e, peer_t *p) noexcept nogil:
    cdef lane_t *l = &p.lane
    cdef int rc
    rewind(e, p)
    rc = to_init(e, l, l.out, True)
    l.signalled = l.tail
    l.epoch += 1
    # late packets of the old connection do not fit
    l.psn = (l.psn + 0x400000 + (<uint32_t>rc_now() & 0xFFFF)) & 0xFFFFFF
    l.state = L_WAITING
    e.lane_repairs += 1
    if rc == 0 and p.state == P_SELF:
        rc = serve_anew(e, l, l.psn)
        if rc == 0:
            rc = go_on(e, p)
    elif rc == 0:
        queue_ctl(e, p, LANE_RESET, l.epoch, 0, l.psn)
    if rc != 0:
        lose_lane(e, p, MODIFY_FAILED, -1, 0, rc, 0)


cdef int serve_anew(engine_t *e, lane_t *l, uint32_t psn) noexcept nogil:
    cdef int rc = to_init(e, l, l.inward, True)
    return to_rtr(e, l, l.inward, psn) if rc == 0 else rc


cdef int go_on(engine_t *e, peer_t *p) noexcept nogil:
    cdef int rc = to_rts(e, &p.lane)
    if rc == 0:
        p.lane.state = L_UP
        mark_dirty(e, p)
    return rc


cdef void on_lane_reset(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """The peer's requests begin anew. Its notifications that had arrived were handled: their
    completions came before this message's."""
    cdef lane_t *l = &p.lane
    cdef int rc
    if l.state == L_DEAD or h.req != l.served + 1:
        return
    l.served += 1
    rc = serve_anew(e, l, <uint32_t>h.size)
    if rc != 0:
        lose_lane(e, p, MODIFY_FAILED, -1, 0, rc, 0)
    else:
        queue_ctl(e, p, LANE_READY, h.req, 0, 0)


cdef void on_lane_ready(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    cdef lane_t *l = &p.lane
    cdef int rc
    if l.state != L_WAITING or h.req != l.epoch:
        return
    rc = go_on(e, p)
    if rc != 0:
        lose_lane(e, p, MODIFY_FAILED, -1, 0, rc, 0)
