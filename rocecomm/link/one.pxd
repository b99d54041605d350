# cython: language_level=3
"""What a one-sided request does, and what a notification is (plain data, no functions)."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    # one_t.op
    O_WRITE = 0
    O_READ = 1
    O_ADD = 2
    O_SWAP = 3

# A place in a one-sided request: how far it has been posted, or carried out.
ctypedef struct cursor_t:
    int64_t piece
    uint64_t offset         # in that piece

# What a one-sided request does, beyond req_t: pieces of local memory (req_t.buf) and of the
# peer's region. The arrays belong to the Python request, which outlives this.
ctypedef struct one_t:
    one_t *next
    uint8_t op
    bint notify             # the last work request carries `imm`
    bint failed
    uint32_t imm
    uint32_t rkey
    uint64_t remote         # address that the offsets count from
    uint64_t operand        # added, or swapped in
    uint64_t compare
    int64_t n               # pieces
    const int64_t *local_at     # NULL: one piece, at 0
    const int64_t *remote_at
    const int64_t *lengths      # NULL: all are `length`
    uint64_t length
    cursor_t at             # posted up to here
    cursor_t done           # carried out up to here
    uint32_t out            # work requests in flight
    bint begun              # something was posted
    bint finished           # all was
    uint64_t extent         # bytes of the local buffer, to be registered as a whole
    bint known              # registered, or needs no registration
    # why it failed alone
    int32_t status
    uint32_t vendor
    uint64_t nbytes
    bint doubtful           # it may or may not have been carried out

ctypedef struct note_t:
    uint64_t order          # of arrival, over all peers
    uint32_t value
