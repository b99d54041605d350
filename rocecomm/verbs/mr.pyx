"""Memory registrations and the scatter-gather elements made from them."""

cimport cython
from cpython.ref cimport Py_INCREF
from libc.errno cimport EBUSY, EFAULT, EINVAL, ENOMEM, errno
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.verbs.buffer cimport Buffer, acquire
from rocecomm.verbs.dlpack cimport a
from rocecomm.verbs.handle cimport Handle, u32, u64, verbs_error
from rocecomm.verbs.libibverbs cimport *
from rocecomm.verbs.pd cimport PD

import operator
import resource

cdef enum:
    WRITES = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
    # bits 20 to 29: a library may ignore them, but only ibv_reg_mr_iova2 takes them
    OPTIONAL = 0x3FF00000


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class MR(Handle):
    """A registration (``ibv_reg_mr``): ``MR(pd, obj, access=IBV_ACCESS_LOCAL_WRITE)``.

    `obj` is anything `rocecomm.verbs.acquire` takes; its memory is held, and cannot be
    resized or closed, until the registration was closed. `access` is an AccessFlags or int;
    rights that write need a writable `obj`.

    Raises BufferError or TypeError for unsuitable memory, ValueError for 0 bytes, and
    VerbsError if the device refuses. ``close()`` raises VerbsError with errno EBUSY while a
    peer that is stopped in the middle of a copy still touches the memory: nothing is given
    back then, and close() can be tried again.
    """

    def __cinit__(self, PD pd not None, obj, access=IBV_ACCESS_LOCAL_WRITE):
        cdef int err
        cdef unsigned int bits = u32(access, "access")
        cdef Buffer buffer
        pd.ensure_open()        # a closed domain is the first thing to say
        buffer = acquire(obj, (bits & WRITES) != 0)
        if buffer.nbytes == 0:
            what = obj
            while isinstance(what, Buffer) and what.obj is not None:
                what = what.obj
            raise ValueError(f"cannot register 0 bytes ({a(type(what).__name__)} of shape "
                             f"{buffer.shape}); a message without data needs no registration")
        self.pd = pd
        self.buffer = buffer
        self.access_bits = bits
        self.mr_addr = buffer.ptr
        pd.enter()
        try:
            with nogil:
                if bits & OPTIONAL:
                    self.mr = pd.context.provider.ops.reg_mr_iova2(
                        pd.pd, buffer.ptr, buffer.nbytes, <uint64_t> buffer.ptr, bits)
                else:
                    self.mr = pd.context.provider.ops.reg_mr(pd.pd, buffer.ptr, buffer.nbytes,
                                                             <int> bits)
                err = errno
            if self.mr == NULL:
                raise verbs_error("ibv_reg_mr", err, pd.context.name,
                                  f"{buffer.nbytes} bytes with access {_access_text(bits)}"
                                  f"{registration_hint(pd.context, err, buffer.nbytes, bits)}")
            buffer.hold()
            self.opened((pd,))
        finally:
            pd.leave()

    cdef int free_handle(self) noexcept:
        cdef int rc
        cdef ibv_mr *mr = self.mr
        with nogil:
            rc = self.pd.context.provider.ops.dereg_mr(mr)
        if rc < 0:
            rc = errno
        if rc == 0:
            self.mr = NULL
            self.buffer.unhold()
            if self.buffer.holds == 0:
                self.buffer.release_now()
        return rc

    cdef str free_verb(self):
        return "ibv_dereg_mr"

    cdef str device_name(self):
        return self.pd.context.name

    cdef void leak(self) noexcept:
        # a device may still write here: better lose the memory than hand it to somebody else
        Py_INCREF(self.buffer)
        Py_INCREF(self.parents)

    def _busy_hint(self, rc):
        if rc == EBUSY:
            return (f"a peer that is stopped in the middle of a copy still uses the "
                    f"{self.buffer.nbytes} bytes; they stay registered, try close() again later")
        return ""

    @property
    def lkey(self):
        """Key for local use in scatter-gather elements."""
        self.ensure_open()
        return self.mr.lkey

    @property
    def rkey(self):
        """Key that a peer needs for RDMA."""
        self.ensure_open()
        return self.mr.rkey

    @property
    def addr(self):
        """Address of the first byte; a peer counts remote addresses from here."""
        self.ensure_open()
        return <size_t> self.buffer.ptr

    @property
    def length(self):
        """Size in bytes."""
        return self.buffer.nbytes if self.is_open else 0

    def sge(self, offset=0, length=None):
        """The part of `length` bytes (default: the rest) at `offset` bytes: SGE.

        ValueError if it does not lie inside the registration.
        """
        cdef uint32_t lkey
        self.ensure_open()
        lkey = self.mr.lkey
        offset = operator.index(offset)
        length = self.buffer.nbytes - offset if length is None else operator.index(length)
        if offset < 0 or length < 0 or offset + length > self.buffer.nbytes:
            raise ValueError(f"bytes {offset}..{offset + length} do not lie inside a registration "
                             f"of {self.buffer.nbytes} bytes")
        return SGE(<size_t> self.mr_addr + offset, length, lkey)

    def __len__(self):
        return self.buffer.nbytes

    def __repr__(self):
        if self.closed:
            return "<MR closed>"
        return (f"<MR {self.buffer.nbytes} bytes at {<size_t> self.buffer.ptr:#x}, "
                f"lkey {self.mr.lkey:#x}, rkey {self.mr.rkey:#x}, {_access_text(self.access_bits)}>")


cdef class SGE:
    """Scatter-gather element: ``SGE(addr, length, lkey)``, plain numbers.

    It holds nothing alive. One element carries at most 2**32-1 bytes.
    """

    def __cinit__(self, addr, length, lkey=0):
        self.sge.addr = u64(addr, "the address of an SGE")
        self.sge.length = u32(length, "the length of one SGE")
        self.sge.lkey = u32(lkey, "an lkey")

    @property
    def addr(self):
        """Address in this process."""
        return self.sge.addr

    @property
    def length(self):
        """Bytes."""
        return self.sge.length

    @property
    def lkey(self):
        """Local key of the registration that covers it."""
        return self.sge.lkey

    def __eq__(self, other):
        if not isinstance(other, SGE):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def _key(self):
        return self.sge.addr, self.sge.length, self.sge.lkey

    def __reduce__(self):
        return SGE, self._key()

    def __repr__(self):
        return f"SGE(addr={self.sge.addr:#x}, length={self.sge.length}, lkey={self.sge.lkey:#x})"


def _access_text(unsigned int bits):
    from rocecomm.enums import AccessFlags
    names = [f.name.removeprefix("IBV_ACCESS_") for f in AccessFlags if f & bits]
    return "|".join(names) or "0"


def registration_hint(context, int err, size_t nbytes, unsigned int bits):
    """What most likely made ``ibv_reg_mr`` fail, and what helps; begins with "; ", or is empty."""
    if err == EINVAL and not context.closed:
        largest = context.query_device().max_mr_size
        if nbytes > largest:
            return (f"; the device registers at most {largest} bytes at once: use smaller "
                    f"pieces")
    if err == ENOMEM:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY:
            kib = [f"{v // 1024} KiB" if v != resource.RLIM_INFINITY else "unlimited"
                   for v in (soft, hard)]
            return (f"; most likely the limit on locked memory, 'ulimit -l', which is {kib[0]} "
                    f"here (hard limit {kib[1]}): raise it with 'ulimit -l unlimited', with "
                    f"'memlock unlimited' in /etc/security/limits.conf, with LimitMEMLOCK=infinity "
                    f"in a systemd unit, or with --ulimit memlock=-1 in docker")
        return ("; memory or the device's registrations are used up (the limit on locked memory, "
                "'ulimit -l', is unlimited here): close registrations that are no longer needed")
    if err == EFAULT:
        return ("; part of the memory is not mapped, or is mapped read-only while the access "
                "rights ask to write, or is a file mapped read-only and shared, which Linux before "
                "6.2 refuses: map it copy-on-write (numpy.memmap mode 'c'), or copy it")
    if err == EINVAL and bits & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) and \
            not bits & IBV_ACCESS_LOCAL_WRITE:
        return "; REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well"
    return ""
