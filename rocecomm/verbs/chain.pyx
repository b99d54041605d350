"""Work requests that are made ready once and posted as often as wanted."""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from libc.errno cimport errno
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from rocecomm.verbs.ah cimport AH
from rocecomm.verbs.columns cimport RecvRow, SendRow, rows
from rocecomm.verbs.handle cimport u32
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.qp cimport QP
from rocecomm.verbs.srq cimport SRQ
from rocecomm.verbs.work cimport chain_recvs, chain_sends, check_opcodes, raise_bad_row, recv_error

from rocecomm.verbs.columns import RECV_WR_DTYPE, SEND_WR_DTYPE, SGE_DTYPE


cdef ibv_sge *copied_sges(object array, Py_ssize_t n, Py_ssize_t *num_sges) except NULL:
    """Room for n elements, followed by a copy of the SGE array."""
    cdef Py_buffer view
    cdef ibv_sge *out
    num_sges[0] = 0
    if array is None:
        out = <ibv_sge *> calloc(n, sizeof(ibv_sge))
        if out == NULL:
            raise MemoryError()
        return out
    num_sges[0] = rows(array, SGE_DTYPE, False, &view, sizeof(ibv_sge))
    try:
        out = <ibv_sge *> calloc(n + num_sges[0], sizeof(ibv_sge))
        if out == NULL:
            raise MemoryError()
        memcpy(out + n, view.buf, num_sges[0] * sizeof(ibv_sge))
        return out
    finally:
        PyBuffer_Release(&view)


@cython.auto_pickle(False)
cdef class SendChain:
    """A chain of send work requests: ``SendChain(qp, wrs, sges=None, *, ah=None, remote_qpn=0, remote_qkey=0)``.

    The arguments are those of `QP.post_send_array`, which makes such a chain anew in every call; here that
    is done once. The arrays are copied. ``len(chain)`` is the number of requests. The memory must stay
    registered as long as the chain is posted.
    """

    def __cinit__(self, QP qp not None, wrs, sges=None, *, AH ah=None, remote_qpn=0, remote_qkey=0):
        cdef Py_buffer view
        cdef Py_ssize_t bad
        cdef Py_ssize_t num_sges
        cdef uint32_t qpn = u32(remote_qpn, "remote_qpn")
        cdef uint32_t qkey = u32(remote_qkey, "remote_qkey")
        qp.ensure_open()
        if ah is not None:
            ah.ensure_open()
        elif qp.qp.qp_type == IBV_QPT_UD:
            raise TypeError("sends on a UD queue pair need ah, remote_qpn and remote_qkey")
        self.qp = qp
        self.ah = ah
        self.count = rows(wrs, SEND_WR_DTYPE, False, &view, sizeof(SendRow))
        try:
            if self.count == 0:
                raise ValueError("a chain has at least one work request")
            check_opcodes(<const SendRow *> view.buf, self.count)
            self.sges = copied_sges(sges, self.count, &num_sges)
            self.wrs = <ibv_send_wr *> calloc(self.count, sizeof(ibv_send_wr))
            if self.wrs == NULL:
                raise MemoryError()
            bad = chain_sends(self.wrs, self.sges, <const SendRow *> view.buf, self.count,
                              self.sges + self.count, num_sges, ah.ah if ah is not None else NULL, qpn, qkey)
            if bad >= 0:
                raise_bad_row(0, bad, num_sges)
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        free(self.wrs)
        free(self.sges)

    def __len__(self):
        return self.count

    def post(self):
        """Posts all of them (one ``ibv_post_send``). Raises VerbsError, whose ``posted`` says how many
        requests the device took; those will complete."""
        cdef ibv_send_wr *bad = NULL
        cdef int rc
        cdef int state
        if self.ah is not None:
            self.ah.ensure_open()
        self.qp.enter()
        with nogil:
            rc = ibv_post_send(self.qp.qp, self.wrs, &bad)
            if rc < 0:
                rc = errno
        state = self.qp.qp.state
        self.qp.leave()
        if rc:
            error = self.qp._send_error(rc, self.wrs[0].num_sge if bad == NULL else bad.num_sge, state)
            error.posted = 0 if bad == NULL else bad - self.wrs
            raise error

    def __reduce__(self):
        raise TypeError("a SendChain cannot be copied or pickled: it belongs to a queue pair of this process")

    def __repr__(self):
        return f"<SendChain of {self.count} requests on {self.qp!r}>"


@cython.auto_pickle(False)
cdef class RecvChain:
    """A chain of receives: ``RecvChain(queue, wrs, sges=None)`` with a QP or an SRQ; see `SendChain`."""

    def __cinit__(self, queue not None, wrs, sges=None):
        cdef Py_buffer view
        cdef Py_ssize_t bad
        cdef Py_ssize_t num_sges
        if isinstance(queue, SRQ):
            self.srq = queue
            self.srq.ensure_open()
        elif isinstance(queue, QP):
            self.qp = queue
            self.qp.ensure_open()
            self.qp.no_srq()
        else:
            raise TypeError(f"expected a QP or an SRQ, not a {type(queue).__name__}")
        self.count = rows(wrs, RECV_WR_DTYPE, False, &view, sizeof(RecvRow))
        try:
            if self.count == 0:
                raise ValueError("a chain has at least one work request")
            self.sges = copied_sges(sges, self.count, &num_sges)
            self.wrs = <ibv_recv_wr *> calloc(self.count, sizeof(ibv_recv_wr))
            if self.wrs == NULL:
                raise MemoryError()
            bad = chain_recvs(self.wrs, self.sges, <const RecvRow *> view.buf, self.count,
                              self.sges + self.count, num_sges)
            if bad >= 0:
                raise_bad_row(0, bad, num_sges)
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        free(self.wrs)
        free(self.sges)

    def __len__(self):
        return self.count

    def post(self):
        """Posts all of them; see `SendChain.post`."""
        cdef ibv_recv_wr *bad = NULL
        cdef int rc
        if self.qp is not None:
            self.qp.enter()
            with nogil:
                rc = ibv_post_recv(self.qp.qp, self.wrs, &bad)
                if rc < 0:
                    rc = errno
            self.qp.leave()
        else:
            self.srq.enter()
            with nogil:
                rc = ibv_post_srq_recv(self.srq.srq, self.wrs, &bad)
                if rc < 0:
                    rc = errno
            self.srq.leave()
        if rc:
            self.fail(rc, bad)

    cdef int fail(self, int rc, ibv_recv_wr *bad) except -1:
        cdef int n = self.wrs[0].num_sge if bad == NULL else bad.num_sge
        if self.qp is not None:
            error = recv_error("ibv_post_recv", rc, self.qp.device_name(), n, self.qp.max_recv_wr,
                               self.qp.max_recv_sge)
        else:
            error = recv_error("ibv_post_srq_recv", rc, self.srq.device_name(), n, self.srq.max_wr, self.srq.max_sge)
        error.posted = 0 if bad == NULL else bad - self.wrs
        raise error

    def __reduce__(self):
        raise TypeError("a RecvChain cannot be copied or pickled: it belongs to a queue of this process")

    def __repr__(self):
        return f"<RecvChain of {self.count} receives on {self.qp or self.srq!r}>"
