# cython: language_level=3
"""The messaging core of one communicator; see engine.pyi for what it offers."""
cimport cython
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strncpy
from rocecomm.link.base cimport Base
from rocecomm.link.core cimport *
from rocecomm.link.peer cimport break_peer, fail_group, repost_slot
from rocecomm.link.progress cimport W_DONE, W_TIMEOUT, poll_once, wake
from rocecomm.link.request cimport Request, start
from rocecomm.link.wire cimport code_of, describe_sig, rc_header, same_sig, sig_of, sig_t
from rocecomm.verbs.context cimport Context, Memory
from rocecomm.verbs.cq cimport CQ, CompChannel
from rocecomm.verbs.mr cimport MR
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.qp cimport QP
from rocecomm.verbs.srq cimport SRQ

import atexit
import os
import secrets
import time
import weakref

from ..config import USE_CONFIG
from ..enums import AccessFlags
from ..errors import ConfigError, RocecommError, VerbsError
from . import failure, wireup
from .regcache import RegistrationCache
from .wire import OPERATIONS, REDUCTIONS, dtype_code

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int) noexcept
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int) noexcept
    int usleep(unsigned int) noexcept

#: Slots beyond the grants of a peer: CREDIT and GOODBYE, which need no credit (see peer.pyx).
cdef enum:
    SPARE_SLOTS = 6

_open_engines = weakref.WeakSet()
_exit_hook = False

#: How long close() waits for what is still under way, in seconds.
CLOSE_LIMIT = 4.0


def _close_all():
    for engine in list(_open_engines):
        try:
            engine.close()
        except Exception:
            pass        # the process is ending: there is nobody left to tell


@cython.auto_pickle(False)
cdef class Signature:
    """What all ranks of a group must agree on for one collective. Made by `coll_begin`."""

    def __init__(self):
        raise TypeError("a Signature is made by Engine.coll_begin()")

    @property
    def seq(self):
        return self.s.coll_seq

    @property
    def op(self):
        return self.s.op

    @property
    def dtype(self):
        return self.s.dtype

    @property
    def count(self):
        return self.s.count

    @property
    def reduction(self):
        return self.s.reduction

    @property
    def root(self):
        return -1 if self.s.root == 0xFFFFFFFF else self.s.root

    @property
    def group(self):
        return self.s.group

    def __str__(self):
        return describe_sig(&self.s)


@cython.auto_pickle(False)
cdef class Engine(Base):
    """Connections to all ranks of a group, and everything that travels over them."""

    def __init__(self, config, group, context=None, port=None):
        """Opens the device and connects to all ranks of `group` (a bootstrap.Group)."""
        global _exit_hook
        if self.is_open or self.foreign:
            raise RuntimeError("an Engine is set up once")
        if config.progress != "calls":
            raise ConfigError("ROCECOMM_PROGRESS=thread comes with version 0.2; this version makes "
                              "progress inside calls only, leave it at 'calls'",
                              name="progress", value=config.progress)
        self.config = config
        self.rank, self.size = group.rank, group.world_size
        self.default_timeout = config.timeout
        self.qps = {}
        if context is None:
            context, port = wireup.choose_device(config)
        self.context = context
        self.device = context.name
        try:
            self.open(config, group, port or 1)
        except BaseException:
            self.tear_down()
            raise
        self.is_open = True
        if not _exit_hook:
            atexit.register(_close_all)
            _exit_hook = True
        _open_engines.add(self)

    # ------------------------------------------------------------------------- set-up
    def open(self, config, group, int port):
        cdef engine_t *e = self.e
        cdef Context context = self.context
        cdef uint32_t i
        cdef int others = self.size - 1
        device = context.query_device()
        port_attr = context.query_port(port)
        e.ops = context.provider.ops
        e.rank = self.rank
        e.size = self.size
        e.instance = secrets.randbits(63) | 1
        e.eager_limit = config.eager_limit
        e.slot_size = (sizeof(rc_header) + max(config.eager_limit, sizeof(abort_t)) + 63) & ~63
        self.reg_free = bool(e.ops.reg_is_free())
        eager, ctrl = self.plan_credits(config, device, others)
        e.eager_grant, e.ctrl_grant = eager, ctrl
        e.n_recv = others * (eager + ctrl + SPARE_SLOTS)
        e.n_send = min(256, max(32, 16 * others)) if others else 1
        depth = 128 if others <= 16 else 64
        while depth > 16 and (depth > device.max_qp_wr
                              or e.n_recv + others * depth + 16 > device.max_cqe):
            depth //= 2

        self.pd = PD(context)
        self.channel = CompChannel(context)
        self.cq = CQ(context, e.n_recv + others * depth + 16, self.channel)
        self.srq = SRQ(self.pd, max(1, e.n_recv))
        e.pd = (<PD>self.pd).pd
        e.cq = (<CQ>self.cq).cq
        e.srq = (<SRQ>self.srq).srq
        e.channel_fd = self.channel.fd
        e.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if e.wake_fd < 0:
            raise OSError("eventfd failed: too many open files?")
        self.make_memory()
        e.peers = <peer_t *>calloc(self.size, sizeof(peer_t))
        if e.peers == NULL:
            raise MemoryError("no memory for the connections")

        mine = self.make_endpoint(config, group, port, port_attr, device, depth, eager, ctrl)
        found = wireup.exchange(group.store, mine, self.size, config.join_timeout)
        self.info = {}
        self.local_ranks = sum(other.host == mine.host for other in found)
        cores = len(os.sched_getaffinity(0))
        e.local_ranks = self.local_ranks
        # more ranks than cores: whoever waits makes room soon
        e.spin = <int64_t>(config.spin * 1e9)
        e.spin_turns = 200 if self.local_ranks <= cores else 20
        e.beat_every = <int64_t>(wireup.beat_interval(config) * 1e9)
        e.linger = 200000
        e.stored_limit = config.unexpected_limit
        e.status.stamp = rc_stamp()
        for other in found:
            if other.rank != self.rank:
                self.connect_peer(mine, other, config, port)
        e.peers[self.rank].state = P_SELF
        e.peers[self.rank].rank = self.rank
        for i in range(e.n_recv):
            if not repost_slot(e, i):
                raise failure.fatal("posting receives", e.fatal, self.device)
        # nobody sends before everybody can receive
        group.store.set(f"link/ready/{self.rank}", b"1")
        group.store.wait([f"link/ready/{r}" for r in range(self.size)], config.join_timeout)
        for i in range(<uint32_t>self.size):
            if <int>i != self.rank:
                e.peers[i].state = P_READY
        if not self.reg_free and config.reg_cache:
            self.cache = RegistrationCache(self.pd, config.reg_cache, device.max_mr)

    def plan_credits(self, config, device, int others):
        """How many slots for payloads and for short messages each peer gets."""
        if others == 0:
            return 1, 1
        slot = self.e.slot_size
        eager = max(config.peer_credits, min(64, config.recv_pool // others))
        eager = max(2, min(eager, config.unexpected_limit // slot // others))
        ctrl = max(4, config.peer_credits)
        while others * (eager + ctrl + SPARE_SLOTS) > device.max_srq_wr:
            if eager <= 2 and ctrl <= 4:
                raise ConfigError(
                    f"{self.device} holds {device.max_srq_wr} shared receives, too few for "
                    f"{others} peers; use fewer ranks", name="peer_credits",
                    value=config.peer_credits)
            eager, ctrl = max(2, eager // 2), max(4, ctrl // 2)
        return eager, ctrl

    def make_memory(self):
        """Receive and send slots; behind them the status that peers read, in a region of its own."""
        cdef engine_t *e = self.e
        cdef Memory memory
        cdef size_t room = <size_t>(e.n_recv + e.n_send) * e.slot_size
        cdef size_t status_bytes = (1 + self.size) * 64
        cdef uint32_t i
        assert sizeof(status_t) <= 64
        slots = Memory(self.context, room)
        status = Memory(self.context, status_bytes)
        self.memory = (slots, status)
        self.memory_mr = (
            MR(self.pd, slots, AccessFlags.IBV_ACCESS_LOCAL_WRITE),
            MR(self.pd, status, AccessFlags.IBV_ACCESS_LOCAL_WRITE
               | AccessFlags.IBV_ACCESS_REMOTE_READ))
        e.slots = <char *><size_t>slots.address
        e.slots_lkey = self.memory_mr[0].lkey
        e.status = <status_t *><size_t>status.address
        e.mirror = <status_t *>(<char *>e.status + 64)
        e.status_lkey = self.memory_mr[1].lkey
        e.send_free = <uint32_t *>malloc(e.n_send * sizeof(uint32_t))
        if e.send_free == NULL:
            raise MemoryError("no memory for the send slots")
        for i in range(e.n_send):
            e.send_free[i] = e.n_recv + e.n_send - 1 - i
        e.n_send_free = e.n_send

    def make_endpoint(self, config, group, int port, port_attr, device, int depth, eager, ctrl):
        """Creates a queue pair for every peer, in INIT, and says all about this rank."""
        cdef engine_t *e = self.e
        cdef int r
        cdef peer_t *p
        cdef QP qp
        inline = None
        numbers = []
        for r in range(self.size):
            if r == self.rank:
                numbers.append((0, 0))
                continue
            qp, inline = self.make_qp(depth, inline)
            qp.to_init(port_num=port, qp_access_flags=AccessFlags.IBV_ACCESS_REMOTE_READ
                       | AccessFlags.IBV_ACCESS_REMOTE_WRITE)
            self.qps[r] = qp
            p = &e.peers[r]
            p.rank = r
            p.qp = qp.qp
            p.qpn = qp.qp.qp_num
            p.max_inline = qp.max_inline_data if inline else 0
            p.sq_depth = depth
            p.sq_signal = <uint32_t>0xFFFFFFFF      # none yet
            p.sq = <sqe_t *>calloc(depth, sizeof(sqe_t))
            if p.sq == NULL:
                raise MemoryError("no memory for the send queues")
            numbers.append((p.qpn, wireup.packet_number()))
        return wireup.Endpoint(
            rank=self.rank, device=self.device, instance=e.instance,
            mtu=wireup.mtu_bytes(port_attr, config.ib_mtu),
            reads_out=device.max_qp_init_rd_atom or device.max_qp_rd_atom,
            reads_in=device.max_qp_rd_atom, max_message=port_attr.max_msg_sz,
            gids=tuple((g.index, g.gid.hex(), int(g.gid_type))
                       for g in self.context.query_gid_table(port)),
            gid_index=config.gid_index, qps=tuple(numbers), eager=eager, ctrl=ctrl,
            slot_size=e.slot_size, status_addr=<size_t>e.status,
            status_rkey=self.memory_mr[1].rkey, host=wireup.host_name())

    def make_qp(self, int depth, inline):
        """A queue pair with as much room for inline data as the device gives, at most 512."""
        for room in ((512, 256, 232, 0) if inline is None else (inline,)):
            try:
                return QP(self.pd, self.cq, srq=self.srq, max_send_wr=depth, max_send_sge=2,
                          max_inline_data=room), room
            except VerbsError:
                if room == 0 or inline is not None:
                    raise

    def connect_peer(self, mine, other, config, int port):
        cdef peer_t *p = &self.e.peers[other.rank]
        agreement = wireup.agree(mine, other)
        wireup.connect(self.qps[other.rank], mine, other, agreement, config, port)
        p.instance = other.instance
        p.eager_credits = other.eager
        p.ctrl_credits = other.ctrl
        p.max_reads = agreement.reads
        p.max_read = agreement.max_message
        p.status_addr = other.status_addr
        p.status_rkey = other.status_rkey
        self.info[other.rank] = agreement

    # ---------------------------------------------------------------------- transfers
    def isend(self, buf, dst, tag=0, space=0, offset=0, nbytes=-1):
        """Starts to send; see engine.pyi."""
        return start(self, False, buf, self.peer_arg(dst, "dst"), tag, False, space, NULL, offset,
                     nbytes)

    def irecv(self, buf, src, tag=0, space=0, offset=0, nbytes=-1):
        """Starts to receive; `src` None means any rank, `tag` None any tag."""
        return start(self, True, buf, -1 if src is None else self.peer_arg(src, "src"),
                     0 if tag is None else tag, tag is None, space, NULL, offset, nbytes)

    def coll_begin(self, op, dtype, count, reduction=0, root=-1, group=1):
        """Numbers a collective and makes its signature known; see engine.pyi."""
        cdef Signature sig = Signature.__new__(Signature)
        cdef group_t *g
        cdef unx_t *u
        cdef int i
        cdef abort_t why
        cdef bint failed = False
        sig.s.op = OPERATIONS.index(op) if isinstance(op, str) else op
        sig.s.dtype = dtype_code(dtype) if isinstance(dtype, str) else dtype
        sig.s.count = count
        sig.s.reduction = (REDUCTIONS.index(reduction or "none")
                           if not isinstance(reduction, int) else reduction)
        sig.s.root = <uint32_t><int>root
        sig.s.group = group
        self.enter()
        poll_once(self.e, False)
        g = find_group(self.e, group, True)
        if g == NULL:
            self.leave()
            raise MemoryError("no memory for another group")
        if not g.aborted:
            g.seq += 1
            sig.s.coll_seq = g.seq
            g.ring[g.seq % SIG_RING] = sig.s
            # what came before we knew what to expect
            for i in range(self.e.size):
                u = self.e.peers[i].unexpected.head
                while u != NULL and not failed:
                    if u.h.group == group and u.h.coll_seq == g.seq and not same_sig(&sig.s, &u.h):
                        memset(&why, 0, sizeof(why))
                        why.sig_a = sig.s
                        why.rank_a = self.e.rank
                        sig_of(&why.sig_b, &u.h)
                        why.rank_b = <int>u.h.source
                        failed = True
                    u = u.next
            if failed:
                fail_group(self.e, group, 1, -1, &why, True)
        self.leave()
        error = self.group_error(group, sig_name(op))
        if error is not None:
            raise error
        return sig

    def coll_isend(self, Signature sig not None, buf, dst, step=0, offset=0, nbytes=-1):
        """Starts to send a piece of a collective; see engine.pyi."""
        return start(self, False, buf, self.peer_arg(dst, "dst"),
                     sig.s.coll_seq << 24 | <uint64_t>step, False, sig.s.group, &sig.s, offset, nbytes)

    def coll_irecv(self, Signature sig not None, buf, src, step=0, offset=0, nbytes=-1):
        """Starts to receive a piece of a collective; see engine.pyi."""
        return start(self, True, buf, self.peer_arg(src, "src"),
                     sig.s.coll_seq << 24 | <uint64_t>step, False, sig.s.group, &sig.s, offset, nbytes)

    def abort(self, sig_or_group, text):
        """Fails a group on all ranks; see engine.pyi. Never raises."""
        cdef abort_t why
        cdef bytes raw = str(text).encode("utf-8", "replace")[:TEXT_MAX - 1]
        if not self.is_open:
            return
        memset(&why, 0, sizeof(why))
        memcpy(why.text, <const char *>raw, len(raw))
        group = sig_or_group.group if isinstance(sig_or_group, Signature) else sig_or_group
        try:
            self.enter()
        except RocecommError:
            return
        fail_group(self.e, group, 4, -1, &why, True)
        poll_once(self.e, False)
        self.leave()

    # ------------------------------------------------------------------------ waiting
    def wait_all(self, requests, timeout=USE_CONFIG):
        """Waits for all requests; see engine.pyi."""
        cdef list todo = [q for q in requests if not (<Request?>q).collect()]
        if todo:
            self.wait_list(todo, False, self.until(timeout), timeout)
        for q in requests:
            if (<Request>q).failure is not None:
                raise (<Request>q).failure

    def wait_any(self, requests, timeout=USE_CONFIG):
        """The index of a request that has ended; see engine.pyi."""
        cdef list todo = list(requests)
        if not todo:
            raise ValueError("wait_any needs at least one request")
        deadline = self.until(timeout)
        for i, q in enumerate(todo):
            if (<Request?>q).collect():
                return i
        self.wait_list(todo, True, deadline, timeout)
        for i, q in enumerate(todo):
            if (<Request>q).collect():
                return i

    def wait_list(self, list todo, bint any_, int64_t deadline, timeout):
        cdef int n = len(todo)
        cdef int i
        cdef int result
        cdef Request q
        cdef req_t **reqs = <req_t **>malloc(n * sizeof(req_t *))
        if reqs == NULL:
            raise MemoryError("no memory to wait for the requests")
        try:
            for i in range(n):
                q = todo[i]
                reqs[i] = q.r
                q.waiters += 1
            try:
                result = self.wait_reqs(reqs, n, any_, deadline)
            finally:
                for q in todo:
                    q.waiters -= 1
                    if q.ended and q.waiters == 0:
                        q.let_go()
        finally:
            free(reqs)
        over = [(<Request>q).collect() for q in todo]
        if any(over) if any_ else all(over):
            return
        q = todo[over.index(False)]
        for p in todo:
            if (<Request>p).failure is not None:
                raise (<Request>p).failure
        if result != W_TIMEOUT:
            raise self.closed_error(q.what)
        raise self.timeout_error(q.what, q.r.source if q.r.source >= 0 and q.r.source != self.rank
                                 else q.r.peer, timeout)

    def progress(self):
        """Moves all pending traffic once; the number of completions seen."""
        cdef int n
        self.enter()
        with nogil:
            n = poll_once(self.e, True)
        self.leave()
        return n

    def trim(self):
        """Empties the registration cache."""
        if self.cache is not None:
            self.cache.trim(0)

    def counters(self):
        """Bytes, messages and seconds in blocking calls since the start: dict."""
        cdef engine_t *e = self.e
        return {"bytes_sent": e.bytes_sent, "bytes_received": e.bytes_received,
                "messages_sent": e.messages_sent, "messages_received": e.messages_received,
                "seconds": self.seconds, "pulls": e.pulls_started,
                "announced_small": e.announced_small}

    def describe(self):
        """What wire-up agreed on: rank -> Agreement (mtu, gids, outstanding reads)."""
        return dict(self.info)

    @property
    def closed(self):
        return not self.is_open

    def peers(self):
        """State of every connection, for debugging: list of dicts."""
        cdef int i
        cdef peer_t *p
        out = []
        for i in range(self.size):
            p = &self.e.peers[i]
            out.append({
                "rank": p.rank, "state": p.state, "sq": (p.sq_tail, p.sq_head),
                "eager": (p.eager_sent, p.eager_acked, p.eager_credits),
                "ctrl": (p.ctrl_sent, p.ctrl_acked, p.ctrl_credits),
                "freed": (p.eager_freed, p.ctrl_freed), "seq": (p.send_seq, p.recv_seq),
                "sends": p.sends.n, "announced": p.announced.n, "posted": p.posted.n,
                "pulls": p.pulls.n, "reading": p.reading.n, "unexpected": p.unexpected.n,
                "ctl": p.ctl_n, "dirty": bool(p.dirty), "heartbeats": p.status_n,
                "strangers": self.e.strangers})
        return out

    # -------------------------------------------------------------------------- close
    def __del__(self):
        if self.is_open:
            self.close()

    def close(self):
        """Delivers what was sent, says goodbye, frees everything. Waits at most
        CLOSE_LIMIT seconds; requests that have not ended by then end with ClosedError."""
        cdef engine_t *e = self.e
        cdef int i
        cdef int64_t limit
        if not self.is_open or self.foreign:
            return
        self.is_open = False
        _open_engines.discard(self)
        limit = rc_now() + <int64_t>(CLOSE_LIMIT * 1e9)
        with nogil:
            pthread_mutex_lock(&e.mutex)
            e.closing = True
            wake(e)
            # those who wait leave first: the queues are not theirs any more
            while e.status.in_call and rc_now() < limit:
                wake(e)
                pthread_mutex_unlock(&e.mutex)
                usleep(100)
                pthread_mutex_lock(&e.mutex)
            flush(e, limit)
            for i in range(e.size):
                e.peers[i].goodbye_due = e.peers[i].state == P_READY
                if e.peers[i].goodbye_due:
                    # its completion proves that all before it has arrived
                    e.peers[i].sq_signal = e.peers[i].sq_head - e.peers[i].sq_depth
                    mark_dirty(e, &e.peers[i])
            flush(e, limit)
            for i in range(e.size):
                end_all(e, &e.peers[i])
            while e.any_posted.head != NULL:
                end_one(e, &e.any_posted, e.any_posted.head)
            e.closed = True
            pthread_mutex_unlock(&e.mutex)
        self.reap()
        self.tear_down()

    cdef void tear_down(self) noexcept:
        cdef engine_t *e = self.e
        cdef req_t *r
        cdef int tries = 0
        try:
            for qp in self.qps.values():
                qp.close()
            self.qps.clear()
            # a stopped peer may still hold one of our buffers
            while e.zombies.head != NULL and tries < 100:
                tries += 1
                with nogil:
                    pthread_mutex_lock(&e.mutex)
                    retry_zombies(e)
                    pthread_mutex_unlock(&e.mutex)
                    usleep(10000)
            self.reap()
            if self.cache is not None:
                self.cache.close()
            self.memory_mr = None
            if self.context is not None:
                self.context.close()
        except Exception:
            # the device would not let go (a peer stopped in the middle of a copy): what remains
            # stays allocated until the process ends
            pass
        self.memory = None
        e.slots = NULL
        if e.wake_fd >= 0:
            c_close(e.wake_fd)
            e.wake_fd = -1


cdef str sig_name(object op):
    return op if isinstance(op, str) else OPERATIONS[op] if 0 <= op < len(OPERATIONS) else str(op)


cdef void end_one(engine_t *e, list_t *l, req_t *r) noexcept nogil:
    unlink(l, r)
    req_end(e, r, R_CLOSED)


cdef void end_all(engine_t *e, peer_t *p) noexcept nogil:
    """Ends what close() could not wait for; first the peer loses access to our memory."""
    if p.state == P_READY and (p.announced.head != NULL or p.pulls.head != NULL
                               or p.reading.head != NULL):
        break_peer(e, p, -3, -1, 0, 0, 0)
    while p.sends.head != NULL:
        end_one(e, &p.sends, p.sends.head)
    while p.announced.head != NULL:
        end_one(e, &p.announced, p.announced.head)
    while p.posted.head != NULL:
        end_one(e, &p.posted, p.posted.head)
    while p.pulls.head != NULL:
        end_one(e, &p.pulls, p.pulls.head)
    while p.reading.head != NULL:
        end_one(e, &p.reading, p.reading.head)


cdef bint announced_for_use(engine_t *e, peer_t *p) noexcept nogil:
    """Whether the peer may still want an announced message: none of a group that failed."""
    cdef req_t *r = p.announced.head
    cdef group_t *g
    while r != NULL:
        g = find_group(e, r.group, False) if r.flags & F_COLL else NULL
        if g == NULL or not g.aborted:
            return True
        r = r.next
    return False


cdef bint busy(engine_t *e) noexcept nogil:
    cdef int i
    cdef peer_t *p
    for i in range(e.size):
        p = &e.peers[i]
        if p.state != P_READY:
            continue
        if (p.sends.head != NULL or announced_for_use(e, p) or p.pulls.head != NULL
                or p.reading.head != NULL or p.ctl_head != NULL or p.goodbye_due):
            return True
        # entries behind the last signalled one are never reported; GOODBYE is signalled
        if p.sq_tail != p.sq_head and e.closing and p.sq_signal - p.sq_tail < p.sq_head - p.sq_tail:
            return True
    return False


cdef void flush(engine_t *e, int64_t limit) noexcept nogil:
    """Moves traffic until nothing is under way, or `limit`."""
    cdef int idle = 0
    while busy(e) and rc_now() < limit and not e.fatal:
        if poll_once(e, True) > 0 or e.more:
            idle = 0
            continue
        idle += 1
        if idle > 200:
            pthread_mutex_unlock(&e.mutex)
            usleep(100)
            pthread_mutex_lock(&e.mutex)
