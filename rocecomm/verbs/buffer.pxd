# cython: language_level=3
"""Anything that holds bytes -> address, nbytes, dtype, writability; the export is held."""

cdef class Buffer:
    cdef char *ptr
    cdef Py_ssize_t nbytes
    cdef bint readonly              # the exporter forbids writing
    cdef readonly object obj        # what the caller passed
    cdef readonly str device        # "cpu", or "cuda_host" for pinned host memory
    cdef readonly Py_ssize_t itemsize
    cdef int holds                  # registrations and requests that use the memory
    cdef Py_buffer view
    cdef bint has_view
    cdef void *dl                   # DLManagedTensor or DLManagedTensorVersioned
    cdef bint dl_versioned
    cdef object guard               # keeps the block from being moved (weakref on the owner)
    cdef object exporter            # array that lent `view` where it is not obj itself
    cdef object dtype_name          # filled on demand
    cdef tuple dims                 # filled on demand
    cdef bint is_plain              # made by acquire_plain: `obj` says the rest
    cdef bint is_released
    cdef object __weakref__

    cdef void hold(self) noexcept           # a registration starts to use the memory
    cdef void unhold(self) noexcept
    cdef int release_now(self) except -1


# Base of classes above that hold memory already: `acquire` takes what `lend` returns.
cdef class Lender:
    cdef Buffer lend(self, bint writable)


cdef Buffer acquire(object obj, bint writable)
# The same for what is known to be an ndarray, no subclass, of plain numbers, C-contiguous and not to
# be refused.
cdef Buffer acquire_plain(object arr)
