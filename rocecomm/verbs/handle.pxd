# cython: language_level=3
"""Lifetime shared by every object that wraps a libibverbs handle."""

cdef class Handle:
    cdef object __weakref__
    cdef dict children              # id -> weakref of everything made from this object
    cdef unsigned int generation    # fork generation of the creator
    cdef int users                  # calls that run without the GIL right now
    cdef bint is_open

    cdef int ensure_open(self) except -1
    cdef bint is_foreign(self) noexcept             # created before a fork, we are the child
    cdef int adopt(self, Handle child) except -1    # parent.adopt(child)
    cdef int disown(self, Handle child) except -1
    cdef int opened(self) except -1                 # the C object exists from now on
    cdef int free_handle(self) except -1            # overridden: destroys the C object or raises
    cdef void drop(self) noexcept                   # overridden: forget the C object (child of a fork)
    cdef object device_name(self)                   # overridden: for messages


cdef object verbs_error(str verb, int errno, object device, str detail)
cdef void warn_leak(object what, object why) noexcept
