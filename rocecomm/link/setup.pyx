# cython: language_level=3
"""Setting an engine up and taking it down: device, queues, memory, connections."""
from libc.stdlib cimport calloc, malloc
from rocecomm.link.answer cimport ANSWER_CELLS
from rocecomm.link.base cimport Base
from rocecomm.link.connect cimport end_caller, post_share
from rocecomm.link.core cimport (
    P_READY, P_SELF, RECYCLE, abort_t, engine_t, int64_t, mark_dirty, peer_t, pthread_mutex_lock,
    pthread_mutex_unlock, rc_stamp, retry_zombies, sqe_t, status_t, uint32_t, uint64_t)
from rocecomm.link.lane_setup cimport join_lane, lane_depth, make_chain, make_lane
from rocecomm.link.lazy_setup cimport count_calls, open_caller, plan_peer
from rocecomm.link.peer cimport post_slots, repost_slot
from rocecomm.link.wire cimport rc_header
from rocecomm.verbs.context cimport Context, Memory
from rocecomm.verbs.cq cimport CQ, CompChannel
from rocecomm.verbs.mr cimport MR
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.qp cimport QP
from rocecomm.verbs.srq cimport SRQ

import os
import secrets
from errno import EBUSY

from ..enums import AccessFlags
from ..errors import VerbsError
from . import wireup
from .credits import SPARE_SLOTS, eager_limit, plan_credits
from .regcache import RegistrationCache

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int) noexcept
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int) noexcept
    int usleep(unsigned int) noexcept


cdef enum:
    SELF_SLOTS = 4          # receive slots for notifications to oneself
    CELLS = 256             # atomics in flight, to all ranks together
    # nanoseconds between heartbeats to peers that answer at once, as those on this host
    BEAT_NEAR = 50000000


cdef class Links(Base):
    """An engine's device, queues, memory and connections."""

    def open(self, config, group, int port):
        cdef engine_t *e = self.e
        cdef Context context = self.context
        cdef uint32_t i
        cdef int others = self.size - 1
        cdef int calls = 0
        cdef bint lazily = config.connects_lazily(self.size)
        device = context.query_device()
        if config.eager_limit is None:
            config = self.config = config.replace(
                source="auto", eager_limit=eager_limit(self.size, device.max_mr_size))
        port_attr = context.query_port(port)
        e.ops = context.provider.ops
        e.rank = self.rank
        e.size = self.size
        e.instance = secrets.randbits(63) | 1
        self.secret = getattr(group, "secret", b"")
        self.held, self.remotes = [], {}
        e.eager_limit = config.eager_limit
        e.slot_size = (sizeof(rc_header) + max(config.eager_limit, sizeof(abort_t)) + 63) & ~63
        self.reg_free = bool(e.ops.reg_is_free())
        plan = plan_credits(config, e.slot_size, others, device.max_srq_wr - SELF_SLOTS, self.device)
        # who connects later gets its reserve then; nothing is lent before
        eager, ctrl = plan.reserve if lazily else plan.grant, plan.ctrl
        e.eager_grant, e.ctrl_grant, e.reserve = eager, plan.ctrl, plan.reserve
        e.max_grant, e.pool = plan.most, plan.pool - others * (eager - plan.reserve)
        e.fair = plan.reserve + plan.pool // max(1, others)
        e.n_recv = plan.slots(others) + SELF_SLOTS + RECYCLE
        e.n_send = min(256, max(28, 16 * others)) if others else 1
        calls = 2 * count_calls(self.size, device) if lazily else 0
        depth = 128 if others <= 16 else 64
        lane = lane_depth(others, device)
        while depth > 16 and (depth > device.max_qp_wr
                              or e.n_recv + others * depth + self.size * lane + calls + 16 > device.max_cqe):
            depth //= 2
            lane = max(16, lane // 2)
        make_chain(e, lane)

        self.pd = PD(context)
        self.channel = CompChannel(context)
        self.cq = CQ(context, e.n_recv + others * depth + self.size * lane + calls + 16, self.channel)
        self.srq = SRQ(self.pd, max(1, e.n_recv))
        e.pd = (<PD>self.pd).pd
        e.cq = (<CQ>self.cq).cq
        e.srq = (<SRQ>self.srq).srq
        e.channel_fd = self.channel.fd
        os.set_blocking(e.channel_fd, False)    # several threads and event loops may look
        e.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if e.wake_fd < 0:
            raise OSError("eventfd failed: too many open files?")
        self.make_memory()
        e.peers = <peer_t *>calloc(self.size, sizeof(peer_t))
        if e.peers == NULL:
            raise MemoryError("no memory for the connections")

        mine = self.make_endpoint(config, group, port, port_attr, device, depth, lane, eager, ctrl, lazily)
        found = wireup.exchange(group.store, mine, self.size, config.join_timeout)
        self.info = {}
        self.local_ranks = sum(other.host == mine.host for other in found)
        cores = len(os.sched_getaffinity(0))
        e.local_ranks = self.local_ranks
        # more ranks than cores: whoever waits makes room soon
        e.spin = <int64_t>(config.spin * 1e9)
        e.spin_turns = 200 if self.local_ranks <= cores else 20
        e.beat_every = <int64_t>(wireup.beat_interval(config) * 1e9)
        e.beat_near = min(e.beat_every, BEAT_NEAR)
        e.linger = 200000
        e.stored_limit = config.unexpected_limit
        e.status.stamp = rc_stamp()
        for other in found:
            if other.rank != self.rank:
                self.connect_peer(mine, other, config, port, lazily)
        e.peers[self.rank].state = P_SELF
        e.peers[self.rank].ctrl_credits = SELF_SLOTS
        join_lane(self, mine, mine, wireup.agree(mine, mine), config, port)
        if lazily:                      # the others' when they are connected
            e.caller.per_peer = plan.reserve + plan.ctrl + SPARE_SLOTS
            post_share(e, plan.pool + SELF_SLOTS + RECYCLE)
        else:
            for i in range(e.n_recv):
                if not repost_slot(e, i):
                    raise self.fatal_error("posting receives")
        if e.fatal or not post_slots(e):
            raise self.fatal_error("posting receives")
        # nobody sends before everybody can receive
        group.store.set(f"link/ready/{self.rank}", b"1")
        group.store.wait([f"link/ready/{r}" for r in range(self.size)], config.join_timeout)
        for i in range(<uint32_t>self.size):
            if <int>i != self.rank and not lazily:
                e.peers[i].state = P_READY
        if config.reg_cache and (config.reg_cache_mode == "always" or not self.reg_free):
            self.cache = RegistrationCache(self.pd, config.reg_cache, device.max_mr)
        config.logger().info(wireup.start_line(config, mine, port, self.info, self.size))

    def make_memory(self):
        """Receive and send slots; behind them the status that peers read, in a region of its own."""
        cdef engine_t *e = self.e
        cdef Memory memory
        cdef size_t room = <size_t>(e.n_recv + e.n_send) * e.slot_size
        cdef size_t status_bytes = ((1 + self.size) * 64
                                    + (CELLS + 1 + ANSWER_CELLS) * sizeof(uint64_t))
        cdef uint32_t i
        assert sizeof(status_t) <= 64
        slots = Memory(self.context, room)
        status = Memory(self.context, status_bytes)
        self.memory = (slots, status)
        self.memory_mr = (
            MR(self.pd, slots, AccessFlags.IBV_ACCESS_LOCAL_WRITE),
            MR(self.pd, status, AccessFlags.IBV_ACCESS_LOCAL_WRITE
               | AccessFlags.IBV_ACCESS_REMOTE_READ | AccessFlags.IBV_ACCESS_REMOTE_WRITE))
        e.slots = <char *><size_t>slots.address
        e.slots_lkey = self.memory_mr[0].lkey
        e.status = <status_t *><size_t>status.address
        e.mirror = <status_t *>(<char *>e.status + 64)
        e.status_lkey = self.memory_mr[1].lkey
        # behind them: where peers answer without a credit, and where atomics' old values arrive
        e.bell = <uint64_t *>(<char *>e.status + (1 + self.size) * 64)
        e.cells = e.bell + 1 + ANSWER_CELLS
        e.cell_free = <uint32_t *>malloc(CELLS * sizeof(uint32_t))
        if e.cell_free == NULL:
            raise MemoryError("no memory for atomics")
        for i in range(<uint32_t>CELLS):
            e.cell_free[i] = CELLS - 1 - i
        e.n_cell_free = CELLS
        e.send_free = <uint32_t *>malloc(e.n_send * sizeof(uint32_t))
        if e.send_free == NULL:
            raise MemoryError("no memory for the send slots")
        for i in range(e.n_send):
            e.send_free[i] = e.n_recv + e.n_send - 1 - i
        e.n_send_free = e.n_send

    def make_endpoint(self, config, group, int port, port_attr, device, int depth, int lane, eager, ctrl,
                      bint lazily):
        """Creates the queue pairs, for every peer or (`lazily`) for datagrams, and says all about this rank."""
        cdef engine_t *e = self.e
        cdef int r
        cdef peer_t *p
        cdef QP qp
        inline = None
        numbers = []
        lanes = []
        call = ()
        for r in range(self.size):
            if lazily and r != self.rank:
                numbers.append((0, 0))
                lanes.append((0, 0, 0))
                continue
            lanes.append(make_lane(self, r, lane if r != self.rank else min(lane, 64), port, device))
            if r == self.rank:
                numbers.append((0, 0))
                continue
            qp, inline = self.make_qp(depth, inline)
            qp.to_init(port_num=port, qp_access_flags=AccessFlags.IBV_ACCESS_REMOTE_READ
                       | AccessFlags.IBV_ACCESS_REMOTE_WRITE)
            self.qps[r] = qp
            p = &e.peers[r]
            p.rank = r
            p.grant = eager
            p.qp = qp.qp
            p.qpn = qp.qp.qp_num
            p.max_inline = qp.max_inline_data if inline else 0
            p.sq_depth = depth
            p.sq_signal = <uint32_t>0xFFFFFFFF      # none yet
            p.sq = <sqe_t *>calloc(depth, sizeof(sqe_t))
            if p.sq == NULL:
                raise MemoryError("no memory for the send queues")
            numbers.append((p.qpn, wireup.packet_number()))
        if lazily:
            qp, inline = self.make_qp(depth, None)      # what the device gives
            call = open_caller(self, port, depth, lane, qp.max_inline_data if inline else 0, device)
            qp.close()
        return wireup.Endpoint(
            rank=self.rank, device=self.device, instance=e.instance,
            mtu=wireup.mtu_bytes(port_attr, config.ib_mtu),
            reads_out=device.max_qp_init_rd_atom or device.max_qp_rd_atom,
            reads_in=device.max_qp_rd_atom, max_message=port_attr.max_msg_sz,
            gids=tuple((g.index, g.gid.hex(), int(g.gid_type))
                       for g in self.context.query_gid_table(port)),
            gid_index=config.gid_index, qps=tuple(numbers), lanes=tuple(lanes), eager=eager, ctrl=ctrl,
            slot_size=e.slot_size, status_addr=<size_t>e.status,
            status_rkey=self.memory_mr[1].rkey, host=wireup.host_name(),
            process=wireup.process_name(), call=call)

    def make_qp(self, int depth, inline):
        """A queue pair with as much room for inline data as the device gives, at most 512."""
        for room in ((512, 256, 232, 0) if inline is None else (inline,)):
            try:
                return QP(self.pd, self.cq, srq=self.srq, max_send_wr=depth, max_send_sge=2,
                          max_inline_data=room), room
            except VerbsError:
                if room == 0 or inline is not None:
                    raise

    def connect_peer(self, mine, other, config, int port, bint lazily):
        cdef peer_t *p = &self.e.peers[other.rank]
        agreement = wireup.agree(mine, other)
        if lazily:
            plan_peer(self, mine, other, agreement, config, port)
        else:
            wireup.connect(self.qps[other.rank], mine, other, agreement, config, port)
            join_lane(self, mine, other, agreement, config, port)
        p.instance = other.instance
        p.eager_credits = other.eager
        p.ctrl_credits = other.ctrl
        p.max_reads = agreement.reads
        p.max_read = agreement.max_message
        p.status_addr = other.status_addr
        p.status_rkey = other.status_rkey
        self.info[other.rank] = agreement
        # a device whose messages are shorter than our slots
        self.e.eager_limit = min(self.e.eager_limit,
                                 max(0, agreement.max_message - <int>sizeof(rc_header)))

    cdef object tear_down(self):
        """Gives everything back; what the device refused to let go of comes back as the exception."""
        cdef engine_t *e = self.e
        cdef int tries = 0
        refused = []

        def attempt(close):
            try:
                close()
            except Exception as error:      # the others go nevertheless
                refused.append(error)
        e.status = &e.spare
        end_caller(e)
        for qp in (*self.qps.values(), *self.lanes):
            attempt(qp.close)
        self.qps.clear()
        self.lanes.clear()
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
            attempt(self.cache.close)
        e.slots = NULL
        e.mirror = NULL
        for held in (*(self.memory_mr or ()), *(self.memory or ())):
            attempt(held.close)
        self.memory_mr = self.memory = None
        if self.context is not None:
            attempt(self.context.close)
        # Busy is what a peer that was stopped in the middle of a copy leaves behind: that memory
        # stays allocated until the process ends. Anything else is tried again, once, and told.
        refused = [error for error in refused
                   if not isinstance(error, OSError) or error.errno != EBUSY]
        if refused and self.context is not None:
            attempt(self.context.close)
        if e.wake_fd >= 0:
            c_close(e.wake_fd)
            e.wake_fd = -1
        return refused[0] if refused else None
