"""Registered buffers and their descriptors (cases B1, B6, B8, D9 through the Communicator)."""

import copy
import gc
import pickle
import struct
import threading

import numpy as np
import pytest

import rocecomm
from rocecomm import ClosedError
from rocecomm.enums import AccessFlags
from rocecomm.link.region import DESCRIPTOR_SIZE

READ, WRITE, ATOMIC = (AccessFlags.IBV_ACCESS_REMOTE_READ, AccessFlags.IBV_ACCESS_REMOTE_WRITE,
                       AccessFlags.IBV_ACCESS_REMOTE_ATOMIC)


def access(comm):
    a = np.zeros(64)
    with comm.register(a) as reg:
        assert reg.access == READ | WRITE | ATOMIC and len(reg) == reg.nbytes == 512
        assert reg.address == a.ctypes.data and reg.lkey and reg.rkey
    for asked, granted in (("r", READ), ("w", WRITE), ("a", ATOMIC), ("", 0), ("rw", READ | WRITE),
                           (READ, READ), (WRITE | AccessFlags.IBV_ACCESS_LOCAL_WRITE, WRITE), (0, 0)):
        with comm.register(a, asked) as reg:
            assert reg.access == granted
            assert comm.open(reg.descriptor()).access == granted
    for bad in ("x", "r,w", -1, 1 << 20, AccessFlags.IBV_ACCESS_MW_BIND):
        with pytest.raises(ValueError, match="access"):
            comm.register(a, bad)
    for bad in (True, 1.0, b"r", ["r"]):
        with pytest.raises(TypeError, match="access"):
            comm.register(a, access=bad)
    fixed = np.zeros(64)
    fixed.flags.writeable = False
    for unwritable in (fixed, b"0123456789abcdef"):
        with comm.register(unwritable) as reg:
            assert reg.access == READ
        with comm.register(unwritable, "r") as reg, pytest.raises(BufferError):
            comm.recv(reg, 0)
        for asked in ("rw", "w", "a", READ | ATOMIC):
            with pytest.raises(BufferError, match="read-only"):
                comm.register(unwritable, asked)
    with pytest.raises(ValueError, match="0 bytes"):
        comm.register(np.zeros(0))
    for bad in (a[::2], np.array([None])):
        with pytest.raises(BufferError):
            comm.register(bad)
    with pytest.raises(TypeError):
        comm.register(5)


def test_access_is_what_was_asked_for(world):
    world(1, access)


def descriptors(comm):
    reg = comm.register(np.zeros(512), "rw")
    data = reg.descriptor()
    comm.send(data, 1 - comm.rank)
    got = bytearray(DESCRIPTOR_SIZE)
    assert comm.recv(got, 1 - comm.rank) == DESCRIPTOR_SIZE == len(data)
    theirs = comm.open(bytes(got))
    assert (theirs.rank, theirs.nbytes, theirs.access, theirs.generation) == \
        (1 - comm.rank, 4096, READ | WRITE, 1)
    assert theirs.descriptor() == got
    assert comm.open(got) is theirs and comm.open(memoryview(got)) is theirs
    assert comm.open(pickle.loads(pickle.dumps(bytes(got)))).nbytes == 4096
    own = comm.open(data)
    assert own.rank == comm.rank
    for i in range(8 * len(data)):                  # any bit
        bad = bytearray(data)
        bad[i // 8] ^= 1 << i % 8
        with pytest.raises(ValueError, match="descriptor"):
            comm.open(bad)
    for n in (0, 1, 4, 48, 63):
        with pytest.raises(ValueError, match="descriptor"):
            comm.open(data[:n])
    with pytest.raises(ValueError, match="descriptor"):
        comm.open(data + b"x")
    for bad in (None, 5, "text", reg, own, [1]):
        with pytest.raises(TypeError):
            comm.open(bad)
    reg.close()
    with pytest.raises(ClosedError):
        reg.descriptor()
    again = comm.register(np.zeros(512), "rw")
    assert comm.open(again.descriptor()).generation == 2
    assert again.descriptor() != data


def test_descriptors_are_plain_bytes_that_cannot_be_changed(world):
    world(2, descriptors)


def of_another(peers):
    """The same ranks meet twice: nothing of the first communicator is good in the second."""
    found = []
    for i in range(2):
        with rocecomm.init(peers.rank, peers.size, job_id=f"{peers.folder.name}-{i}") as comm:
            reg = comm.register(np.zeros(8))
            found.append(reg.descriptor())
            remote = comm.open(reg.descriptor())
            for old in found[:-1]:
                with pytest.raises(ValueError, match="another"):
                    comm.open(old)
            # the right MAC of this job, another instance
            if i == 1:
                from rocecomm.link.region import DESCRIPTOR_SIZE
                assert len(found[0]) == DESCRIPTOR_SIZE and remote.rank == peers.rank
    with pytest.raises(ClosedError):
        comm.open(found[-1])
    with pytest.raises(ClosedError):
        comm.register(np.zeros(8))


def test_descriptors_of_another_communicator_are_refused(world):
    world(2, of_another, plain=True)


def not_copied(comm):
    reg = comm.register(np.zeros(8))
    remote = comm.open(reg.descriptor())
    for thing in (reg, remote):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="descriptor"):
                way(thing)


def test_only_the_descriptor_travels(world):                    # D9
    world(1, not_copied)


def as_a_buffer(comm, n):
    other = 1 - comm.rank
    out, into = np.arange(n, dtype="i4") + comm.rank, np.zeros(n, "i4")
    want = np.arange(n, dtype="i4") + other
    with comm.register(out, "") as a, comm.register(out, "r") as b, comm.register(into) as c:
        for source in (a, b, out):
            for target in (c, into):
                into[:] = 0
                assert comm.sendrecv(source, other, target, other) == 4 * n
                assert (into == want).all()
                into[:] = 0
                sending = comm.isend(source, other)
                assert comm.recv(target, other) == 4 * n and sending.wait() == 4 * n
                assert (into == want).all()
        if comm.rank == 0:
            comm.send(b, 1)
        else:
            into[:] = 0
            assert comm.recv(c, 0) == 4 * n and (into == want).all()
            # of the same dtype only, as for the array itself
        wrong = np.zeros(n, "f4")
        with pytest.raises(rocecomm.MismatchError):
            sending = comm.isend(b, other)
            comm.recv(wrong, other)
        sending.wait()
    with pytest.raises(ClosedError):
        comm.send(b, other)
    with pytest.raises(ClosedError):
        comm.irecv(c, other)


@pytest.mark.parametrize("n", [5, 100000])
def test_registered_buffers_are_sent_and_received(world, n):
    world(2, as_a_buffer, n)


def close_while_in_use(comm, n):
    """The memory is held until the last transfer that uses it has ended."""
    other = 1 - comm.rank
    array = np.zeros(n, "u1")
    reg = comm.register(array)
    receiving = comm.irecv(reg, other)
    reg.close()
    reg.close()
    assert reg.closed
    with pytest.raises(ValueError):
        array.resize(2 * n, refcheck=False)
    comm.send(np.full(n, 7, "u1"), other) if comm.rank else None
    if comm.rank == 0:
        assert receiving.wait() == n and (array == 7).all()
        comm.send(np.full(n, 7, "u1"), other)
    else:
        assert receiving.wait() == n and (array == 7).all()
    array.resize(2 * n, refcheck=False)


@pytest.mark.parametrize("n", [100, 100000])
def test_closing_while_a_transfer_uses_it(world, n):
    world(2, close_while_in_use, n)


def resized(comm):                                              # B8
    import array
    b, c, d = bytearray(4096), array.array("d", [0.0] * 512), np.zeros(512)
    regs = [comm.register(x) for x in (b, c, d)]
    with pytest.raises(BufferError):
        b.extend(b"x" * 10**6)
    with pytest.raises(BufferError):
        c.extend([1.0] * 10**5)
    with pytest.raises(ValueError):
        d.resize(10**6, refcheck=False)
    for reg in regs:
        reg.close()
    b.extend(b"x" * 10**6)
    c.extend([1.0] * 10**5)
    d.resize(10**6, refcheck=False)


def test_registered_memory_cannot_be_resized(world):
    world(1, resized)


def dropped(comm):
    d = np.zeros(512)
    reg = comm.register(d)
    again = comm.register(d)
    del reg
    gc.collect()
    with pytest.raises(ValueError):
        d.resize(10**6, refcheck=False)
    del again
    gc.collect()
    d.resize(10**6, refcheck=False)
    left = comm.register(np.zeros(8))
    threads = [threading.Thread(target=lambda: [comm.register(d).close() for _ in range(50)])
               for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    comm.close()
    assert left.closed
    left.close()
    with pytest.raises(ClosedError):
        left.descriptor()


def test_dropping_it_is_closing_it(world):
    world(1, dropped)


def test_the_layout_that_is_documented():
    assert struct.calcsize("<4sBBHIIQQQQ") + 16 == DESCRIPTOR_SIZE
