# cython: language_level=3
from libc.stdint cimport int64_t, uint16_t, uint64_t
from rocecomm.link.core cimport engine_t, peer_t, req_t, status_t
from rocecomm.verbs.buffer cimport Buffer

# Where a message lies.
ctypedef struct mem_t:
    char *ptr
    uint64_t n
    uint16_t dtype

# What is known of a peer at one moment.
ctypedef struct view_t:
    status_t status
    uint64_t answers            # to questions for its status, so far
    bint ready
    bint closing

cdef bint plain_array(object obj, bint writable, mem_t *m) except -1
cdef Buffer hold(object obj, bint writable, mem_t *m)

cdef class Inquiry

cdef class Base:
    cdef engine_t *e
    cdef readonly int rank
    cdef readonly int size
    cdef readonly str device
    cdef readonly object config
    cdef object default_timeout
    cdef bint is_open
    cdef bint foreign
    cdef bint reg_free
    cdef object first_cause
    cdef object context
    cdef object channel
    cdef object cq
    cdef object pd
    cdef object srq
    cdef object memory          # slots, status, mirror
    cdef object memory_mr
    cdef dict qps
    cdef readonly object cache
    cdef list lanes             # their queue pairs
    cdef bytes secret           # key for descriptors, made from the job's secret
    cdef uint64_t generation    # registrations made so far
    cdef list held              # MRs that a stopped peer kept from being deregistered
    cdef readonly uint64_t staged           # bytes in copies of read-only memory, now and at most
    cdef readonly uint64_t staged_most
    cdef dict remotes           # descriptor -> RemoteBuffer, of those opened last
    cdef object call_qp         # for datagrams, where peers connect on first use
    cdef object info            # what wire-up agreed on, for people
    cdef double seconds
    cdef list watchers          # of event loops: weak references (aio.pyx)
    cdef int64_t aio_spin       # ns: how long an awaiter polls before it lets the loop sleep
    cdef int64_t aio_yielded    # when an awaiter last gave way to the loop's other tasks
    cdef object __weakref__

    cdef int ensure(self, str what) except -1
    cdef int enter(self, str what) except -1
    cdef int enter_plain(self, str what, object array) except -1
    cdef void leave(self) noexcept
    cdef int poll_and_leave(self) noexcept
    cdef void reap(self) noexcept
    cdef int peer_arg(self, object rank, str what) except -1
    cdef uint64_t tag_arg(self, object tag) except? 0xFFFFFFFFFFFFFFFF
    cdef int64_t until(self, object timeout) except? -1
    cdef int wait_reqs(self, req_t **reqs, int n, bint any_, int64_t deadline) except -1
    cdef void release(self, req_t *r, object owner) noexcept
    cdef object error_of(self, req_t *r, str what)
    cdef object closed_error(self, str what)
    cdef object fatal_error(self, str what)
    cdef object peer_error(self, int rank, str what)
    cdef void look_at(self, int rank, bint ask, bint heavy, view_t *view) noexcept
    cdef Inquiry inquire(self, str what, int rank, object timeout)
    cdef list ranks_gone(self)
    cdef object timeout_error(self, str what, int rank, object timeout)

cdef class Inquiry:
    cdef Base engine
    cdef str what
    cdef int rank
    cdef object timeout
    cdef bint asked             # an answer is under way
    cdef int looks              # at the peer's status so far
    cdef int64_t due            # until when the answer is waited for, or when to ask again
    cdef uint64_t answers
    cdef uint64_t beats

    cdef object say(self, str state, str detail)
    cdef object known(self)
    cdef object step(self, bint heavy)
