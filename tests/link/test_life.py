"""Threads, signals, fork, the end of the interpreter, leaks (cases of theme H)."""

import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from worlds import ROOT, rank_environment, threads

from rocecomm import ClosedError

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


# --------------------------------------------------------------------------------- exit, H4 C11

ENDINGS = {
    "end of script": ("", 0), "sys.exit(3)": ("sys.exit(3)", 3),
    "uncaught": ("raise ZeroDivisionError('mine')", 1), "os._exit": ("os._exit(0)", 0),
    "in a cycle": ("class A: pass\na = A(); a.me = a; a.comm = comm; del comm, a", 0),
    "closed before": ("comm.close()", 0),
    "a thread waits": ("import threading\nt = threading.Thread(target=lambda: comm.recv(x, 1 - comm.rank,"
                       " tag=77), daemon=True); t.start(); time.sleep(0.2)", 0),
}

SCRIPT = """
import os, sys, time
import numpy as np
import rocecomm
comm = rocecomm.init()
other = 1 - comm.rank
x, big = np.zeros(4), np.zeros(1 << 18)
comm.sendrecv(x, other, np.zeros(4), other)
pending = comm.irecv(np.zeros(4), other, tag=5)
if comm.rank == 0:
    comm.send(np.full(1 << 17, 3.0), 1, tag=6)
else:
    time.sleep(0.3)
    comm.recv(big, 0, tag=6)
    assert (big[:1 << 17] == 3).all()
%s
"""


def test_the_end_of_the_script(device, scale, tmp_path):
    end_of_the_interpreter(device, scale, tmp_path, "end of script")


# the other ways out do not depend on the device, and a slow machine starts Python slowly
@pytest.mark.parametrize("name", [name for name in ENDINGS if name != "end of script"])
def test_the_end_of_the_interpreter(scale, tmp_path, name):
    end_of_the_interpreter("soft0", scale, tmp_path, name)


KILLED = {
    "killed": ("import signal\nos.kill(os.getpid(), signal.SIGKILL)", -9),
    "Ctrl-C": ("import signal\nos.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -2),
}


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*ENDINGS, *KILLED])
def test_fifty_ends_of_each_kind(scale, tmp_path, name):
    for _ in range(scale.rounds(50)):
        end_of_the_interpreter("soft0", scale, tmp_path, name)


def end_of_the_interpreter(device, scale, tmp_path, name):
    code, expected = {**ENDINGS, **KILLED}[name]
    (tmp_path / "s.py").write_text(SCRIPT % code)
    start = time.monotonic()
    ranks = [subprocess.Popen([sys.executable, tmp_path / "s.py"], cwd=ROOT, text=True,
                              env=rank_environment(r, 2, tmp_path, device),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for r in range(2)]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=40 * scale.time)
            assert rank.returncode == expected, err
            if name == "uncaught":
                assert err.count("Traceback") == 1 and "ZeroDivisionError: mine" in err
            elif name == "Ctrl-C":
                assert err.count("Traceback") == 1 and err.endswith("KeyboardInterrupt\n")
            elif name != "a thread waits":
                assert err == ""
            assert out == "" and "Exception ignored" not in err
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert time.monotonic() - start < 15 * scale.time


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
