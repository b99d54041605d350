"""An engine of threads in one process, as unkind as the real one may be.

A send is announced and its bytes are read later, when the receiver gets round to it, in
random order among what has matched; the sender's memory is looked at only then. So an
algorithm that overwrites what it is still sending gives wrong numbers here.
"""

import copy
import random
import threading
import time

from rocecomm.errors import MismatchError, RocecommError, TimeoutError
from rocecomm.link.memory import acquire


class Request:
    def __init__(self, view):
        self.view, self.done, self.peer = view, False, None

    def cancel(self):
        return not self.done


class Fabric:
    """What the ranks of one world share. ``eager`` bytes and less are copied at once."""

    def __init__(self, size, seed=0, eager=0):
        self.size, self.eager = size, eager
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.sends, self.receives, self.matched = {}, {}, []
        self.signatures, self.broken = {}, None
        self.messages = 0

    def engines(self):
        return [Engine(self, rank) for rank in range(self.size)]


class Engine:
    device = "fake"

    def __init__(self, fabric, rank):
        self.fabric, self.rank, self.size = fabric, rank, fabric.size
        self._seq = 0

    def coll_begin(self, op, dtype, count, reduction=0, root=-1, group=1):
        self._seq += 1
        sig = (group, self._seq, op, dtype, count, reduction, root)
        with self.fabric.changed:
            first = self.fabric.signatures.setdefault(sig[:2], sig)
            if first != sig:
                self.fabric.broken = MismatchError(f"{first} is not {sig}")
                self.fabric.changed.notify_all()
            self._check()
        return sig

    def coll_isend(self, sig, buf, dst, step=0, offset=0, nbytes=-1):
        view = memoryview(buf)[offset:offset + nbytes]
        assert len(view) == nbytes
        request = Request(view)
        with self.fabric.changed:
            self.fabric.messages += 1
            if nbytes <= self.fabric.eager:
                request.view, request.done = bytes(view), True
            self.fabric.sends.setdefault((sig, self.rank, dst, step), []).append(request)
            self._match((sig, self.rank, dst, step))
        return request

    def coll_irecv(self, sig, buf, src, step=0, offset=0, nbytes=-1):
        view = memoryview(acquire(buf, True))[offset:offset + nbytes]
        assert len(view) == nbytes
        request = Request(view)
        with self.fabric.changed:
            key = (sig, src, self.rank, step)
            self.fabric.receives.setdefault(key, []).append(request)
            self._match(key)
        return request

    def _match(self, key):
        sends, receives = self.fabric.sends.get(key), self.fabric.receives.get(key)
        if sends and receives:
            self.fabric.matched.append((key[2], sends.pop(0), receives.pop(0)))
            self.fabric.changed.notify_all()

    def _check(self):
        if self.fabric.broken:
            raise copy.copy(self.fabric.broken)

    def wait_all(self, requests, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        with self.fabric.changed:
            while not all(request.done for request in requests):
                self._check()
                mine = [pair for pair in self.fabric.matched if pair[0] == self.rank]
                if mine:                          # the receiver pulls, one at a time
                    pair = self.fabric.random.choice(mine)
                    self.fabric.matched.remove(pair)
                    _, send, receive = pair
                    receive.view[:] = send.view
                    send.done = receive.done = True
                    self.fabric.changed.notify_all()
                elif end is not None and time.monotonic() > end:
                    raise TimeoutError("late")
                else:
                    self.fabric.changed.wait(0.05)

    def abort(self, sig, text, error=None):
        kind = TimeoutError if isinstance(error, TimeoutError) else RocecommError
        with self.fabric.changed:
            self.fabric.broken = self.fabric.broken or kind(text)
            self.fabric.changed.notify_all()

    def group_error(self, group):
        with self.fabric.changed:
            return self.fabric.broken


def run(size, function, seed=0, eager=0, config=None):
    """``function(collectives, rank)`` on each rank; results or exceptions, by rank."""
    from rocecomm.collectives import Collectives
    from rocecomm.config import Config
    results = [None] * size

    def one(engine):
        try:
            results[engine.rank] = function(Collectives(engine, config or Config()),
                                            engine.rank)
        except Exception as error:
            results[engine.rank] = error

    fabric = Fabric(size, seed, eager)
    threads = [threading.Thread(target=one, args=(engine,), daemon=True)
               for engine in fabric.engines()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results, fabric
