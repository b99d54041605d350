# cython: language_level=3
"""`await` in asyncio: the event loop sleeps on the completion channel's descriptor.

No thread and no polling task. The first awaiter of a loop that has to sleep makes a `Watcher`:
the loop then reads the channel (a duplicate of its descriptor, so that closing the
communicator elsewhere never leaves the loop with a stranger's descriptor) and an eventfd, through
which another thread that ended what is awaited here says so. Once a second a timer
looks at peers and deadlines; when nothing was awaited between two of its turns, readers and
timer go.
"""
cimport cython
from rocecomm.link.base cimport Base, Inquiry
from rocecomm.link.core cimport (
    engine_t, int64_t, loop_t, pthread_mutex_unlock, rc_lock, rc_now, rc_set, rc_stamp, tell_loops)
from rocecomm.link.progress cimport arm, heartbeats, lingers, poll_once, take_event

import os
import weakref
from asyncio import get_running_loop

from ..config import USE_CONFIG
from ..errors import RocecommError

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int) noexcept
    int EFD_NONBLOCK
    int EFD_CLOEXEC

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int) noexcept
    ssize_t c_read "read"(int, void *, size_t) noexcept

cdef:
    int64_t FOREVER = 0x3FFFFFFFFFFFFFFF
    # An awaiter polls this long at most before the loop sleeps, in ns, and this long at least ...
    int64_t SPIN_MOST = 50000
    int64_t SPIN_LEAST = 1000
    # ... and learns: what came within this time would have been worth polling for.
    int64_t WORTH = 100000
    # After this long without a turn of the loop an await that need not sleep gives way once.
    int64_t FAIR = 500000
    # Eight polls that took this long: others want this CPU, polling keeps them from it.
    int64_t PREEMPTED = 200000


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Watcher:
    """One event loop's watch over one communicator's completion channel."""

    def __cinit__(self):
        self.l.fd = self.channel = -1
        self.sleepers = []

    def __init__(self):
        raise TypeError("made by awaiting a request")

    def __dealloc__(self):
        cdef engine_t *e
        cdef loop_t **at
        if self.engine is not None and self.l.fd >= 0 and not self.engine.foreign:
            e = self.engine.e
            with nogil:
                rc_lock(&e.mutex, &e.want)
                at = &e.loops
                while at[0] != NULL and at[0] != &self.l:
                    at = &at[0].next
                if at[0] != NULL:
                    at[0] = self.l.next
                pthread_mutex_unlock(&e.mutex)
        if self.l.fd >= 0:
            c_close(self.l.fd)
        if self.channel >= 0:
            c_close(self.channel)

    # ------------------------------------------------------------------ from awaiters
    cdef void count(self, int n) noexcept:
        """Awaiters that sleep. With the GIL; other threads look with the mutex only."""
        rc_set(&self.l.waiting, self.l.waiting + n)

    cdef object add(self, Awaiter a):
        """The future that ends when `a` is over; None if it is over already."""
        cdef Base g = self.engine
        cdef engine_t *e = g.e
        cdef bint again
        cdef bint soon
        if not self.watching:
            self.start_watching()
        future = self.loop.create_future()
        g.enter("await")
        if not a.mark():
            g.leave()
            return None
        self.count(1)
        arm(e)
        poll_once(e, False)             # what came in before the arming
        again = e.more
        if a.over():
            self.count(-1)
            g.leave()
            a.unmark()
            return None
        soon = lingers(e)
        g.leave()                       # first: making an object may run any finalizer
        self.used = True
        self.sleepers.append(a)
        if soon and self.soon is None:
            self.soon = self.loop.call_later(0.001, self.on_soon)
        if again:
            self.loop.call_soon(self.on_work)
        if a.deadline != FOREVER and (a.deadline - rc_now()) * 1e-9 < self.due - self.loop.time():
            self.set_timer((a.deadline - rc_now()) * 1e-9 + 0.001)
        return future

    cdef int start_watching(self) except -1:
        self.loop.add_reader(self.channel, self.on_event)
        self.loop.add_reader(self.l.fd, self.on_told)
        self.watching = True
        self.set_timer(min(1.0, self.engine.e.beat_every * 1e-9))
        return 0

    cdef int set_timer(self, double seconds) except -1:
        if self.timer is not None:
            self.timer.cancel()
        seconds = max(0.0, seconds)
        self.due = self.loop.time() + seconds
        self.timer = self.loop.call_later(seconds, self.on_tick)
        return 0

    # ------------------------------------------------------------------- from the loop
    def on_event(self):
        """The channel is readable."""
        self.look(True)

    def on_told(self):
        """Another thread ended something, or closed the communicator."""
        cdef int64_t drop
        c_read(self.l.fd, &drop, 8)
        self.look(False)

    def on_work(self):
        """A large transfer goes on."""
        self.look(False)

    def on_soon(self):
        self.soon = None
        self.look(False)

    def on_tick(self):
        """Once a second: are the peers alive, are deadlines over, is anybody still waiting?"""
        cdef Base g = self.engine
        self.timer = None
        if not self.l.waiting and not self.used:
            self.stop()
            return
        self.used = False
        self.set_timer(min(1.0, g.e.beat_every * 1e-9))
        if g.is_open:
            try:
                g.enter("await")
            except RocecommError:
                pass                    # `look` tells
            else:
                heartbeats(g.e, rc_now())
                g.leave()
        self.look(False)
        self.give_up()

    cdef int look(self, bint event) except -1:
        """Handles what has completed, arms the queue again, and wakes whose turn it is."""
        cdef Base g = self.engine
        cdef engine_t *e = g.e
        cdef bint again
        cdef bint soon
        if not g.is_open:
            return self.stop()
        if event:
            take_event(e)               # with the GIL held: close() cannot get between
            if not self.l.waiting:
                return self.stop()      # others use the channel; this loop need not wake for it
        try:
            g.enter("await")
        except RocecommError:
            return self.stop()
        self.l.told = True              # no need to write to our own descriptor
        if poll_once(e, False) == 0 or not e.more:
            arm(e)
            poll_once(e, False)
        self.l.told = False
        again = e.more
        soon = lingers(e)
        if again:
            g.poll_and_leave()          # one piece; then the loop's other tasks have their turn
            self.loop.call_soon(self.on_work)
        else:
            g.leave()
        if soon and self.soon is None:
            self.soon = self.loop.call_later(0.001, self.on_soon)
        return self.resolve()

    cdef int resolve(self) except -1:
        """Wakes the tasks whose requests have ended."""
        cdef Awaiter a
        cdef Py_ssize_t i
        cdef Py_ssize_t kept = 0
        cdef list all_ = self.sleepers
        cdef list woken = None
        for i in range(len(all_)):
            a = <Awaiter>all_[i]
            if a.watcher is None or a.over():
                if woken is None:
                    woken = []
                woken.append(a)
            elif woken is not None:
                all_[kept] = a
                kept += 1
            else:
                kept += 1
        if woken is None:
            return 0
        del all_[kept:]
        for a in woken:
            if a.watcher is not None:
                a.leave()
                if a.future is not None and not a.future.done():
                    a.future.set_result(None)
        return 0

    cdef int give_up(self) except -1:
        """Ends the awaits whose time is over, as soon as it is known what their peers do: the loop
        goes on meanwhile."""
        cdef Awaiter a
        cdef int64_t now = rc_now()
        cdef bint again = False
        for a in list(self.sleepers):
            if a.watcher is not None and now >= a.deadline and not a.over():
                again = not self.give_up_one(a) or again
        if again and self.asking is None and self.watching:
            self.asking = self.loop.call_later(0.002, self.on_asking)
        return self.resolve()

    cdef bint give_up_one(self, Awaiter a) except -1:
        """False: it is not known yet."""
        if a.inquiry is None:
            a.inquiry = a.late()
        error = a.inquiry.step(False)
        if error is None:
            return False
        if a.watcher is not None and not a.over():
            a.error = error
            a.leave()
            if a.future is not None and not a.future.done():
                a.future.set_result(None)
        return True

    def on_asking(self):
        self.asking = None
        self.give_up()

    cdef int stop(self) except -1:
        """The communicator is closed, or nothing is awaited: the loop is left as it was."""
        cdef Awaiter a
        cdef list all_ = self.sleepers
        self.sleepers = []
        for a in all_:
            if a.watcher is not None:
                a.leave()
                if a.future is not None and not a.future.done():
                    a.future.set_result(None)       # its task finds out why
        for timer in (self.timer, self.soon, self.asking):
            if timer is not None:
                timer.cancel()
        self.timer = self.soon = self.asking = None
        if self.watching:
            self.watching = False
            self.loop.remove_reader(self.channel)
            self.loop.remove_reader(self.l.fd)
        return 0


cdef Watcher watcher_of(Base g):
    """The running loop's watcher of this communicator."""
    cdef Watcher w
    cdef engine_t *e = g.e
    loop = get_running_loop()
    for ref in g.watchers:
        w = <Watcher>ref() if ref() is not None else None
        if w is not None and w.loop is loop:
            return w
    w = Watcher.__new__(Watcher)
    w.engine = g
    w.loop = loop
    g.ensure("await")
    w.channel = os.dup(e.channel_fd)    # with the GIL held: close() cannot get between
    w.l.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    if w.l.fd < 0:
        raise OSError("eventfd failed: too many open files?")
    g.enter("await")
    w.l.next = e.loops
    e.loops = &w.l
    g.leave()
    g.watchers = [ref for ref in g.watchers if ref() is not None] + [weakref.ref(w)]
    return w


@cython.auto_pickle(False)
cdef class Awaiter:
    """One `await`: the iterator that a task drives. What it waits for is its subclass's."""

    def __init__(self):
        raise TypeError("made by awaiting a request")

    cdef bint over(self) noexcept:
        """Whether it has ended; without the mutex."""
        return True

    cdef bint mark(self) noexcept:
        """With the mutex held: its end is to be told to event loops. False: it has ended."""
        return False

    cdef void unmark(self) noexcept:
        pass

    cdef object result(self):
        """What `await` returns, or raises."""

    cdef Inquiry late(self):
        """What its TimeoutError says is found out."""

    cdef bint withdraw(self):
        """The task was cancelled. Whether the transfer still goes on."""
        return False

    def __iter__(self):
        return self

    def __next__(self):
        cdef Base g = self.engine
        cdef int64_t now
        if self.future is not None:         # woken by the loop: it has had its turn
            self.future = None
            self.gave_way = True
            now = g.aio_yielded = rc_now()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            if self.over() and now - self.start < WORTH and g.e.spin_turns > 20:
                g.aio_spin = min(SPIN_MOST, g.e.spin)
        if g.is_open and not self.over() and not self.spin():
            self.future = self.suspend()
            if self.future is not None:
                self.future._asyncio_future_blocking = True
                return self.future
        if not self.gave_way:
            now = rc_now()
            if now - g.aio_yielded > FAIR:
                g.aio_yielded = now
                self.gave_way = True
                return None                 # the other tasks first; then we are asked again
        raise StopIteration(self.result())

    cdef bint spin(self) except -1:
        """Polls as long as that was worth it lately. Whether it is over."""
        cdef Base g = self.engine
        cdef engine_t *e = g.e
        cdef int64_t now = rc_now()
        cdef int64_t turn
        cdef int64_t limit
        cdef int i
        self.start = now
        limit = 0
        while True:
            g.enter("await")
            if limit == 0:
                limit = now + (SPIN_LEAST if now < e.crowded else max(SPIN_LEAST, g.aio_spin))
            for i in range(8):
                if poll_once(e, False) == 0 and e.more:
                    g.poll_and_leave()      # a large transfer: the loop must turn meanwhile
                    return self.over()
                if self.over():
                    break
            turn, now = now, rc_now()
            if now - turn > PREEMPTED:
                e.crowded = now + 20000000
            if self.over() or e.leader or now >= limit:
                g.leave()
                break
            g.leave()
        if self.over():
            return True
        g.aio_spin //= 2
        return False

    cdef object suspend(self):
        cdef Base g = self.engine
        cdef Watcher w = watcher_of(g)
        self.deadline = g.until(USE_CONFIG)
        self.inquiry = None
        self.watcher = w
        future = w.add(self)
        if future is None:
            self.watcher = None
        return future

    cdef int leave(self) except -1:
        """Its future ends, or nobody waits for it any more."""
        if self.watcher is not None:
            self.watcher.count(-1)
            self.watcher = None
            self.unmark()
        return 0

    def throw(self, kind, value=None, trace=None):
        """The task was cancelled while it slept: so is what it waits for, as far as it can be."""
        cdef Watcher w = self.watcher
        self.leave()
        self.future = None
        try:
            if self.withdraw() and w is not None and self.engine.is_open:
                # it goes on, and holds its memory: the loop sees it through
                self.watcher = w
                if w.add(self) is None:
                    self.watcher = None
        except RocecommError:
            pass                            # closed meanwhile: the cancellation matters more
        if value is None:
            value = kind if isinstance(kind, BaseException) else kind()
        raise value.with_traceback(trace) if trace is not None else value

    def close(self):
        """The coroutine is given up: what it waited for goes on."""
        self.leave()
        self.future = None
