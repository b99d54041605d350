"""The registration cache: what it keeps, what it never keeps, and for how long.

Where registering costs nothing it is off; ROCECOMM_REG_CACHE_MODE=always switches it on there.
"""

import array as arrays
import collections
import gc
import mmap
import random
import weakref

import numpy as np
import pytest

import rocecomm
from rocecomm.link.regcache import RegistrationCache
from rocecomm.verbs.buffer import py_acquire as acquire
from rocecomm.verbs.device import open_device
from rocecomm.verbs.pd import PD


@pytest.fixture
def pd(device):
    with open_device(device) as context:
        yield PD(context)


def device_memory(pd, nbytes):
    """As `rocecomm.empty` makes it, which would keep the device open until the process ends."""
    return np.frombuffer(pd.context.alloc(nbytes), "u1")


def find(cache, array):
    with acquire(array) as buffer:
        return cache.find(buffer)


def test_an_array_and_its_views_share_one_registration(pd):
    cache = RegistrationCache(pd, 1 << 30, 1024)
    array = np.zeros((64, 1024))
    whole = find(cache, array)
    assert whole.lkey and whole.start == array.ctypes.data and whole.end - whole.start == array.nbytes
    assert find(cache, array[3:5]) is whole and find(cache, array.reshape(-1)[7:]) is whole
    assert (cache.hits, cache.misses, len(cache), cache.nbytes) == (2, 1, 1, array.nbytes)
    cache.close()


def test_an_entry_goes_with_its_array(pd):
    cache = RegistrationCache(pd, 1 << 30, 1024)
    array = np.zeros(100000)
    gone = weakref.ref(array)
    entry = find(cache, array)
    del array
    gc.collect()
    assert gone() is None, "the cache keeps the array alive"
    assert len(cache) == cache.nbytes == 0
    del entry
    # an allocator that hands out the same address again gets a registration of its own
    for _ in range(20):
        again = np.zeros(100000)
        assert find(cache, again).start == again.ctypes.data
        del again
    assert cache.hits == 0


def test_what_can_be_resized_or_closed_is_never_kept(pd):
    cache = RegistrationCache(pd, 1 << 30, 1024)
    text, mapped = bytearray(100000), mmap.mmap(-1, 100000)
    numbers = arrays.array("d", [0.0] * 10000)
    for thing in (text, mapped, bytes(100000), memoryview(text), numbers, np.frombuffer(text, "u1"),
                  np.frombuffer(mapped, "u1")):
        assert find(cache, thing) is None
        del thing
    assert len(cache) == 0
    text.extend(b"x")
    numbers.append(1.0)
    gc.collect()
    mapped.close()


def test_least_recently_used_goes_first(pd):
    cache = RegistrationCache(pd, 3 * 80000, 1024)
    a, b, c, d = (np.zeros(10000) for _ in range(4))
    for array in (a, b, c, a, d):
        find(cache, array)
    assert len(cache) == 3 and cache.nbytes == 3 * 80000
    hits = cache.hits
    find(cache, a)
    find(cache, c)
    find(cache, d)
    assert cache.hits == hits + 3
    find(cache, b)
    assert cache.hits == hits + 3
    assert find(cache, np.zeros(40000)) is None     # larger than the whole cache
    cache.trim()
    assert len(cache) == cache.nbytes == 0


def test_an_entry_in_use_outlives_its_eviction(pd):
    cache = RegistrationCache(pd, 100000, 1024)
    a, b = np.zeros(10000), np.zeros(10000)
    entry = find(cache, a)
    find(cache, b)
    assert len(cache) == 1 and entry.lkey != 0
    cache.close()


def test_memory_of_the_device_is_kept_with_its_owner(pd):
    cache = RegistrationCache(pd, 1 << 30, 1024)
    a = device_memory(pd, 400000).view("f4").reshape(100, 1000)
    entry = find(cache, a[10:20])
    assert entry.start == a.ctypes.data and entry.end - entry.start >= a.nbytes
    assert find(cache, a) is entry is find(cache, a.reshape(-1)[7:])
    del a, entry
    gc.collect()
    assert len(cache) == 0


def test_torch_storages_are_kept(pd):
    torch = pytest.importorskip("torch")
    cache = RegistrationCache(pd, 1 << 30, 1024)
    t = torch.zeros(100000)
    entry = find(cache, t[5:500])
    assert (entry.start, entry.end) == (t.data_ptr(), t.data_ptr() + 400000)
    assert find(cache, t) is entry is find(cache, t.view(100, 1000)) is find(cache, t.numpy()[7:])
    assert find(cache, torch.nn.Parameter(t)) is entry
    assert (cache.hits, cache.misses) == (4, 1)
    # its storage moves: the entry is not served any more
    t.share_memory_()
    moved = find(cache, t)
    assert moved is not entry and moved.start == t.data_ptr() and len(cache) == 1
    # another storage under the same tensor
    t.data = torch.zeros(100000)
    gc.collect()
    assert find(cache, t).start == t.data_ptr() and len(cache) == 1
    view = t[10:]
    gone = weakref.ref(t.untyped_storage())
    del t, entry, moved
    gc.collect()
    assert gone() is not None and len(cache) == 1
    del view
    gc.collect()
    assert gone() is None and len(cache) == cache.nbytes == 0
    lent = torch.frombuffer(bytearray(100000), dtype=torch.uint8)
    assert find(cache, lent).start == lent.data_ptr()       # the tensor holds the bytearray itself
    del lent
    gc.collect()
    assert len(cache) == 0


def test_a_cache_that_cannot_register_all_leaves_it_to_the_request(pd):
    cache = RegistrationCache(pd, 1 << 30, 1024)
    owner = np.zeros(100000)
    cache._locked, cache._limit = 500000, 250000        # as a limit on locked memory would have it
    assert find(cache, owner[:1000]) is None and len(cache) == 0
    small = np.zeros(20000)
    assert find(cache, small) is not None
    assert find(cache, bytearray(100000)) is None and len(cache) == 0       # room was made for it


def test_closing_ends_what_requests_still_use(device):
    with open_device(device) as context:
        domain = PD(context)
        cache = RegistrationCache(domain, 100000, 1024)
        a, b = np.zeros(10000), np.zeros(10000)
        kept = find(cache, a)
        find(cache, b)                                  # evicts the first, which we still hold
        cache.close()
        assert kept.handle == 0
        domain.close()                                  # EBUSY if a registration were left


class Model:
    """What the cache ought to hold: owners by name, least recently used first."""

    def __init__(self, limit):
        self.limit, self.entries = limit, collections.OrderedDict()

    def find(self, name, nbytes):
        if nbytes > self.limit:
            return False
        hit = name in self.entries
        self.entries[name] = nbytes
        self.entries.move_to_end(name)
        while sum(self.entries.values()) > self.limit:
            self.entries.popitem(last=False)
        return hit


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_agree_with_a_model(pd, scale, seed):
    torch = pytest.importorskip("torch") if seed == 2 else None
    rnd = random.Random(seed)
    cache, model = RegistrationCache(pd, 400000, 1 << 20), Model(400000)
    owners, names, in_use = {}, iter(range(10**6)), collections.deque(maxlen=3)
    for step in range(scale.rounds(3000, 100)):
        what = rnd.random()
        if what < 0.25 or not owners:
            nbytes = rnd.choice((8, 4096, 40000, 100000, 100000, 300000, 500000))
            make = [lambda n: np.zeros(n, "u1"), lambda n: device_memory(pd, n)]
            if torch:
                make.append(lambda n: torch.zeros(n, dtype=torch.uint8))
            owners[next(names)] = rnd.choice(make)(nbytes)      # often where one has just been freed
        elif what < 0.4:
            name = rnd.choice(list(owners))
            del owners[name]
            model.entries.pop(name, None)
        elif what < 0.45:
            name = rnd.choice(list(owners))
            owner = owners[name]
            if isinstance(owner, np.ndarray) and owner.base is None:
                try:
                    owner.resize(len(owner) % 200000 + 1, refcheck=False)
                    assert name not in model.entries, "the block moved under a registration"
                except ValueError:
                    assert name in model.entries or owner.ctypes.data in {e.start for e in in_use}
        elif what < 0.5:
            limit = rnd.choice((0, 100000))
            cache.trim(limit)
            while sum(model.entries.values()) > limit:
                model.entries.popitem(last=False)
        else:
            name = rnd.choice(list(owners))
            owner = owners[name]
            start = rnd.randrange(len(owner))
            hits = cache.hits
            part = owner[start:rnd.randrange(start, len(owner)) + 1]
            entry = find(cache, part)
            base = len(owner.base.obj) if isinstance(owner, np.ndarray) and owner.base is not None \
                else len(owner)
            hit = model.find(name, base)
            assert (cache.hits > hits) == hit, (seed, step)
            if entry is None:
                assert base > 400000
            else:
                at = owner.ctypes.data if isinstance(owner, np.ndarray) else owner.data_ptr()
                assert (entry.start, entry.end) == (at, at + base), (seed, step)
                in_use.append(entry)            # as a request would: eviction does not end it
            del part
        owner = None
        assert len(cache) == len(model.entries), (seed, step)
        assert cache.nbytes == sum(model.entries.values()), (seed, step)
    cache.close()


# ------------------------------------------------------------------- through a communicator

ALWAYS = {"ROCECOMM_REG_CACHE_MODE": "always", "ROCECOMM_REG_CACHE": "1M"}


def plain_sends(comm, rounds, seed):
    """Memory comes and goes between transfers; what arrives is right, and nothing is held."""
    rnd, other = random.Random(seed), 1 - comm.rank
    cache = comm._engine.cache
    text, numbers, mapped = bytearray(50000), arrays.array("B", bytes(50000)), mmap.mmap(-1, 50000)
    for i in range(rounds):
        n = rnd.choice((20000, 100000, 100000, 300000))
        mine = np.full(n, (i + comm.rank) & 255, "u1")
        theirs = np.zeros(n, "u1") if rnd.random() < 0.7 else rocecomm.empty(n, "u1", device=comm.device)
        sending = comm.isend(mine, other)
        if rnd.random() < 0.1:
            comm.trim()                         # while a request uses the entry
        assert comm.recv(theirs, other) == sending.wait() == n
        assert (theirs == (i + other) & 255).all(), (seed, i)
        if rnd.random() < 0.3:                  # the block moves; its old address is handed out again
            del sending
            comm.trim()
            mine.resize(n // 2, refcheck=False)
        if i % 7 == 0:
            for thing in (text, numbers, mapped):
                part = memoryview(thing)[:50000]
                part[:] = bytes([i & 255]) * 50000
                if comm.rank == 0:
                    comm.send(part, 1)
                    comm.isend(thing, 1).wait()
                else:
                    got = np.zeros(len(thing), "u1")
                    comm.recv(got, 0)
                    comm.irecv(got, 0).wait()
                    assert (got[:50000] == i & 255).all()
                part.release()
            text.extend(b"x")
            numbers.extend([1])
            mapped.close()
            mapped = mmap.mmap(-1, 50000)
    gone = weakref.ref(mine)
    mine = theirs = got = sending = None
    assert gone() is None, "the cache keeps an array alive"
    return cache is not None and (cache.hits, cache.misses, cache.nbytes <= 1 << 20)


def test_memory_that_comes_and_goes_between_sends(world, scale):
    for result in world(2, plain_sends, scale.rounds(300, 25), 5, env=ALWAYS):
        assert result and result[1] > 0 and result[2]


def kept(comm, n):
    """The same memory is registered once per communicator."""
    other = 1 - comm.rank
    cache = comm._engine.cache
    for make in (lambda: np.zeros(n, "u1"), lambda: rocecomm.empty(n, "u1", device=comm.device)):
        mine, theirs = make(), make()
        mine[:] = comm.rank + 1
        before = cache.misses
        for i in range(5):
            comm.sendrecv(mine[i:], other, theirs[: n - i], other)
            assert (theirs[: n - i] == other + 1).all()
        assert cache.misses - before == 2 and cache.hits >= 8
    waiting = comm.irecv(theirs, other)         # evicted while a request uses it
    comm.trim()
    assert len(cache) == 0
    comm.send(mine, other) if comm.rank else None
    assert waiting.wait() == n if comm.rank == 0 else True
    comm.send(mine, other) if comm.rank == 0 else None
    assert waiting.wait() == n
    comm.irecv(theirs, other)                   # close() ends what nobody waits for
    global _left
    _left = comm.irecv(theirs, other)
    comm.sendrecv(b"", other, bytearray(0), other, 9, 9)


def test_memory_is_registered_once(world):
    world(2, kept, 100000, env={**ALWAYS, "ROCECOMM_REG_CACHE": "1G"})
