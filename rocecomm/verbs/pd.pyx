"""Protection domain."""

cimport cython
from libc.errno cimport errno
from rocecomm.verbs.context cimport Context
from rocecomm.verbs.handle cimport Handle, verbs_error
from rocecomm.verbs.libibverbs cimport *


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class PD(Handle):
    """Protection domain (``ibv_alloc_pd``): ``PD(context)``.

    Registrations, queue pairs, SRQs and address handles of one domain work together; those
    of different domains are refused by the device.
    """

    def __cinit__(self, Context context not None):
        cdef int err
        self.context = context
        context.enter()
        try:
            with nogil:
                self.pd = context.provider.ops.alloc_pd(context.ctx)
                err = errno
            if self.pd == NULL:
                raise verbs_error("ibv_alloc_pd", err, context.name, "")
            self.opened((context,))
        finally:
            context.leave()

    cdef int free_handle(self) noexcept:
        cdef int rc
        with nogil:
            rc = self.context.provider.ops.dealloc_pd(self.pd)
        return rc if rc >= 0 else errno

    cdef str free_verb(self):
        return "ibv_dealloc_pd"

    cdef str device_name(self):
        return self.context.name

    def __repr__(self):
        return f"<PD of {self.context.name}{' closed' if self.closed else ''}>"
