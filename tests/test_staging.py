"""Ranks on soft0 whose memory the system does not let each other reach: everything works as before.

Forced for all ranks, and as it happens: a seccomp filter refuses process_vm to one of them.
"""

import ctypes
import os
import platform
import struct
import time

import numpy as np
import pytest

import rocecomm
from rocecomm import PeerDeadError

SOFT = {"ROCECOMM_IB_HCA": "soft0"}
FORCED = {**SOFT, "ROCECOMM_SOFT_STAGING": "1"}


def traffic(comm):
    """Each size class to each peer, from plain memory and from memory that peers would map."""
    for size in (1, 200, 5000, 100_000, 3_000_001):
        for empty in (np.empty, rocecomm.empty):
            data, got = empty(size, "u1"), empty(size, "u1")
            data[:] = (np.arange(size) * 7 + comm.rank) % 251
            for step in range(1, comm.size):
                to, of = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
                comm.sendrecv(data, to, got, of)
                assert (got == (np.arange(size) * 7 + of) % 251).all()
    total = np.full(100_000, comm.rank + 1.0)
    comm.all_reduce(total)
    assert (total == comm.size * (comm.size + 1) / 2).all()
    comm.barrier()


def helpers():
    """Helper threads of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as f:
            names.append(f.read().strip())
    return names.count("softnic-staging")


def forced(comm):
    traffic(comm)
    return helpers()


def refuse_process_vm():
    """From here on process_vm_readv and process_vm_writev fail with EPERM in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    read, write = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]
    code = [(0x20, 0, 0, 0), (0x15, 1, 0, read), (0x15, 0, 1, write),
            (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    text = b"".join(struct.pack("HBBI", *c) for c in code)
    buffer = ctypes.create_string_buffer(text, len(text))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0      # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0    # PR_SET_SECCOMP


def refused(peers, one):
    assert helpers() == 0
    if peers.rank == one:
        refuse_process_vm()
    peers.barrier()
    with rocecomm.init() as comm:
        traffic(comm)
        found = helpers()
        comm.barrier()
    assert helpers() == 0
    return found


def dies(comm):
    data = np.zeros(4 << 20, "u1")
    if comm.rank == 1:
        comm.recv(data, 0)
        os.kill(os.getpid(), 9)
    comm.send(data, 1)
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="rank 1"):
        for _ in range(1000):
            comm.send(data, 1)
    return time.monotonic() - start


@pytest.mark.parametrize("n", [2, 4])
def test_forced(world, n):
    assert world(n, forced, env=FORCED) == [1] * n


@pytest.mark.parametrize("one", [0, 1])
def test_refused_to_one_rank(world, one):
    assert world(2, refused, one, plain=True, env=SOFT) == [1, 1]


def test_not_needed_not_there(world):
    assert world(2, refused, -1, plain=True, env=SOFT) == [0, 0]


def test_a_peer_that_dies(world, scale):
    assert world(2, dies, env=FORCED, mortal=[1])[0] < 10 * scale.time
