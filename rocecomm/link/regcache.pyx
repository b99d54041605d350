# cython: language_level=3
"""Registrations kept for reuse where registering costs something.

Only numpy arrays that own their memory, and arrays that lie within one, are kept: a weak
reference on the owner drops the entry before the memory is freed or handed out again.
Exporters that can be resized or closed (bytearray, array.array, mmap) are registered per
call. Bounded in bytes and entries, least recently used first.
"""

cimport cython
from rocecomm.link.core cimport req_t
from rocecomm.verbs.libibverbs cimport ibv_mr
from rocecomm.verbs.pd cimport PD

import collections
import os
import weakref

import numpy as np

from ..enums import AccessFlags
from . import failure

cdef extern from "<errno.h>" nogil:
    int errno

__all__ = ["RegistrationCache"]

_ACCESS = AccessFlags.IBV_ACCESS_LOCAL_WRITE | AccessFlags.IBV_ACCESS_REMOTE_READ


@cython.auto_pickle(False)
cdef class Entry:
    """A registration in the cache. It must not keep the array alive, so it is made from a bare
    address; requests that use it hold it (and the array), and it ends with its last user."""

    cdef ibv_mr *mr
    cdef PD pd
    cdef readonly size_t start
    cdef readonly size_t end
    cdef object watch

    def __cinit__(self, PD pd not None, size_t start, size_t nbytes):
        pd._ensure_open()
        self.mr = pd.context.provider.ops.reg_mr(pd.pd, <void *>start, nbytes, <int>_ACCESS)
        if self.mr == NULL:
            raise failure.registration("a transfer", errno, nbytes, pd.context.name)
        self.pd, self.start, self.end = pd, start, start + nbytes

    def __dealloc__(self):
        if self.mr != NULL and self.pd is not None and not self.pd.closed:
            self.pd.context.provider.ops.dereg_mr(self.mr)
        self.mr = NULL

    @property
    def lkey(self):
        return self.mr.lkey

    @property
    def rkey(self):
        return self.mr.rkey

    @property
    def handle(self):
        return <size_t>self.mr


class RegistrationCache:
    """``find(buffer)`` gives the entry whose registration covers the buffer, or None when its
    memory must be registered by the request itself."""

    def __init__(self, pd, limit, max_entries):
        self._pd, self._limit = pd, limit
        self._max = max(1, min(1024, max_entries // 4))
        self._entries = collections.OrderedDict()       # id(owner) -> Entry
        self._bytes = 0
        self.hits = self.misses = 0

    def __len__(self):
        return len(self._entries)

    @property
    def nbytes(self):
        """Bytes registered by entries in the cache."""
        return self._bytes

    def find(self, buffer):
        """The entry for a `verbs.Buffer`, or None."""
        owner = _owner(buffer.obj)
        if owner is None or not owner.flags.writeable or owner.nbytes > self._limit:
            return None
        start = owner.ctypes.data
        key = id(owner)
        entry = self._entries.get(key)
        if entry is not None and entry.start <= buffer.address \
                and buffer.address + buffer.nbytes <= entry.end:
            self._entries.move_to_end(key)
            self.hits += 1
            return entry
        self.misses += 1
        if entry is not None:
            self._drop(key)
        if not start <= buffer.address <= buffer.address + buffer.nbytes <= start + owner.nbytes:
            return None
        entry = Entry(self._pd, start, owner.nbytes)
        watch(entry, weakref.ref(owner, lambda _, key=key: self._drop(key)))
        self._entries[key] = entry
        self._bytes += owner.nbytes
        self.trim(self._limit)
        return entry

    def _drop(self, key):
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.end - entry.start

    def trim(self, limit=0):
        """Drops the least recently used entries until at most ``limit`` bytes are kept."""
        while self._entries and (self._bytes > limit or len(self._entries) > self._max):
            self._drop(next(iter(self._entries)))

    def close(self):
        """Drops everything."""
        self.trim(0)


def watch(Entry entry, ref):
    entry.watch = ref


def _owner(obj):
    """The ndarray that owns the memory, for arrays and what is based on one."""
    while isinstance(obj, np.ndarray):
        if obj.base is None:
            return obj if obj.flags.owndata and type(obj) is np.ndarray else None
        obj = obj.base
    return None

