# cython: language_level=3
"""Messages of several buffers: how they travel.

Small ones are gathered into the slot, and scattered out of it. A large one's announcement
carries a table (address, size, key of each of the sender's buffers), up to LIST_INLINE
rows; a longer table stays at the sender, and its place is announced, so the receiver reads
first the table, then the bytes. Every read goes from one buffer into one buffer: it ends
where either side's buffer ends.
"""
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from rocecomm.link.core cimport (
    F_IN_PULLS, Q_READ, R_REGISTER, engine_t, mark_dirty, peer_t, push, req_end, req_t,
    slot_addr, uint32_t, uint64_t, unlink, unx_t)
from rocecomm.link.peer cimport post_message, post_wr, queue_ctl, sq_room
from rocecomm.link.pieces cimport (
    LIST_INLINE, LIST_MAX, gather, piece_register, pieces_free, pieces_new, pieces_t, pieces_unregister,
    row_t, rows_unregister, scatter)
from rocecomm.link.store cimport store_get
from rocecomm.link.wire cimport ANSWER_FAILED, DONE, FLAG_LIST, rc_header
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_WR_RDMA_READ, ibv_send_wr, ibv_sge)

cdef extern from "<errno.h>" nogil:
    int errno
    int ENOMEM
    int EPROTO

cdef enum:
    # as in rendezvous.pyx: a long read is posted in pieces; and not with the GIL held
    PIECE = 8 << 20
    LIGHT = 64 << 10
    STACK = 512


# ----------------------------------------------------------------------- sending side

cdef int post_gathered(engine_t *e, peer_t *p, rc_header *h, req_t *r) noexcept nogil:
    """An eager message of several buffers; answers as post_message."""
    cdef char small[STACK]
    cdef char *place
    if r.size <= STACK and sizeof(rc_header) + r.size <= p.max_inline:
        gather(small, r.pieces)
        return post_message(e, p, h, small, r.size)
    if e.n_send_free == 0 or not sq_room(p):
        return 0
    # straight into the slot that post_message takes next
    place = slot_addr(e, e.send_free[e.n_send_free - 1]) + sizeof(rc_header)
    gather(place, r.pieces)
    return post_message(e, p, h, place, r.size)


cdef int post_table(engine_t *e, peer_t *p, rc_header *h, req_t *r) noexcept nogil:
    """The announcement of a message of several buffers, all registered; answers as post_message."""
    cdef pieces_t *s = r.pieces
    cdef row_t far
    h.flags |= FLAG_LIST
    h.addr = s.n_rows
    if s.n_rows <= LIST_INLINE:
        return post_message(e, p, h, <const char *>s.rows, s.n_rows * sizeof(row_t))
    far.addr = <uint64_t>s.rows
    far.size = s.n_rows * sizeof(row_t)
    far.rkey = s.rows_mr.rkey
    far.zero = 0
    return post_message(e, p, h, <const char *>&far, sizeof(row_t))


# --------------------------------------------------------------------- receiving side

cdef bint keep_table(engine_t *e, unx_t *u, const rc_header *h) noexcept nogil:
    """An announcement is stored: its table with it. False without memory."""
    cdef size_t n = (h.addr if h.addr <= LIST_INLINE else 1) * sizeof(row_t)
    u.copy = store_get(&e.store, n)
    if u.copy == NULL:
        return False
    memcpy(u.copy, <const char *>h + sizeof(rc_header), n)
    return True


cdef bint learn(engine_t *e, req_t *r, const rc_header *h, const char *table) noexcept nogil:
    """An announcement has met its receive, and one of them is of several buffers. `table`: what
    came behind the header. False: no memory, or it makes no sense; `r.err` says which."""
    cdef pieces_t *s = r.pieces
    cdef uint64_t n = h.addr if h.flags & FLAG_LIST else 1
    cdef const row_t *rows = <const row_t *>table
    if n == 0 or n > LIST_MAX:
        r.err = EPROTO
        return False
    if s == NULL:
        s = pieces_new(1)
        if s == NULL:
            r.err = ENOMEM
            return False
        s.passing = True
        s.v[0].addr = r.buf
        s.v[0].size = h.size
        s.v[0].mr = r.mr
        s.v[0].lkey = r.lkey
        r.pieces = s
    s.i = s.j = 0
    s.at = s.row_at = 0
    s.n_rows = <uint32_t>n
    s.rows = <row_t *>calloc(n, sizeof(row_t))
    if s.rows == NULL:
        r.err = ENOMEM
        return False
    s.ready = n <= LIST_INLINE
    if not h.flags & FLAG_LIST:
        s.rows[0].addr = h.addr
        s.rows[0].size = h.size
        s.rows[0].rkey = h.rkey
    elif s.ready:
        memcpy(s.rows, rows, n * sizeof(row_t))
    else:
        s.rows_addr = rows[0].addr
        s.rows_rkey = rows[0].rkey
        s.rows_mr = e.ops.reg_mr(e.pd, s.rows, n * sizeof(row_t), IBV_ACCESS_LOCAL_WRITE)
        if s.rows_mr == NULL:
            r.err = errno
            return False
        return True
    if not makes_sense(r, h.size):
        r.err = EPROTO
        return False
    return True


cdef void unlearn(engine_t *e, req_t *r) noexcept nogil:
    """The message was withdrawn before any of its bytes were read: the receive waits again."""
    cdef pieces_t *s = r.pieces
    rows_unregister(e.ops, s)
    free(s.rows)
    s.rows = NULL
    s.ready = False
    if s.passing:
        r.pieces = NULL
        pieces_free(s)


cdef bint makes_sense(const req_t *r, uint64_t size) noexcept nogil:
    """Whether the rows add up to the message."""
    cdef const pieces_t *s = r.pieces
    cdef uint64_t total = 0
    cdef uint32_t j
    for j in range(s.n_rows):
        if s.rows[j].size == 0 or s.rows[j].size > size - total:
            return False
        total += s.rows[j].size
    return total == size


cdef void give_up_pull(engine_t *e, peer_t *p, req_t *r, int status) noexcept nogil:
    unlink(&p.pulls, r)
    queue_ctl(e, p, DONE, r.r_req, r.r_gen, ANSWER_FAILED)
    req_end(e, r, status)


cdef bint post_read(engine_t *e, peer_t *p, req_t *r, char *to, uint32_t lkey, uint64_t addr,
                    uint32_t rkey, uint64_t n) noexcept nogil:
    cdef ibv_send_wr wr
    cdef ibv_sge sge
    memset(&wr, 0, sizeof(wr))
    sge.addr = <uint64_t>to
    sge.length = <uint32_t>n
    sge.lkey = lkey
    wr.opcode = IBV_WR_RDMA_READ
    wr.sg_list = &sge
    wr.num_sge = 1
    wr.wr.rdma.remote_addr = addr
    wr.wr.rdma.rkey = rkey
    if post_wr(e, p, &wr, Q_READ, 0, r.id, <uint32_t>n, True) != 0:
        return False
    r.read_posted += n
    r.reads_out += 1
    p.reads_out += 1
    return True


cdef bint pull_table(engine_t *e, peer_t *p, req_t *r, bint heavy) noexcept nogil:
    """Reads the sender's table. True when it is here."""
    cdef pieces_t *s = r.pieces
    cdef uint64_t length = s.n_rows * sizeof(row_t)
    cdef uint64_t n
    while r.read_posted < length:
        if p.reads_out >= p.max_reads or not sq_room(p):
            return False                # a completion marks the peer again
        n = min(length - r.read_posted, p.max_read)
        if n > LIGHT and not heavy:
            mark_dirty(e, p)
            e.more = True
            return False
        if not post_read(e, p, r, <char *>s.rows + r.read_posted, s.rows_mr.lkey,
                         s.rows_addr + r.read_posted, s.rows_rkey, n):
            return False
    if r.read_done < length:
        return False
    rows_unregister(e.ops, s)           # else once more at the end
    r.read_posted = r.read_done = 0
    s.ready = True
    return True


cdef bint pull_pieces(engine_t *e, peer_t *p, req_t *r, bint heavy) noexcept nogil:
    """Posts the reads of the first of `p.pulls`. True when that has gone on from there."""
    cdef pieces_t *s = r.pieces
    cdef row_t *row
    cdef uint64_t n
    if not s.ready:
        if not pull_table(e, p, r, heavy):
            return False
        if not makes_sense(r, r.other_size):
            r.err = EPROTO
            give_up_pull(e, p, r, R_REGISTER)
            return True
    while True:
        row = &s.rows[s.j]
        n = min(s.v[s.i].size - s.at, row.size - s.row_at)
        n = min(n, min(<uint64_t>PIECE, p.max_read))
        if n > LIGHT and not heavy:
            mark_dirty(e, p)
            e.more = True
            return False
        if p.reads_out >= p.max_reads or not sq_room(p):
            return False                # a completion marks the peer again
        if not piece_register(e.ops, e.pd, &s.v[s.i], IBV_ACCESS_LOCAL_WRITE, &r.err):
            if r.reads_out:
                return False            # end when nothing is written any more
            give_up_pull(e, p, r, R_REGISTER)
            return True
        if r.read_posted == 0:
            e.pulls_started += 1
        if not post_read(e, p, r, s.v[s.i].addr + s.at, s.v[s.i].lkey, row.addr + s.row_at, row.rkey, n):
            return False
        s.at += n
        s.row_at += n
        if s.at == s.v[s.i].size:
            s.i += 1
            s.at = 0
        if s.row_at == row.size:
            s.j += 1
            s.row_at = 0
        if r.read_posted == r.other_size:
            r.flags &= ~<uint32_t>F_IN_PULLS
            unlink(&p.pulls, r)
            push(&p.reading, r)
            if n > LIGHT and p.pulls.head != NULL:
                mark_dirty(e, p)
                e.more = True
                return False
            return True
        if n > LIGHT:
            mark_dirty(e, p)
            e.more = True
            return False


# ------------------------------------------------------------------------- to oneself

cdef void copy_self(req_t *to, req_t *r) noexcept nogil:
    """All bytes of the send `r` into the receive `to`, which has room."""
    cdef uint64_t done = 0
    cdef uint64_t skip
    cdef uint64_t n
    cdef uint32_t i
    cdef uint32_t k = 0
    if r.pieces == NULL:
        if to.pieces != NULL:
            scatter(to.pieces, r.buf, r.size)
        elif r.size:
            memcpy(to.buf, r.buf, r.size)
        return
    if to.pieces == NULL:
        gather(to.buf, r.pieces)
        return
    skip = 0                            # bytes of to.pieces.v[k] that are filled
    for i in range(r.pieces.n):
        done = 0
        while done < r.pieces.v[i].size:
            n = min(r.pieces.v[i].size - done, to.pieces.v[k].size - skip)
            memcpy(to.pieces.v[k].addr + skip, r.pieces.v[i].addr + done, n)
            done += n
            skip += n
            if skip == to.pieces.v[k].size:
                skip = 0
                k += 1
