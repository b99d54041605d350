# cython: language_level=3
"""Progress: the completion queue is polled, messages are dispatched, waiters wait.

One thread leads: it polls, then yields, then sleeps on the completion channel. The others
wait for its signal, and one of them takes over when it leaves.
"""
from libc.string cimport memcpy, memset
from rocecomm.link.core cimport (
    F_ANNOUNCE, F_COLL, P_BROKEN, P_JOINING, P_LEFT, P_READY, P_SELF, POLL_BATCH, RECYCLE_SOON, S_DONE,
    S_PULLING, TEXT_MAX, WR_CALL, WR_CALL_SENT, WR_LANE, WR_RECV, abort_t, device_failed, engine_t, find_group,
    group_t, int32_t, list_t, mark_dirty, peer_t, poke_worker, pthread_cond_broadcast, pthread_mutex_unlock,
    rc_cond_wait, rc_count, rc_cpu_now, rc_get64, rc_get, rc_let_others, rc_lock, rc_now, rc_set, rc_show, rc_stamp,
    req_t, retry_zombies, slot_addr, tell_loops, uint32_t, uint64_t, unx_free, unx_new, unx_t)
from rocecomm.link.answer cimport take_answers
from rocecomm.link.connect cimport heard, join_turn, on_call, on_call_end, watch
from rocecomm.link.cycle cimport ask_cycle, on_cycle
from rocecomm.link.lane_post cimport drain_lane
from rocecomm.link.lane_repair cimport on_lane_ready, on_lane_reset, on_lane_sent
from rocecomm.link.lend cimport count_payload, on_recall, on_return, reclaim
from rocecomm.link.match cimport match_posted, store_unexpected
from rocecomm.link.notify cimport on_lane_message, on_noted
from rocecomm.link.peer cimport (
    beat, break_peer, ctrl_credit, drain_ctl, fail_group, free_slot, leave_peer, post_slots, queue_ctl, repost_slot, retire)
from rocecomm.link.pull cimport keep_table
from rocecomm.link.rendezvous cimport (
    accept, deliver, disagrees, drain_pulls, drain_sends, on_done, on_withdraw, on_withdrawn)
from rocecomm.link.store cimport store_get
from rocecomm.link.wire cimport (
    ABORT, ANNOUNCE, ANSWER_MISMATCH, CYCLE, CYCLE_YES, DONE, EAGER, FLAG_BLOCKING, FLAG_LIST,
    FLAG_SHORT, GOODBYE, LANE_READY, LANE_RESET, NOTED, RC_MAGIC, RC_SHORT, RC_VERSION, RECALL, RETURN, WITHDRAW,
    WITHDRAWN, header_size, rc_header)
from rocecomm.verbs.libibverbs cimport (
    IBV_WC_RECV, IBV_WC_SUCCESS, ibv_cq, ibv_poll_cq, ibv_req_notify_cq, ibv_wc)

cdef extern from *:
    """
    #include <poll.h>
    #include <sched.h>
    #include <unistd.h>
    """
    struct pollfd:
        int fd
        short events
        short revents
    int c_poll "poll"(pollfd *, unsigned long, int) noexcept nogil
    ssize_t c_read "read"(int, void *, size_t) noexcept nogil
    ssize_t c_write "write"(int, const void *, size_t) noexcept nogil
    short POLLIN

cdef enum:
    # Wake up this often at least: signals that another thread took, the deadline, heartbeats.
    NAP_MS = 100
    # More processes than CPUs: offer the CPU after so few empty polls, for so long after it was seen.
    CROWDED_TURNS = 20
    CROWDED_NS = 20000000

# An empty poll that used this much CPU, in ns, did some work for a peer.
cdef int64_t WORKED = 4000


# ------------------------------------------------------------------------ completions

cdef peer_t *peer_by_qpn(engine_t *e, uint32_t qpn) noexcept nogil:
    cdef int32_t i
    for i in range(e.size):
        if e.peers[i].qp != NULL and e.peers[i].qpn == qpn:
            return &e.peers[i]
    return NULL


cdef void on_message(engine_t *e, ibv_wc *wc, uint32_t slot) noexcept nogil:
    cdef rc_header *h = <rc_header *>slot_addr(e, slot)
    cdef rc_header whole                # of one that came short
    cdef const char *payload
    cdef peer_t *p
    cdef req_t *r
    cdef unx_t *u
    if wc.status != IBV_WC_SUCCESS:
        p = peer_by_qpn(e, wc.qp_num)
        if p == NULL and on_lane_message(e, wc, slot):
            return
        repost_slot(e, slot)
        if p != NULL:
            break_peer(e, p, wc.status, IBV_WC_RECV, wc.vendor_err, 0, e.slot_size)
        return
    if (wc.byte_len < RC_SHORT or h.magic != RC_MAGIC or h.version != RC_VERSION
            or wc.byte_len < header_size(h) or (h.flags & FLAG_SHORT and h.kind != EAGER)
            or h.instance != e.instance or h.source >= <uint32_t>e.size
            or e.peers[h.source].qp == NULL or e.peers[h.source].qpn != wc.qp_num):
        if on_lane_message(e, wc, slot):    # a notification: the slot holds nothing
            return
        if not heard(e, h, wc):
            e.strangers += 1
            repost_slot(e, slot)
            return
    payload = <const char *>h + header_size(h)
    if h.flags & FLAG_SHORT:
        memcpy(&whole, h, RC_SHORT)
        memset(<char *>&whole + RC_SHORT, 0, sizeof(rc_header) - RC_SHORT)
        whole.size = wc.byte_len - RC_SHORT
        h = &whole
    p = &e.peers[h.source]
    p.eager_acked = h.eager_back
    p.ctrl_acked = h.ctrl_back
    if p.sends.head != NULL or p.ctl_head != NULL:
        mark_dirty(e, p)
    if h.kind == EAGER or h.kind == ANNOUNCE:
        if h.seq != p.recv_seq or (h.kind == EAGER and
                                   h.size + header_size(h) != wc.byte_len):
            e.strangers += 1
            repost_slot(e, slot)
            break_peer(e, p, -2, IBV_WC_RECV, 0, 0, h.size)
            return
        p.recv_seq += 1
        if h.kind == EAGER:
            count_payload(e, p)
        if h.coll_seq != 0 and disagrees(e, h):
            if h.kind == ANNOUNCE:
                queue_ctl(e, p, DONE, h.req, h.gen, ANSWER_MISMATCH)
            free_slot(e, p, slot, h.kind)
            return
        r = match_posted(e, p, h)
        if r != NULL:
            if h.kind == EAGER:
                deliver(e, p, r, h, payload)
            else:
                accept(e, p, r, h, payload)
            free_slot(e, p, slot, h.kind)
            return
        u = unx_new(e)
        if u != NULL and h.flags & FLAG_LIST and not keep_table(e, u, h):
            unx_free(e, u)
            u = NULL
        if u == NULL:
            free_slot(e, p, slot, h.kind)
            break_peer(e, p, -1, -1, 0, 12, h.size)     # ENOMEM
            return
        u.h = h[0]
        store_unexpected(e, p, u)
        if u.h.kind == ANNOUNCE:        # `h` is the device's again once its slot is free
            if u.h.flags & FLAG_BLOCKING:
                ask_cycle(e)
            free_slot(e, p, slot, ANNOUNCE)
        elif p.in_slots >= p.grant // 2 and e.stored + h.size <= e.stored_limit:
            u.copy = store_get(&e.store, h.size)
            if u.copy != NULL:
                memcpy(u.copy, payload, h.size)
                e.stored += h.size
                free_slot(e, p, slot, EAGER)
        if u.h.kind == EAGER and u.copy == NULL:
            u.slot = slot               # stays there until it is matched: its sender feels it
            p.in_slots += 1
        return
    if h.kind == DONE:
        on_done(e, p, h)
    elif h.kind == WITHDRAW:
        on_withdraw(e, p, h)
    elif h.kind == WITHDRAWN:
        on_withdrawn(e, h)
    elif h.kind == ABORT:
        on_abort(e, h)
    elif h.kind == CYCLE or h.kind == CYCLE_YES:
        on_cycle(e, p, h)
    elif h.kind == RECALL:
        queue_ctl(e, p, RETURN, 0, 0, on_recall(p, h.size))
    elif h.kind == RETURN:
        on_return(e, p, h.size)
    elif h.kind == LANE_RESET:
        on_lane_reset(e, p, h)
    elif h.kind == LANE_READY:
        on_lane_ready(e, p, h)
    elif h.kind == NOTED:
        on_noted(e, p, h)
    elif h.kind == GOODBYE:
        leave_peer(e, p)
    free_slot(e, p, slot, h.kind)


cdef void on_abort(engine_t *e, rc_header *h) noexcept nogil:
    cdef abort_t why
    cdef size_t n = h.size
    memset(&why, 0, sizeof(why))
    memcpy(&why, <char *>h + sizeof(rc_header), n if n < sizeof(why) else sizeof(why))
    why.text[TEXT_MAX - 1] = 0
    # Passed on once: then a rank that closes next has said why before it says goodbye.
    fail_group(e, h.group, <int>h.req, <int32_t>h.root, &why, True)


cdef void on_sent(engine_t *e, ibv_wc *wc) noexcept nogil:
    cdef uint32_t rank = <uint32_t>(wc.wr_id >> 32)
    cdef uint32_t at = <uint32_t>wc.wr_id
    cdef peer_t *p
    cdef uint32_t length
    if rank >= <uint32_t>e.size:
        if rank & <uint32_t>WR_LANE:
            on_lane_sent(e, wc)
        elif rank == <uint32_t>WR_CALL:
            on_call(e, wc)
        elif rank == <uint32_t>WR_CALL_SENT:
            on_call_end(e, wc)
        return
    p = &e.peers[rank]
    if wc.status != IBV_WC_SUCCESS:
        length = p.sq[at & (p.sq_depth - 1)].length
        # the type tells the operation; wc.opcode is not defined on errors
        break_peer(e, p, wc.status, 16 + p.sq[at & (p.sq_depth - 1)].type, wc.vendor_err, 0, length)
    retire(e, p, at, wc.status == IBV_WC_SUCCESS)


cdef void drain(engine_t *e, bint heavy) noexcept nogil:
    """Lets every peer post what it has waiting."""
    cdef peer_t *p = e.dirty
    cdef peer_t *after
    e.dirty = NULL
    e.more = False
    while p != NULL:
        after = p.next_dirty
        p.dirty = False
        if p.state == P_READY:
            drain_ctl(e, p)
            drain_sends(e, p)
            drain_pulls(e, p, heavy)
            drain_lane(e, p, heavy)
        elif p.state == P_SELF:
            drain_lane(e, p, heavy)
        elif p.state == P_JOINING:
            join_turn(e, p)
        elif p.state == P_LEFT or p.state == P_BROKEN:
            reclaim(e, p)
        p = after


cdef int poll_once(engine_t *e, bint heavy) noexcept nogil:
    """Handles what has completed, then posts what can be posted. With the mutex held.

    Reads are posted only when the queue is empty: a WITHDRAW behind an announcement is seen
    before anything is read. Returns how many completions were handled.
    """
    cdef int n, i
    cdef int total = 0
    while True:
        n = ibv_poll_cq(e.cq, POLL_BATCH, e.wc)
        if n < 0:
            device_failed(e, 5, "ibv_poll_cq")      # EIO: overrun or a dead device
            return total
        for i in range(n):
            if <uint32_t>(e.wc[i].wr_id >> 32) == <uint32_t>WR_RECV:
                on_message(e, &e.wc[i], <uint32_t>e.wc[i].wr_id)
            else:
                on_sent(e, &e.wc[i])
        total += n
        if n < POLL_BATCH or total >= 8 * POLL_BATCH:
            break
    if rc_get64(e.bell):
        take_answers(e)
        total += 1
    if e.dirty != NULL and n < POLL_BATCH:
        drain(e, heavy)
    if total == 0 and e.n_recycle >= RECYCLE_SOON:
        post_slots(e)                   # not while somebody waits for the answer to a message
    return total


# ---------------------------------------------------------------------------- waiting

cdef bint all_done(engine_t *e, req_t **reqs, int n, bint any_) noexcept nogil:
    """Whether the wait is over: all ended (or one, with `any_`), or a collective failed."""
    cdef int i
    cdef group_t *g
    for i in range(n):
        if reqs[i].state == S_DONE:
            if any_:
                return True
        else:
            # what is being read is waited for: nothing may land in the buffer later
            if reqs[i].flags & F_COLL and reqs[i].state != S_PULLING:
                g = find_group(e, reqs[i].group, False)
                if g != NULL and g.aborted:
                    return True
            if not any_:
                return False
    return not any_


cdef void wake(engine_t *e) noexcept nogil:
    """Tells everybody who waits to look again. With the mutex held."""
    cdef uint64_t one = 1
    if e.followers:
        pthread_cond_broadcast(&e.cond)
    if e.asleep and e.wake_fd >= 0:
        c_write(e.wake_fd, &one, 8)
    if e.worker_asleep and (e.dirty != NULL or e.closing):
        poke_worker(e)                  # what waits for a credit or a moment is now its business
    if e.closing:
        tell_loops(e)


cdef void heartbeats(engine_t *e, int64_t now) noexcept nogil:
    """To every peer that something here waits for."""
    cdef int32_t i
    cdef peer_t *p
    for i in range(e.size):
        p = &e.peers[i]
        if p.state != P_READY or now - p.beat_at < (e.beat_near if p.near else e.beat_every):
            continue
        if (p.posted.head != NULL or p.sends.head != NULL or p.announced.head != NULL
                or p.reading.head != NULL or p.pulls.head != NULL or e.any_posted.head != NULL
                or p.lane.pending.head != NULL or p.lane.flying.head != NULL
                or e.note_waits.head != NULL or e.probes.head != NULL):
            beat(e, p, True)
    watch(e, now)
    if e.zombies.head != NULL:
        retry_zombies(e)


cdef bint lingers(engine_t *e) noexcept nogil:
    """Whether a small message waits for a credit and will be announced after a while."""
    cdef peer_t *p = e.dirty
    while p != NULL:
        if (p.state == P_READY and p.sends.head != NULL and not p.sends.head.flags & F_ANNOUNCE
                and ctrl_credit(p)):
            return True
        p = p.next_dirty
    return False


cdef int arm(engine_t *e) noexcept nogil:
    """Arms the completion queue: 0, or an errno. With the mutex held."""
    cdef int rc
    # first: who takes the event of this arming says after it that there is none left
    rc_set(<int *>&e.armed, True)
    rc = ibv_req_notify_cq(e.cq, 0)
    if rc != 0:
        rc_set(<int *>&e.armed, False)
    return rc


cdef void take_event(engine_t *e) noexcept nogil:
    """Takes an event from the channel, if another thread has not; never blocks."""
    cdef ibv_cq *cq
    cdef void *context
    if e.ops.get_cq_event(e.cq.channel, &cq, &context) == 0:
        e.ops.ack_cq_events(cq, 1)
        rc_set(<int *>&e.armed, False)


cdef void hand_back(engine_t *e) noexcept nogil:
    """A thread that may have taken events leaves: event loops that sleep on the channel must hear
    of what comes next. With the mutex held."""
    if e.worker_parked:
        poke_worker(e)
    if (e.loops == NULL and not e.worker_asleep) or rc_get(<int *>&e.armed):
        return
    if arm(e) == 0:
        if poll_once(e, False) == 0 and not e.more:
            return
        if e.followers:
            pthread_cond_broadcast(&e.cond)
    if e.worker_asleep:
        poke_worker(e)
    tell_loops(e)


cdef int nap(engine_t *e, int64_t until) noexcept nogil:
    """Sleeps until a completion, a wake-up, `until`, or a short while has passed. Called and left
    with the mutex held."""
    cdef pollfd fds[2]
    cdef int64_t ms
    cdef uint64_t drop
    cdef int rc
    rc = arm(e)
    if rc != 0:
        device_failed(e, rc, "ibv_req_notify_cq")
        return 0
    if poll_once(e, True) > 0 or e.more:    # came in before the arming
        return 0
    ms = (until - rc_now() + 999999) // 1000000
    if ms > NAP_MS:
        ms = NAP_MS
    if ms <= 0:
        return 0
    if ms > 1 and lingers(e):
        ms = 1
    fds[0].fd = e.channel_fd
    fds[0].events = POLLIN
    fds[0].revents = 0
    fds[1].fd = e.wake_fd
    fds[1].events = POLLIN
    fds[1].revents = 0
    rc_set(<int *>&e.asleep, True)
    pthread_mutex_unlock(&e.mutex)
    rc = c_poll(fds, 2, <int>ms)
    if rc > 0 and fds[0].revents & POLLIN:
        take_event(e)
    if rc > 0 and fds[1].revents & POLLIN:
        c_read(e.wake_fd, &drop, 8)
    rc_lock(&e.mutex, &e.want)
    rc_set(<int *>&e.asleep, False)
    if rc == 0 and not rc_get(<int *>&e.armed):
        e.overslept += 1                # and who took it has not woken us
    return rc


cdef int wait_turn(engine_t *e, req_t **reqs, int n, bint any_, int64_t deadline) noexcept nogil:
    """Waits, without the GIL, until `reqs` are done, or it is time to look at signals."""
    cdef int64_t start = rc_now()
    cdef int64_t now = start
    cdef int64_t busy = start           # when something last happened
    cdef int64_t until
    cdef int64_t spin
    cdef int64_t polled                 # when the last turn began
    cdef int64_t cpu
    cdef int64_t seen_cpu = -1          # the CPU time of this thread at `seen`
    cdef int64_t seen = 0
    cdef int turns = 0
    cdef unsigned int loops = 0
    cdef int result = W_SIGNALS
    cdef uint64_t ended
    rc_lock(&e.mutex, &e.want)
    if e.closing:                       # queues and memory are close()'s now
        result = W_DONE if all_done(e, reqs, n, any_) else W_CLOSED
        pthread_mutex_unlock(&e.mutex)
        return result
    rc_count(&e.status.in_call)
    rc_count(&e.status.beats)
    spin = e.spin
    while True:
        if all_done(e, reqs, n, any_):
            result = W_DONE
            break
        if e.closing or e.fatal:
            result = W_CLOSED
            break
        if e.leader:                    # somebody polls for us
            now = rc_now()
            if now >= deadline:
                result = W_TIMEOUT
                break
            if now - start > NAP_MS * 1000000:
                break
            until = start + NAP_MS * 1000000 + 1000000
            if until > deadline:
                until = deadline
            e.followers += 1
            rc_cond_wait(&e.cond, &e.mutex, until)
            e.followers -= 1
            continue
        rc_set(<int *>&e.leader, True)
        ended = e.ended
        polled = rc_now()
        while True:
            if poll_once(e, True) > 0 or e.more:
                if e.ended != ended:
                    ended = e.ended
                    if e.followers:
                        pthread_cond_broadcast(&e.cond)
                    while not any_ and n > 1 and reqs[0].state == S_DONE:
                        reqs += 1           # looked at once, not with every message
                        n -= 1
                    if all_done(e, reqs, n, any_):
                        break
                turns = 0
                busy = 0
                polled = 0
                if e.closing or e.fatal:
                    break
                loops += 1
                if loops & 1023 == 0:
                    heartbeats(e, rc_now())
                rc_let_others(&e.mutex, &e.want, False)     # they may want to post
                if all_done(e, reqs, n, any_):
                    break
                continue
            if all_done(e, reqs, n, any_) or e.closing or e.fatal:
                break
            turns += 1
            now = rc_now()
            if polled != 0 and now - polled > WORKED:
                # Some devices move the bytes of a peer's transfer in an empty poll (soft0's
                # two CPUs, one message). Then sleeping would make it slower. Only CPU time tells
                # that from a thread that did not get the CPU.
                cpu = rc_cpu_now()
                if seen_cpu >= 0 and (cpu - seen_cpu) - (polled - seen) > WORKED:
                    busy = now
                    heartbeats(e, now)
                seen_cpu = cpu
                seen = now
            polled = now
            if rc_let_others(&e.mutex, &e.want, turns > (CROWDED_TURNS if now < e.crowded else e.spin_turns)):
                e.crowded = rc_now() + CROWDED_NS
            if turns & 15:
                continue
            rc_count(&e.status.beats)
            if busy == 0:
                busy = now
            if now >= deadline or now - start > NAP_MS * 1000000:
                break
            if now - busy > spin:
                heartbeats(e, now)
                until = start + NAP_MS * 1000000
                if until > deadline:
                    until = deadline
                if nap(e, until) < 0:
                    break               # EINTR
                turns = 0
                busy = rc_now() - spin // 2     # woken for nothing: sleep again soon
                now = rc_now()
                if now >= deadline or now - start > NAP_MS * 1000000:
                    break
        rc_set(<int *>&e.leader, False)
        if e.followers:
            pthread_cond_broadcast(&e.cond)
        if all_done(e, reqs, n, any_):
            result = W_DONE
        elif e.closing or e.fatal:
            result = W_CLOSED
        elif rc_now() >= deadline:
            result = W_TIMEOUT
        break
    if not e.leader:
        hand_back(e)
    rc_show(&e.status.in_call, e.status.in_call - 1)
    rc_show(&e.status.stamp, rc_stamp())
    pthread_mutex_unlock(&e.mutex)
    return result
