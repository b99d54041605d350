# cython: language_level=3
"""Connecting on first use: from the first request for a peer to its queue pairs.

    here                                            the peer
    a request: JOINING, queue pairs made
    CALLING ---numbers----------------------------> queue pairs made and connected: HEARD
    connected: READY <------numbers, have yours---- (repeated until it knows that we are)
            ---have yours-------------------------> READY

Both sides make one set of queue pairs for each other, ever, so it does not matter who begins, whether both
do, and how often a datagram comes: numbers are taken once, and answered whenever the other side asks.
Nobody sends before it knows that the other's queue pair can receive. That is also known when
a message comes over it (`heard`). While nothing is heard, the numbers go again after a pause that grows.

Datagrams prove nothing about a peer that is silent. Where its process runs on this host /proc tells
whether it has ended; else the operation's timeout is the end. A rank that closes says so (CALL_LEFT) to those
with whom it never was connected, and first which collectives have failed (CALL_FAILED).
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy, memset
from rocecomm.link.call cimport (
    CALL_ANSWER, CALL_FAILED, CALL_HAVE, CALL_LEFT, CALL_NUMBERS, CALL_REFUSED, on_call_sent, rc_call, send_call, take_call)
from rocecomm.link.core cimport (
    L_NONE, L_UP, P_BROKEN, P_JOINING, P_LEFT, P_NONE, P_READY, abort_t, engine_t, group_t, lane_t, lsqe_t, mark_dirty, peer_t,
    rc_now, rc_set8, req_t, sqe_t)
from rocecomm.link.join cimport J_CALLING, J_DONE, J_HEARD, J_NONE, caller_t, join_t
from rocecomm.link.lane_repair cimport connect_lane
from rocecomm.link.peer cimport break_peer, fail_group, leave_peer, queue_abort, repost_slot
from rocecomm.link.wire cimport FLAG_SHORT, EAGER, RC_MAGIC, RC_SHORT, RC_VERSION, header_size, rc_header, sig_t
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC,
    IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_SUCCESS, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_wc)

cdef extern from "<errno.h>" nogil:
    int errno
    int ENOMEM

cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdio.h>
    #include <string.h>
    #include <unistd.h>
    /* Whether the process `pid` that started at `started` (proc_pid_stat(5), field 22) has ended, be it
       that nobody has waited for it yet. Not if that cannot be told. */
    static int rc_process_gone(int pid, unsigned long long started) {
        char text[1024], state, *at;
        unsigned long long when;
        ssize_t n;
        int fd;
        snprintf(text, sizeof(text), "/proc/%d/stat", pid);
        fd = open(text, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return errno == ENOENT;
        n = read(fd, text, sizeof(text) - 1);
        if (n < 0) {
            n = errno == ESRCH ? -1 : 0;
        }
        close(fd);
        if (n <= 0)
            return n < 0;
        text[n] = 0;
        at = strrchr(text, ')');
        if (!at || sscanf(at + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                          &state, &when) != 2)
            return 0;
        return state == 'Z' || state == 'X' || when != started;
    }
    """
    bint rc_process_gone(int pid, unsigned long long started) noexcept nogil

cdef enum:
    # nanoseconds: the first pause between two datagrams and the longest; between two looks at a process
    FIRST_PAUSE = 20000000
    LONGEST_PAUSE = 1000000000
    LOOK_EVERY = 100000000
    WATCH_EVERY = 1000000000
    # causes beyond completion statuses (statuses.py)
    NOT_CONNECTED = -5
    ENDED_BEFORE = -6


# ------------------------------------------------------------------------ queue pairs

cdef ibv_qp *new_qp(engine_t *e, uint32_t depth, uint32_t elements, uint32_t max_inline) noexcept nogil:
    cdef ibv_qp_init_attr a
    memset(&a, 0, sizeof(a))
    a.send_cq = a.recv_cq = e.cq
    a.srq = e.srq
    a.cap.max_send_wr = depth
    a.cap.max_send_sge = elements
    a.cap.max_inline_data = max_inline
    a.qp_type = IBV_QPT_RC
    return e.ops.create_qp(e.pd, &a)


cdef void post_share(engine_t *e, uint32_t n) noexcept nogil:
    """Posts `n` more of the receive slots: there are as many as the grants so far need."""
    cdef caller_t *c = e.caller
    cdef uint32_t i
    for i in range(n):
        if c.posted < e.n_recv:
            c.posted += 1
            repost_slot(e, c.posted - 1)


cdef int make_pairs(engine_t *e, peer_t *p) noexcept nogil:
    """The queue pairs towards a peer: those for messages in INIT, its lane's in RESET. errno or 0."""
    cdef caller_t *c = e.caller
    cdef join_t *j = p.join
    cdef lane_t *l = &p.lane
    cdef ibv_qp_attr a
    cdef int rc
    p.sq = <sqe_t *>calloc(c.depth, sizeof(sqe_t))
    l.sq = <lsqe_t *>calloc(c.lane_depth, sizeof(lsqe_t))
    if p.sq == NULL or l.sq == NULL:
        return ENOMEM
    p.qp = new_qp(e, c.depth, 2, c.max_inline)
    if p.qp == NULL:
        return errno
    l.out = new_qp(e, c.lane_depth, 1, c.lane_inline)
    if l.out == NULL:
        return errno
    l.inward = new_qp(e, 1, 1, 0)
    if l.inward == NULL:
        return errno
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_INIT
    a.port_num = c.port
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
    rc = e.ops.modify_qp(p.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
    if rc != 0:
        return rc
    j.qpn = p.qp.qp_num
    p.max_inline = c.max_inline
    p.sq_depth = c.depth
    p.sq_signal = <uint32_t>0xFFFFFFFF      # none yet
    l.inward_qpn = l.inward.qp_num
    l.port = c.port
    l.depth = c.lane_depth
    l.max_inline = c.lane_inline
    l.access = c.lane_access
    p.grant = e.eager_grant
    c.connections += 1
    post_share(e, c.per_peer)
    return 0


cdef int take_numbers(engine_t *e, peer_t *p, const rc_call *m) noexcept nogil:
    """Connects our queue pairs to the peer's. errno or 0."""
    cdef join_t *j = p.join
    cdef lane_t *l = &p.lane
    cdef ibv_qp_attr a
    cdef int rc
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_RTR
    a.ah_attr = j.attr
    a.path_mtu = j.mtu
    a.dest_qp_num = m.qpn
    a.rq_psn = m.psn
    a.max_dest_rd_atomic = j.serves
    a.min_rnr_timer = 1
    rc = e.ops.modify_qp(p.qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
                         | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
    if rc != 0:
        return rc
    memset(&a, 0, sizeof(a))
    a.qp_state = IBV_QPS_RTS
    a.sq_psn = j.psn
    a.timeout = j.timeout
    a.retry_cnt = j.retry
    a.rnr_retry = 7
    a.max_rd_atomic = j.reads
    rc = e.ops.modify_qp(p.qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT
                         | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
    if rc != 0:
        return rc
    l.dest_out = m.lane_in
    l.dest_inward = m.lane_out
    rc = connect_lane(e, p, m.lane_psn)
    l.state = L_NONE                    # nothing goes out before the peer can receive
    p.eager_credits = m.eager
    p.ctrl_credits = m.ctrl
    return rc


cdef bint begin(engine_t *e, peer_t *p) noexcept nogil:
    """Makes the queue pairs if they are not there; False: the device refused, the peer is lost."""
    cdef int rc
    if p.join.stage != J_NONE:
        return True
    rc_set8(&p.state, P_JOINING)
    rc = make_pairs(e, p)
    if rc != 0:
        break_peer(e, p, NOT_CONNECTED, -1, 0, rc, 0)
        return False
    p.join.stage = J_CALLING
    p.join.pause = FIRST_PAUSE
    return True


cdef void ready(engine_t *e, peer_t *p) noexcept nogil:
    """Both ends can receive: what has waited goes out with the next drain."""
    cdef group_t *g = e.groups
    cdef req_t *r = p.sends.head
    p.join.stage = J_DONE
    p.qpn = p.join.qpn
    p.lane.state = L_UP
    rc_set8(&p.state, P_READY)
    p.credit_due = True                 # sent if anything is owed
    mark_dirty(e, p)
    while r != NULL:                    # they wait for a credit from now on
        r.t0 = rc_now()
        r = r.next
    while g != NULL:                    # it was told of no failure so far
        if g.aborted:
            queue_abort(e, p, g.id)
        g = g.next


# ------------------------------------------------------------------------- datagrams

cdef void call(engine_t *e, peer_t *p, int64_t now) noexcept nogil:
    cdef join_t *j = p.join
    send_call(e, p, CALL_NUMBERS, CALL_ANSWER | CALL_HAVE if j.stage == J_HEARD else CALL_ANSWER, NULL)
    j.again_at = now + j.pause
    j.pause = min(2 * j.pause, <int64_t>LONGEST_PAUSE)


cdef bint has_ended(engine_t *e, peer_t *p, int64_t now) noexcept nogil:
    """Looks whether the peer's process has ended; if so the peer is lost, at the second look: what it
    said before it ended has come by then."""
    cdef join_t *j = p.join
    j.looked_at = now
    if j.pid == 0 or not rc_process_gone(j.pid, j.started):
        return False
    if not j.ended:
        j.ended = True
        return False
    break_peer(e, p, ENDED_BEFORE, -1, 0, 0, 0)
    return True


cdef void join_turn(engine_t *e, peer_t *p) noexcept nogil:
    """A peer that somebody needs: the next datagram, when its time has come."""
    cdef join_t *j = p.join
    cdef int64_t now = rc_now()
    if not begin(e, p):
        return
    if now >= j.again_at:
        call(e, p, now)
    if now - j.looked_at >= LOOK_EVERY and has_ended(e, p, now):
        return
    mark_dirty(e, p)


cdef void watch(engine_t *e, int64_t now) noexcept nogil:
    """While something may come from anybody: peers that nobody was connected to may have ended."""
    cdef int32_t i
    if e.caller == NULL or now - e.caller.watched_at < WATCH_EVERY:
        return
    e.caller.watched_at = now
    if e.any_posted.head == NULL and e.probes.head == NULL and e.note_waits.head == NULL:
        return
    for i in range(e.size):
        if e.peers[i].state == P_NONE:
            has_ended(e, &e.peers[i], now)


cdef void on_call(engine_t *e, ibv_wc *wc) noexcept nogil:
    """A datagram has come."""
    cdef rc_call m
    cdef abort_t why
    cdef peer_t *p = take_call(e, wc, &m)
    cdef join_t *j
    cdef int rc
    if p == NULL:
        return
    j = p.join
    if m.kind == CALL_LEFT:
        leave_peer(e, p)
        return
    if m.kind == CALL_FAILED:
        memset(&why, 0, sizeof(why))
        memcpy(&why.sig_a, m.sig_a, sizeof(sig_t))
        memcpy(&why.sig_b, m.sig_b, sizeof(sig_t))
        why.rank_a, why.rank_b = m.rank_a, m.rank_b
        memcpy(why.text, m.text, sizeof(m.text) - 1)
        fail_group(e, m.group, m.cls, m.who, &why, True)
        return
    if m.kind == CALL_REFUSED and p.state == P_JOINING:
        break_peer(e, p, IBV_WC_RETRY_EXC_ERR, 16, 0, 0, 0)
        return
    if m.kind != CALL_NUMBERS:
        return
    if p.state == P_BROKEN:
        send_call(e, p, CALL_REFUSED, 0, NULL)
        return
    if p.state == P_READY:
        if m.flags & CALL_ANSWER:       # it has not heard our answer
            send_call(e, p, CALL_NUMBERS, CALL_HAVE, NULL)
        return
    if e.closing and p.state != P_JOINING:
        send_call(e, p, CALL_LEFT, 0, NULL)
        return
    if (p.state != P_NONE and p.state != P_JOINING) or not begin(e, p):
        return
    if j.stage == J_CALLING:
        rc = take_numbers(e, p, &m)
        if rc != 0:
            break_peer(e, p, NOT_CONNECTED, -1, 0, rc, 0)
            return
        j.stage = J_HEARD
        j.pause = FIRST_PAUSE
    if m.flags & CALL_HAVE:
        ready(e, p)
        if m.flags & CALL_ANSWER:
            send_call(e, p, CALL_NUMBERS, CALL_HAVE, NULL)
    else:
        call(e, p, rc_now())
        mark_dirty(e, p)


cdef void on_call_end(engine_t *e, ibv_wc *wc) noexcept nogil:
    """A datagram has left. If the device could not send it, nobody can be connected any more."""
    cdef int32_t i
    if on_call_sent(e, wc) == IBV_WC_SUCCESS:
        return
    for i in range(e.size):
        if e.peers[i].state == P_JOINING:
            break_peer(e, &e.peers[i], wc.status, 16, wc.vendor_err, 0, sizeof(rc_call))


cdef bint heard(engine_t *e, const rc_header *h, ibv_wc *wc) noexcept nogil:
    """Whether a message came over a connection of which we did not know yet that it is ready: its
    sender does, so it is."""
    cdef peer_t *p
    if (e.caller == NULL or wc.byte_len < RC_SHORT or h.magic != RC_MAGIC or h.version != RC_VERSION
            or wc.byte_len < header_size(h) or (h.flags & FLAG_SHORT and h.kind != EAGER)
            or h.instance != e.instance or h.source >= <uint32_t>e.size):
        return False
    p = &e.peers[h.source]
    if p.state != P_JOINING or p.join.stage != J_HEARD or p.join.qpn != wc.qp_num:
        return False
    ready(e, p)
    return p.state == P_READY


# ------------------------------------------------------------------------------- end

cdef bint say_left(engine_t *e) noexcept nogil:
    """Tells those who are not connected to us that they need not call, and which groups have failed
    (the connected ones were told then). False: there is no room for all at once, the rest is for
    the next time."""
    cdef int32_t i
    cdef peer_t *p
    cdef group_t *g
    if e.caller == NULL:
        return True
    for i in range(e.size):
        p = &e.peers[i]
        if p.state != P_NONE and p.state != P_JOINING:
            continue
        g = e.groups
        while g != NULL:
            if g.aborted and not send_call(e, p, CALL_FAILED, 0, g):
                return p.join.ah == NULL        # then it is not for want of room
            g = g.next
        if not send_call(e, p, CALL_LEFT, 0, NULL):
            return p.join.ah == NULL
        rc_set8(&p.state, P_LEFT)       # we call it no more, either
    return True


cdef void end_caller(engine_t *e) noexcept nogil:
    """Gives queue pairs and address handles back. What a stopped peer holds stays."""
    cdef int32_t i
    cdef peer_t *p
    cdef lane_t *l
    if e.caller == NULL:
        return
    for i in range(e.size):
        p = &e.peers[i]
        if p.join == NULL:
            continue
        l = &p.lane
        if p.qp != NULL:
            e.ops.destroy_qp(p.qp)
        if l.out != NULL:
            e.ops.destroy_qp(l.out)
        if l.inward != NULL:
            e.ops.destroy_qp(l.inward)
        if p.join.ah != NULL:
            e.ops.destroy_ah(p.join.ah)
        p.qp = l.out = l.inward = NULL
        p.join.ah = NULL
