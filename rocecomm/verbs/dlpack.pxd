# cython: language_level=3
"""Import of DLPack tensors; buffer.pyx is its user."""

ctypedef struct Lent:
    void *managed               # give it to delete() exactly once
    bint versioned
    char *ptr                   # byte_offset included
    Py_ssize_t nbytes
    bint readonly
    Py_ssize_t itemsize

cdef str a(str name)
cdef bint is_capsule(object obj) noexcept
cdef tuple take(object obj, bint writable, Lent *out)
cdef void delete(void *managed, bint versioned) noexcept
