"""Several ranks in one process, for tests that drive each of them call by call.

``with together(3) as comms:`` gives three connected communicators of the device under test.
Nothing moves unless a test calls one of them, so what happens, happens in the order of its lines.
"""

import contextlib
import threading

import rocecomm


class Shared:
    """A store in memory: what ``rocecomm.init(store=...)`` takes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout):
                raise TimeoutError(key)
            return self.values[key]


def start(n, device=None, by_rank=None, timeout=30, **options):
    """Starts ``n`` ranks; the list of their communicators, or of what init() raised instead.
    ``by_rank``: rank -> further options of that one."""
    store, made = Shared(), [None] * n

    def one(rank):
        try:
            made[rank] = rocecomm.init(rank=rank, world_size=n, store=store, device=device,
                                       join_timeout=timeout,
                                       **{**options, **(by_rank or {}).get(rank, {})})
        except BaseException as error:
            made[rank] = error
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10)
    return made


def close(comms):
    """Closes them all at the same time."""
    closers = [threading.Thread(target=comm.close) for comm in comms
               if not isinstance(comm, BaseException)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(20)


@contextlib.contextmanager
def together(n, device=None, **options):
    """``n`` connected communicators, closed at the end."""
    comms = start(n, device, **options)
    try:
        for comm in comms:
            if isinstance(comm, BaseException):
                raise comm
        yield comms
    finally:
        close(comms)
