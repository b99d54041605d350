# cython: language_level=3
from rocecomm.link.core cimport engine_t

cdef int start_worker(engine_t *e) noexcept nogil
cdef void stop_worker(engine_t *e) noexcept nogil
