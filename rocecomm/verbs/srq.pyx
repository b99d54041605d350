"""Shared receive queue."""

cimport cython
from libc.errno cimport errno
from libc.string cimport memset
from rocecomm.verbs.handle cimport Handle, u64, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.work cimport (RecvRoom, SgeList, free_recv_room, post_recv_rows, recv_error,
                                  sge_list)

import weakref

from rocecomm.verbs.attrs import SRQAttr


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class SRQ(Handle):
    """Shared receive queue (``ibv_create_srq``): ``SRQ(pd, max_wr, max_sge=1, srq_limit=0)``.

    ``max_wr`` and ``max_sge`` say what the device granted.
    """

    def __cinit__(self, PD pd not None, uint32_t max_wr, uint32_t max_sge=1, uint32_t srq_limit=0):
        cdef ibv_srq_init_attr init
        cdef int err
        memset(&init, 0, sizeof(init))
        init.attr.max_wr = max_wr
        init.attr.max_sge = max_sge
        init.attr.srq_limit = srq_limit
        self.pd = pd
        pd.enter()
        try:
            with nogil:
                self.srq = pd.context.provider.ops.create_srq(pd.pd, &init)
                err = errno
            if self.srq == NULL:
                raise verbs_error("ibv_create_srq", err, pd.context.name,
                                  f"{max_wr} work requests of {max_sge} elements")
            self.max_wr = init.attr.max_wr
            self.max_sge = init.attr.max_sge
            self.opened((pd,))
            pd.context.by_pointer[<size_t> self.srq] = weakref.ref(self)
        finally:
            pd.leave()

    def __dealloc__(self):
        free_recv_room(&self.room)

    cdef int free_handle(self) noexcept:
        cdef int rc
        # before: once it is gone, another object may get the same address
        ref = self.pd.context.by_pointer.pop(<size_t> self.srq, None)
        with nogil:
            rc = self.pd.context.provider.ops.destroy_srq(self.srq)
        if rc == 0:
            self.srq = NULL
        else:
            self.pd.context.by_pointer[<size_t> self.srq] = ref
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_destroy_srq"

    cdef str device_name(self):
        return self.pd.context.name

    def query(self):
        """Size and limit (``ibv_query_srq``): SRQAttr."""
        cdef ibv_srq_attr a
        cdef int rc
        self.ensure_open()
        memset(&a, 0, sizeof(a))
        self.enter()
        with nogil:
            rc = self.pd.context.provider.ops.query_srq(self.srq, &a)
        self.leave()
        if rc:
            raise verbs_error("ibv_query_srq", rc if rc > 0 else errno, self.device_name(), "")
        return SRQAttr(a.max_wr, a.max_sge, a.srq_limit)

    def modify(self, *, max_wr=None, srq_limit=None):
        """Resizes the queue, or arms the event "fewer than `srq_limit` receives are left"."""
        cdef ibv_srq_attr a
        cdef int mask = 0
        cdef int rc
        memset(&a, 0, sizeof(a))
        if max_wr is not None:
            a.max_wr = max_wr
            mask |= IBV_SRQ_MAX_WR
        if srq_limit is not None:
            a.srq_limit = srq_limit
            mask |= IBV_SRQ_LIMIT
        self.enter()
        with nogil:
            rc = self.pd.context.provider.ops.modify_srq(self.srq, &a, mask)
        self.leave()
        if rc:
            raise verbs_error("ibv_modify_srq", rc if rc > 0 else errno, self.device_name(),
                              f"max_wr={max_wr}, srq_limit={srq_limit}")
        if max_wr is not None:
            self.max_wr = self.query().max_wr

    def post_recv(self, local=None, wr_id=0):
        """Posts one receive; like `QP.post_recv`."""
        cdef ibv_recv_wr wr
        cdef ibv_recv_wr *bad = NULL
        cdef SgeList sges
        cdef int rc
        sges = sge_list(local, False)
        wr.wr_id = u64(wr_id, "wr_id")
        wr.next = NULL
        wr.sg_list = sges.items
        wr.num_sge = sges.count
        self.enter()
        with nogil:
            rc = ibv_post_srq_recv(self.srq, &wr, &bad)
        self.leave()
        if rc:
            raise recv_error("ibv_post_srq_recv", rc if rc > 0 else errno, self.device_name(),
                             sges.count, self.max_wr, self.max_sge)

    def post_recv_array(self, wrs, sges=None):
        """Posts a structured array of receives; like `QP.post_recv_array`."""
        cdef int rc
        cdef Py_ssize_t posted = 0
        cdef bint own
        self.enter()
        own = not self.recv_busy
        if own:
            self.recv_busy = True
        try:
            rc = post_recv_rows(NULL, self.srq, wrs, sges, &self.room if own else NULL, &posted)
        finally:
            self.leave()
            if own:
                self.recv_busy = False
        if rc:
            error = recv_error("ibv_post_srq_recv", rc, self.device_name(), 1, self.max_wr,
                               self.max_sge)
            error.posted = posted
            raise error
        return posted
