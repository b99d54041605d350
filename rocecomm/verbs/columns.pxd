# cython: language_level=3
"""Layout of the structured arrays of work requests and completions."""
from libc.stdint cimport uint32_t, uint64_t

cdef packed struct SendRow:
    uint64_t wr_id
    uint32_t opcode
    uint32_t send_flags
    uint64_t addr
    uint32_t length
    uint32_t lkey
    uint64_t remote_addr
    uint32_t rkey
    uint32_t imm_data           # host byte order
    uint64_t compare_add
    uint64_t swap
    uint32_t sge_start
    uint32_t num_sge

cdef packed struct RecvRow:
    uint64_t wr_id
    uint64_t addr
    uint32_t length
    uint32_t lkey
    uint32_t sge_start
    uint32_t num_sge

# Takes the buffer of a one-dimensional array of that dtype; returns its number of rows.
cdef Py_ssize_t rows(object array, object dtype, bint writable, Py_buffer *view,
                     size_t itemsize) except -1
