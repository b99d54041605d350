# cython: language_level=3
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.link.base cimport Base
from rocecomm.verbs.buffer cimport Buffer, Lender
from rocecomm.verbs.mr cimport MR

# What a RegisteredBuffer and the requests that use it share: it ends with the last of them.
cdef class Registration:
    cdef Base engine
    cdef MR mr
    cdef object __weakref__


cdef class RegisteredBuffer(Lender):
    cdef Base engine
    cdef Registration registration      # None once closed
    cdef uint64_t address
    cdef uint64_t nbytes
    cdef uint32_t lkey
    cdef uint32_t rkey
    cdef int bits                       # IBV_ACCESS_*, with LOCAL_WRITE where the memory is writable
    cdef uint64_t generation
    cdef bytes packed
    cdef object __weakref__

    cdef int ensure_open(self, str what) except -1


cdef class RemoteBuffer:
    cdef int rank
    cdef uint64_t addr
    cdef uint64_t length
    cdef uint32_t rkey
    cdef int bits                       # what the owner grants: IBV_ACCESS_REMOTE_*
    cdef uint64_t generation
    cdef uint64_t user                  # instance of the communicator that may use it
    cdef bytes packed

    # the address of `nbytes` at `offset`, which must lie inside and allow `need` (one of
    # IBV_ACCESS_REMOTE_*); ValueError or TypeError otherwise, naming `what`
    cdef uint64_t at(self, object offset, uint64_t nbytes, int need, str what) except? 0


cdef RegisteredBuffer register(Base g, object buf, object access)
cdef RemoteBuffer open_descriptor(Base g, object data)
cdef RemoteBuffer remote_arg(Base g, object remote, str what)
# the registration to use for a transfer from (need REMOTE_READ) or into (LOCAL_WRITE) the
# memory of `buf`, which `held` holds: a Registration, an entry of the cache, or None
cdef object covering(Base g, object buf, Buffer held, int need)
# where registering costs something: a read-only buffer that goes out, with its registration;
# (a copy, None) where the kernel does not register it, (held, None) where the request shall try
cdef tuple lend_read_only(Base g, Buffer held, Py_ssize_t offset, Py_ssize_t nbytes)
cdef void retry_held(Base g) noexcept
