# cython: language_level=3
from rocecomm.link.core cimport engine_t, peer_t, uint32_t, uint64_t

cdef enum:
    ANSWER_CELLS = 4096

cdef bint answer_in_place(engine_t *e, peer_t *p, uint64_t req, uint32_t gen,
                          uint64_t answer) noexcept nogil
cdef void take_answers(engine_t *e) noexcept nogil
