"""Registered memory and its life, through the Communicator: theme B.

| case | test |
|---|---|
| B1 | test_closing_in_every_order, test_dropping_in_every_order |
| B3 | test_temporaries_are_held; test_communicator.test_requests_keep_their_buffers |
| B5 | test_registering_again_and_again |
| B6 | test_the_same_memory_registered_several_times |
| B7 | test_the_limit_on_locked_memory |
| B8 | link/test_region.test_registered_memory_cannot_be_resized |
| B9 | test_memory_beyond_the_region_limit |
| B10 | test_pages_shared_with_a_child |
| B11 | test_huge_pages |

What stale keys do: test_a_stale_descriptor_never_reaches_new_memory. A3 on memory that the kernel
does not register: test_communicator_buffers.test_read_only_memory_is_sent_and_never_written.
"""

import gc
import itertools
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from memlock import WITHOUT_IPC_LOCK
from verbs.pair import SANITIZED

import rocecomm
from rocecomm import ClosedError, CompletionError, VerbsError

ORDERS = list(itertools.permutations(range(4)))


def of_the_other(comm, reg):
    """Descriptors are exchanged; returns the other rank's."""
    theirs = bytearray(64)
    comm.sendrecv(reg.descriptor(), 1 - comm.rank, theirs, 1 - comm.rank, 90, 90)
    return bytes(theirs)


def meet(comm):
    comm.sendrecv(b"", 1 - comm.rank, bytearray(0), 1 - comm.rank, 91, 91)


# --------------------------------------------------------------------------- B1

def alone(name):
    """A communicator, two registrations, and a pending receive into one of them."""
    comm = rocecomm.init(0, 1, job_id=name)
    reg, other = comm.register(np.zeros(1000)), comm.register(bytearray(100))
    return [comm, reg, other, comm.irecv(reg, 0, tag=5)]


def end(thing):
    thing.cancel() if isinstance(thing, rocecomm.Request) else thing.close()


def unusable(thing):
    if isinstance(thing, rocecomm.Communicator):
        uses = [lambda: thing.send(b"x", 0), lambda: thing.register(bytearray(8)), thing.progress,
                thing.trim, lambda: thing.open(b"x")]
    elif isinstance(thing, rocecomm.RegisteredBuffer):
        assert thing.closed
        uses = [thing.descriptor, thing.__enter__, lambda: thing.rkey]
    else:
        with pytest.raises(rocecomm.RocecommError, match="cancelled|closed"):
            thing.wait()
        return
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def in_every_order(peers, orders, drop, collect):
    import warnings
    warnings.simplefilter("error", ResourceWarning)
    usage = []
    gc.freeze()                                 # what pytest left need not be looked at each time
    for i, order in enumerate(orders):
        things = alone(f"{peers.folder.name}-{i}")
        for at in order:
            if drop:
                things[at] = None
            else:
                end(things[at])
                end(things[at])
                unusable(things[at])
            if collect:
                gc.collect()
        if not drop:
            for thing in things:
                unusable(thing)
        del things
        gc.collect()
        usage.append(len(os.listdir("/proc/self/fd")))
    assert usage[-1] == usage[0]
    try:
        shown = subprocess.run(["rdma", "resource", "show", "mr"], capture_output=True, text=True,
                               timeout=60)
    except FileNotFoundError:
        return
    assert shown.returncode or f"pid {os.getpid()} " not in shown.stdout


@pytest.mark.parametrize("collect", [False, True])
def test_closing_in_every_order(world, scale, collect):
    orders = ORDERS if scale.share == 1 else ORDERS[collect::8]
    world(1, in_every_order, orders, False, collect, plain=True, timeout=60)


@pytest.mark.parametrize("collect", [False, True])
def test_dropping_in_every_order(world, scale, collect):
    orders = ORDERS if scale.share == 1 else ORDERS[collect::8]
    world(1, in_every_order, orders, True, collect, plain=True, timeout=60)


# --------------------------------------------------------------------------- B3

def temporaries(comm, rounds, sizes):
    other = 1 - comm.rank
    for i in range(rounds):
        n = sizes[i % len(sizes)]
        x = np.full(n, i, "i4")
        with comm.register(x * 3) as reg:       # nothing else refers to that array
            sending = comm.isend(reg, other)
        del reg
        kept = np.empty(n, "i4")
        gone = weakref.ref(kept)
        receiving = comm.irecv(comm.register(kept), other)
        if i % 2:
            del kept
        if i % 50 == 0:
            gc.collect()
        noise = [np.full(n, -1, "i4") for _ in range(5)]
        assert gone() is not None
        assert receiving.wait() == sending.wait() == 4 * n
        if not i % 2:
            assert (kept == 3 * i).all(), i
            del kept
        assert gone() is None, "an ended request holds its buffer"
        del noise


def test_temporaries_are_held(world, scale):
    world(2, temporaries, scale.rounds(1000, 40), (100, 20000))


# --------------------------------------------------------------------------- B5

def footprint():
    with open("/proc/self/maps") as f:
        maps = len(f.readlines())
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return maps, len(os.listdir("/proc/self/fd")), resident


def churn(comm, rounds, nbytes):
    block = np.zeros(nbytes, "u1")
    block[::4096] = 1
    rnd = random.Random(7)

    def some(n):
        for _ in range(n):
            size = rnd.randint(1, len(block) // 64)
            start = rnd.randint(0, len(block) - size)
            comm.register(block[start:start + size]).close()

    some(100)
    gc.collect()
    before = footprint()
    some(rounds)
    gc.collect()
    after = footprint()
    assert after[0] - before[0] < 100 and after[1] <= before[1]
    assert SANITIZED or after[2] - before[2] < 20 << 20
    with comm.register(block) as last:
        assert len(last) == nbytes


@pytest.mark.timeout(120)
def test_registering_again_and_again(world, scale):
    world(1, churn, scale.rounds(100_000, 500), min(64 << 20, 4 * scale.bytes), timeout=100)


# --------------------------------------------------------------------------- B6

def several_times(comm, threads, rounds):
    a = np.zeros(8192, "u1")
    r1, r2, r3 = comm.register(a), comm.register(a), comm.register(a[10:20])
    r4 = comm.register(a[4000:4200])            # shares its page
    theirs = [of_the_other(comm, r) for r in (r1, r2, r3, r4)]
    assert len(set(theirs)) == 4
    r1.close()
    meet(comm)
    values = np.arange(1, 11, dtype="u1")
    for remote, offset in zip(theirs[1:], (100, 0, 50), strict=True):
        comm.write(values, remote, offset)
    meet(comm)
    for start in (100, 10, 4050):
        assert (a[start:start + 10] == values).all()
    assert np.count_nonzero(a) == 30
    r2.close()
    r4.close()
    meet(comm)
    comm.write(values[::-1].copy(), theirs[2])
    meet(comm)
    assert (a[10:20] == values[::-1]).all()
    r3.close()
    errors = []

    def work(seed):
        rnd = random.Random(seed)
        try:
            for _ in range(rounds):
                mine = [comm.register(a[rnd.randrange(1000):]) for _ in range(4)]
                rnd.shuffle(mine)
                for reg in mine:
                    reg.close()
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for t in pool:
        t.start()
    for t in pool:
        t.join()
    assert not errors, errors
    with comm.register(a) as reg:
        remote = of_the_other(comm, reg)
        comm.write(values, remote)
        meet(comm)
        assert (a[:10] == values).all()
        meet(comm)


def test_the_same_memory_registered_several_times(world, scale):
    world(2, several_times, 8, scale.rounds(100, 5))


def stale(comm, rounds):
    """The owner closes a region and registers again, at the same address: who has the old
    descriptor gets an error, and the new memory is untouched."""
    a, values = np.zeros(4096, "u1"), np.full(16, 9, "u1")
    old = comm.register(a)
    theirs = of_the_other(comm, old)
    old.close()
    keys = set()
    for _ in range(rounds):
        reg = comm.register(a)
        keys.add(reg.rkey)
        reg.close()
    assert len(keys) == rounds
    reg = comm.register(a)
    meet(comm)
    if comm.rank == 0:
        with pytest.raises(CompletionError, match="rank 1"):
            comm.write(values, theirs)
    meet(comm)
    assert not a.any()
    comm.write(values, of_the_other(comm, reg))
    meet(comm)
    assert (a[:16] == 9).all()


def test_a_stale_descriptor_never_reaches_new_memory(world, scale):
    world(2, stale, scale.rounds(2000, 50))


# --------------------------------------------------------------------------- B7

LIMIT = WITHOUT_IPC_LOCK + """
import rocecomm
def fails(what):
    try:
        what()
    except OSError as e:
        assert e.errno == 12, e
        assert f"'ulimit -l', which is {kib} KiB" in str(e) and "ulimit -l unlimited" in str(e), e
        return "limited"
    return "unlimited"
with rocecomm.init(0, 1, device=sys.argv[1], job_id=sys.argv[2]) as comm:
    # 64 KiB more than the communicator has locked itself
    kib = 64 + [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmPin")][0]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib << 10, kib << 10))
    print(fails(lambda: comm.register(bytearray(1 << 20)).close()))
    for _ in range(50):
        comm.register(bytearray(16 << 10)).close()      # what fits, again and again
    sending = comm.isend(b"x" * 20000, 0)
    got = bytearray(20000)
    assert comm.recv(got, 0) == sending.wait() == 20000
def two():
    rocecomm.init(0, 1, device=sys.argv[1], job_id=sys.argv[2] + "b", eager_limit=1 << 20).close()
print(fails(two))
"""


def test_the_limit_on_locked_memory(device):
    done = subprocess.run([sys.executable, "-c", LIMIT, device, f"limit-{os.getpid()}"],
                          capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    from rocecomm import verbs as v
    free = [d.provider for d in v.devices() if d.name == device] == ["softnic"]
    assert done.stdout.split() == 2 * ["unlimited" if free else "limited"]


# --------------------------------------------------------------------------- B9

def beyond(comm, limit):
    big = np.zeros(3 << 20, "u1")
    piece = np.full(65536, 7, "u1")
    reg = None
    if limit < big.nbytes:
        with pytest.raises(VerbsError, match=f"at most {limit} bytes"):
            comm.register(big)
    else:
        reg = comm.register(big)
    with comm.register(big[2 << 20:]) as last:
        for r, offset in ((reg, 2 << 20), (last, 0)):
            if r is None:
                continue
            comm.write(piece, of_the_other(comm, r), offset)
            meet(comm)
            assert (big[2 << 20:(2 << 20) + 65536] == 7).all() and not big[:2 << 20].any()
            meet(comm)
            big[:] = 0
            meet(comm)


def test_memory_beyond_the_region_limit(world, device):
    from rocecomm import verbs as v
    with v.open_device(device) as context:
        limit, free = context.query_device().max_mr_size, context.provider.name == "softnic"
    world(2, beyond, 1 << 20 if free else limit, env={"ROCECOMM_SOFT_MAX_MR": str(1 << 20)})


# --------------------------------------------------------------------------- B10

def child(arrays, code):
    total = 0
    for x in arrays[1::2]:
        x[:] = 1
        total += int(x.sum())
    if code:
        os._exit(0 if total == 500 * 64 else 1)
    assert total == 500 * 64


def neighbours(comm, written):
    """A child writes what lies on the same pages while a peer writes into registered memory."""
    arrays = [np.zeros(64, "u1") for _ in range(1000)]
    regs = [comm.register(x) for x in arrays[::2]]
    theirs = [of_the_other(comm, r) for r in regs[:written]]
    values = np.zeros(64, "u1")
    for how in ("fork", "multiprocessing", "subprocess"):
        if how == "fork":
            pid = os.fork()
            if pid == 0:
                child(arrays, True)
        elif how == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=child, args=(arrays, False))
            process.start()
        else:
            subprocess.run(["true"], check=True)
        for i, remote in enumerate(theirs):
            values[:] = i + len(how)
            comm.write(values, remote)
        meet(comm)
        for i in range(written):
            assert (arrays[2 * i] == i + len(how)).all(), (how, i)
        assert not any(x.any() for x in arrays[1::2])
        if how == "fork":
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        elif how == "multiprocessing":
            process.join(30)
            assert process.exitcode == 0


def test_pages_shared_with_a_child(world, scale):
    world(2, neighbours, scale.rounds(100, 20))


# --------------------------------------------------------------------------- B11

def huge(comm):
    size = 2 << 20
    try:
        block = mmap.mmap(-1, 2 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)    # HUGETLB
    except OSError:                             # none reserved: transparent ones
        block = mmap.mmap(-1, 4 * size)
        block.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(block, "u1")
    view[::4096] = 0
    with comm.register(view[4096:12288]) as reg:
        comm.write(np.full(8192, 5, "u1"), of_the_other(comm, reg))
        meet(comm)
        assert (view[4096:12288] == 5).all()
        assert not view[:4096].any() and not view[12288:].any()
        meet(comm)
    del view
    block.close()


def test_huge_pages(world):
    world(2, huge)
