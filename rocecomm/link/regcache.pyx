# cython: language_level=3
"""Registrations kept for reuse where registering costs something.

Kept is only memory whose owner cannot move or free it unnoticed: numpy arrays that own their
memory, torch storages, and `rocecomm.empty`'s memory, each with all its views. A weak reference
on the owner drops the entry before the memory is freed or handed out again, and no entry is
served unless it lies where the owner's memory lies now. Exporters that can be resized or closed
(bytearray, array.array, mmap) are registered per call. Bounded in bytes and entries, least
recently used first; what a request still uses is deregistered with its last request.
"""

cimport cython
from libc.errno cimport EFAULT, ENOMEM, errno
from libc.stdint cimport uint32_t
from rocecomm.verbs.buffer cimport Buffer
from rocecomm.verbs.context cimport Memory
from rocecomm.verbs.libibverbs cimport IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, ibv_mr
from rocecomm.verbs.pd cimport PD

import collections
import resource
import sys
import weakref

import numpy as np

from ..verbs.mr import registration_hint
from . import failure

__all__ = ["RegistrationCache"]

cdef object ndarray = np.ndarray
cdef int ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ
CAP_IPC_LOCK = 14


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Entry:
    """A registration in the cache. It must not keep the owner alive, so it is made from a bare
    address; requests that use it hold it (and the memory), and it ends with its last user."""

    cdef ibv_mr *mr
    cdef PD pd
    cdef readonly size_t start
    cdef readonly size_t end
    cdef readonly uint32_t lkey
    cdef readonly uint32_t rkey
    cdef object watch
    cdef object __weakref__

    def __cinit__(self, PD pd not None, size_t start, size_t nbytes):
        cdef int err
        pd.enter()
        try:
            with nogil:
                self.mr = pd.context.provider.ops.reg_mr(pd.pd, <void *>start, nbytes, ACCESS)
                err = errno
        finally:
            pd.leave()
        if self.mr == NULL:
            raise failure.registration(
                "a transfer", err, nbytes, pd.context.name,
                registration_hint(pd.context, err, nbytes, ACCESS))
        self.pd, self.start, self.end = pd, start, start + nbytes
        self.lkey, self.rkey = self.mr.lkey, self.mr.rkey

    def __dealloc__(self):
        self.end_now()

    cdef void end_now(self) noexcept:
        cdef ibv_mr *mr = self.mr
        self.mr = NULL
        if mr == NULL or not self.pd.is_open or self.pd.is_foreign():
            return
        self.pd.users += 1      # it is not closed meanwhile
        with nogil:
            self.pd.context.provider.ops.dereg_mr(mr)
        self.pd.users -= 1

    @property
    def handle(self):
        """Address of the ibv_mr, for the request that uses it."""
        return <size_t>self.mr


class RegistrationCache:
    """``find(buffer)`` gives the entry whose registration covers the buffer, or None when its
    memory must be registered by the request itself.

    `limit`: bytes kept at most, and at most half of what may be locked; `max_entries`: the
    device's registrations, of which a quarter may be kept. ``hits`` and ``misses`` count.
    """

    def __init__(self, pd, limit, max_entries):
        locked = locked_limit()
        self._pd, self._locked = pd, locked
        self._limit = limit if locked is None else min(limit, locked // 2)
        self._max = max(1, min(1024, max_entries // 4))
        self._entries = collections.OrderedDict()       # id(owner) -> Entry
        self._live = weakref.WeakSet()                  # also those that only requests use
        self._bytes = 0
        self.hits = self.misses = 0

    def __len__(self):
        return len(self._entries)

    @property
    def nbytes(self):
        """Bytes registered by entries in the cache."""
        return self._bytes

    def find(self, Buffer buffer not None):
        """The entry for a `verbs.Buffer`, or None."""
        cdef Entry entry
        cdef Entry other
        cdef size_t start
        cdef size_t nbytes
        found = owner_of(buffer.obj)
        if found is None:
            self.make_room(buffer.nbytes)
            return None
        owner, start, nbytes = found
        if not start <= <size_t>buffer.ptr <= <size_t>buffer.ptr + buffer.nbytes <= start + nbytes:
            return None
        key = id(owner)
        entry = self._entries.get(key)
        if entry is not None and entry.start == start and entry.end == start + nbytes:
            self._entries.move_to_end(key)
            self.hits += 1
            return entry
        self.misses += 1
        self._drop(key)
        if nbytes > self._limit:
            self.make_room(buffer.nbytes)
            return None
        self.trim(self._limit - nbytes)
        try:
            entry = Entry(self._pd, start, nbytes)
        except OSError as error:
            # read-only pages, or no room for all of it: the request registers its part itself
            if error.errno == ENOMEM:
                self.trim(0)
            elif error.errno != EFAULT:
                raise
            return None
        self._live.add(entry)
        other = self._entries.get(key)      # of another thread, which registered it meanwhile
        if other is not None and other.start == start and other.end == start + nbytes:
            return other
        self._drop(key)
        try:
            entry.watch = weakref.ref(owner, _Gone(self, key))
        except TypeError:
            return None
        self._entries[key] = entry
        self._bytes += nbytes
        self.trim(self._limit)
        return entry

    def make_room(self, nbytes):
        """Gives up entries so that `nbytes` outside of the cache can be locked."""
        if self._locked is not None:
            self.trim(max(0, self._locked // 2 - nbytes))

    def _drop(self, key):
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.end - entry.start

    def _gone(self, key, watch):
        cdef Entry entry = self._entries.get(key)
        if entry is not None and entry.watch is watch:
            self._drop(key)

    def trim(self, limit=0):
        """Drops the least recently used entries until at most ``limit`` bytes are kept."""
        while self._entries and (self._bytes > limit or len(self._entries) > self._max):
            try:
                self._drop(next(iter(self._entries)))
            except RuntimeError:
                pass        # an owner went just now, and its entry with it

    def close(self):
        """Ends every registration, also of requests that nobody has asked for their result."""
        self.trim(0)
        for entry in list(self._live):
            (<Entry>entry).end_now()


class _Gone:
    """What the death of an owner calls; it does not keep the cache alive."""

    def __init__(self, cache, key):
        self._cache, self._key = weakref.ref(cache), key

    def __call__(self, watch):
        cache = self._cache()
        if cache is not None:
            cache._gone(self._key, watch)


cdef object owner_of(object obj):
    """``(owner, address, nbytes)`` of the memory in which `obj` lies, None where that may be
    moved, closed or freed unnoticed."""
    while type(obj) is Buffer:
        obj = obj.obj
    while isinstance(obj, ndarray):
        if obj.base is None:
            return (obj, obj.ctypes.data, obj.nbytes) if obj.flags.owndata else None
        obj = obj.base
    if type(obj) is memoryview:
        obj = obj.obj
    if type(obj) is Memory:
        return (obj, obj.address, len(obj)) if not obj.closed else None
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)     # None while torch is being imported
    if tensor is not None and isinstance(obj, tensor):
        storage = obj.untyped_storage()     # lending it (tensor.numpy()) made it unresizable
        return storage, storage.data_ptr(), storage.nbytes()
    return None


cdef object locked_limit():
    """How many bytes this process may lock, None if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/status") as f:
            for line in f:
                if line.startswith("CapEff:"):
                    return None if int(line.split()[1], 16) >> CAP_IPC_LOCK & 1 else soft
    except (OSError, ValueError):
        pass
    return soft
