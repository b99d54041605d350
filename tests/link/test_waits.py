"""A peer that is stopped, dies, or comes again, in every kind of wait (F3, F4, H6)."""

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from together import together
from worlds import ROOT

import rocecomm
from rocecomm import ANY_SOURCE, JoinError, PeerDeadError, TimeoutError
from rocecomm.errors import VerbsError
from rocecomm.verbs import soft

BIG = 40_000                                # doubles: beyond every eager limit


def waits(comm, other, remote):
    """Name -> a call that waits for rank `other`; timeout in seconds or None."""
    big, into = np.zeros(BIG), np.zeros(BIG)
    return {
        "recv": lambda t: comm.recv(into, other, tag=1, timeout=t),
        "recv from anyone": lambda t: comm.recv(into, ANY_SOURCE, tag=1, timeout=t),
        "send": lambda t: comm.send(big, other, tag=2, timeout=t),
        "irecv": lambda t: comm.irecv(into, other, tag=3).wait(t),
        "isend": lambda t: comm.isend(big, other, tag=4).wait(t),
        "wait_all": lambda t: comm.wait_all([comm.irecv(into, other, tag=5)], t),
        "wait_any": lambda t: (comm.wait_any([r := comm.irecv(into, other, tag=6)], t), r.wait(0)),
        "sendrecv": lambda t: comm.sendrecv(big, other, into, other, 7, 7, t),
        "probe": lambda t: comm.probe(other, 8, timeout=t),
        "wait_notify": lambda t: comm.wait_notify(other, timeout=t),
        "write and wait": lambda t: [comm.write(big, remote, timeout=t) for _ in range(10**6)],
        "read and wait": lambda t: [comm.read(into, remote, timeout=t) for _ in range(10**6)],
        "all_reduce": lambda t: comm.all_reduce(into, timeout=t),
        "barrier": lambda t: comm.barrier(timeout=t),
    }


ONE_SIDED = ("write and wait", "read and wait")     # the peer's device does them: no CPU is waited for


# ------------------------------------------------------------------------------- stopped

def stopped(comm, inside):
    me = np.array([os.getpid()])
    if comm.rank == 1:
        comm.send(me, 0)
        if inside:
            comm.recv(bytearray(4), 0)
        else:
            end = time.monotonic() + 60
            while "going on" not in said and time.monotonic() < end:
                time.sleep(0.01)
        return True
    pid = me.copy()
    comm.recv(pid, 1)
    time.sleep(0.2)
    os.kill(int(pid[0]), signal.SIGSTOP)
    seen = {}
    try:
        for name, wait in waits(comm, 1, None).items():
            if name in (*ONE_SIDED, "recv from anyone", "barrier"):     # a collective has failed before
                continue
            with pytest.raises(TimeoutError) as caught:
                wait(0.1)
            seen[name] = caught.value.peer_state, str(caught.value)
    finally:
        os.kill(int(pid[0]), signal.SIGCONT)
    comm.send(b"go", 1)
    for name, (state, text) in seen.items():
        assert state == "stopped" and "kill -CONT" in text and "rank 1" in text, (name, text)
    return len(seen) == 11 - 1


said = []


def resume(_signal, _frame):
    said.append("going on")


def stopped_outside(comm):
    signal.signal(signal.SIGCONT, resume)
    return stopped(comm, False)


def stopped_inside(comm):
    return stopped(comm, True)


@pytest.mark.parametrize("where", [stopped_inside, stopped_outside])
def test_a_stopped_peer_is_told_in_every_wait(world, where):
    assert all(world(2, where, timeout=60))


# ---------------------------------------------------------------------------------- death

def dies_in(comm, name):
    remote = None
    region = comm.register(np.zeros(BIG), "rw")
    if comm.rank == 1:
        comm.send(region.descriptor(), 0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    descriptor = bytearray(200)
    n = comm.recv(descriptor, 1)
    remote = bytes(descriptor[:n])
    others = comm.size > 2
    wait = waits(comm, 1, remote)[name]
    # kernel Soft-RoCE takes the regions of a dying process away before its queue pairs
    early = (rocecomm.CompletionError,) if name in ONE_SIDED else ()
    with pytest.raises((PeerDeadError, *early)) as caught:
        wait(None)
    assert "rank 1" in str(caught.value)
    begin = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 1"):
        comm.recv(np.zeros(BIG), 1)
    region.close()
    comm.close()
    assert not others and time.monotonic() - begin < 5
    return True


@pytest.mark.parametrize("name", ["isend", "wait_all", "probe", "wait_notify", "write and wait",
                                  "read and wait", "all_reduce", "barrier"])
def test_a_dead_peer_is_found_in_every_wait(world, name):      # the others: test_failure.py
    assert world(2, dies_in, name, mortal=[1])[0]


def dies_in_a_pull(comm, n):
    data = np.zeros(n, "u1")
    if comm.rank == 1:
        pending = [comm.isend(data, 0, tag=i) for i in range(50)]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            pending[0].test()
    with pytest.raises(PeerDeadError, match="rank 1"):
        for turn in range(50):
            comm.recv(data, 1, tag=turn, timeout=None)
            time.sleep(0.02)
    return True


def test_a_sender_that_dies_while_it_is_read(world, scale):
    assert world(2, dies_in_a_pull, min(scale.bytes, 16 << 20), mortal=[1])[0] is True


# --------------------------------------------------------------- nothing stays pending, F4 b

def test_a_hundred_requests_and_a_remote_access_error(device):
    with together(2, device, dead_after=1) as (a, b):
        data = np.zeros(BIG)
        receives = [a.irecv(np.zeros(BIG), 1, tag=i) for i in range(50)]
        sends = [a.isend(data, 1, tag=i) for i in range(50)]
        try:
            fault = soft.inject("access", op="rdma_read", times=1, qp=a._engine.queue_pairs()[1])
        except VerbsError as error:
            assert error.errno == errno.EOPNOTSUPP
            for request in receives + sends:
                request.cancel()
            pytest.skip(f"the device cannot inject faults: {error}")
        with fault:
            theirs = b.isend(data, 0, tag=25)
            texts = set()
            for request in receives + sends:
                with pytest.raises(rocecomm.CompletionError, match="IBV_WC_REM_ACCESS_ERR") as caught:
                    request.wait(10)
                texts.add(str(caught.value).partition(": ")[2])
                assert request.done
        assert len(texts) == 1 and fault.hit == 1
        a.close()
        with pytest.raises(rocecomm.RocecommError, match="rank 0"):
            theirs.wait(10)


# ----------------------------------------------------------------- a peer that comes again

AGAIN = """
import sys, rocecomm
try:
    comm = rocecomm.init(rank=1, world_size=2, join_timeout=float(sys.argv[1]))
except (rocecomm.JoinError, rocecomm.TimeoutError) as error:
    print("refused:", error)
else:
    got = bytearray(3)
    comm.recv(got, 0)
    print("joined", got.decode())
    comm.close()
"""


def again(seconds):
    return subprocess.Popen([sys.executable, "-c", AGAIN, str(seconds)], text=True, cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def restarted(comm):
    if comm.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDeadError):
        comm.recv(np.zeros(4), 1)
    late = again(1.5)                       # while the old communicator still lives
    out, err = late.communicate(timeout=60)
    assert "refused" in out and "rank 0" in out and not err, (out, err)
    with pytest.raises(PeerDeadError):      # it was not taken for the old one
        comm.send(b"old", 1)
    comm.close()
    with pytest.raises(JoinError, match="new job_id"):      # this process counts on
        rocecomm.init(rank=0, world_size=2, join_timeout=0.2)
    os.environ["ROCECOMM_JOB_ID"] += "-again"               # and now both start anew
    late = again(20)
    try:
        with rocecomm.init(rank=0, world_size=2, join_timeout=20) as fresh:
            fresh.send(b"new", 1)
            out, err = late.communicate(timeout=60)
        assert "joined new" in out and not err, (out, err)
    finally:
        late.kill()
        late.wait()
    return True


def test_a_restarted_peer_is_not_taken_for_the_old_one(world):
    assert world(2, restarted, mortal=[1], timeout=60)[0] is True



# ------------------------------------------------- stores that cannot be reached, H6

def fds():
    return len(os.listdir("/proc/self/fd"))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fails_to_join(rounds, port, expected):
    from rocecomm import bootstrap
    from rocecomm.config import Config
    config = Config(store=f"127.0.0.1:{port}", secret="s" * 32)

    def once():
        with pytest.raises(expected):
            bootstrap.join(config, 1, 2, timeout=0.1)
    for _ in range(5):
        once()
    gc.collect()
    before = fds(), threading.active_count(), resident()
    for _ in range(rounds):
        once()
    gc.collect()
    assert fds() == before[0] and threading.active_count() == before[1]
    assert resident() < before[2] + (8 << 20)


def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_closed_port_leaves_nothing():
    fails_to_join(5, closed_port(), (JoinError, TimeoutError))


@contextlib.contextmanager
def silent():
    """A listener that accepts and then says nothing."""
    held = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    while len(held) > 2:
                        held.pop(0).close()
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in held:
                connection.close()


def test_a_silent_listener_leaves_nothing():
    with silent() as port:
        fails_to_join(5, port, (JoinError, TimeoutError))


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_five_hundred_closed_ports_and_silent_listeners():
    fails_to_join(500, closed_port(), (JoinError, TimeoutError))
    with silent() as port:
        fails_to_join(500, port, (JoinError, TimeoutError))


# ------------------------------------------------- what ends while its peer is asked how it is

def ends_while_asked(comm):
    from rocecomm.link import wireup
    other, asked = 1 - comm.rank, []
    if comm.rank == 1:
        for size in (8, 9, 9):          # fits, and twice it does not
            comm.recv(bytearray(0), other)
            comm.send(bytes(size), other, tag=1)
        comm.barrier()
        return

    def stopped(_):
        comm.send(b"", other)
        while not request.test():
            pass
        asked.append(request)
        return False
    wireup.stopped = stopped            # a world's processes are its own
    request = comm.irecv(bytearray(8), other, 1)
    assert comm.wait_all([request], timeout=0.01) == [8]
    request = comm.irecv(bytearray(8), other, 1)
    assert comm.wait_any([request], timeout=0.01) == 0
    with pytest.raises(rocecomm.MessageTruncatedError):
        request.wait(0)
    request = comm.irecv(bytearray(8), other, 1)
    with pytest.raises(rocecomm.MessageTruncatedError):
        comm.wait_all([request, comm.irecv(bytearray(8), other, 2)], timeout=0.01)
    assert len(asked) == 3
    comm.barrier()


def test_a_request_that_ends_while_its_peer_is_asked_has_ended(world):
    world(2, ends_while_asked)
