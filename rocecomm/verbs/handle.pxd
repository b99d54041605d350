# cython: language_level=3
"""Lifetime shared by every object that wraps a libibverbs handle."""

cdef class Handle:
    cdef object __weakref__
    cdef dict children              # addresses of everything made from this object
    cdef tuple parents              # Handles that must outlive this one
    cdef unsigned int generation    # fork generation of the creator
    cdef int creator                # its pid, for messages
    cdef int users                  # calls that run without the GIL right now
    cdef bint is_open
    cdef bint is_closing

    cdef int ensure_open(self) except -1            # raises ClosedError
    cdef int enter(self) except -1                  # same, and close() waits until leave()
    cdef void leave(self) noexcept
    cdef bint is_foreign(self) noexcept             # made before a fork, and we are the child
    cdef int opened(self, tuple parents) except -1  # the C object exists from now on
    cdef Handle child_at(self, key)
    cdef void settle(self) noexcept                 # the C object is gone
    # overridden by each class
    cdef int free_handle(self) noexcept             # destroys the C object: 0 or errno
    cdef str free_verb(self)                        # the verb that free_handle calls
    cdef str device_name(self)
    cdef void leak(self) noexcept                   # could not be freed: keep memory for ever


ctypedef const char *(*reason_fn)() noexcept

cdef void use_reasons(reason_fn source) noexcept    # a provider that says why it refused
cdef object verbs_error(str verb, int err, str device, str detail)
cdef object u64(object value, str what)             # ValueError unless 0 <= value < 2**64
cdef object u32(object value, str what)
