"""``init(progress="thread")``: traffic moves while the rank computes; fork, signals, the end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from worlds import rank_environment

from rocecomm import RocecommError, TimeoutError

ROOT = Path(__file__).resolve().parent.parent
THREAD = {"progress": "thread"}


def compute_until(condition, seconds):
    """Pure Python, no call of the library."""
    end, n = time.monotonic() + seconds, 0
    while not condition() and time.monotonic() < end:
        n += sum(range(100))
    return condition()


def computing(comm, nbytes, patience, expected):
    if comm.rank == 0:
        data = np.arange(nbytes // 4, dtype="u4")
        comm.recv(bytearray(1), 1)
        comm.isend(data, 1).wait(3 * patience) if expected else comm.isend(data, 1)
        comm.recv(bytearray(1), 1)
    else:
        into = np.zeros(nbytes // 4, "u4")
        request = comm.irecv(into, 0)
        comm.send(b"x", 0)
        assert compute_until(lambda: request.done, patience if expected else 0.3) is expected
        comm.send(b"x", 0)
        assert request.wait() == nbytes
        assert (into == np.arange(nbytes // 4, dtype="u4")).all()


@pytest.mark.parametrize("mode", ["thread", "calls"])
def test_a_large_receive_ends_while_its_rank_computes(world, scale, mode):
    world(2, computing, scale.bytes, 20 * scale.time, mode == "thread", options={"progress": mode})


def answering(comm):
    if comm.rank == 0:
        comm.recv(bytearray(1), 1)
        for _ in range(3):                  # nobody receives it: withdrawn, and answered by the thread
            with pytest.raises(TimeoutError):
                comm.send(np.ones(100000), 1, tag=5, timeout=0.02)
        big = comm.isend(np.ones(100000), 1, tag=5)
        big.cancel()
        with pytest.raises(RocecommError, match="cancelled"):
            big.wait(20)
        comm.send(np.full(3, 7.0), 1, tag=5)
        comm.send(b"x", 1, tag=6)
    else:
        last = comm.irecv(bytearray(1), 0, tag=6)
        comm.send(b"x", 0)
        assert compute_until(lambda: last.done, 50)
        got = np.zeros(100000)
        assert comm.recv(got, 0, tag=5) == 24 and got[0] == 7


def test_the_thread_answers_what_a_peer_asks(world):
    world(2, answering, options=THREAD)


def sleeping(comm, rounds, patience):
    """The thread sleeps on the channel, then a call does, too; one of them takes the event."""
    if comm.rank == 0:
        for _ in range(rounds):
            comm.recv(bytearray(1), 1)
            time.sleep(0.005)           # the other rank may be asleep by now; if not, nothing is lost
            comm.send(b"x", 1)
        return 0
    state = comm._engine.peers          # looks, and counts as no call
    for _ in range(rounds):
        end = time.monotonic() + 20 * patience
        while not state()[0]["worker_asleep"]:
            assert time.monotonic() < end, "the thread does not sleep on the channel"
            time.sleep(0.0005)
        comm.send(b"x", 0)
        comm.recv(bytearray(1), 0)
    return state()[0]["overslept"]


def test_a_call_does_not_sleep_past_an_event_that_the_thread_took(world, scale):
    _, overslept = world(2, sleeping, scale.rounds(60, 20), scale.time, options={**THREAD, "spin": 0.0})
    assert overslept == 0, f"{overslept} sleeps went on for 0.1 s after their event"


def threads_of_this_process():
    return {int(t) for t in os.listdir("/proc/self/task")}


def blocked_signals(task):
    for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return int(line.split()[1], 16)


def signals_and_cpu(comm, patience):
    known = {t.native_id for t in threading.enumerate()}
    extra = [t for t in threads_of_this_process() - known if blocked_signals(t) & 1 << (signal.SIGUSR1 - 1)]
    assert extra, "no thread blocks all signals"
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.get_ident()))
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.001)
    assert seen and set(seen) == {threading.main_thread().ident}
    used = time.process_time()
    time.sleep(1)
    used = time.process_time() - used
    assert used < 0.05 * patience, f"{used:.3f} s of CPU in 1 s of sleep"
    used = time.process_time()
    with pytest.raises(TimeoutError):
        comm.recv(bytearray(1), comm.rank, timeout=1)
    used = time.process_time() - used
    assert used < 0.1 * patience, f"{used:.3f} s of CPU in 1 s of recv"


def test_signals_and_cpu_of_an_idle_rank(soft_world, scale):
    soft_world(1, signals_and_cpu, scale.time, options=THREAD)


def forking(comm):
    other = 1 - comm.rank
    for i in range(5):
        pid = os.fork()
        if pid == 0:
            try:
                comm.send(b"x", other)
            except RocecommError:
                comm.close()
                os._exit(7)
            os._exit(1)
        mine, theirs = np.full(1000, i), np.zeros(1000, int)
        comm.sendrecv(mine, other, theirs, other)
        assert (theirs == i).all()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_fork(soft_world):
    soft_world(2, forking, options=THREAD)


def crowd(comm, rounds):
    """Threads of Python and the library's on one communicator."""
    other, failures = 1 - comm.rank, []

    def work(tag):
        try:
            rng = np.random.default_rng(tag)
            for i in range(rounds):
                n = int(rng.integers(1, 200000))
                send = comm.isend(np.full(n, i % 100, "u1"), other, tag=tag)
                into = np.zeros(n, "u1")
                if i % 2:
                    assert comm.recv(into, other, tag=tag) == n
                else:
                    request = comm.irecv(into, other, tag=tag)
                    while not request.done:
                        time.sleep(0.0001)
                assert (into == i % 100).all()
                send.wait()
        except BaseException as error:
            failures.append(repr(error))
    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_with_python_threads(world, scale):
    world(2, crowd, scale.rounds(100, 10), options=THREAD, timeout=60)


END = """
import os, sys, threading, time
import numpy as np
import rocecomm
comm = rocecomm.init(progress="thread")
big = np.zeros(300000)
other = 1 - comm.rank
how = sys.argv[1]
pending = [comm.irecv(big, other, tag=1), comm.irecv(np.zeros(4), rocecomm.ANY_SOURCE, tag=2)]
if how == "raise":
    pending.append(comm.isend(big, other, tag=3))       # close() waits for it, 4 s
cycle = [comm, pending]
cycle.append(cycle)
comm.send(b"x", other)
comm.recv(bytearray(1), other)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise ValueError("mine")
if how == "os":
    os._exit(0)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("raise", 1), ("os", 0)])
def test_the_end_of_the_interpreter(scale, tmp_path, how, code):
    for turn in range(1 if how == "raise" else scale.rounds(2, 1)):
        procs = [subprocess.Popen([sys.executable, "-c", END, how], cwd=ROOT, text=True,
                                  env=rank_environment(rank, 2, f"{tmp_path}-{turn}", "soft0"),
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
        try:
            for proc in procs:
                out, err = proc.communicate(timeout=30 * scale.time)
                assert proc.returncode == code, err
                assert not out, out
                assert err.strip().endswith("ValueError: mine") if how == "raise" else not err, err
        finally:
            for proc in procs:
                proc.kill()
                proc.wait()
