"""Structured numpy dtypes for posting and polling without a Python object per entry.

``SEND_WR_DTYPE``, one row per send work request:
    wr_id u8, opcode u4, send_flags u4, addr u8, length u4, lkey u4 (the local memory of a
    request with one element; length 0 means none), remote_addr u8, rkey u4, imm_data u4
    (host byte order), compare_add u8, swap u8, and for requests with several elements
    sge_start u4, num_sge u4: rows of the SGE array passed beside it (num_sge 0: use addr,
    length, lkey).
``RECV_WR_DTYPE``: wr_id, addr, length, lkey, sge_start, num_sge likewise.
``SGE_DTYPE``: addr u8, length u4, lkey u4.
``WC_DTYPE``: libibverbs' own struct ibv_wc, byte for byte; imm_data is declared in network
    order, so numpy reads it as the number that was sent.
"""

from cpython.buffer cimport PyBUF_ND, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from rocecomm.verbs.libibverbs cimport ibv_sge, ibv_wc

import numpy as np

cdef extern from *:
    """
    #include <stddef.h>
    #include <infiniband/verbs.h>
    #define RC_WC(field) offsetof(struct ibv_wc, field)
    """
    size_t RC_WC_wr_id "RC_WC(wr_id)"
    size_t RC_WC_status "RC_WC(status)"
    size_t RC_WC_opcode "RC_WC(opcode)"
    size_t RC_WC_vendor_err "RC_WC(vendor_err)"
    size_t RC_WC_byte_len "RC_WC(byte_len)"
    size_t RC_WC_imm_data "RC_WC(imm_data)"
    size_t RC_WC_qp_num "RC_WC(qp_num)"
    size_t RC_WC_src_qp "RC_WC(src_qp)"
    size_t RC_WC_wc_flags "RC_WC(wc_flags)"
    size_t RC_WC_pkey_index "RC_WC(pkey_index)"
    size_t RC_WC_slid "RC_WC(slid)"
    size_t RC_WC_sl "RC_WC(sl)"
    size_t RC_WC_dlid_path_bits "RC_WC(dlid_path_bits)"

SEND_WR_DTYPE = np.dtype([
    ("wr_id", "u8"), ("opcode", "u4"), ("send_flags", "u4"), ("addr", "u8"), ("length", "u4"),
    ("lkey", "u4"), ("remote_addr", "u8"), ("rkey", "u4"), ("imm_data", "u4"),
    ("compare_add", "u8"), ("swap", "u8"), ("sge_start", "u4"), ("num_sge", "u4")])
RECV_WR_DTYPE = np.dtype([
    ("wr_id", "u8"), ("addr", "u8"), ("length", "u4"), ("lkey", "u4"), ("sge_start", "u4"),
    ("num_sge", "u4")])
SGE_DTYPE = np.dtype([("addr", "u8"), ("length", "u4"), ("lkey", "u4")])
WC_DTYPE = np.dtype({
    "names": ["wr_id", "status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num",
              "src_qp", "wc_flags", "pkey_index", "slid", "sl", "dlid_path_bits"],
    "formats": ["u8", "u4", "u4", "u4", "u4", ">u4", "u4", "u4", "u4", "u2", "u2", "u1", "u1"],
    "offsets": [RC_WC_wr_id, RC_WC_status, RC_WC_opcode, RC_WC_vendor_err, RC_WC_byte_len,
                RC_WC_imm_data, RC_WC_qp_num, RC_WC_src_qp, RC_WC_wc_flags, RC_WC_pkey_index,
                RC_WC_slid, RC_WC_sl, RC_WC_dlid_path_bits],
    "itemsize": sizeof(ibv_wc)})

if SEND_WR_DTYPE.itemsize != sizeof(SendRow) or RECV_WR_DTYPE.itemsize != sizeof(RecvRow) or \
        SGE_DTYPE.itemsize != sizeof(ibv_sge):
    raise ImportError("the layout of work request arrays does not fit this build")


cdef object ndarray = np.ndarray


cdef Py_ssize_t rows(object array, object dtype, bint writable, Py_buffer *view,
                     size_t itemsize) except -1:
    cdef object found
    if not isinstance(array, ndarray):
        raise TypeError(f"expected a one-dimensional array of dtype {dtype}, not a {type(array).__name__}")
    found = array.dtype
    if (found is not dtype and found != dtype) or array.ndim != 1:
        raise TypeError(f"expected a one-dimensional array of dtype {dtype}, not a "
                        f"{array.ndim}-dimensional array of dtype {found}")
    try:
        PyObject_GetBuffer(array, view, PyBUF_ND | PyBUF_WRITABLE if writable else PyBUF_ND)
    except ValueError:
        if array.flags.c_contiguous:
            raise
        raise BufferError("the array of work requests or completions must be contiguous") from None
    return view.len // <Py_ssize_t> itemsize
