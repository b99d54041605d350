# cython: language_level=3
from rocecomm.verbs.cq cimport CQ
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.srq cimport SRQ

cdef class QP(Handle):
    cdef ibv_qp *qp
    cdef readonly PD pd
    cdef readonly CQ send_cq
    cdef readonly CQ recv_cq
    cdef readonly SRQ srq               # or None
    # what the device granted, at least what was asked for
    cdef readonly int max_send_wr
    cdef readonly int max_recv_wr
    cdef readonly int max_send_sge
    cdef readonly int max_recv_sge
    cdef readonly int max_inline_data
    cdef readonly bint sq_sig_all
    # work request arrays of the columnar forms, allocated once
    cdef ibv_send_wr *send_wrs
    cdef ibv_recv_wr *recv_wrs
    cdef ibv_sge *send_sges
    cdef ibv_sge *recv_sges
    cdef bint send_busy
    cdef bint recv_busy
