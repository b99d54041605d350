"""Queue pairs: states, posting one request at a time, posting arrays of requests."""

cimport cython
from libc.errno cimport EINVAL, ENOMEM, errno
from libc.string cimport memset
from rocecomm.verbs.ah cimport AH, fill_ah_attr, read_ah_attr
from rocecomm.verbs.cq cimport CQ
from rocecomm.verbs.handle cimport Handle, u32, u64, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.srq cimport SRQ
from rocecomm.verbs.work cimport (SgeList, free_recv_room, free_send_room, post_recv_rows,
                                  post_send_rows, recv_error, sge_list)

import operator
import weakref

from rocecomm.enums import QPState, QPType
from rocecomm.verbs.attrs import AHAttr, QPAttr

# attribute of modify() -> bits of its field, and the mask bit
_ATTRS = {
    "cur_qp_state": (8, IBV_QP_CUR_STATE), "en_sqd_async_notify": (8, IBV_QP_EN_SQD_ASYNC_NOTIFY),
    "qp_access_flags": (32, IBV_QP_ACCESS_FLAGS), "pkey_index": (16, IBV_QP_PKEY_INDEX),
    "port_num": (8, IBV_QP_PORT), "qkey": (32, IBV_QP_QKEY), "ah_attr": (0, IBV_QP_AV),
    "path_mtu": (8, IBV_QP_PATH_MTU), "timeout": (8, IBV_QP_TIMEOUT),
    "retry_cnt": (8, IBV_QP_RETRY_CNT), "rnr_retry": (8, IBV_QP_RNR_RETRY),
    "rq_psn": (32, IBV_QP_RQ_PSN), "max_rd_atomic": (8, IBV_QP_MAX_QP_RD_ATOMIC),
    "min_rnr_timer": (8, IBV_QP_MIN_RNR_TIMER), "sq_psn": (32, IBV_QP_SQ_PSN),
    "max_dest_rd_atomic": (8, IBV_QP_MAX_DEST_RD_ATOMIC), "dest_qp_num": (32, IBV_QP_DEST_QPN),
    "path_mig_state": (8, IBV_QP_PATH_MIG_STATE),
}


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class QP(Handle):
    """Queue pair (``ibv_create_qp``).

    ``QP(pd, send_cq, recv_cq=send_cq, qp_type=IBV_QPT_RC, *, srq=None, max_send_wr=16,
    max_recv_wr=16, max_send_sge=1, max_recv_sge=1, max_inline_data=0, sq_sig_all=False)``

    The attributes of the same names say what the device granted. Raises VerbsError if the
    device refuses, for example a type that it does not know.
    """

    def __cinit__(self, PD pd not None, CQ send_cq not None, CQ recv_cq=None,
                  qp_type=IBV_QPT_RC, *, SRQ srq=None, uint32_t max_send_wr=16,
                  uint32_t max_recv_wr=16, uint32_t max_send_sge=1, uint32_t max_recv_sge=1,
                  uint32_t max_inline_data=0, bint sq_sig_all=False):
        cdef ibv_qp_init_attr init
        cdef int err
        cdef Handle parent
        if recv_cq is None:
            recv_cq = send_cq
        if send_cq.context is not pd.context or recv_cq.context is not pd.context:
            raise ValueError("a QP, its PD and its CQs must be of the same context")
        memset(&init, 0, sizeof(init))
        init.cap.max_send_wr = max_send_wr
        init.cap.max_recv_wr = max_recv_wr if srq is None else 0
        init.cap.max_send_sge = max_send_sge
        init.cap.max_recv_sge = max_recv_sge if srq is None else 0
        init.cap.max_inline_data = max_inline_data
        init.qp_type = operator.index(qp_type)
        init.sq_sig_all = sq_sig_all
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.srq = srq
        self.sq_sig_all = sq_sig_all
        parents = [pd, send_cq]
        if recv_cq is not send_cq:
            parents.append(recv_cq)
        if srq is not None:
            parents.append(srq)
        entered = []
        try:
            for parent in parents:
                parent.enter()
                entered.append(parent)
            init.send_cq = send_cq.cq
            init.recv_cq = recv_cq.cq
            init.srq = srq.srq if srq is not None else NULL
            with nogil:
                self.qp = pd.context.provider.ops.create_qp(pd.pd, &init)
                err = errno
            if self.qp == NULL:
                raise verbs_error(
                    "ibv_create_qp", err, pd.context.name,
                    f"{_type_name(qp_type)}, {max_send_wr} sends of {max_send_sge} elements, "
                    f"{max_recv_wr} receives of {max_recv_sge} elements, {max_inline_data} bytes "
                    f"inline")
            self.max_send_wr = init.cap.max_send_wr
            self.max_recv_wr = init.cap.max_recv_wr
            self.max_send_sge = init.cap.max_send_sge
            self.max_recv_sge = init.cap.max_recv_sge
            self.max_inline_data = init.cap.max_inline_data
            self.opened(tuple(parents))
            pd.context.by_pointer[<size_t> self.qp] = weakref.ref(self)
        finally:
            for parent in entered:
                parent.leave()

    def __dealloc__(self):
        free_send_room(&self.send_room)
        free_recv_room(&self.recv_room)

    cdef int free_handle(self) noexcept:
        cdef int rc
        # before: once it is gone, another object may get the same address
        ref = self.pd.context.by_pointer.pop(<size_t> self.qp, None)
        with nogil:
            rc = self.pd.context.provider.ops.destroy_qp(self.qp)
        if rc == 0:
            self.qp = NULL
        else:
            self.pd.context.by_pointer[<size_t> self.qp] = ref
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_destroy_qp"

    cdef str device_name(self):
        return self.pd.context.name

    # ------------------------------------------------------------------ attributes
    @property
    def qp_num(self):
        """Number of the queue pair, 24 bits; a peer needs it to connect."""
        self.ensure_open()
        return self.qp.qp_num

    @property
    def qp_type(self):
        """QPType."""
        self.ensure_open()
        return QPType(self.qp.qp_type)

    @property
    def state(self):
        """QPState, as the device sees it now."""
        return self.query(IBV_QP_STATE).qp_state

    def query(self, int mask=0x1FFFFF):
        """Attributes (``ibv_query_qp``): QPAttr. Fields outside of `mask` may be stale."""
        cdef ibv_qp_attr a
        cdef ibv_qp_init_attr init
        cdef int rc
        cdef int kind
        memset(&a, 0, sizeof(a))
        memset(&init, 0, sizeof(init))
        self.enter()
        kind = self.qp.qp_type
        with nogil:
            rc = self.pd.context.provider.ops.query_qp(self.qp, &a, mask, &init)
        self.leave()
        if rc:
            raise verbs_error("ibv_query_qp", rc if rc > 0 else errno, self.device_name(), "")
        return QPAttr(
            QPState(a.qp_state), QPState(a.cur_qp_state), QPType(kind), a.path_mtu,
            a.path_mig_state, a.qkey, a.rq_psn, a.sq_psn, a.dest_qp_num, a.qp_access_flags,
            a.cap.max_send_wr, a.cap.max_recv_wr, a.cap.max_send_sge, a.cap.max_recv_sge,
            a.cap.max_inline_data, read_ah_attr(&a.ah_attr), a.pkey_index, a.sq_draining,
            a.max_rd_atomic, a.max_dest_rd_atomic, a.min_rnr_timer, a.port_num, a.timeout,
            a.retry_cnt, a.rnr_retry, bool(init.sq_sig_all))

    def modify(self, state=None, **attrs):
        """Changes state and attributes in one ``ibv_modify_qp``; the mask is what was given.

        `attrs`: the names of ``struct ibv_qp_attr`` (``ah_attr`` is an AHAttr). Raises
        VerbsError if the device refuses, and then nothing has changed.
        """
        cdef ibv_qp_attr a
        cdef int mask = 0
        cdef int rc
        self.ensure_open()
        memset(&a, 0, sizeof(a))
        if state is not None:
            a.qp_state = operator.index(state)
            mask |= IBV_QP_STATE
        values = {}
        for name, value in attrs.items():
            if name not in _ATTRS:
                raise TypeError(f"a queue pair has no attribute {name!r}; it has {', '.join(_ATTRS)}")
            bits, bit = _ATTRS[name]
            mask |= bit
            if name == "ah_attr":
                fill_ah_attr(&a.ah_attr, value)
                continue
            value = values[name] = operator.index(value)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} must lie in 0..2**{bits}-1, not {value}")
        a.cur_qp_state = values.get("cur_qp_state", 0)
        a.en_sqd_async_notify = values.get("en_sqd_async_notify", 0)
        a.qp_access_flags = values.get("qp_access_flags", 0)
        a.pkey_index = values.get("pkey_index", 0)
        a.port_num = values.get("port_num", 0)
        a.qkey = values.get("qkey", 0)
        a.path_mtu = values.get("path_mtu", 0)
        a.timeout = values.get("timeout", 0)
        a.retry_cnt = values.get("retry_cnt", 0)
        a.rnr_retry = values.get("rnr_retry", 0)
        a.rq_psn = values.get("rq_psn", 0)
        a.max_rd_atomic = values.get("max_rd_atomic", 0)
        a.min_rnr_timer = values.get("min_rnr_timer", 0)
        a.sq_psn = values.get("sq_psn", 0)
        a.max_dest_rd_atomic = values.get("max_dest_rd_atomic", 0)
        a.dest_qp_num = values.get("dest_qp_num", 0)
        a.path_mig_state = values.get("path_mig_state", 0)
        self.enter()
        with nogil:
            rc = self.pd.context.provider.ops.modify_qp(self.qp, &a, mask)
        self.leave()
        if rc:
            what = f"to {_state_name(state)}" if state is not None else "its attributes"
            raise verbs_error("ibv_modify_qp", rc if rc > 0 else errno, self.device_name(),
                              f"changing {what} with {', '.join(attrs) or 'no attributes'}")

    def to_init(self, *, port_num=1, pkey_index=0, qp_access_flags=0, qkey=None):
        """RESET to INIT; UD queue pairs take a `qkey` instead of access flags."""
        if self.qp_type == QPType.IBV_QPT_UD:
            self.modify(IBV_QPS_INIT, port_num=port_num, pkey_index=pkey_index,
                        qkey=0 if qkey is None else qkey)
        else:
            self.modify(IBV_QPS_INIT, port_num=port_num, pkey_index=pkey_index,
                        qp_access_flags=qp_access_flags)

    def to_rtr(self, dest_qp_num=None, ah_attr=None, *, path_mtu=3, rq_psn=0, max_dest_rd_atomic=1,
               min_rnr_timer=12):
        """INIT to RTR. RC and UC need the peer's number and the path to it (AHAttr).

        `path_mtu` is an MTU member; `min_rnr_timer` is the code of the delay that this side
        asks for when it has no receive posted (12: 0.64 ms; 0 means 655 ms).
        """
        if self.qp_type == QPType.IBV_QPT_UD:
            return self.modify(IBV_QPS_RTR)
        if dest_qp_num is None or ah_attr is None:
            raise TypeError("to_rtr of a connected queue pair needs dest_qp_num and ah_attr")
        more = {}
        if self.qp_type == QPType.IBV_QPT_RC:
            more = dict(max_dest_rd_atomic=max_dest_rd_atomic, min_rnr_timer=min_rnr_timer)
        self.modify(IBV_QPS_RTR, dest_qp_num=dest_qp_num, ah_attr=ah_attr, path_mtu=path_mtu,
                    rq_psn=rq_psn, **more)

    def to_rts(self, *, sq_psn=0, timeout=14, retry_cnt=7, rnr_retry=7, max_rd_atomic=1):
        """RTR to RTS. `timeout` is a code, 4.096 us * 2**timeout; rnr_retry 7 is for ever."""
        if self.qp_type == QPType.IBV_QPT_RC:
            self.modify(IBV_QPS_RTS, sq_psn=sq_psn, timeout=timeout, retry_cnt=retry_cnt,
                        rnr_retry=rnr_retry, max_rd_atomic=max_rd_atomic)
        else:
            self.modify(IBV_QPS_RTS, sq_psn=sq_psn)

    # ------------------------------------------------------------------ posting
    def post_send(self, opcode, local=None, *, wr_id=0, flags=IBV_SEND_SIGNALED, imm_data=None,
                  remote_addr=None, rkey=None, compare_add=0, swap=0, AH ah=None, remote_qpn=0,
                  remote_qkey=0, invalidate_rkey=None):
        """Posts one work request to the send queue (``ibv_post_send``).

        `opcode`: WROpcode. `local`: an MR (all of it), an SGE, a sequence of those, or None
        for no data; with IBV_SEND_INLINE also any object with memory. `flags`: SendFlags.
        `imm_data` goes with the *_WITH_IMM operations only, 0..2**32-1 in host order.
        `remote_addr` and `rkey` name the peer's memory for writes, reads and atomics;
        `compare_add` is what to compare with or to add, `swap` the new value. `ah`,
        `remote_qpn`, `remote_qkey` address a UD message. `invalidate_rkey`: the memory window
        that IBV_WR_LOCAL_INV takes back here, IBV_WR_SEND_WITH_INV at the peer.

        The memory must stay registered until the completion was polled. Raises VerbsError if
        the request cannot be posted (errno ENOMEM: the queue is full).
        """
        cdef ibv_send_wr wr
        cdef ibv_send_wr *bad = NULL
        cdef int op = operator.index(opcode)
        cdef unsigned int bits = u32(flags, "flags")
        cdef SgeList sges
        cdef int rc
        cdef int state
        cdef bint datagram
        self.ensure_open()
        datagram = self.qp.qp_type == IBV_QPT_UD
        if not 0 <= op <= IBV_WR_ATOMIC_FETCH_AND_ADD and op != IBV_WR_LOCAL_INV and \
                op != IBV_WR_SEND_WITH_INV:
            raise ValueError(f"opcode {op} cannot be posted; use the operations send, write, read, "
                             f"atomics and invalidate of WROpcode, and MW.bind()")
        sges = sge_list(local, (bits & IBV_SEND_INLINE) != 0)
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = u64(wr_id, "wr_id")
        wr.next = NULL
        wr.sg_list = sges.items
        wr.num_sge = sges.count
        wr.opcode = op
        wr.send_flags = bits
        if op == IBV_WR_SEND_WITH_IMM or op == IBV_WR_RDMA_WRITE_WITH_IMM:
            if imm_data is None:
                raise ValueError("an operation with immediate data needs imm_data")
            wr.imm_data = htonl(u32(imm_data, "imm_data"))
        elif imm_data is not None:
            raise ValueError("imm_data goes with IBV_WR_SEND_WITH_IMM and "
                             "IBV_WR_RDMA_WRITE_WITH_IMM only")
        if op == IBV_WR_LOCAL_INV or op == IBV_WR_SEND_WITH_INV:
            if invalidate_rkey is None:
                raise TypeError("an operation that invalidates needs invalidate_rkey")
            wr.invalidate_rkey = u32(invalidate_rkey, "invalidate_rkey")
        elif invalidate_rkey is not None:
            raise ValueError("invalidate_rkey goes with IBV_WR_LOCAL_INV and IBV_WR_SEND_WITH_INV only")
        if op == IBV_WR_LOCAL_INV or op == IBV_WR_SEND_WITH_INV:
            pass
        elif op == IBV_WR_SEND or op == IBV_WR_SEND_WITH_IMM:
            if ah is not None:
                ah.ensure_open()
                wr.wr.ud.ah = ah.ah
                wr.wr.ud.remote_qpn = u32(remote_qpn, "remote_qpn")
                wr.wr.ud.remote_qkey = u32(remote_qkey, "remote_qkey")
            elif datagram:
                raise TypeError("a send on a UD queue pair needs ah, remote_qpn and remote_qkey")
        elif remote_addr is None or rkey is None:
            raise TypeError("a write, read or atomic needs remote_addr and rkey")
        elif op == IBV_WR_ATOMIC_CMP_AND_SWP or op == IBV_WR_ATOMIC_FETCH_AND_ADD:
            wr.wr.atomic.remote_addr = u64(remote_addr, "remote_addr")
            wr.wr.atomic.rkey = u32(rkey, "rkey")
            wr.wr.atomic.compare_add = u64(compare_add, "compare_add")
            wr.wr.atomic.swap = u64(swap, "swap")
        else:
            wr.wr.rdma.remote_addr = u64(remote_addr, "remote_addr")
            wr.wr.rdma.rkey = u32(rkey, "rkey")
        self.enter()
        with nogil:
            rc = ibv_post_send(self.qp, &wr, &bad)
            if rc < 0:
                rc = errno
        state = self.qp.state
        self.leave()
        if rc:
            raise self._send_error(rc, sges.count, state)

    def post_send_array(self, wrs, sges=None, *, AH ah=None, remote_qpn=0, remote_qkey=0):
        """Posts every row of a SEND_WR_DTYPE array, chained, and returns how many that is.

        Rows with ``num_sge`` > 0 take their elements from `sges`, an SGE_DTYPE array. On a UD
        queue pair all rows go to `ah`, `remote_qpn`, `remote_qkey`. The arrays are read during
        the call only. If the device refuses a row, the VerbsError's ``posted`` says how many
        rows before it were posted; those will complete.
        """
        cdef Py_ssize_t posted = 0
        cdef int rc
        cdef uint32_t qpn = u32(remote_qpn, "remote_qpn")
        cdef uint32_t qkey = u32(remote_qkey, "remote_qkey")
        cdef bint own
        cdef int state
        self.ensure_open()
        if ah is not None:
            ah.ensure_open()
        elif self.qp.qp_type == IBV_QPT_UD:
            raise TypeError("sends on a UD queue pair need ah, remote_qpn and remote_qkey")
        self.enter()
        own = not self.send_busy
        if own:
            self.send_busy = True
        state = self.qp.state
        try:
            rc = post_send_rows(self.qp, wrs, sges, ah.ah if ah is not None else NULL, qpn, qkey,
                                &self.send_room if own else NULL, &posted)
        finally:
            self.leave()
            if own:
                self.send_busy = False
        if rc:
            error = self._send_error(rc, 1, state)
            error.posted = posted
            raise error
        return posted

    def post_recv(self, local=None, wr_id=0):
        """Posts one receive (``ibv_post_recv``). `local` as in `post_send`.

        The memory must stay registered until the completion was polled; a UD message puts 40
        bytes of header in front.
        """
        cdef ibv_recv_wr wr
        cdef ibv_recv_wr *bad = NULL
        cdef SgeList sges
        cdef int rc
        self.no_srq()
        sges = sge_list(local, False)
        wr.wr_id = u64(wr_id, "wr_id")
        wr.next = NULL
        wr.sg_list = sges.items
        wr.num_sge = sges.count
        self.enter()
        with nogil:
            rc = ibv_post_recv(self.qp, &wr, &bad)
        self.leave()
        if rc:
            raise recv_error("ibv_post_recv", rc if rc > 0 else errno, self.device_name(),
                             sges.count, self.max_recv_wr, self.max_recv_sge)

    def post_recv_array(self, wrs, sges=None):
        """Posts every row of a RECV_WR_DTYPE array, chained; see `post_send_array`."""
        cdef Py_ssize_t posted = 0
        cdef int rc
        cdef bint own
        self.no_srq()
        self.enter()
        own = not self.recv_busy
        if own:
            self.recv_busy = True
        try:
            rc = post_recv_rows(self.qp, NULL, wrs, sges, &self.recv_room if own else NULL, &posted)
        finally:
            self.leave()
            if own:
                self.recv_busy = False
        if rc:
            error = recv_error("ibv_post_recv", rc, self.device_name(), 1, self.max_recv_wr,
                               self.max_recv_sge)
            error.posted = posted
            raise error
        return posted

    cdef int no_srq(self) except -1:
        if self.srq is not None:
            raise ValueError("this queue pair takes its receives from an SRQ; post them there")
        return 0

    def _send_error(self, int err, int elements, int state):
        detail = f"{elements} element(s) of at most {self.max_send_sge}"
        if err == ENOMEM:
            detail += (f"; the queue takes {self.max_send_wr} requests and is full: poll for "
                       f"completions first (unsignaled requests count until a later signaled one "
                       f"completes), or make it larger")
        elif err == EINVAL and state != IBV_QPS_RTS:
            detail += (f"; the queue pair is in state {_state_name(state)}, sending needs "
                       f"RTS")
        elif err == EINVAL:
            detail += (f"; the request itself is wrong: inline data must fit "
                       f"{self.max_inline_data} bytes, and an atomic needs 8 aligned bytes")
        return verbs_error("ibv_post_send", err, self.device_name(), detail)

    def __repr__(self):
        cdef int number
        cdef int kind
        if not self.is_open or self.is_foreign():
            return "<QP closed>"
        number, kind = self.qp.qp_num, self.qp.qp_type
        return f"<QP {number:#08x} {_type_name(kind)} of {self.device_name()}>"


def _type_name(value):
    try:
        return QPType(value).name.removeprefix("IBV_QPT_")
    except ValueError:
        return f"type {value}"


def _state_name(value):
    try:
        return QPState(value).name.removeprefix("IBV_QPS_")
    except ValueError:
        return f"state {value}"
