# cython: language_level=3
from libc.stdint cimport uint32_t

# A block of 1 MiB, at a multiple of that; or larger, for one message.
ctypedef struct slab_t:
    slab_t *next
    size_t room             # bytes of the whole block
    size_t used
    uint32_t live           # messages in it

ctypedef struct store_t:
    slab_t *now             # being filled
    slab_t *spare
    uint32_t n_spare

cdef char *store_get(store_t *s, size_t n) noexcept nogil
cdef void store_put(store_t *s, char *p) noexcept nogil
cdef void store_end(store_t *s) noexcept nogil
