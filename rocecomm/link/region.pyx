# cython: language_level=3
"""Memory that its owner registers for good, and what a peer holds of it.

`RegisteredBuffer` is the owner's side. Its `descriptor()` is plain bytes, from which a
peer makes a `RemoteBuffer`. A descriptor (little-endian, 64 bytes; docs/design/messaging.md):

    magic, version, access, 0, rank, key, generation, instance, address, length, MAC

The MAC is HMAC-SHA256, cut to 16 bytes, with a key made from the job's secret, so what
was changed on the way, or comes from another job, is found before anything is posted.
"""
cimport cython
from libc.stdint cimport uint32_t, uint64_t
from rocecomm.link.base cimport Base
from rocecomm.verbs.buffer cimport Buffer, Lender, acquire
from rocecomm.verbs.libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE)
from rocecomm.verbs.mr cimport MR

import hmac
import struct
import weakref
from errno import EFAULT

import numpy as np

from ..enums import AccessFlags
from ..config import as_integer
from ..errors import ClosedError, VerbsError, brief

#: Bytes of read-only memory that a rank sends from copies at a time, see `lend_read_only`.
STAGED_MAX = 256 << 20

#: Size of a descriptor in bytes.
DESCRIPTOR_SIZE = 64

_MAGIC, _VERSION, _MAC = b"rcRB", 1, 16
_BODY = struct.Struct("<4sBBHIIQQQQ")
_READ, _WRITE, _ATOMIC = IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_ATOMIC
_LETTERS = {"r": _READ, "w": _WRITE, "a": _ATOMIC}
cdef enum:
    REMOTE = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
    REMOTE_CHANGE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
    # descriptors opened last, so that passing the bytes again and again costs little
    OPENED_MAX = 1024


cdef str letters(int bits):
    return "".join(letter for letter, bit in _LETTERS.items() if bits & bit)


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Registration:
    """What a RegisteredBuffer and its transfers share; the last of them ends it."""

    def __init__(self):
        raise TypeError("a Registration is made by Communicator.register()")

    def __del__(self):
        if self.mr is None or self.mr.closed:
            return
        try:
            self.mr.close()
        except VerbsError:
            # a peer that is stopped in mid copy still touches the memory: both are held
            if self.engine.held is not None:
                self.engine.held.append(self.mr)

    @property
    def lkey(self):
        return self.mr.mr.lkey

    @property
    def rkey(self):
        return self.mr.mr.rkey

    @property
    def handle(self):
        return <size_t>self.mr.mr


cdef void retry_held(Base g) noexcept:
    """Lets go of what a stopped peer kept from being deregistered."""
    try:
        for mr in list(g.held):
            try:
                mr.close()
            except VerbsError:
                continue
            if mr in g.held:
                g.held.remove(mr)
    except Exception:
        pass        # another thread did the same


@cython.auto_pickle(False)
cdef class RegisteredBuffer(Lender):
    """Memory registered with the device (ibv_reg_mr), for peers and for own transfers.

    Made by :meth:`Communicator.register`; a context manager. It holds the memory: while it is
    registered it cannot be resized or freed. ``descriptor()`` is what peers need to write,
    read and change it. Passed to ``send``, ``recv``, ``isend``, ``irecv`` and as local side of
    one-sided calls it is used as it is, without another registration; ``len()`` is its size.

    ``close()`` ends it, as does dropping the last reference, and closing the communicator.
    """

    def __init__(self):
        raise TypeError("a RegisteredBuffer is made by Communicator.register(buf)")

    cdef int ensure_open(self, str what) except -1:
        if self.registration is not None and not self.registration.mr.closed:
            return 0
        if self.engine.foreign:
            raise ClosedError(f"{what}: this RegisteredBuffer belongs to the parent process; a "
                              "forked child must register its memory itself")
        if not self.engine.is_open:
            raise self.engine.closed_error(what)
        raise ClosedError(f"{what}: this RegisteredBuffer of {self.nbytes} bytes was closed")

    cdef Buffer lend(self, bint writable):
        self.ensure_open("the call")
        return acquire(self.registration.mr.buffer, writable)

    def descriptor(self):
        """What a peer needs to use the memory: 64 plain bytes, to be sent in any way.

        They are worth as much as the memory: whoever of the job has them may use it, as
        far as `access` allows, until it is closed. Raises ClosedError.
        """
        self.ensure_open("descriptor")
        return self.packed

    def close(self):
        """Ends the registration; peers that still use the memory get an error. Twice is fine.

        Where own transfers that use it are still in flight it ends with the last of them, and
        only then the memory can be resized. After that, nothing touches it any more: if
        a peer that is stopped (SIGSTOP) in the middle of a copy keeps the device from
        deregistering, the memory stays held until the peer has let go.
        """
        self.registration = None        # ends it, unless a request uses it as well

    @property
    def closed(self):
        """Whether it was closed, or its communicator (also true in a forked child)."""
        return self.registration is None or self.registration.mr.closed

    @property
    def address(self):
        """Address of the first byte in this process."""
        return self.address

    @property
    def nbytes(self):
        """Size in bytes."""
        return self.nbytes

    @property
    def access(self):
        """What peers may do: AccessFlags (IBV_ACCESS_REMOTE_READ, _WRITE, _ATOMIC)."""
        return AccessFlags(self.bits & REMOTE)

    @property
    def lkey(self):
        """The device's key for local use. Raises ClosedError."""
        self.ensure_open("lkey")
        return self.lkey

    @property
    def rkey(self):
        """The device's key for peers. Raises ClosedError."""
        self.ensure_open("rkey")
        return self.rkey

    @property
    def generation(self):
        """Number of this registration, counted by its communicator from 1."""
        return self.generation

    def __len__(self):
        return self.nbytes

    def __enter__(self):
        self.ensure_open("with")
        return self

    def __exit__(self, *exc):
        self.close()

    def __reduce__(self):
        raise TypeError("a RegisteredBuffer cannot be copied or pickled: it stands for memory of "
                        "this process; send its descriptor() instead")

    def __repr__(self):
        if self.closed:
            return f"<RegisteredBuffer {self.nbytes} bytes, closed>"
        return (f"<RegisteredBuffer {self.nbytes} bytes at {self.address:#x} of rank "
                f"{self.engine.rank}, access {letters(self.bits)!r}>")


cdef int access_arg(object access) except -1:
    """IBV_ACCESS_REMOTE_* bits from letters or AccessFlags."""
    cdef int bits = 0
    if isinstance(access, str):
        for letter in access:
            if letter not in _LETTERS:
                raise ValueError("register: access is made of 'r' (peers may read), 'w' (write) and "
                                 f"'a' (atomic operations), or AccessFlags, not {brief(access)}")
            bits |= <int>_LETTERS[letter]
        return bits
    number = as_integer(access)
    if number is None:
        raise TypeError("register: access must be a string of 'r', 'w' and 'a', or AccessFlags, not "
                        f"{brief(access)} of type {type(access).__name__}")
    if number < 0 or number & ~(REMOTE | IBV_ACCESS_LOCAL_WRITE):
        raise ValueError("register: access may hold IBV_ACCESS_REMOTE_READ, _REMOTE_WRITE, "
                         f"_REMOTE_ATOMIC and _LOCAL_WRITE, not {access!r}")
    return number & REMOTE


cdef RegisteredBuffer register(Base g, object buf, object access):
    """What `Communicator.register` does; see there."""
    cdef RegisteredBuffer reg
    cdef Registration registration
    cdef Buffer held
    cdef int bits
    g.ensure("register")
    if g.held:
        retry_held(g)
    bits = -1 if access is None else access_arg(access)
    held = acquire(buf, False)
    if bits < 0:
        bits = IBV_ACCESS_REMOTE_READ if held.readonly else REMOTE
    elif bits & REMOTE_CHANGE and held.readonly:
        if held.dl == NULL:
            acquire(buf, True)          # says why, and what helps
        raise BufferError(
            f"register: a read-only {type(buf).__name__} of {held.nbytes} bytes can only be read by "
            f"peers (access 'r'), and {letters(bits)!r} was asked for; pass writable memory")
    if not held.readonly:
        bits |= IBV_ACCESS_LOCAL_WRITE
    registration = Registration.__new__(Registration)
    registration.engine = g
    registration.mr = MR(g.pd, held, bits)
    reg = RegisteredBuffer.__new__(RegisteredBuffer)
    reg.engine, reg.registration, reg.bits = g, registration, bits
    reg.address, reg.nbytes = <size_t>registration.mr.mr_addr, held.nbytes
    reg.lkey, reg.rkey = registration.mr.mr.lkey, registration.mr.mr.rkey
    g.generation += 1
    reg.generation = g.generation
    body = _BODY.pack(_MAGIC, _VERSION, bits & REMOTE, 0, g.rank, reg.rkey, reg.generation,
                      g.e.instance, reg.address, reg.nbytes)
    reg.packed = body + mac(g, body)
    return reg


cdef bytes mac(Base g, bytes body):
    return hmac.digest(g.secret, b"descriptor" + body, "sha256")[:_MAC]


@cython.auto_pickle(False)
cdef class RemoteBuffer:
    """Memory of another rank: what :meth:`Communicator.open` makes of a descriptor.

    Plain numbers, nothing to close: ``rank``, ``nbytes``, ``access``, ``generation``. It
    belongs to the communicator that opened it.
    """

    def __init__(self):
        raise TypeError("a RemoteBuffer is made by Communicator.open(descriptor)")

    cdef uint64_t at(self, object offset, uint64_t nbytes, int need, str what) except? 0:
        cdef uint64_t start
        number = as_integer(offset)
        if number is None:
            raise TypeError(f"{what}: offset must be an integer, bytes from the start of the remote "
                            f"region, not {brief(offset)} of type {type(offset).__name__}")
        if number < 0 or number > self.length or nbytes > self.length - <uint64_t>number:
            raise ValueError(f"{what}: bytes {number} to {number + nbytes} do not lie in the region of "
                             f"{self.length} bytes of rank {self.rank}; nothing was transferred")
        start = number
        if not self.bits & need:
            self.refuse_access(need, what)
        return self.addr + start

    def refuse_access(self, need, what):
        """Raises the ValueError for an operation that the owner did not allow."""
        raise ValueError(
            f"{what}: the region of {self.length} bytes of rank {self.rank} was registered with "
            f"access {letters(self.bits)!r}, which does not allow it: {letters(need)!r} is needed, "
            "as in comm.register(buf, access=...)")

    @property
    def rank(self):
        """Whose memory it is."""
        return self.rank

    @property
    def nbytes(self):
        """Size in bytes."""
        return self.length

    @property
    def access(self):
        """What its owner allows: AccessFlags."""
        return AccessFlags(self.bits)

    @property
    def generation(self):
        """Number of the registration at its owner."""
        return self.generation

    def descriptor(self):
        """The bytes it was made from."""
        return self.packed

    def __len__(self):
        return self.length

    def __reduce__(self):
        raise TypeError("a RemoteBuffer cannot be copied or pickled: it belongs to a communicator of "
                        "this process; send its descriptor() instead")

    def __repr__(self):
        return (f"<RemoteBuffer {self.length} bytes of rank {self.rank}, access "
                f"{letters(self.bits)!r}>")


cdef RemoteBuffer open_descriptor(Base g, object data):
    """What `Communicator.open` does; see there."""
    cdef RemoteBuffer remote
    cdef bytes packed
    g.ensure("open")
    if type(data) is not bytes:
        try:
            packed = bytes(memoryview(data))
        except TypeError:
            hint = "; a RegisteredBuffer has a descriptor() for that" \
                if isinstance(data, RegisteredBuffer) else ""
            raise TypeError("open: expected the bytes of a descriptor(), not "
                            f"{type(data).__name__}{hint}") from None
    else:
        packed = data
    remote = g.remotes.get(packed)
    if remote is not None:
        return remote
    if len(packed) != DESCRIPTOR_SIZE or packed[:4] != _MAGIC:
        raise ValueError(f"open: {len(packed)} bytes that begin with {packed[:4].hex()!r} are not a "
                         f"descriptor, which has {DESCRIPTOR_SIZE} bytes; pass what descriptor() "
                         "returned, unchanged and whole")
    magic, version, bits, zero, rank, rkey, generation, instance, addr, length = \
        _BODY.unpack_from(packed)
    if version != _VERSION:
        raise ValueError(f"open: a descriptor of version {version}, while this rocecomm reads version "
                         f"{_VERSION}; install the same rocecomm on all hosts")
    if not hmac.compare_digest(mac(g, packed[:-_MAC]), packed[-_MAC:]):
        known = rank < g.size and instance == instance_of(g, rank)
        raise ValueError(
            f"open: the descriptor (of rank {rank}, {length} bytes) "
            + ("was changed on the way; pass what descriptor() returned, unchanged" if known else
               "comes from another job, or was changed on the way; its owner must register the "
               "memory with the communicator of this job"))
    if rank >= g.size or instance != instance_of(g, rank):
        raise ValueError(
            f"open: the descriptor comes from another communicator of rank {rank}, not from the one "
            "that is connected to this one; register the memory again after init()")
    remote = RemoteBuffer.__new__(RemoteBuffer)
    remote.rank, remote.addr, remote.length, remote.rkey = rank, addr, length, rkey
    remote.bits, remote.generation, remote.packed = bits, generation, packed
    remote.user = g.e.instance
    if len(g.remotes) >= OPENED_MAX:
        g.remotes.clear()
    g.remotes[packed] = remote
    return remote


cdef uint64_t instance_of(Base g, int rank) noexcept:
    return g.e.instance if rank == g.rank else g.e.peers[rank].instance


cdef RemoteBuffer remote_arg(Base g, object remote, str what):
    """A RemoteBuffer of this communicator from what a user passed."""
    cdef RemoteBuffer r
    g.ensure(what)
    if type(remote) is not RemoteBuffer:
        if isinstance(remote, (bytes, bytearray, memoryview)):
            return open_descriptor(g, remote)
        hint = "; pass its descriptor(), or what open() made of it, of the other rank" \
            if isinstance(remote, RegisteredBuffer) else ""
        raise TypeError(f"{what}: remote must be the bytes of a descriptor() or what "
                        f"Communicator.open() made of them, not {type(remote).__name__}{hint}")
    r = remote
    if r.user != g.e.instance:
        raise ValueError(f"{what}: this RemoteBuffer was opened by another communicator; open its "
                         "descriptor() with this one")
    return r


cdef object covering(Base g, object buf, Buffer held, int need):
    cdef RegisteredBuffer reg
    if type(buf) is RegisteredBuffer:
        reg = buf
        if reg.engine is g and reg.bits & need:
            return reg.registration
        return None
    return g.cache.find(held) if g.cache is not None else None


cdef tuple lend_read_only(Base g, Buffer held, Py_ssize_t offset, Py_ssize_t nbytes):
    """Linux before 6.2 does not register a file that is mapped read-only and shared, as
    numpy.memmap(mode="r") does. Such a message goes out from a copy, up to STAGED_MAX bytes in all."""
    cdef Registration registration = Registration.__new__(Registration)
    registration.engine = g
    part = memoryview(held)[offset:offset + nbytes]
    try:
        registration.mr = MR(g.pd, part, IBV_ACCESS_REMOTE_READ)
        return held, registration
    except VerbsError as error:
        if error.errno != EFAULT or g.staged + nbytes > STAGED_MAX:
            return held, None           # the request finds out, and says why
    if g.staged_most == 0:
        g.config.logger().warning(
            "memory that is mapped read-only and shared (numpy.memmap mode 'r') is sent from a copy, "
            "as this kernel does not register it; map it copy-on-write (mode 'c') to send it in place")
    copy = np.frombuffer(part, np.uint8).copy()
    g.staged += nbytes
    g.staged_most = max(g.staged_most, g.staged)
    weakref.finalize(copy, _unstage, weakref.ref(g), nbytes).atexit = False
    return acquire(copy, False), None


def _unstage(engine, nbytes):
    cdef Base g = engine()
    if g is not None:
        g.staged -= nbytes
