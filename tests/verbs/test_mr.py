"""Registrations: holding memory, churn (B5), overlaps (B6), limits (B7), resizing (B8)."""

import array
import gc
import os
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from memlock import WITHOUT_IPC_LOCK
from verbs.pair import ALL, LOCAL, READ, SANITIZED, WRITE, Pair, drain, pattern

from rocecomm import verbs as v
from rocecomm.errors import ClosedError, VerbsError


@pytest.fixture
def pd(device):
    with v.open_device(device) as ctx:
        yield v.PD(ctx)


def test_fields(pd):
    a = np.zeros(1000, "u1")
    mr = v.MR(pd, a[100:], ALL)
    assert (mr.addr, mr.length, len(mr)) == (a.__array_interface__["data"][0] + 100, 900, 900)
    assert mr.lkey > 0 or mr.rkey > 0
    assert mr.sge(10, 20) == v.SGE(mr.addr + 10, 20, mr.lkey) and mr.sge(10).length == 890
    assert mr.sge().length == 900 and mr.sge(900).length == 0
    assert mr.pd is pd and mr.buffer.obj is not None and "900 bytes" in repr(mr)
    for bad in ((-1, 1), (0, 901), (900, 1), (5, -1), (2**70, 1)):
        with pytest.raises(ValueError, match="do not lie inside"):
            mr.sge(*bad)
    mr.close()
    mr.close()
    assert mr.closed and mr.length == 0 and repr(mr) == "<MR closed>"
    for act in (lambda: mr.lkey, lambda: mr.rkey, lambda: mr.addr, mr.sge):
        with pytest.raises(ClosedError):
            act()


def test_unsuitable_memory(pd):
    for bad, error in ((np.zeros((4, 4))[:, 1], BufferError), (b"read only", BufferError),
                       (np.array([object()]), BufferError), (3, TypeError), ("text", TypeError)):
        with pytest.raises(error):
            v.MR(pd, bad, LOCAL)
    for empty in (b"", np.empty((2, 0)), bytearray()):
        with pytest.raises(ValueError, match="0 bytes"):
            v.MR(pd, empty, 0)
    for rights in (LOCAL, LOCAL | WRITE, ALL):
        with pytest.raises(BufferError, match="read-only"):
            v.MR(pd, b"read only", rights)
    v.MR(pd, b"readable", READ).close()


def test_remote_write_needs_local_write(pd):
    with pytest.raises(VerbsError, match="need LOCAL_WRITE") as e:
        v.MR(pd, bytearray(64), WRITE)
    assert e.value.verb == "ibv_reg_mr" and e.value.errno == 22


def test_optional_access_flag(pd):
    v.MR(pd, bytearray(64), ALL | v.IBV_ACCESS_RELAXED_ORDERING).close()


def test_memory_is_held_and_given_back(pd):
    class Owner(np.ndarray):
        pass
    a = np.zeros(1000).view(Owner)
    ref = weakref.ref(a)
    mr = v.MR(pd, a)
    del a
    gc.collect()
    assert ref() is not None
    del mr
    gc.collect()
    assert ref() is None
    b = np.zeros(10).view(Owner)
    ref = weakref.ref(b)
    mr = v.MR(pd, b)
    mr.close()
    del b
    gc.collect()
    assert ref() is None and mr.closed      # a closed registration holds nothing


# --------------------------------------------------------------------------- B8
def test_resize_is_refused_while_registered(pd):
    ba, aa, nd = bytearray(4096), array.array("i", [1, 2, 3]), np.zeros(100)
    mrs = [v.MR(pd, x) for x in (ba, aa, nd)]
    with pytest.raises(BufferError):
        ba.extend(b"x" * 10**6)
    with pytest.raises(BufferError):
        aa.extend([1] * 1000)
    with pytest.raises(ValueError):
        nd.resize(10**6, refcheck=False)
    for mr in mrs:
        mr.close()
    ba.extend(b"x" * 10**6)
    aa.extend([1] * 1000)
    nd.resize(10**6, refcheck=False)
    assert (len(ba), len(aa), nd.size) == (4096 + 10**6, 1003, 10**6)


# --------------------------------------------------------------------------- B5
def footprint():
    with open("/proc/self/maps") as f:
        maps = len(f.readlines())
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return maps, len(os.listdir("/proc/self/fd")), resident


@pytest.mark.timeout(120)
def test_churn(pd, scale):
    """Acceptance 7: 100,000 rounds of random sizes at random offsets, within fixed bounds."""
    block = np.zeros(min(64 << 20, 8 * scale.bytes), "u1")
    block[::4096] = 1
    rnd = random.Random(7)
    biggest = len(block) // 64

    def rounds(n):
        for _ in range(n):
            size = rnd.randint(1, biggest)
            start = rnd.randint(0, len(block) - size)
            v.MR(pd, block[start:start + size], ALL).close()

    rounds(100)
    gc.collect()
    before = footprint()
    rounds(scale.rounds(100_000, 1000))
    gc.collect()
    after = footprint()
    assert after[0] - before[0] < 100 and after[1] <= before[1]
    if not SANITIZED:           # a sanitizer keeps freed memory on purpose
        assert after[2] - before[2] < 20 << 20
    mr = v.MR(pd, block, ALL)
    assert mr.length == len(block)


def test_many_at_once(pd, scale):
    a = np.zeros(1 << 16, "u1")
    mrs = [v.MR(pd, a[i:i + 64], ALL) for i in range(scale.rounds(5000, 300))]
    assert len({m.rkey for m in mrs}) == len(mrs)
    for m in mrs[::2] + mrs[1::2]:
        m.close()


def test_keys_do_not_come_back_at_once(pd):
    a = np.zeros(64, "u1")
    keys = []
    for _ in range(50):
        mr = v.MR(pd, a, ALL)
        keys.append(mr.rkey)
        mr.close()
    assert all(x != y for x, y in zip(keys, keys[1:], strict=False))


# --------------------------------------------------------------------------- B6
def test_overlapping_registrations(device, scale):
    with Pair(device) as (a, b):
        theirs = np.zeros(8192, "u1")
        r1, r2, r3 = b.mr(theirs), b.mr(theirs), b.mr(theirs[10:20])
        r4 = b.mr(theirs[4000:4200])
        r1.close()
        src = a.mr(pattern(10))
        for mr, offset in ((r2, 100), (r3, 0), (r4, 50)):
            a.qp.post_send(v.IBV_WR_RDMA_WRITE, src, remote_addr=mr.addr + offset, rkey=mr.rkey)
            drain(a.send_cq, 1, scale.time)[0].check()
        for start in (100, 10, 4050):
            assert (theirs[start:start + 10] == pattern(10)).all()
        r2.close()
        a.qp.post_send(v.IBV_WR_RDMA_WRITE, src, remote_addr=r3.addr, rkey=r3.rkey)
        drain(a.send_cq, 1, scale.time)[0].check()


def test_eight_threads_register_the_same_memory(pd, scale):
    a, errors = np.zeros(1 << 16, "u1"), []

    def work(seed):
        rnd = random.Random(seed)
        try:
            for _ in range(scale.rounds(300, 20)):
                mine = [v.MR(pd, a[rnd.randrange(1000):], ALL) for _ in range(4)]
                rnd.shuffle(mine)
                for mr in mine:
                    mr.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


# --------------------------------------------------------------------------- B7
LIMIT = WITHOUT_IPC_LOCK + """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
from rocecomm import verbs as v
ctx = v.open_device(sys.argv[1])
pd = v.PD(ctx)
try:
    v.MR(pd, bytearray(1 << 20)).close()
    print("unlimited")
except OSError as e:
    assert e.errno == 12, e
    assert "'ulimit -l', which is 64 KiB" in str(e) and "ulimit -l unlimited" in str(e), e
    print("limited")
mr = v.MR(pd, bytearray(16 << 10))
qp = v.QP(pd, v.CQ(ctx, 8))
ctx.close()
"""


def test_locked_memory_limit(device):
    done = subprocess.run([sys.executable, "-c", LIMIT, device], capture_output=True, text=True,
                          timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    provider = [d.provider for d in v.devices() if d.name == device][0]
    assert done.stdout.strip() == ("unlimited" if provider == "softnic" else "limited")


# --------------------------------------------------------------------------- plain data
def test_sge_is_plain_data():
    import copy
    import pickle
    s = v.SGE(2**63, 5, 7)
    assert pickle.loads(pickle.dumps(s)) == s == copy.copy(s) and hash(s) == hash(v.SGE(2**63, 5, 7))
    assert s != v.SGE(2**63, 5, 8) and "0x8000000000000000" in repr(s)
    for bad in ((-1, 5), (2**64, 5), (0, -1)):
        with pytest.raises(ValueError):
            v.SGE(*bad)
