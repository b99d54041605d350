"""The registration cache: what it keeps, what it never keeps, and for how long."""

import gc
import mmap
import weakref

import numpy as np
import pytest

from rocecomm.link.regcache import RegistrationCache
from rocecomm.verbs.buffer import py_acquire as acquire
from rocecomm.verbs.device import open_device
from rocecomm.verbs.pd import PD


@pytest.fixture
def pd(device):
    with open_device(device) as context:
        yield PD(context)


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
    fixed = np.zeros(100000)
    fixed.flags.writeable = False
    for thing in (text, mapped, bytes(100000), memoryview(text), fixed, np.frombuffer(mapped, "u1")):
        assert find(cache, thing) is None
        del thing
    assert len(cache) == 0
    text.extend(b"x")
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
