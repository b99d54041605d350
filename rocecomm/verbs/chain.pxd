# cython: language_level=3
from rocecomm.verbs.ah cimport AH
from rocecomm.verbs.libibverbs cimport ibv_recv_wr, ibv_send_wr, ibv_sge
from rocecomm.verbs.qp cimport QP
from rocecomm.verbs.srq cimport SRQ

cdef class SendChain:
    cdef readonly QP qp
    cdef readonly AH ah             # of a UD queue pair, else None
    cdef ibv_send_wr *wrs
    cdef ibv_sge *sges              # one per request, then the rows of the SGE array
    cdef Py_ssize_t count

cdef class RecvChain:
    cdef readonly QP qp             # or None
    cdef readonly SRQ srq           # or None
    cdef ibv_recv_wr *wrs
    cdef ibv_sge *sges
    cdef Py_ssize_t count
    cdef int fail(self, int rc, ibv_recv_wr *bad) except -1
