"""Lifetime rules that all verbs objects share.

A child holds its parents, so nothing is freed under an object that is in use. Closing a
parent closes its children first. A child process of a fork never touches what its parent
made: there every call raises ClosedError, and close() and garbage collection only forget.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.errno cimport EBUSY
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport strerror
from posix.unistd cimport getpid, usleep

import errno as _errno
import operator
import warnings

from rocecomm.errors import ClosedError, VerbsError

cdef extern from *:
    """
    #include <pthread.h>
    static volatile unsigned int fork_generation;
    static void after_fork_in_child(void) { fork_generation++; }
    static int watch_forks(void) { return pthread_atfork(NULL, NULL, after_fork_in_child); }
    """
    unsigned int fork_generation
    int watch_forks() noexcept nogil

if watch_forks() != 0:
    raise ImportError("rocecomm.verbs cannot watch for forks: pthread_atfork failed")


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Handle:
    """Base of all verbs objects: ``close``, ``closed``, context manager, no pickling."""

    def __cinit__(self):
        self.children = {}
        self.parents = ()
        self.is_open = False

    cdef bint is_foreign(self) noexcept:
        return self.generation != fork_generation

    cdef int ensure_open(self) except -1:
        if self.is_open and not self.is_closing and self.generation == fork_generation:
            return 0
        name = type(self).__name__
        if self.is_open and self.is_foreign():
            raise ClosedError(
                f"this {name} belongs to process {self.creator} and cannot be used in its forked "
                f"child {getpid()}; open the device again in the child")
        raise ClosedError(f"this {name} is closed")

    # Any Python call, even an allocation, may let another thread run and close the object:
    # whoever uses the C pointer after one must be between enter() and leave().
    cdef int enter(self) except -1:
        self.ensure_open()
        self.users += 1
        return 0

    cdef void leave(self) noexcept:
        self.users -= 1

    def _ensure_open(self):
        """Raises ClosedError if the object is closed or was made before a fork."""
        self.ensure_open()

    cdef int opened(self, tuple parents) except -1:
        cdef Handle parent
        self.generation = fork_generation
        self.creator = getpid()
        self.parents = parents
        for parent in parents:
            parent.children[id(self)] = None
        self.is_open = True
        return 0

    # Children are kept as bare addresses: the collector clears weak references before it calls
    # finalizers. An address is good while it is in `children`, for a child leaves the table
    # (settle) before it dies, and a finalizer may be overtaken by a new reference.
    cdef Handle child_at(self, key):
        return <Handle> <PyObject *> <size_t> key

    cdef void settle(self) noexcept:
        cdef Handle parent
        self.is_open = False
        for parent in self.parents:
            parent.children.pop(id(self), None)

    # Not __dealloc__: freeing releases the GIL, and while a destructor runs another thread may
    # still get the object from a weak reference. A finalizer survives that.
    def __del__(self):
        """Frees what was left open when the last reference went; never raises."""
        cdef int rc
        if not self.is_open or self.is_closing:
            return
        if self.is_foreign():
            self.settle()
            return
        self.is_closing = True
        # only when the collector takes a whole cycle: it calls finalizers in any order
        for key in list(self.children):
            try:
                if key in self.children:
                    self.child_at(key).close()
            except BaseException:
                pass        # the child warns when its own turn comes
        rc = self.free_handle()
        if rc:
            self.leak()
            try:
                warnings.warn(
                    f"a {type(self).__name__} of {self.device_name()} could not be freed "
                    f"({self.free_verb()}: {strerror(rc).decode()}) and stays allocated until "
                    f"the process ends; call close() on it to see why", ResourceWarning)
            except BaseException:
                pass    # a filter made the warning an error, or the interpreter is ending
        self.settle()

    cdef int free_handle(self) noexcept:
        return 0

    cdef str free_verb(self):
        return "close"

    cdef str device_name(self):
        return "?"

    cdef void leak(self) noexcept:
        Py_INCREF(self.parents)

    def close(self):
        """Closes the objects made from this one, then this one; doing it twice is fine.

        Raises VerbsError if the device refuses; the object then stays open and close() can
        be tried again.
        """
        cdef int rc
        while self.is_closing and self.is_open:
            with nogil:                     # another thread is closing it: wait for its result
                usleep(200)
        if not self.is_open:
            return
        if self.is_foreign():
            self.settle()
            return
        self.is_closing = True
        try:
            while self.users:               # calls of other threads, among them some that
                with nogil:                 # are just making a child
                    usleep(50)
            for key in list(self.children):
                if key in self.children:
                    self.child_at(key).close()
            rc = self.free_handle()
            if rc:
                raise verbs_error(self.free_verb(), rc, self.device_name(), self._busy_hint(rc))
            self.settle()
        finally:
            self.is_closing = False

    def _busy_hint(self, rc):
        if rc == EBUSY:
            return "it is still in use; close what uses it first, or try again later"
        return ""

    @property
    def closed(self):
        """True once closed, and in a forked child of the process that made the object."""
        return not self.is_open or self.is_foreign()

    def __enter__(self):
        self.ensure_open()
        return self

    def __exit__(self, *exc):
        self.close()

    def __reduce__(self):
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it stands for an object of a "
            f"device in process {self.creator or getpid()}; send its plain data (keys, addresses, "
            f"queue pair numbers) instead")


cdef reason_fn reason = NULL


cdef void use_reasons(reason_fn source) noexcept:
    global reason
    reason = source


cdef object verbs_error(str verb, int err, str device, str detail):
    name = _errno.errorcode.get(err, "?")
    text = f"{verb} failed on {device}: {strerror(err).decode()} ({name})"
    words = reason().decode("utf-8", "replace") if reason != NULL else ""
    if words or detail:
        text += ": " + "; ".join(part for part in (words, detail) if part)
    return VerbsError(text, verb=verb, errno=err, device=device)


cdef object u64(object value, str what):
    value = operator.index(value)
    if not 0 <= value <= 0xFFFFFFFFFFFFFFFF:
        raise ValueError(f"{what} must lie in 0..2**64-1, not {value}")
    return value


cdef object u32(object value, str what):
    value = operator.index(value)
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError(f"{what} must lie in 0..2**32-1, not {value}")
    return value
