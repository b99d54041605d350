# cython: language_level=3
from rocecomm.verbs.cq cimport CQ
from rocecomm.verbs.handle cimport Handle
from rocecomm.verbs.libibverbs cimport ibv_qp
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.srq cimport SRQ
from rocecomm.verbs.work cimport RecvRoom, SendRoom

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
    # work request arrays of the columnar forms, one thread at a time
    cdef SendRoom send_room
    cdef RecvRoom recv_room
    cdef bint send_busy
    cdef bint recv_busy
    cdef int no_srq(self) except -1
