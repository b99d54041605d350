# cython: language_level=3
"""The state of one communicator as plain C structures.

They are touched only with `engine_t.mutex` held (never while waiting for the GIL), so every
function on them runs without the GIL. cimport order of link/: wire, one, join, pieces, store, sync, core,
match, lane, peer, pull, rendezvous, lane_post, lane_repair, call, connect, notify, progress, base, regcache,
region, lists, probe, request, blocking, onesided, lane_setup, lazy_setup, setup, engine; nobody cimports to the
right.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from rocecomm.link.join cimport caller_t, join_t
from rocecomm.link.one cimport note_t, one_t
from rocecomm.link.pieces cimport pieces_t
from rocecomm.link.store cimport store_t
from rocecomm.link.sync cimport (
    pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_t, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_trylock, pthread_mutex_unlock, rc_cond_init,
    rc_cond_wait, rc_count, rc_counted, rc_cpu_now, rc_get, rc_get64, rc_get8, rc_get_ptr, rc_let_others, rc_lock, rc_now, rc_set,
    rc_set64, rc_set8, rc_set_ptr, rc_show, rc_stamp)
from rocecomm.link.wire cimport rc_header, sig_t
from rocecomm.verbs.libibverbs cimport (
    ibv_ah_attr, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_wc)
from rocecomm.verbs.provider cimport provider_ops

cdef enum:
    # req_t.kind
    K_SEND = 1
    K_RECV = 2
    K_ONE = 3               # a one-sided operation: travels on the peer's lane
    K_NOTE = 4              # waits for notifications
    K_PROBE = 9             # waits for a message to be stored, takes nothing

    # req_t.state
    S_FREE = 0
    S_QUEUED = 1            # send: waits for a slot or credit; receive: posted, unmatched
    S_ANNOUNCED = 2         # send: the receiver may read the buffer at any time
    S_PULLING = 3           # receive: matched; reads are or will be in flight
    S_DONE = 4

    # req_t.status, once done
    R_OK = 0
    R_TRUNCATED = 1
    R_DTYPE = 2
    R_SIGNATURE = 3
    R_BROKEN = 4            # the connection; peer_t says why
    R_CANCELLED = 5
    R_CLOSED = 6
    R_NOMEM = 7
    R_REGISTER = 8          # registration failed, see req_t.err
    R_ABORTED = 9           # the group was aborted
    R_CYCLE = 10            # both block in large sends to each other
    R_ONE = 11              # a one-sided operation failed alone; one_t says how

    # req_t.flags
    F_ANYTAG = 1
    F_OWN_MR = 2            # req_t.mr was registered for this request
    F_ORPHAN = 4            # nobody waits: release when done
    F_WITHDRAWING = 8
    F_COLL = 16             # carries a signature
    F_BLOCKING = 32         # its caller does nothing else until it ends
    F_ANNOUNCE = 64         # too large for a slot, or told to go by announcement
    F_IN_PULLS = 128        # in peer_t.pulls
    F_WAITS = 512           # a blocking send: its caller sends nothing else
    F_AGAIN = 1024          # small, announced, and being withdrawn as there is a credit for it now
    F_ZOMBIE = 256          # done, but its registration could not be removed yet
    F_AWAITED = 0x100000    # an event loop waits for it: its end is told to the loops

    # peer_t.state
    P_NONE = 0              # not connected yet: neither side needed it
    P_READY = 1
    P_LEFT = 2              # said goodbye; what it sent before can still be received
    P_BROKEN = 3
    P_SELF = 4
    P_JOINING = 5           # being connected, join_t says how far; requests wait

    # sqe_t.type
    Q_INLINE = 0            # nothing to give back
    Q_SLOT = 1
    Q_READ = 2
    Q_BEAT = 3
    Q_STATUS = 4

    # lane_t.state
    L_NONE = 0
    L_UP = 1
    L_DRAINING = 2          # a request failed; those behind it come back unexecuted
    L_WAITING = 3           # empty and reset; waits for the peer's LANE_READY
    L_DEAD = 4              # with its peer

    # wr_id: upper half
    WR_RECV = 0xFFFFFFFF
    WR_LANE = 0x80000000    # | rank
    WR_CALL = 0x7FFFFFFF    # datagrams (call.pyx)
    WR_CALL_SENT = 0x7FFFFFFE

    NO_SLOT = 0xFFFFFFFF
    CYCLE_LOG = 64
    SIG_RING = 64
    MAX_GROUPS = 64
    POLL_BATCH = 16
    NOTE_WINDOW = 65536     # notifications of one peer that may be stored unread
    RECYCLE = 8             # receive slots are posted again at most this many at a time,
    RECYCLE_SOON = 4        # and from so many on when there is nothing else to do
    TEXT_MAX = 512

ctypedef struct req_t:
    req_t *next
    req_t *prev
    void *owner             # PyObject that holds the buffer, or NULL
    char *buf
    uint64_t size           # send: bytes; receive: capacity
    uint64_t got            # bytes transferred
    uint64_t tag
    uint64_t order          # posting order, over all peers
    sig_t sig
    uint32_t group
    uint32_t id
    uint32_t gen
    int32_t peer            # -1: any source
    int32_t source          # the peer it matched with
    uint32_t flags
    uint16_t dtype
    uint8_t kind
    uint8_t state
    uint8_t status
    ibv_mr *mr
    uint32_t lkey
    uint32_t rkey
    pieces_t *pieces        # several buffers instead of `buf`; or NULL
    # receive: what is being pulled
    uint64_t r_addr
    uint64_t r_req
    uint32_t r_gen
    uint32_t r_rkey
    uint32_t reads_out
    uint64_t read_posted
    uint64_t read_done
    one_t *one              # K_ONE
    # for the error message
    uint64_t other_size
    sig_t other_sig
    uint16_t other_dtype
    int32_t err
    int64_t t0

ctypedef struct list_t:
    req_t *head
    req_t *tail
    uint64_t n

# A message that came before its receive was posted.
ctypedef struct unx_t:
    unx_t *next
    unx_t *prev
    rc_header h
    uint64_t order
    uint32_t slot           # eager: where the payload lies
    req_t *local            # a message to oneself: the sending request, or NULL
    char *copy              # eager: payload in memory of its own

ctypedef struct unx_list_t:
    unx_t *head
    unx_t *tail
    uint64_t n

ctypedef struct sqe_t:
    uint32_t slot
    uint32_t req
    uint32_t length
    uint8_t type

# A short message that waits for a credit or a send queue entry.
ctypedef struct ctl_t:
    ctl_t *next
    uint8_t kind
    uint16_t flags
    uint32_t gen
    uint64_t req
    uint64_t size
    uint32_t group          # ABORT
    # CYCLE: the send that asked first, whose rank it is, sends passed so far; where ours goes
    uint64_t other_req
    uint32_t other_gen
    int32_t rank
    uint32_t hops
    uint64_t where

# Who passed a CYCLE on to us, and about which of its sends.
ctypedef struct asked_t:
    uint64_t first_req      # the send that asked first: with rank and generation
    uint64_t req
    uint32_t first_gen
    uint32_t gen
    int32_t first_rank
    int32_t rank

# One posted work request of a lane.
ctypedef struct lsqe_t:
    req_t *req
    uint32_t length
    uint32_t cell           # where an atomic's old value arrives, or NO_SLOT
    bint notify

# One-sided traffic with one peer: `out` carries this rank's operations, `inward` serves the
# peer's. So a request that fails breaks a queue pair that carries requests of its own rank only.
ctypedef struct lane_t:
    ibv_qp *out
    ibv_qp *inward
    uint32_t inward_qpn
    uint32_t dest_out       # the peer's inward queue pair, which `out` leads to
    uint32_t dest_inward    # and its outward one
    uint32_t psn            # first packet of `out`
    uint32_t epoch          # counts connections of `out`
    uint32_t served         # and of `inward`
    uint8_t state
    uint8_t path_mtu        # what the queue pairs are connected with
    uint8_t timeout
    uint8_t retry
    uint8_t reads
    uint8_t serves
    uint8_t port
    uint32_t access
    ibv_ah_attr ah
    lsqe_t *sq
    uint32_t depth          # a power of two
    uint32_t head
    uint32_t tail
    uint32_t signalled      # position behind the last signalled entry
    uint32_t max_inline
    list_t pending          # not all posted; the head may be partly
    list_t flying           # all posted, not all done
    bint doubtful           # what came back unexecuted may have been executed
    # notifications
    note_t *notes           # a ring
    uint32_t notes_room     # a power of two
    uint32_t notes_head
    uint32_t notes_n
    uint64_t notes_taken    # given to waiters so far, and what of it the peer was told
    uint64_t notes_told
    uint64_t notes_sent     # to the peer, and what it has taken
    uint64_t notes_acked

ctypedef struct peer_t:
    int32_t rank
    uint8_t state
    bint dirty              # in engine_t.dirty
    bint credit_due         # owes the peer a CREDIT message
    bint goodbye_due
    peer_t *next_dirty
    ibv_qp *qp
    uint32_t qpn
    uint64_t instance
    uint32_t max_inline
    # what this side may still send, counted in slots of the peer, modulo 2^32
    uint32_t eager_sent
    uint32_t eager_acked
    uint32_t eager_credits
    uint32_t fences         # one-sided writes and atomics that have not ended: messages wait for them
    uint32_t ctrl_sent
    uint32_t ctrl_acked
    uint32_t ctrl_credits
    # what this side gave beyond the first grant, and what of it the peer was told
    uint32_t eager_given
    uint32_t eager_told
    uint32_t ctrl_freed
    uint32_t ctrl_told
    uint32_t eager_got      # payloads received, and credits returned unused
    uint32_t grant          # payload slots that this peer may fill now: its reserve and what is lent
    bint hungry             # could use more than there was to lend
    bint recall_due         # is going to be asked for what it does not use
    bint recall_out         # was asked
    int64_t recalled_at
    uint8_t reclaimed       # 1: it is gone; 2: and its unused slots were taken back
    uint64_t send_seq
    uint64_t recv_seq
    # send queue
    sqe_t *sq
    uint32_t sq_depth       # a power of two
    uint32_t sq_head
    uint32_t sq_tail
    uint32_t sq_signal      # position behind the last signalled entry
    uint32_t reads_out
    uint32_t max_reads
    uint64_t max_read       # bytes of one read
    list_t sends            # wait for a slot or credit, in order
    list_t announced
    bint small_out          # small blocking sends may be among them
    list_t posted
    list_t pulls            # matched, not all reads posted
    list_t reading          # all reads posted, not all done
    unx_list_t unexpected
    uint32_t in_slots       # of them in receive slots
    ctl_t *ctl_head
    ctl_t *ctl_tail
    uint32_t ctl_n
    # liveness
    uint64_t status_addr
    uint32_t status_rkey
    bint beat_out
    bint status_out
    int64_t beat_at         # when the last heartbeat was posted
    bint near               # answered the last heartbeat at once: it is asked more often
    uint64_t seen_beats
    int64_t seen_since      # since when the peer's counter stands at seen_beats
    uint64_t status_n       # answers to status reads so far
    # why it broke
    int32_t cause_status
    int32_t cause_opcode
    uint32_t cause_vendor
    int32_t cause_errno
    uint64_t cause_bytes
    bint left               # said goodbye before
    lane_t lane
    join_t *join            # NULL where all peers connect at the start

# What a rank shows to peers that wait for it; read by RDMA.
ctypedef struct status_t:
    uint64_t beats          # grows with every call and every turn of a waiting loop
    uint64_t in_call        # threads that wait in a call
    uint64_t stamp          # wall clock, ns, when the last call ended

# What an ABORT message carries after its header, followed by a text.
ctypedef struct abort_t:
    sig_t sig_a
    sig_t sig_b
    int32_t rank_a          # whose signature sig_a is
    int32_t rank_b
    char text[TEXT_MAX]

ctypedef struct group_t:
    group_t *next           # never moved or freed before the end: read without the mutex
    uint32_t id
    uint64_t seq            # of the last collective begun
    sig_t ring[SIG_RING]
    bint aborted
    int32_t abort_class     # 1: signatures differ, 2: rank died, 3: rank closed, 4 and up: see text
    int32_t abort_rank      # who died or closed, or was waited for
    abort_t why

# An event loop in which something is awaited (aio.pyx).
ctypedef struct loop_t:
    loop_t *next
    int fd                  # an eventfd: written when another thread ended what is awaited
    int waiting             # awaiters that sleep
    bint told               # fd was written, or the loop is looking right now

ctypedef struct engine_t:
    pthread_mutex_t mutex
    pthread_cond_t cond
    provider_ops *ops
    ibv_pd *pd
    ibv_cq *cq
    ibv_srq *srq
    int32_t rank
    int32_t size
    uint64_t instance
    peer_t *peers
    peer_t *dirty
    # slots: n_recv receive slots, then n_send send slots
    char *slots
    uint32_t slot_size
    uint32_t slots_lkey
    uint32_t n_recv
    uint32_t n_send
    uint32_t recycle[RECYCLE]   # read slots that are not posted again yet
    uint32_t n_recycle
    uint32_t *send_free
    uint32_t n_send_free
    uint64_t eager_limit
    uint32_t eager_grant    # payload slots that each peer may fill at first
    uint32_t ctrl_grant     # slots that each peer may fill with short messages
    uint32_t reserve        # payload slots of a peer that are never lent to others
    uint32_t fair           # a peer's share if all wanted slots at once
    uint32_t max_grant
    uint32_t pool           # payload slots that are lent to nobody
    uint32_t n_hungry
    uint32_t strangers      # messages refused: not of this job, or not understood
    # requests
    req_t **blocks
    uint32_t n_blocks
    req_t *free
    uint64_t live           # requests in use
    uint64_t order
    list_t any_posted
    list_t probes           # K_PROBE requests that wait
    int32_t untold          # rank + 1 of a dead peer of which no wait for any source has been told
    list_t zombies          # ended, but their registration could not be removed yet
    req_t *done_owned       # ended, own a Python reference that a GIL holder must drop
    unx_t *unx_free
    ctl_t *ctl_free
    uint64_t unexpected     # messages stored
    uint64_t stored         # bytes of them in memory of their own
    uint64_t stored_limit
    store_t store
    uint64_t arrivals
    uint32_t blocked_id         # the blocking send that was announced last
    uint32_t blocked_gen
    uint64_t blocking_stored    # stored announcements whose senders block
    asked_t asked[CYCLE_LOG]
    uint32_t n_asked
    group_t *groups         # a list
    # liveness
    status_t *status        # in registered memory
    status_t *mirror        # one per peer, target of status reads
    status_t spare          # stands in for `status` once the registered memory is gone
    uint32_t status_lkey
    uint64_t *bell          # peers ring it when they have filled one of the cells behind it
    int64_t beat_every
    int64_t beat_near       # the same for peers that answer at once
    int64_t linger          # how long a small send waits for a credit before it is announced
    # waiting
    int want                # threads that wait for the mutex
    bint leader
    int followers
    bint asleep
    bint armed              # no event was taken from the channel since the queue was armed
    uint32_t overslept      # sleeps that ran out though another thread had taken their event
    loop_t *loops
    # the progress thread (worker.pyx)
    unsigned long worker
    int worker_fd
    bint worker_on
    bint worker_stop
    bint worker_asleep      # on the channel
    bint worker_parked      # until the Python thread that sleeps on the channel leaves
    int wake_fd
    int channel_fd
    int64_t spin
    int spin_turns          # empty polls before the CPU is offered to others
    int64_t crowded         # until when: others wanted this CPU lately, so it is offered soon
    int local_ranks
    bint closing
    bint closed
    bint more               # something can be posted right away
    int fatal               # errno of a broken completion queue, else 0
    const char *fatal_verb  # that said so
    uint64_t ended          # requests ended so far
    # counters
    uint64_t bytes_sent
    uint64_t bytes_received
    uint64_t messages_sent
    uint64_t messages_received
    uint64_t pulls_started
    uint64_t announced_small
    ibv_wc wc[POLL_BATCH]
    # one-sided
    one_t *one_free
    list_t note_waits       # K_NOTE requests
    uint64_t notes          # notifications so far
    ibv_send_wr *chain      # room for one post of a lane
    ibv_sge *chain_sge
    uint32_t chain_max
    uint64_t *cells         # where atomics' old values arrive; registered
    uint32_t *cell_free
    uint32_t n_cell_free
    uint64_t one_bytes      # counters: written and read by this rank's operations
    uint64_t one_requests
    uint64_t lane_repairs
    # connecting on first use (connect.pyx)
    caller_t *caller        # NULL where all peers connect at the start
    join_t *joins           # one per peer

cdef req_t *req_new(engine_t *e) noexcept nogil
cdef void req_free(engine_t *e, req_t *r) noexcept nogil
cdef req_t *req_find(engine_t *e, uint64_t id, uint32_t gen) noexcept nogil
cdef void req_end(engine_t *e, req_t *r, int status) noexcept nogil
cdef bint req_unregister(engine_t *e, req_t *r) noexcept nogil
cdef bint req_register(engine_t *e, req_t *r, int access) noexcept nogil
cdef void retry_zombies(engine_t *e) noexcept nogil
cdef one_t *one_new(engine_t *e) noexcept nogil
cdef unx_t *unx_new(engine_t *e) noexcept nogil
cdef void unx_free(engine_t *e, unx_t *u) noexcept nogil
cdef void free_all(engine_t *e) noexcept nogil
cdef group_t *find_group(engine_t *e, uint32_t id, bint make) noexcept nogil
cdef void tell_loops(engine_t *e) noexcept nogil
cdef void poke_worker(engine_t *e) noexcept nogil

cdef inline void device_failed(engine_t *e, int err, const char *verb) noexcept nogil:
    e.fatal_verb = verb                 # first: others may look at `fatal` without the mutex
    rc_set(&e.fatal, err)

cdef inline bint collective(const req_t *r) noexcept nogil:
    """Whether the request has F_COLL; without the mutex, as nothing changes `sig` after the start."""
    return r.sig.coll_seq != 0

cdef inline bint ended(req_t *r) noexcept nogil:
    """Whether the request is over; without the mutex. If so, what it says of its end can be read."""
    return rc_get8(&r.state) == S_DONE

cdef inline void push(list_t *l, req_t *r) noexcept nogil:
    r.next = NULL
    r.prev = l.tail
    if l.tail != NULL:
        l.tail.next = r
    else:
        l.head = r
    l.tail = r
    l.n += 1

cdef inline void push_front(list_t *l, req_t *r) noexcept nogil:
    r.prev = NULL
    r.next = l.head
    if l.head != NULL:
        l.head.prev = r
    else:
        l.tail = r
    l.head = r
    l.n += 1

cdef inline void unlink(list_t *l, req_t *r) noexcept nogil:
    if r.prev != NULL:
        r.prev.next = r.next
    else:
        l.head = r.next
    if r.next != NULL:
        r.next.prev = r.prev
    else:
        l.tail = r.prev
    r.next = r.prev = NULL
    l.n -= 1

cdef inline void mark_dirty(engine_t *e, peer_t *p) noexcept nogil:
    if not p.dirty:
        p.dirty = True
        p.next_dirty = e.dirty
        e.dirty = p

cdef inline bint may_come(const peer_t *p) noexcept nogil:
    """Whether messages of this peer can still come, now or once it is connected."""
    return p.state == P_READY or p.state == P_NONE or p.state == P_JOINING

cdef inline bint reach(engine_t *e, peer_t *p) noexcept nogil:
    """Somebody needs this peer: connecting begins if it has not. False: it is gone."""
    if p.state == P_NONE:
        rc_set8(&p.state, P_JOINING)
        mark_dirty(e, p)
    return p.state == P_READY or p.state == P_SELF or p.state == P_JOINING

cdef inline char *slot_addr(engine_t *e, uint32_t slot) noexcept nogil:
    return e.slots + <size_t>slot * e.slot_size
