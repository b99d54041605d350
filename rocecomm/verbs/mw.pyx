"""Memory windows: a key of its own for a part of a registration."""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from rocecomm.verbs.handle cimport Handle, u32, u64, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.mr cimport MR
from rocecomm.verbs.pd cimport PD
from rocecomm.verbs.qp cimport QP

import operator


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class MW(Handle):
    """Memory window (``ibv_alloc_mw``): ``MW(pd, mw_type=2)``.

    It is bound to a part of a registration by a work request, and then a peer uses its
    `rkey` as that of a registration. Type 1 is taken back by binding it to nothing or anew, by
    the owner's queue pairs; type 2 belongs to the queue pair that bound it, which
    invalidates it (``IBV_WR_LOCAL_INV``), as a send of its peer can (``IBV_WR_SEND_WITH_INV``).
    Raises VerbsError with errno EOPNOTSUPP where the device has no windows. (IB specification,
    volume 1, 10.6.7.)
    """

    def __cinit__(self, PD pd not None, mw_type=IBV_MW_TYPE_2):
        cdef int err
        cdef int kind = operator.index(mw_type)
        self.pd = pd
        pd.enter()
        try:
            with nogil:
                self.mw = ibv_alloc_mw(pd.pd, kind)
                err = errno
            if self.mw == NULL:
                raise verbs_error("ibv_alloc_mw", err, pd.context.name, f"a window of type {kind}")
            self.opened((pd,))
        finally:
            pd.leave()

    cdef int free_handle(self) noexcept:
        cdef int rc
        with nogil:
            rc = ibv_dealloc_mw(self.mw)
        if rc == 0:
            self.mw = NULL
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_dealloc_mw"

    cdef str device_name(self):
        return self.pd.context.name

    @property
    def rkey(self):
        """Key for the peer, once the bind has completed; changes with each bind."""
        self.ensure_open()
        return self.mw.rkey

    @property
    def mw_type(self):
        """1 or 2."""
        self.ensure_open()
        return self.mw.type

    def bind(self, QP qp not None, MR mr, offset=0, length=None,
             access=IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, *, wr_id=0,
             flags=IBV_SEND_SIGNALED):
        """Posts a bind to `length` bytes (default: the rest) at `offset` of `mr`; returns the
        window's new rkey. ``mr=None`` unbinds a window of type 1 (not on rxe: its library crashes).

        `mr` needs IBV_ACCESS_MW_BIND, and IBV_ACCESS_LOCAL_WRITE where the peer may write. The
        completion (IBV_WC_BIND_MW) says whether it worked. Type 1 goes through ``ibv_bind_mw``, type
        2 through ``ibv_post_send``. Raises ValueError if the part does not lie in `mr`, VerbsError if
        the request cannot be posted.
        """
        cdef ibv_mw_bind b
        cdef ibv_send_wr wr
        cdef ibv_send_wr *bad = NULL
        cdef uint32_t fresh
        cdef int rc
        memset(&b, 0, sizeof(b))
        memset(&wr, 0, sizeof(wr))
        b.wr_id = u64(wr_id, "wr_id")
        b.send_flags = u32(flags, "flags")
        if mr is not None:
            part = mr.sge(offset, length)
            b.bind_info.addr = part.addr
            b.bind_info.length = part.length
            b.bind_info.mw_access_flags = u32(access, "access")
        self.enter()
        try:
            qp.enter()
            try:
                if mr is not None:
                    mr.enter()
                    b.bind_info.mr = mr.mr
                if self.mw.type == IBV_MW_TYPE_1:
                    with nogil:
                        rc = ibv_bind_mw(qp.qp, self.mw, &b)
                        fresh = self.mw.rkey
                else:
                    fresh = ibv_inc_rkey(self.mw.rkey)
                    wr.wr_id = b.wr_id
                    wr.opcode = IBV_WR_BIND_MW
                    wr.send_flags = b.send_flags
                    wr.bind_mw.mw = self.mw
                    wr.bind_mw.rkey = fresh
                    wr.bind_mw.bind_info = b.bind_info
                    with nogil:
                        rc = ibv_post_send(qp.qp, &wr, &bad)
                    if rc == 0:
                        self.mw.rkey = fresh
                if rc < 0:
                    rc = errno
                if mr is not None:
                    mr.leave()
            finally:
                qp.leave()
        finally:
            self.leave()
        if rc:
            raise verbs_error("ibv_bind_mw" if self.mw.type == IBV_MW_TYPE_1 else "ibv_post_send", rc,
                              self.device_name(), f"bind of a type {self.mw.type} window to "
                              f"{b.bind_info.length} bytes; the registration needs MW_BIND, and the "
                              f"queue pair to be of the window's domain and in state RTS")
        return fresh

    def __repr__(self):
        if self.closed:
            return "<MW closed>"
        return f"<MW of type {self.mw.type} of {self.device_name()}, rkey {self.mw.rkey:#x}>"
