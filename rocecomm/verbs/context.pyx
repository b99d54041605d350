"""An opened device, and memory that its peers can map."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EAGAIN, EINTR, EOPNOTSUPP, errno
from libc.stdint cimport uint16_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.fcntl cimport F_GETFL, F_SETFL, O_NONBLOCK, fcntl
from rocecomm.verbs.handle cimport Handle, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.provider cimport Provider

import os
import warnings
import weakref

from rocecomm.enums import AtomicCap, DeviceCap, EventType, GIDType, LinkLayer, MTU, PortState
from rocecomm.errors import VerbsError
from rocecomm.verbs.attrs import AsyncEvent, DeviceAttr, GIDEntry, PortAttr
from rocecomm.verbs.waiting import wait_readable

cdef extern from *:
    """
    #include <endian.h>
    #include <stdint.h>
    static uint64_t rc_be64(uint64_t v) { return be64toh(v); }
    """
    uint64_t rc_be64(uint64_t value) noexcept nogil

_SYSFS = "/sys/class/infiniband"


def _guid(uint64_t value):
    text = f"{rc_be64(value):016x}"
    return ":".join(text[i:i + 4] for i in range(0, 16, 4))


def _enum(cls, value):
    """The member, or the bare number where a newer library knows more than we do."""
    try:
        return cls(value)
    except ValueError:
        return value


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Context(Handle):
    """An opened device (``ibv_open_device``): ``Context(provider, name)``.

    Usually made by ``rocecomm.verbs.open_device(name)``. Raises VerbsError if the device
    cannot be opened, LookupError if the provider does not list it.
    """

    def __cinit__(self, Provider provider not None, str name not None):
        cdef int n = 0
        cdef int i
        cdef int err = 0
        cdef ibv_device **devices
        cdef ibv_device *found = NULL
        cdef bytes wanted = name.encode()
        self.provider = provider
        self.name = name
        self.by_pointer = {}
        with nogil:
            devices = provider.ops.get_device_list(&n)
            err = errno
        if devices == NULL:
            raise verbs_error("ibv_get_device_list", err, name, "")
        try:
            for i in range(n):
                if devices[i].name == wanted:
                    found = devices[i]
            if found == NULL:
                raise LookupError(f"{provider.path} lists no device {name!r}")
            with nogil:
                self.ctx = provider.ops.open_device(found)
                err = errno
        finally:
            provider.ops.free_device_list(devices)
        if self.ctx == NULL:
            raise verbs_error("ibv_open_device", err, name, "")
        # so that a reader that lost the race for an event does not sleep for the next one
        fcntl(self.ctx.async_fd, F_SETFL, fcntl(self.ctx.async_fd, F_GETFL) | O_NONBLOCK)
        self.opened(())

    cdef int free_handle(self) noexcept:
        cdef int rc
        cdef ibv_context *ctx = self.ctx
        if self.memories:
            return 0        # arrays still live in its memory: the last one closes the device
        with nogil:
            rc = self.provider.ops.close_device(ctx)
        if rc == 0:
            self.ctx = NULL
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_close_device"

    cdef str device_name(self):
        return self.name

    cdef int release_memory(self, void *addr, size_t length) except -1:
        cdef int rc
        with nogil:
            rc = self.provider.ops.free(self.ctx, addr, length)
        if rc:
            raise verbs_error("softnic_free", rc, self.name, "")
        self.memories -= 1
        if not self.memories and not self.is_open and self.ctx != NULL:
            rc = self.free_handle()
            if rc:
                raise verbs_error("ibv_close_device", rc, self.name, "")
        return 0

    @property
    def async_fd(self):
        """File descriptor that becomes readable when an asynchronous event is waiting."""
        self.ensure_open()
        return self.ctx.async_fd

    @property
    def num_comp_vectors(self):
        """How many completion vectors a CQ can choose from."""
        self.ensure_open()
        return self.ctx.num_comp_vectors

    def query_device(self):
        """Limits and abilities of the device (``ibv_query_device``): DeviceAttr."""
        cdef ibv_device_attr a
        cdef int rc
        memset(&a, 0, sizeof(a))
        self.enter()
        with nogil:
            rc = self.provider.ops.query_device(self.ctx, &a)
        self.leave()
        if rc:
            raise verbs_error("ibv_query_device", rc if rc > 0 else errno, self.name, "")
        return DeviceAttr(
            a.fw_ver.decode("utf-8", "replace"), _guid(a.node_guid), _guid(a.sys_image_guid),
            a.max_mr_size, a.page_size_cap, a.vendor_id, a.vendor_part_id, a.hw_ver, a.max_qp,
            a.max_qp_wr, DeviceCap(a.device_cap_flags), a.max_sge, a.max_sge_rd, a.max_cq,
            a.max_cqe, a.max_mr, a.max_pd, a.max_qp_rd_atom, a.max_res_rd_atom,
            a.max_qp_init_rd_atom, _enum(AtomicCap, a.atomic_cap), a.max_mw, a.max_mcast_grp,
            a.max_ah, a.max_srq, a.max_srq_wr, a.max_srq_sge, a.max_pkeys,
            a.local_ca_ack_delay, a.phys_port_cnt)

    def query_port(self, int port_num=1):
        """State and limits of a port (``ibv_query_port``): PortAttr. Ports count from 1."""
        cdef ibv_port_attr a
        cdef int rc
        _check_port(port_num)
        self.enter()
        with nogil:
            rc = self.provider.ops.query_port(self.ctx, <uint8_t> port_num, &a)
        self.leave()
        if rc:
            raise verbs_error("ibv_query_port", rc if rc > 0 else errno, self.name,
                              f"port {port_num}; ports count from 1")
        return PortAttr(
            _enum(PortState, a.state), _enum(MTU, a.max_mtu), _enum(MTU, a.active_mtu),
            a.gid_tbl_len, a.port_cap_flags, a.max_msg_sz, a.bad_pkey_cntr, a.qkey_viol_cntr,
            a.pkey_tbl_len, a.lid, a.sm_lid, a.lmc, a.max_vl_num, a.sm_sl, a.subnet_timeout,
            a.active_width, a.active_speed, a.phys_state, _enum(LinkLayer, a.link_layer), a.flags)

    def query_pkey(self, int port_num=1, int index=0):
        """Entry of a port's partition key table (``ibv_query_pkey``): int."""
        cdef uint16_t pkey = 0
        cdef int rc
        cdef int err
        _check_port(port_num)
        self.enter()
        with nogil:
            rc = self.provider.ops.query_pkey(self.ctx, <uint8_t> port_num, index, &pkey)
            err = errno
        self.leave()
        if rc:
            raise verbs_error("ibv_query_pkey", rc if rc > 0 else err, self.name,
                              f"port {port_num}, index {index}")
        return ntohs(pkey)

    def query_gid(self, int port_num=1, int index=0):
        """Entry of a port's GID table with its type: GIDEntry; an empty one is all zero.

        Source: ``ibv_query_gid_ex``, or ``ibv_query_gid`` and sysfs where that is missing.
        """
        cdef ibv_gid_entry entry
        cdef ibv_gid gid
        cdef int rc
        cdef int err
        _check_port(port_num)
        memset(&entry, 0, sizeof(entry))
        memset(&gid, 0, sizeof(gid))
        self.enter()
        with nogil:
            rc = self.provider.ops.query_gid_ex(self.ctx, port_num, index, &entry, 0,
                                                sizeof(ibv_gid_entry))
        self.leave()
        if rc == 0:
            return GIDEntry(index, port_num, bytes(entry.gid.raw[:16]),
                            _enum(GIDType, entry.gid_type), entry.ndev_ifindex)
        self.enter()
        with nogil:     # says ENODATA for an empty entry, or is not there at all
            rc = self.provider.ops.query_gid(self.ctx, <uint8_t> port_num, index, &gid)
            err = errno
        self.leave()
        if rc:
            raise verbs_error("ibv_query_gid", rc if rc > 0 else err, self.name,
                              f"port {port_num}, index {index}")
        return GIDEntry(index, port_num, bytes(gid.raw[:16]), *self._sysfs_gid(port_num, index))

    def _sysfs_gid(self, port_num, index):
        base = f"{_SYSFS}/{self.name}/ports/{port_num}/gid_attrs"
        kind, ifindex = GIDType.IBV_GID_TYPE_IB, 0
        try:
            with open(f"{base}/types/{index}") as f:
                text = f.read().strip()
            if text == "RoCE v2":
                kind = GIDType.IBV_GID_TYPE_ROCE_V2
            elif text == "IB/RoCE v1" and \
                    self.query_port(port_num).link_layer == LinkLayer.IBV_LINK_LAYER_ETHERNET:
                kind = GIDType.IBV_GID_TYPE_ROCE_V1
            with open(f"{base}/ndevs/{index}") as f, open(f"/sys/class/net/{f.read().strip()}/ifindex") as g:
                ifindex = int(g.read())
        except (OSError, ValueError):
            pass        # an empty entry has no files to read
        return kind, ifindex

    def query_gid_table(self, int port_num=1):
        """All entries of a port's GID table that are not empty: list of GIDEntry.

        Source: ``ibv_query_gid_table``, or entry by entry where that is missing.
        """
        cdef ibv_gid_entry *entries
        cdef ssize_t got
        cdef size_t room = 0
        cdef ssize_t i
        n = self.query_port(port_num).gid_tbl_len
        for port in range(1, self.query_device().phys_port_cnt + 1):
            room += self.query_port(port).gid_tbl_len
        entries = <ibv_gid_entry *> calloc(max(room, 1), sizeof(ibv_gid_entry))
        if entries == NULL:
            raise MemoryError()
        try:
            self.enter()
            with nogil:
                got = self.provider.ops.query_gid_table(self.ctx, entries, room, 0,
                                                        sizeof(ibv_gid_entry))
            self.leave()
            if got >= 0:
                return [GIDEntry(entries[i].gid_index, port_num, bytes(entries[i].gid.raw[:16]),
                                 _enum(GIDType, entries[i].gid_type), entries[i].ndev_ifindex)
                        for i in range(got) if entries[i].port_num == <uint32_t> port_num]
        finally:
            free(entries)
        every = (self.query_gid(port_num, i) for i in range(n))
        return [e for e in every if e.gid != bytes(16)]

    def get_async_event(self, timeout=None):
        """Next asynchronous event of the device, acknowledged: AsyncEvent, or None.

        `timeout` in seconds; None waits, 0 polls. Python signal handlers run while waiting,
        and close() by another thread ends the wait with ClosedError.
        """
        cdef ibv_async_event event
        cdef int rc
        cdef int err
        cdef void *pointer
        while True:
            if not wait_readable(self, self.async_fd, timeout):
                return None
            self.enter()
            with nogil:
                rc = self.provider.ops.get_async_event(self.ctx, &event)
                err = errno
            self.leave()
            if rc == 0:
                break
            if err != EAGAIN and err != EINTR:
                raise verbs_error("ibv_get_async_event", err, self.name, "")
        kind = event.event_type
        pointer = NULL
        if kind in (IBV_EVENT_CQ_ERR,):
            pointer = event.element.cq
        elif kind in (IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
                      IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG,
                      IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_QP_LAST_WQE_REACHED):
            pointer = event.element.qp
        elif kind in (IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED):
            pointer = event.element.srq
        element = None
        if pointer != NULL:
            ref = self.by_pointer.get(<size_t> pointer)
            element = ref() if ref is not None else None
        elif kind in (IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE,
                      IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_CLIENT_REREGISTER,
                      IBV_EVENT_GID_CHANGE):
            element = event.element.port_num
        with nogil:
            self.provider.ops.ack_async_event(&event)
        return AsyncEvent(_enum(EventType, kind), element)

    def alloc(self, size_t nbytes):
        """Zeroed, page-aligned memory that peers of the device may be able to map: Memory."""
        return Memory(self, nbytes)

    def __repr__(self):
        return f"<Context {self.name}{' closed' if self.closed else ''}>"


def _check_port(int port_num):
    if not 0 <= port_num <= 255:
        raise ValueError(f"a port number lies in 1..255, not {port_num}")


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Memory(Handle):
    """Memory allocated through a device: ``Memory(context, nbytes)``, a writable buffer.

    ``numpy.frombuffer(memory, dtype)`` is an array in it. It lives as long as any array
    needs it, also after ``context.close()``. On soft0 it is shared memory, so a child that
    is forked later sees and makes changes in the same bytes.
    """

    def __cinit__(self, Context context not None, size_t nbytes):
        cdef int rc
        if nbytes == 0:
            raise ValueError("cannot allocate 0 bytes")
        self.context = context
        self.nbytes = nbytes
        context.enter()
        with nogil:
            rc = context.provider.ops.alloc(context.ctx, nbytes, &self.addr)
        if rc == 0:
            context.memories += 1       # from here on the device outlives the memory
        context.leave()
        if rc:
            raise verbs_error("softnic_alloc", rc, context.name, f"{nbytes} bytes")
        self.opened(())

    cdef int free_handle(self) noexcept:
        try:
            self.context.release_memory(self.addr, self.nbytes)
        except VerbsError as error:
            return error.errno
        except BaseException:
            return EOPNOTSUPP
        return 0

    cdef str free_verb(self):
        return "softnic_free"

    cdef str device_name(self):
        return self.context.name

    @property
    def address(self):
        """Address of the first byte."""
        self.ensure_open()
        return <size_t> self.addr

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.is_open:    # a forked child may look: the pages are mapped there as well
            raise BufferError("this Memory is closed")
        PyBuffer_FillInfo(view, self, self.addr, self.nbytes, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1

    def close(self):
        """Frees the memory; BufferError while an array still lies in it. Twice is fine."""
        if self.exports and not self.closed:
            raise BufferError(
                f"the {self.nbytes} bytes of this Memory are still used by "
                f"{self.exports} array(s) or view(s); drop those first")
        Handle.close(self)
