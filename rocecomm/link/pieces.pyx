# cython: language_level=3
"""A message that is spread over several buffers, at the sender, the receiver or both.

Its payload is their bytes one after the other. The two sides' cuts need not agree. Empty
buffers are left out, and one that is left alone is no list but a plain message; so every
piece here has bytes, and there are at least two (or one, where a plain buffer receives a
list).
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_REMOTE_READ

cdef extern from "<errno.h>" nogil:
    int errno
    int ENOMEM


cdef pieces_t *pieces_new(uint32_t n) noexcept nogil:
    """Room for `n` pieces, zeroed; NULL without memory."""
    cdef pieces_t *s = <pieces_t *>calloc(1, sizeof(pieces_t))
    if s == NULL:
        return NULL
    s.v = <piece_t *>calloc(n, sizeof(piece_t))
    if s.v == NULL:
        free(s)
        return NULL
    s.n = n
    return s


cdef void pieces_free(pieces_t *s) noexcept nogil:
    """The registrations are gone already."""
    free(s.rows)
    free(s.v)
    free(s)


cdef bint piece_register(provider_ops *ops, ibv_pd *pd, piece_t *v, int access, int32_t *err) noexcept nogil:
    """Registers one piece, unless it came with a registration."""
    if v.mr != NULL:
        return True
    v.mr = ops.reg_mr(pd, v.addr, v.size, access)
    if v.mr == NULL:
        err[0] = errno
        return False
    v.own = True
    v.lkey = v.mr.lkey
    v.rkey = v.mr.rkey
    return True


cdef bint offer(provider_ops *ops, ibv_pd *pd, pieces_t *s, int32_t *err) noexcept nogil:
    """Registers everything for the receiver's reads and makes the table that says where it lies.
    May be called again. On failure nothing stays registered that can be removed."""
    cdef uint32_t i
    if s.ready:
        return True
    for i in range(s.n):
        if not piece_register(ops, pd, &s.v[i], IBV_ACCESS_REMOTE_READ, err):
            pieces_unregister(ops, s)
            return False
    if s.rows == NULL:
        s.rows = <row_t *>malloc(s.n * sizeof(row_t))
    if s.rows == NULL:
        err[0] = ENOMEM
        pieces_unregister(ops, s)
        return False
    s.n_rows = s.n
    for i in range(s.n):
        s.rows[i].addr = <uint64_t>s.v[i].addr
        s.rows[i].size = s.v[i].size
        s.rows[i].rkey = s.v[i].rkey
        s.rows[i].zero = 0
    if s.n > LIST_INLINE:
        s.rows_mr = ops.reg_mr(pd, s.rows, s.n * sizeof(row_t), IBV_ACCESS_REMOTE_READ)
        if s.rows_mr == NULL:
            err[0] = errno
            pieces_unregister(ops, s)
            return False
    s.ready = True
    return True


cdef bint rows_unregister(provider_ops *ops, pieces_t *s) noexcept nogil:
    if s.rows_mr != NULL and ops.dereg_mr(s.rows_mr) != 0:
        return False
    s.rows_mr = NULL
    return True


cdef bint pieces_unregister(provider_ops *ops, pieces_t *s) noexcept nogil:
    """False if a peer still touches one of them; may be called again then."""
    cdef uint32_t i
    cdef bint all_gone = rows_unregister(ops, s)
    for i in range(s.n):
        if s.v[i].own:
            if ops.dereg_mr(s.v[i].mr) != 0:
                all_gone = False
                continue
            s.v[i].own = False
        s.v[i].mr = NULL
    return all_gone


cdef void gather(char *to, const pieces_t *s) noexcept nogil:
    """All bytes of the pieces, one after the other."""
    cdef uint32_t i
    for i in range(s.n):
        memcpy(to, s.v[i].addr, s.v[i].size)
        to += s.v[i].size


cdef void scatter(const pieces_t *s, const char *data, uint64_t n) noexcept nogil:
    """The first `n` bytes of the pieces, from `data`."""
    cdef uint32_t i
    cdef uint64_t part
    for i in range(s.n):
        part = s.v[i].size if s.v[i].size < n else n
        if part == 0:
            return
        memcpy(s.v[i].addr, data, part)
        data += part
        n -= part
