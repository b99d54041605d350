# cython: language_level=3
"""Work request chains for QP and SRQ: from Python arguments, and from structured arrays."""
from libc.stdint cimport uint32_t
from rocecomm.verbs.columns cimport RecvRow, SendRow
from rocecomm.verbs.libibverbs cimport ibv_ah, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq

cdef enum:
    SGES_INSIDE = 8

cdef class SgeList:
    """The elements of one work request; the first few need no allocation."""
    cdef ibv_sge inside[SGES_INSIDE]
    cdef ibv_sge *items
    cdef int count
    cdef object keep            # buffers of an inline post

cdef SgeList sge_list(object local, bint inlined)

# Space for chained work requests, allocated on first use and kept.
ctypedef struct SendRoom:
    ibv_send_wr *wrs
    ibv_sge *sges

ctypedef struct RecvRoom:
    ibv_recv_wr *wrs
    ibv_sge *sges

cdef void free_send_room(SendRoom *room) noexcept
cdef void free_recv_room(RecvRoom *room) noexcept

# Fill chains of `n` requests from rows; the row that names elements outside of `all_sges`, or -1.
cdef Py_ssize_t chain_sends(ibv_send_wr *wrs, ibv_sge *sges, const SendRow *from_rows, Py_ssize_t n,
                            ibv_sge *all_sges, size_t num_sges, ibv_ah *ah,
                            unsigned int remote_qpn, unsigned int remote_qkey) noexcept nogil
cdef Py_ssize_t chain_recvs(ibv_recv_wr *wrs, ibv_sge *sges, const RecvRow *from_rows, Py_ssize_t n,
                            ibv_sge *all_sges, size_t num_sges) noexcept nogil
cdef int check_opcodes(const SendRow *from_rows, Py_ssize_t n) except -1
cdef int raise_bad_row(Py_ssize_t posted, Py_ssize_t row, Py_ssize_t num_sges) except -1

# Post a structured array in chains. `room` NULL: somebody else uses it, allocate. Return 0 or
# the errno of the device; `posted` counts the rows that it took.
cdef int post_send_rows(ibv_qp *qp, object array, object sge_array, ibv_ah *ah, uint32_t remote_qpn,
                        uint32_t remote_qkey, SendRoom *room, Py_ssize_t *posted) except -1
cdef int post_recv_rows(ibv_qp *qp, ibv_srq *srq, object array, object sge_array, RecvRoom *room,
                        Py_ssize_t *posted) except -1
cdef object recv_error(str verb, int err, str device, int elements, int max_wr, int max_sge)
