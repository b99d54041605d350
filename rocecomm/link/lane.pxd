# cython: language_level=3
from libc.stdint cimport int64_t, uint32_t, uint64_t
from rocecomm.link.core cimport engine_t, peer_t, req_t
from rocecomm.link.one cimport O_READ, cursor_t, one_t

cdef void end_request(engine_t *e, peer_t *p, req_t *r, int status) noexcept nogil
cdef void take_back(engine_t *e, peer_t *p, uint32_t position) noexcept nogil
cdef void take_entry(engine_t *e, peer_t *p, bint good) noexcept nogil
cdef void end_lane(engine_t *e, peer_t *p) noexcept nogil
cdef void end_idle(engine_t *e, peer_t *p, int status, bint force) noexcept nogil

cdef inline bint changes(const one_t *o) noexcept nogil:
    """Whether the operation changes the peer's memory: later messages wait for it."""
    return o.op != O_READ

cdef inline uint64_t piece_length(const one_t *o, int64_t i) noexcept nogil:
    return <uint64_t>o.lengths[i] if o.lengths != NULL else o.length

cdef inline void skip_empty(const one_t *o, cursor_t *c) noexcept nogil:
    """Empty pieces of a list are not posted; a single empty piece is."""
    if o.n > 1:
        while c.piece < o.n and piece_length(o, c.piece) == 0:
            c.piece += 1

cdef inline void advance(const one_t *o, cursor_t *c, uint64_t n) noexcept nogil:
    c.offset += n
    if c.offset >= piece_length(o, c.piece):
        c.piece += 1
        c.offset = 0
        skip_empty(o, c)
