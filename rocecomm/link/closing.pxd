# cython: language_level=3
from rocecomm.link.core cimport engine_t, int64_t

cdef void finish(engine_t *e, int64_t limit) noexcept nogil
