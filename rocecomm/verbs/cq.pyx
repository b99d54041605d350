"""Completion queues, completion channels and completions."""

cimport cython
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint32_t, uint64_t
from cpython.buffer cimport PyBuffer_Release
from libc.stdlib cimport calloc, free
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.fcntl cimport F_GETFL, F_SETFL, O_NONBLOCK, fcntl
from rocecomm.verbs.context cimport Context
from rocecomm.verbs.columns cimport rows
from rocecomm.verbs.handle cimport Handle, verbs_error
from rocecomm.verbs.libibverbs cimport *

import time
import weakref

from rocecomm.enums import WCFlags, WCOpcode, WCStatus
from rocecomm.errors import CompletionError
from rocecomm.verbs.columns import WC_DTYPE
from rocecomm.verbs.waiting import check_timeout, wait_readable

cdef enum:
    ON_STACK = 16       # completions that poll() takes without an allocation
    SPINS = 64          # polls between two looks at the clock

cdef double SLICE = 1e-3    # seconds between two looks at signals and close()


cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class CompChannel(Handle):
    """Completion channel (``ibv_create_comp_channel``): ``CompChannel(context)``.

    ``fd`` becomes readable when an armed CQ of the channel gets a completion.
    """

    def __cinit__(self, Context context not None):
        cdef int err
        self.context = context
        context.enter()
        try:
            with nogil:
                self.channel = context.provider.ops.create_comp_channel(context.ctx)
                err = errno
            if self.channel == NULL:
                raise verbs_error("ibv_create_comp_channel", err, context.name, "")
            # so that a reader that lost the race for an event does not sleep for the next one
            fcntl(self.channel.fd, F_SETFL, fcntl(self.channel.fd, F_GETFL) | O_NONBLOCK)
            self.opened((context,))
        finally:
            context.leave()

    cdef int free_handle(self) noexcept:
        cdef int rc
        with nogil:
            rc = self.context.provider.ops.destroy_comp_channel(self.channel)
        if rc == 0:
            self.channel = NULL
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_destroy_comp_channel"

    cdef str device_name(self):
        return self.context.name

    @property
    def fd(self):
        """File descriptor for select, poll, epoll or asyncio's add_reader."""
        self.ensure_open()
        return self.channel.fd

    def fileno(self):
        """The same as `fd`, so that the channel itself can be passed to select()."""
        return self.fd

    def get_event(self, timeout=None):
        """Waits for an event (``ibv_get_cq_event``) and acknowledges it.

        Returns the CQ that it belongs to, or None after `timeout` seconds (None waits, 0
        polls). The CQ must be armed again with req_notify() and polled once more. Python
        signal handlers run while waiting; close() by another thread ends it with ClosedError.
        """
        cdef ibv_cq *cq
        cdef void *user
        cdef int rc
        cdef int err
        deadline = None if not timeout else time.monotonic() + timeout
        while True:
            if not wait_readable(self, self.fd, timeout):
                return None
            self.enter()
            with nogil:
                rc = self.context.provider.ops.get_cq_event(self.channel, &cq, &user)
                err = errno
                if rc == 0:
                    self.context.provider.ops.ack_cq_events(cq, 1)
            self.leave()
            if rc == 0:
                ref = self.context.by_pointer.get(<size_t> cq)
                found = ref() if ref is not None else None
                if found is not None:
                    return found
            elif err != EAGAIN and err != EINTR:
                raise verbs_error("ibv_get_cq_event", err, self.context.name, "")
            if deadline is not None:
                timeout = max(0, deadline - time.monotonic())
            elif timeout == 0 and rc:
                return None

    def __repr__(self):
        return f"<CompChannel of {self.context.name}{' closed' if self.closed else ''}>"


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class CQ(Handle):
    """Completion queue (``ibv_create_cq``): ``CQ(context, cqe, channel=None, comp_vector=0)``.

    `cqe` is the least number of entries; ``capacity`` says how many there are. A queue that
    gets more completions than it holds is lost: poll it, or post less.
    """

    def __cinit__(self, Context context not None, int cqe, CompChannel channel=None,
                  int comp_vector=0):
        cdef int err
        cdef ibv_comp_channel *c = NULL
        if channel is not None and channel.context is not context:
            raise ValueError("a CQ and its completion channel must be of the same context")
        self.context = context
        self.channel = channel
        context.enter()
        try:
            if channel is not None:
                channel.ensure_open()       # and stays so: nothing below lets another thread run
                c = channel.channel
                channel.users += 1
            with nogil:
                self.cq = context.provider.ops.create_cq(context.ctx, cqe, NULL, c, comp_vector)
                err = errno
            try:
                if self.cq == NULL:
                    raise verbs_error("ibv_create_cq", err, context.name,
                                      f"{cqe} entries, completion vector {comp_vector}")
                self.opened((context,) if channel is None else (context, channel))
                context.by_pointer[<size_t> self.cq] = weakref.ref(self)
            finally:
                if channel is not None:
                    channel.leave()
        finally:
            context.leave()

    def __dealloc__(self):
        free(self.scratch)

    cdef int free_handle(self) noexcept:
        cdef int rc
        # before: once it is gone, another object may get the same address
        ref = self.context.by_pointer.pop(<size_t> self.cq, None)
        with nogil:
            rc = self.context.provider.ops.destroy_cq(self.cq)
        if rc == 0:
            self.cq = NULL
        else:
            self.context.by_pointer[<size_t> self.cq] = ref
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_destroy_cq"

    cdef str device_name(self):
        return self.context.name

    @property
    def capacity(self):
        """How many completions the queue holds."""
        self.ensure_open()
        return self.cq.cqe

    def resize(self, int cqe):
        """Changes the number of entries to at least `cqe` (``ibv_resize_cq``)."""
        cdef int rc
        self.enter()
        with nogil:
            rc = self.context.provider.ops.resize_cq(self.cq, cqe)
        self.leave()
        if rc:
            raise verbs_error("ibv_resize_cq", rc if rc > 0 else errno, self.context.name,
                              f"to {cqe} entries")

    def req_notify(self, bint solicited_only=False):
        """Arms the queue (``ibv_req_notify_cq``): its next completion makes an event.

        With `solicited_only` only an error, or a receive whose sender asked for it, does.
        """
        cdef int rc
        self.enter()
        with nogil:
            rc = ibv_req_notify_cq(self.cq, solicited_only)
        self.leave()
        if rc:
            raise verbs_error("ibv_req_notify_cq", rc if rc > 0 else errno, self.context.name, "")

    def poll(self, int n=ON_STACK):
        """Takes up to `n` completions (``ibv_poll_cq``) without waiting: list of WC."""
        cdef ibv_wc stack[ON_STACK]
        cdef ibv_wc *wcs = stack
        cdef int got
        cdef int i
        cdef WC wc
        if n <= 0:
            raise ValueError(f"the number of completions to take must be at least 1, not {n}")
        self.ensure_open()
        if n > ON_STACK:
            n = min(n, self.cq.cqe + 1)
            wcs = self.take_scratch(n)
        self.enter()
        with nogil:
            got = ibv_poll_cq(self.cq, n, wcs)
        self.leave()
        try:
            if got < 0:
                raise verbs_error("ibv_poll_cq", errno, self.context.name,
                                  "the completion queue may have overrun")
            out = []
            for i in range(got):
                wc = WC.__new__(WC)
                wc.wc = wcs[i]
                out.append(wc)
            return out
        finally:
            if wcs == self.scratch:
                self.scratch_busy = False
            elif wcs != stack:
                free(wcs)

    cdef ibv_wc *take_scratch(self, int n) except NULL:
        cdef ibv_wc *wcs
        if self.scratch_busy or self.scratch_len < n:
            wcs = <ibv_wc *> calloc(n, sizeof(ibv_wc))
            if wcs == NULL:
                raise MemoryError()
            if self.scratch_busy:
                return wcs              # another thread polls right now: a block of our own
            free(self.scratch)
            self.scratch = wcs
            self.scratch_len = n
        self.scratch_busy = True
        return self.scratch

    def poll_array(self, out, Py_ssize_t start=0):
        """Takes completions into the structured array `out` from row `start` on.

        `out` is one-dimensional, writable, of dtype WC_DTYPE. Returns how many rows were
        filled (0 if nothing had completed). No Python object is made per completion. Statuses
        are not looked at: check ``out["status"][:n].any()``.
        """
        cdef Py_buffer view
        cdef Py_ssize_t total
        cdef int room
        cdef int got
        cdef int err
        self.ensure_open()
        total = rows(out, WC_DTYPE, True, &view, sizeof(ibv_wc))
        try:
            if not 0 <= start <= total:
                raise ValueError(f"start row {start} does not lie in 0..{total}")
            room = <int> min(total - start, 0x7FFFFFFF)
            if room == 0:
                return 0
            self.enter()
            with nogil:
                got = ibv_poll_cq(self.cq, room, <ibv_wc *> view.buf + start)
                err = errno
            self.leave()
        finally:
            PyBuffer_Release(&view)
        if got < 0:
            raise verbs_error("ibv_poll_cq", err, self.context.name,
                              "the completion queue may have overrun")
        return got

    def poll_until(self, out, Py_ssize_t count=1, timeout=None, Py_ssize_t start=0):
        """Takes completions into `out` from row `start` on until there are `count`, polling all the while.

        `out` as in `poll_array`; more than `count` are taken if they are there and it has the rows. Returns how
        many rows were filled: less than `count` only after `timeout` seconds (None: no limit). The GIL is free
        meanwhile, signal handlers run (if one raises, the rows filled so far stay), and close() by another thread
        ends it with ClosedError. Statuses are not looked at.
        """
        cdef Py_buffer view
        cdef Py_ssize_t total
        cdef Py_ssize_t got = 0
        cdef int n = 0
        cdef int err = 0
        cdef int room
        cdef int tries
        cdef double until = INFINITY
        cdef double look
        if timeout is not None:
            until = now() + check_timeout(timeout)
        self.ensure_open()
        total = rows(out, WC_DTYPE, True, &view, sizeof(ibv_wc)) - start
        try:
            if start < 0 or not 1 <= count <= total:
                raise ValueError(f"{count} completions do not fit into rows {start}..{total + start}")
            while True:
                self.enter()
                with nogil:
                    look = -1
                    tries = SPINS
                    while True:
                        room = <int> min(total - got, 0x7FFFFFFF)
                        n = ibv_poll_cq(self.cq, room, <ibv_wc *> view.buf + start + got)
                        if n < 0:
                            err = errno
                            break
                        got += n
                        if got >= count:
                            break
                        tries -= 1
                        if tries == 0:
                            tries = SPINS
                            if look < 0:
                                look = min(now() + SLICE, until)
                            elif now() >= look:
                                break
                self.leave()
                if n < 0:
                    raise verbs_error("ibv_poll_cq", err, self.context.name, "the completion queue may have overrun")
                if got >= count or (until != INFINITY and now() >= until):
                    return got
                PyErr_CheckSignals()
                self.ensure_open()
        finally:
            PyBuffer_Release(&view)

    def __repr__(self):
        if self.closed:
            return "<CQ closed>"
        return f"<CQ of {self.context.name}, {self.cq.cqe} entries>"


cdef class WC:
    """A completion. Only `wr_id`, `status`, `qp_num` and `vendor_err` count if it is bad."""

    @property
    def wr_id(self):
        """The number given when posting."""
        return self.wc.wr_id

    @property
    def status(self):
        """WCStatus."""
        return WCStatus(self.wc.status)

    @property
    def ok(self):
        """True if the status is IBV_WC_SUCCESS."""
        return self.wc.status == IBV_WC_SUCCESS

    @property
    def opcode(self):
        """WCOpcode; None if the status is bad, where it is not defined."""
        return WCOpcode(self.wc.opcode) if self.wc.status == IBV_WC_SUCCESS else None

    @property
    def byte_len(self):
        """Bytes that arrived (receives, reads, atomics); not defined for other sends."""
        return self.wc.byte_len

    @property
    def imm_data(self):
        """Immediate data in host byte order, 0..2**32-1, or None if there was none."""
        if self.wc.status == IBV_WC_SUCCESS and self.wc.wc_flags & IBV_WC_WITH_IMM and \
                self.wc.opcode & IBV_WC_RECV:   # rxe sets the flag for the sender as well
            return ntohl(self.wc.imm_data)
        return None

    @property
    def invalidated_rkey(self):
        """Key of the memory window that the peer's send took back, or None."""
        if self.wc.status == IBV_WC_SUCCESS and self.wc.wc_flags & IBV_WC_WITH_INV and \
                self.wc.opcode & IBV_WC_RECV:
            return self.wc.invalidated_rkey
        return None

    @property
    def qp_num(self):
        """Number of the local queue pair."""
        return self.wc.qp_num

    @property
    def src_qp(self):
        """Number of the sender's queue pair (UD receives)."""
        return self.wc.src_qp

    @property
    def wc_flags(self):
        """WCFlags."""
        return WCFlags(self.wc.wc_flags)

    @property
    def vendor_err(self):
        """The device's own error number."""
        return self.wc.vendor_err

    @property
    def pkey_index(self):
        """Partition key index (UD receives)."""
        return self.wc.pkey_index

    @property
    def slid(self):
        """Source LID (UD receives, InfiniBand)."""
        return self.wc.slid

    @property
    def sl(self):
        """Service level (UD receives)."""
        return self.wc.sl

    def check(self):
        """Raises CompletionError if the status is bad; returns the completion otherwise."""
        if self.wc.status != IBV_WC_SUCCESS:
            status = self.status
            raise CompletionError(
                f"work request {self.wc.wr_id} on queue pair {self.wc.qp_num} failed with "
                f"{status.name} (vendor error {self.wc.vendor_err})",
                status=status, opcode=None, wr_id=self.wc.wr_id, qp_num=self.wc.qp_num,
                vendor_err=self.wc.vendor_err)
        return self

    def _fields(self):
        cdef ibv_wc *w = &self.wc
        return (w.wr_id, w.status, w.opcode, w.vendor_err, w.byte_len, w.imm_data, w.qp_num,
                w.src_qp, w.wc_flags, w.pkey_index, w.slid, w.sl, w.dlid_path_bits)

    def __reduce__(self):
        return _rebuild_wc, self._fields()

    def __eq__(self, other):
        if not isinstance(other, WC):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self):
        return hash(self._fields())

    def __repr__(self):
        text = f"<WC wr_id={self.wc.wr_id} {self.status.name}"
        if self.ok:
            text += f" {self.opcode.name} byte_len={self.wc.byte_len}"
            if self.imm_data is not None:
                text += f" imm_data={self.imm_data:#x}"
        return f"{text} qp_num={self.wc.qp_num}>"


def _rebuild_wc(wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
                pkey_index, slid, sl, dlid_path_bits):
    cdef WC wc = WC.__new__(WC)
    wc.wc.wr_id = wr_id
    wc.wc.status = status
    wc.wc.opcode = opcode
    wc.wc.vendor_err = vendor_err
    wc.wc.byte_len = byte_len
    wc.wc.imm_data = imm_data
    wc.wc.qp_num = qp_num
    wc.wc.src_qp = src_qp
    wc.wc.wc_flags = wc_flags
    wc.wc.pkey_index = pkey_index
    wc.wc.slid = slid
    wc.wc.sl = sl
    wc.wc.dlid_path_bits = dlid_path_bits
    return wc
