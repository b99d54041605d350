# cython: language_level=3
"""A message that is spread over several buffers: their registrations, and copies to and from them."""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from rocecomm.verbs.libibverbs cimport ibv_mr, ibv_pd
from rocecomm.verbs.provider cimport provider_ops

cdef enum:
    LIST_INLINE = 24        # rows that fit into an announcement
    LIST_MAX = 16384        # pieces of one message

# One buffer of this rank.
ctypedef struct piece_t:
    char *addr
    uint64_t size
    ibv_mr *mr
    uint32_t lkey
    uint32_t rkey
    bint own                # registered for this request

# One buffer of the sender, as it tells the receiver: 24 bytes.
ctypedef struct row_t:
    uint64_t addr
    uint64_t size
    uint32_t rkey
    uint32_t zero

ctypedef struct pieces_t:
    piece_t *v
    uint32_t n
    bint passing            # stands for a plain buffer that receives a list
    # the sender's buffers: told to the receiver, or learned by it
    row_t *rows
    uint32_t n_rows
    bint ready              # the receiver knows all rows
    uint64_t rows_addr      # where they lie at the sender, if they did not fit
    uint32_t rows_rkey
    ibv_mr *rows_mr
    # what is read next: byte `at` of v[i], from byte `row_at` of rows[j]
    uint32_t i
    uint32_t j
    uint64_t at
    uint64_t row_at

cdef pieces_t *pieces_new(uint32_t n) noexcept nogil
cdef void pieces_free(pieces_t *s) noexcept nogil
cdef bint piece_register(provider_ops *ops, ibv_pd *pd, piece_t *v, int access, int32_t *err) noexcept nogil
cdef bint offer(provider_ops *ops, ibv_pd *pd, pieces_t *s, int32_t *err) noexcept nogil
cdef bint pieces_unregister(provider_ops *ops, pieces_t *s) noexcept nogil
cdef bint rows_unregister(provider_ops *ops, pieces_t *s) noexcept nogil
cdef void gather(char *to, const pieces_t *s) noexcept nogil
cdef void scatter(const pieces_t *s, const char *data, uint64_t n) noexcept nogil
