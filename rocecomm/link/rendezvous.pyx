# cython: language_level=3
"""How one message travels: eager through a slot, or announced and pulled by the receiver.

    sender                          receiver
    QUEUED --EAGER-----------------> slot, copied out when matched
      |
      +----ANNOUNCE----------------> matched: PULLING, RDMA reads into the user's array
    ANNOUNCED <------------DONE----- all reads done (or refused, with the reason)
      +----WITHDRAW----------------> not matched yet: forgotten
           <----------WITHDRAWN----- the buffer is free
"""
from libc.string cimport memcpy, memset
from rocecomm.link.anyone cimport to_tell
from rocecomm.link.core cimport (
    F_AGAIN, F_ANNOUNCE, F_BLOCKING, F_COLL, F_IN_PULLS, F_WAITS, F_WITHDRAWING, P_READY, Q_READ,
    R_ABORTED, R_BROKEN, R_CANCELLED, R_CYCLE, R_DTYPE, R_NOMEM, R_OK, R_REGISTER, R_SIGNATURE, R_TRUNCATED,
    S_ANNOUNCED, S_PULLING, S_QUEUED, SIG_RING, abort_t, engine_t, find_group, group_t, mark_dirty, peer_t, push,
    push_front, rc_now, rc_set8, reach, req_end, req_find, req_register, req_t, slot_addr,
    uint32_t, unlink, unx_free, unx_new, unx_t)
from rocecomm.link.cycle cimport ask_cycle, forget
from rocecomm.link.match cimport (
    drop_unexpected, match_posted, match_unexpected, post_receive, repost_receive, store_unexpected)
from rocecomm.link.peer cimport (
    ctrl_credit, eager_credit, fail_group, free_slot, post_message, post_wr, queue_ctl, sq_room)
from rocecomm.link.pieces cimport gather, offer, scatter
from rocecomm.link.pull cimport copy_self, learn, post_gathered, post_table, pull_pieces, unlearn
from rocecomm.link.store cimport store_get
from rocecomm.link.wire cimport (
    ANNOUNCE, ANSWER_FAILED, ANSWER_MISMATCH, ANSWER_OK, ANSWER_TRUNCATED,
    DONE, EAGER, FLAG_BLOCKING, FLAG_LIST, FLAG_SHORT, WITHDRAW, WITHDRAWN, dtypes_agree, header_size, rc_header,
    same_sig, sig_of, sig_t)
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_READ, ibv_send_wr, ibv_sge)

cdef enum:
    # A small blocking send waits this many times longer for a credit before it is announced.
    PATIENCE = 10
    # A long read is posted in pieces, so that other traffic moves in between.
    PIECE = 16 << 20
    # What may be posted while the GIL is held: soft0 copies within the post.
    LIGHT = 64 << 10


cdef void fill_message(req_t *r, rc_header *h) noexcept nogil:
    """The part of the header that says which message this is."""
    memset(h, 0, sizeof(rc_header))
    h.tag = r.tag
    h.size = r.size
    h.dtype = r.dtype
    h.group = r.group
    if r.flags & F_COLL:
        h.coll_seq = r.sig.coll_seq
        h.count = r.sig.count
        h.coll_dtype = r.sig.dtype
        h.op = r.sig.op
        h.reduction = r.sig.reduction
        h.root = r.sig.root


# ----------------------------------------------------------------------- sending side

cdef inline bint group_failed(engine_t *e, req_t *r) noexcept nogil:
    cdef group_t *g
    if not r.flags & F_COLL:
        return False
    g = find_group(e, r.group, False)
    return g != NULL and g.aborted


cdef int send_eager(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    cdef rc_header h
    cdef int rc
    fill_message(r, &h)
    h.kind = EAGER
    h.flags = 0 if r.flags & F_COLL or r.pieces != NULL else FLAG_SHORT
    h.seq = p.send_seq
    if r.pieces != NULL:
        rc = post_gathered(e, p, &h, r)
    else:
        rc = post_message(e, p, &h, r.buf, r.size)
    if rc == 1:
        p.send_seq += 1
        p.eager_sent += 1
    return rc


cdef int announce(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    """1: announced, 0: no room, -1: broken, -2: the buffer cannot be registered."""
    cdef rc_header h
    cdef int rc
    if not sq_room(p):
        return 0
    if r.pieces != NULL:
        if not offer(e.ops, e.pd, r.pieces, &r.err):
            return -2
    elif not req_register(e, r, IBV_ACCESS_REMOTE_READ):
        return -2
    fill_message(r, &h)
    h.kind = ANNOUNCE
    h.seq = p.send_seq
    h.req = r.id
    h.gen = r.gen
    h.addr = <uint64_t>r.buf
    h.rkey = r.rkey
    h.flags = FLAG_BLOCKING if r.flags & F_BLOCKING and r.size > e.eager_limit else 0
    if r.pieces != NULL:
        rc = post_table(e, p, &h, r)
    else:
        rc = post_message(e, p, &h, NULL, 0)
    if rc == 1:
        p.send_seq += 1
        p.ctrl_sent += 1
        if r.size <= e.eager_limit:
            e.announced_small += 1
    return rc


cdef int try_send(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    """1: under way, 0: has to wait, -1: broken, -2: not registered."""
    cdef int rc
    if p.fences:
        return 0                        # writes that were started before it go first
    if not r.flags & F_ANNOUNCE:
        if eager_credit(p):
            return send_eager(e, p, r)
        if rc_now() - r.t0 < (e.linger * PATIENCE if r.flags & F_WAITS else e.linger):
            return 0
        # The receiver stores as much as it may: it gets told, and pulls when it wants to.
        # Messages behind this one can still be matched.
        if not ctrl_credit(p):
            return 0
        r.flags |= F_ANNOUNCE
        rc = announce(e, p, r)
        if rc == 0 or (rc == -2 and r.flags & F_WAITS):
            r.flags &= ~<uint32_t>F_ANNOUNCE        # a credit may come first
            r.t0 = rc_now()
            return 0
        return rc
    if not ctrl_credit(p):
        return 0
    return announce(e, p, r)


cdef inline void sent(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    e.bytes_sent += r.size
    e.messages_sent += 1
    if r.flags & F_ANNOUNCE:
        rc_set8(&r.state, S_ANNOUNCED)
        push(&p.announced, r)
        if r.size <= e.eager_limit:
            if r.flags & F_WAITS:
                p.small_out = True
                mark_dirty(e, p)
        elif r.flags & F_BLOCKING:
            e.blocked_id = r.id
            e.blocked_gen = r.gen
            ask_cycle(e)
    else:
        r.got = r.size
        req_end(e, r, R_OK)


cdef void end_lost(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    """Ends a request that comes when its peer is gone already. A collective ends with it on all
    ranks: those that do not exchange anything with the lost one would wait for this rank."""
    if r.flags & F_COLL:
        fail_group(e, r.group, 3 if p.left else 2, p.rank, NULL, True)
    req_end(e, r, R_BROKEN)


cdef void start_send(engine_t *e, peer_t *p, req_t *r) noexcept nogil:
    """Sends, or queues behind what waits already. Ends `r` at once if the peer is gone."""
    cdef int rc = 0
    if group_failed(e, r):
        req_end(e, r, R_ABORTED)
        return
    r.state = S_QUEUED
    if r.size > e.eager_limit:
        r.flags |= F_ANNOUNCE
    if r.peer == e.rank:
        send_self(e, r)
        return
    if p.state != P_READY:
        if reach(e, p):                 # it goes out once the peer is connected
            r.t0 = rc_now()
            push(&p.sends, r)
        else:
            end_lost(e, p, r)
        return
    r.t0 = rc_now() if p.sends.head != NULL or not eager_credit(p) else 0
    if p.sends.head == NULL:
        if r.t0 == 0 and not r.flags & F_ANNOUNCE:
            rc = send_eager(e, p, r)
            if rc == 0:
                r.t0 = rc_now()
        else:
            rc = try_send(e, p, r)
    if rc == 1:
        sent(e, p, r)
    elif rc == 0:
        push(&p.sends, r)
        mark_dirty(e, p)
    elif rc == -2:
        req_end(e, r, R_REGISTER)
    else:
        end_lost(e, p, r)


cdef void small_again(engine_t *e, peer_t *p) noexcept nogil:
    """There is a credit: a small blocking send that was announced need not wait for its match.

    It is withdrawn and sent eagerly, so it waits for its receive only while the receiver stores
    as much as it may, and two ranks that send small messages to each other first go on. What its
    caller sent before is ahead of it all the same; afterwards it sends nothing.
    """
    cdef req_t *r = p.announced.head
    p.small_out = False
    while r != NULL:
        if r.flags & F_WAITS and r.size <= e.eager_limit:
            p.small_out = True
            if not r.flags & F_WITHDRAWING:
                r.flags |= F_WITHDRAWING | F_AGAIN
                queue_ctl(e, p, WITHDRAW, r.id, r.gen, 0)
                return                  # one credit; the list may be another one now
        r = r.next


cdef void drain_sends(engine_t *e, peer_t *p) noexcept nogil:
    cdef req_t *r
    cdef int rc
    if p.small_out and eager_credit(p) and p.sends.head == NULL:
        small_again(e, p)
    if p.small_out:
        mark_dirty(e, p)
    while p.sends.head != NULL and p.state == P_READY:
        r = p.sends.head
        rc = try_send(e, p, r)
        if rc == 0:
            mark_dirty(e, p)
            return
        if rc == -1:
            return                      # break_peer has ended the whole list
        unlink(&p.sends, r)
        if rc == 1:
            sent(e, p, r)
        else:
            req_end(e, r, R_REGISTER)


cdef void withdraw(engine_t *e, req_t *r) noexcept nogil:
    """Takes a send back if it has not left, else asks the receiver to forget it."""
    cdef peer_t *p = &e.peers[r.peer]
    cdef bint asked
    if r.peer == e.rank:
        withdraw_self(e, r)
    elif r.state == S_QUEUED:
        unlink(&p.sends, r)
        req_end(e, r, R_CANCELLED)
    elif r.state == S_ANNOUNCED:
        asked = r.flags & F_WITHDRAWING != 0
        r.flags = (r.flags | F_WITHDRAWING) & ~<uint32_t>F_AGAIN
        if not asked:
            queue_ctl(e, p, WITHDRAW, r.id, r.gen, 0)


cdef req_t *announced(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    cdef req_t *r = req_find(e, h.req, h.gen)
    if r == NULL or r.state != S_ANNOUNCED or r.peer != p.rank:
        return NULL
    unlink(&p.announced, r)
    return r


cdef void on_done(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """The receiver has all it wants. A refusal is the receiver's error, not the sender's."""
    cdef req_t *r = announced(e, p, h)
    if r != NULL:
        r.got = r.size
        req_end(e, r, R_OK)


cdef void on_withdrawn(engine_t *e, const rc_header *h) noexcept nogil:
    cdef req_t *r = req_find(e, h.req, h.gen)
    cdef peer_t *p
    if r == NULL or r.state != S_ANNOUNCED:
        return
    p = &e.peers[r.peer]
    unlink(&p.announced, r)
    if not r.flags & F_AGAIN:
        req_end(e, r, R_CANCELLED)
        return
    r.flags &= ~<uint32_t>(F_AGAIN | F_WITHDRAWING | F_ANNOUNCE)
    rc_set8(&r.state, S_QUEUED)
    r.t0 = rc_now()
    e.bytes_sent -= r.size
    e.messages_sent -= 1
    push_front(&p.sends, r)
    mark_dirty(e, p)


# --------------------------------------------------------------------- receiving side

cdef bint disagrees(engine_t *e, const rc_header *h) noexcept nogil:
    """Whether a collective message contradicts what this rank does under that number; if so
    the group has failed now, here and on all ranks."""
    cdef group_t *g
    cdef sig_t *mine
    cdef abort_t why
    if h.coll_seq == 0:
        return False
    g = find_group(e, h.group, False)
    if g == NULL:
        return False
    mine = &g.ring[h.coll_seq % SIG_RING]
    if mine.coll_seq != h.coll_seq or same_sig(mine, h):
        return False
    memset(&why, 0, sizeof(why))
    why.sig_a = mine[0]
    why.rank_a = e.rank
    sig_of(&why.sig_b, h)
    why.rank_b = <int>h.source
    fail_group(e, h.group, 1, -1, &why, True)
    return True


cdef int verdict(req_t *r, const rc_header *h) noexcept nogil:
    """R_OK, or why this message may not go into this receive."""
    r.other_size = h.size
    r.other_dtype = h.dtype
    r.source = <int>h.source
    r.tag = h.tag
    if r.flags & F_COLL and not same_sig(&r.sig, h):
        sig_of(&r.other_sig, h)
        return R_SIGNATURE
    if h.size > r.size:
        return R_TRUNCATED
    if not dtypes_agree(r.dtype, h.dtype) and h.size != 0:
        return R_DTYPE
    return R_OK


cdef void deliver(engine_t *e, peer_t *p, req_t *r, const rc_header *h,
                  const char *payload) noexcept nogil:
    """An eager message reaches its receive: the one copy out of the slot."""
    cdef int status = verdict(r, h)
    if status == R_OK:
        if r.pieces != NULL:
            scatter(r.pieces, payload, h.size)
        elif h.size:
            memcpy(r.buf, payload, h.size)
        r.got = h.size
        e.bytes_received += h.size
        e.messages_received += 1
    req_end(e, r, status)


cdef void deliver_self(engine_t *e, peer_t *p, req_t *to, const rc_header *h, req_t *r) noexcept nogil:
    """The send `r` to oneself reaches its receive."""
    cdef int status
    if to.pieces == NULL and r.pieces == NULL:
        deliver(e, p, to, h, r.buf)
    else:
        status = verdict(to, h)
        if status == R_OK:
            copy_self(to, r)
            to.got = h.size
            e.bytes_received += h.size
            e.messages_received += 1
        req_end(e, to, status)
    r.got = r.size
    req_end(e, r, R_OK)


cdef void accept(engine_t *e, peer_t *p, req_t *r, const rc_header *h, const char *table) noexcept nogil:
    """An announcement reaches its receive: it is going to be pulled, or refused. `table`: what
    came behind the header."""
    r.status = verdict(r, h)
    if p.state != P_READY:
        end_lost(e, p, r)               # it left before we could pull
        return
    rc_set8(&r.state, S_PULLING)
    r.r_addr = h.addr
    r.r_rkey = h.rkey
    r.r_req = h.req
    r.r_gen = h.gen
    r.read_posted = r.read_done = 0
    if ((h.flags & FLAG_LIST or r.pieces != NULL) and r.status == R_OK and h.size != 0
            and not learn(e, r, h, table)):
        r.status = R_REGISTER
    r.flags |= F_IN_PULLS
    push(&p.pulls, r)
    mark_dirty(e, p)


cdef void drain_pulls(engine_t *e, peer_t *p, bint heavy) noexcept nogil:
    """Posts reads, within what both devices allow. `heavy` is false while the GIL is held."""
    cdef ibv_send_wr wr
    cdef ibv_sge sge
    cdef req_t *r
    cdef uint64_t n
    cdef uint64_t size
    while p.pulls.head != NULL and p.state == P_READY:
        r = p.pulls.head
        if r.status != R_OK or r.other_size == 0:
            unlink(&p.pulls, r)
            queue_ctl(e, p, DONE, r.r_req, r.r_gen, ANSWER_OK if r.status == R_OK else
                      ANSWER_TRUNCATED if r.status == R_TRUNCATED else ANSWER_MISMATCH)
            req_end(e, r, r.status)
            continue
        if r.pieces != NULL:
            if not pull_pieces(e, p, r, heavy):
                return
            continue
        n = r.other_size - r.read_posted
        if n > PIECE:
            n = PIECE
        if n > p.max_read:
            n = p.max_read
        if n > LIGHT and not heavy:
            mark_dirty(e, p)
            e.more = True
            return
        if p.reads_out >= p.max_reads or not sq_room(p):
            return                      # a completion marks the peer again
        if r.mr == NULL:
            size = r.size
            r.size = r.other_size       # register what is needed, not all of a large buffer
            if not req_register(e, r, IBV_ACCESS_LOCAL_WRITE):
                r.size = size
                unlink(&p.pulls, r)
                queue_ctl(e, p, DONE, r.r_req, r.r_gen, ANSWER_FAILED)
                req_end(e, r, R_REGISTER)
                continue
            r.size = size
        memset(&wr, 0, sizeof(wr))
        sge.addr = <uint64_t>r.buf + r.read_posted
        sge.length = <uint32_t>n
        sge.lkey = r.lkey
        wr.opcode = IBV_WR_RDMA_READ
        wr.sg_list = &sge
        wr.num_sge = 1
        wr.wr.rdma.remote_addr = r.r_addr + r.read_posted
        wr.wr.rdma.rkey = r.r_rkey
        if r.read_posted == 0:
            e.pulls_started += 1
        if post_wr(e, p, &wr, Q_READ, 0, r.id, <uint32_t>n, True) != 0:
            return
        r.read_posted += n
        r.reads_out += 1
        p.reads_out += 1
        if r.read_posted == r.other_size:
            r.flags &= ~<uint32_t>F_IN_PULLS
            unlink(&p.pulls, r)
            push(&p.reading, r)
        if n > LIGHT and p.pulls.head != NULL:
            mark_dirty(e, p)
            e.more = True
            return


cdef void on_withdraw(engine_t *e, peer_t *p, const rc_header *h) noexcept nogil:
    """The sender gave up. If nothing has been read the message is forgotten and its receive
    waits for the next one; otherwise DONE answers."""
    cdef req_t *r = p.pulls.head
    if forget(e, p, h.req, h.gen):
        queue_ctl(e, p, WITHDRAWN, h.req, h.gen, 0)
        return
    while r != NULL:
        if r.r_req == h.req and r.r_gen == h.gen and r.read_posted == 0:
            unlink(&p.pulls, r)
            r.flags &= ~<uint32_t>F_IN_PULLS
            r.status = R_OK
            r.source = -1
            if r.pieces != NULL:
                unlearn(e, r)
            queue_ctl(e, p, WITHDRAWN, h.req, h.gen, 0)
            start_receive(e, r, True)
            return
        r = r.next


# ------------------------------------------------------------------ stored and to oneself

cdef void start_receive(engine_t *e, req_t *r, bint again) noexcept nogil:
    """Takes the stored message that matches, else waits for one (`again`: in its old place)."""
    cdef peer_t *p = NULL
    cdef unx_t *u
    if group_failed(e, r):
        req_end(e, r, R_ABORTED)
        return
    u = match_unexpected(e, r, &p)
    if u != NULL:
        take_stored(e, p, u, r)
    elif r.peer >= 0 and not reach(e, &e.peers[r.peer]):
        end_lost(e, &e.peers[r.peer], r)
    else:
        if r.peer < 0 and r.group == 0:
            r.source = to_tell(e)
        if r.source >= 0:
            req_end(e, r, R_BROKEN)
        elif again:
            repost_receive(e, r)
        else:
            post_receive(e, r)


cdef void take_stored(engine_t *e, peer_t *p, unx_t *u, req_t *r) noexcept nogil:
    cdef req_t *local = u.local
    if local != NULL:
        unlink(&p.announced, local)
        deliver_self(e, p, r, &u.h, local)
    elif u.h.kind == ANNOUNCE:
        accept(e, p, r, &u.h, u.copy)
    elif u.copy != NULL:
        deliver(e, p, r, &u.h, u.copy)
        e.stored -= u.h.size
    else:
        deliver(e, p, r, &u.h, slot_addr(e, u.slot) + header_size(&u.h))
        p.in_slots -= 1
        free_slot(e, p, u.slot, EAGER)
    unx_free(e, u)


cdef void send_self(engine_t *e, req_t *r) noexcept nogil:
    """A message to oneself: one copy, or two if it is small and nobody waits for it yet."""
    cdef peer_t *p = &e.peers[e.rank]
    cdef rc_header h
    cdef req_t *to
    cdef unx_t *u
    fill_message(r, &h)
    h.kind = EAGER
    h.source = <uint32_t>e.rank
    e.bytes_sent += r.size
    e.messages_sent += 1
    to = match_posted(e, p, &h)
    if to != NULL:
        deliver_self(e, p, to, &h, r)
        return
    u = unx_new(e)
    if u == NULL:
        req_end(e, r, R_NOMEM)
        return
    u.h = h
    if r.size <= e.eager_limit and p.unexpected.n < 4096:
        u.copy = store_get(&e.store, r.size)
        if u.copy == NULL:
            unx_free(e, u)
            req_end(e, r, R_NOMEM)
            return
        if r.pieces != NULL:
            gather(u.copy, r.pieces)
        elif r.size:
            memcpy(u.copy, r.buf, r.size)
        e.stored += r.size
        r.got = r.size
        store_unexpected(e, p, u)
        req_end(e, r, R_OK)
        return
    if r.flags & F_BLOCKING:
        unx_free(e, u)
        req_end(e, r, R_CYCLE)          # nobody else is there to receive it
        return
    u.local = r
    u.h.req = r.id
    u.h.gen = r.gen
    store_unexpected(e, p, u)
    rc_set8(&r.state, S_ANNOUNCED)
    push(&p.announced, r)


cdef void withdraw_self(engine_t *e, req_t *r) noexcept nogil:
    cdef peer_t *p = &e.peers[e.rank]
    cdef unx_t *u = p.unexpected.head
    while u != NULL and u.local != r:
        u = u.next
    if u != NULL:
        drop_unexpected(e, p, u)
        unx_free(e, u)
        unlink(&p.announced, r)
        req_end(e, r, R_CANCELLED)
