"""Fork, import, leaks, many ranks on one device (cases of theme H)."""

import errno
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from memlock import WITHOUT_IPC_LOCK
from worlds import ROOT, threads

from rocecomm import ClosedError, VerbsError
from rocecomm import verbs as v

# ------------------------------------------------------------------------------------ fork, B10

def forks(comm):
    other = 1 - comm.rank
    held = np.zeros(50000)
    pending = comm.irecv(held, other, tag=3)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                comm.send(np.zeros(1), other)
            except ClosedError as error:
                code = 0 if "parent" in str(error) else 2
            comm.close()
            del pending
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for i in range(100):
        got = np.zeros(64, "u1")
        comm.sendrecv(np.full(64, i, "u1"), other, got, other)
        assert (got == i).all()
    comm.isend(np.ones(50000), other, tag=3).wait()
    pending.wait()
    assert (held == 1).all()


def test_a_forked_child_cannot_harm_the_parent(world):
    world(2, forks)


# --------------------------------------------------------------- privileges that are dropped later

def without_privileges(comm):
    """Whether messages still go; if not, the error says why."""
    comm.barrier()
    exec(WITHOUT_IPC_LOCK, {})
    other = 1 - comm.rank
    try:
        for size in (10, 50000):
            got = np.empty(size)
            comm.sendrecv(np.full(size, comm.rank, "f8"), other, got, other)
            assert (got == other).all()
    except VerbsError as error:
        assert error.errno == errno.EACCES and "drop privileges before init()" in str(error), error
        return False
    comm.barrier()
    return True


def test_privileges_dropped_after_init(world, device):
    """soft0 does not mind; for rxe0 sending is a write() to a file, which the kernel then refuses."""
    results = world(2, without_privileges)
    if [d.provider for d in v.devices() if d.name == device] == ["softnic"]:
        assert results == [True, True]


# ------------------------------------------------------------------------------------- import

def test_import_has_no_side_effects():
    code = ("import os, threading, logging, sys\nbefore = dict(os.environ), os.listdir('/proc/self/fd')\n"
            "import numpy\nfds = os.listdir('/proc/self/fd'); n = len(os.listdir('/proc/self/task'))\n"
            "import rocecomm\n"
            "assert dict(os.environ) == before[0] and os.listdir('/proc/self/fd') == fds\n"
            "assert len(os.listdir('/proc/self/task')) == n and not logging.getLogger().handlers\n"
            "assert 'libsoftnic' not in open('/proc/self/maps').read()\n")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# -------------------------------------------------------------------------------- leaks, H6

def usage():
    end = time.monotonic() + 5      # a thread that was joined may not have left the kernel yet
    while len(threads()) > threading.active_count() and time.monotonic() < end:
        time.sleep(0.01)
    with open("/proc/self/maps") as f:
        maps = sum(1 for _ in f)
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * 4096
    return maps, len(os.listdir("/proc/self/fd")), threads(), resident


def connect_and_close(peers, rounds):
    import rocecomm
    levels = []
    for i in range(rounds):
        with rocecomm.init(peers.rank, peers.size, job_id=f"round-{os.getppid()}-{i}",
                           timeout=20) as comm:
            got = np.zeros(4)
            other = 1 - peers.rank
            comm.sendrecv(np.full(4, i, "f8"), other, got, other)
            assert (got == i).all()
        if i == 10 or i == rounds - 1:
            levels.append(usage())
    return levels


@pytest.mark.timeout(100)
def test_rounds_of_joining_leave_nothing(world, scale):
    for first, last in world(2, connect_and_close, scale.rounds(200, 12), plain=True, timeout=80):
        flat(first, last)


def flat(first, last):
    assert last[0] - first[0] < 100, "maps"
    assert last[1] - first[1] <= 2, "file descriptors"
    assert len(last[2]) - len(first[2]) <= 2, f"threads: {first[2]}, then {last[2]}"
    if "ROCECOMM_TEST_SANITIZER" not in os.environ:     # ASan keeps freed memory for a while
        assert last[3] - first[3] < 20 << 20, "resident memory"


class OneProcessStore:
    """The group's store for ranks that are threads of one process."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key, timeout):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout)
            return self._values[key]

    def wait(self, keys, timeout):
        for key in keys:
            self.get(key, timeout)


def one_connection(rank, store, config, failures):
    from rocecomm.link.engine import Engine
    try:
        engine = Engine(config, types.SimpleNamespace(rank=rank, world_size=2, store=store))
        got = np.zeros(4)
        engine.wait_all([engine.isend(np.full(4, rank, "f8"), 1 - rank), engine.irecv(got, 1 - rank)])
        assert (got == 1 - rank).all()
        engine.close()
    except BaseException as error:
        failures.append(error)


def rounds_of_two_threads(peers, rounds):
    from rocecomm.config import Config
    config, failures = Config.from_env(timeout=20.0), []
    for i in range(rounds):
        store = OneProcessStore()
        pair = [threading.Thread(target=one_connection, args=(r, store, config, failures))
                for r in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        assert not failures, failures
        if i == 10:
            first = usage()
    return first, usage()


@pytest.mark.timeout(100)
def test_two_thousand_connections_leave_nothing(world, scale):
    rounds = 2000 if scale.share == 1 else 20
    (levels,) = world(1, rounds_of_two_threads, rounds, plain=True, timeout=80)
    flat(*levels)


# ------------------------------------------------------------ many ranks on one device

def around(comm, rounds):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for size in (1, 1000, 100_000):
        got = np.zeros(size)
        for i in range(rounds):
            assert comm.sendrecv(np.full(size, comm.rank + i, "f8"), after, got, before) == got.nbytes
            assert (got == before + i).all()
    comm.barrier()
    return comm.all_reduce(np.array([comm.rank]))[0]


@pytest.mark.timeout(100)
def test_eight_ranks_on_one_device(world, scale):
    """H10: all of them on the device of one host, with fewer CPUs."""
    assert world(8, around, scale.rounds(20, 1), timeout=60) == [28] * 8
