"""Point to point between two ranks: cases of themes A, C and H for what exists."""

import copy
import pickle
import time

import ml_dtypes
import numpy as np
import pytest

import rocecomm
from rocecomm import MessageTruncatedError, MismatchError


def pattern(n):
    return ((np.arange(n, dtype="u8") * 2654435761 >> 24) & 255).astype("u1")


# ------------------------------------------------------------------------ sizes, C1 C2 C3 C8

def every_size(comm, sizes):
    for n in sizes:
        if comm.rank == 0:
            comm.send(pattern(n), 1)
        else:
            got = np.zeros(n + 8, "u1")
            assert comm.recv(got, 0) == n
            assert (got[:n] == pattern(n)).all() and not got[n:].any(), n
    return comm.counters["bytes_received"]


@pytest.mark.timeout(120)
def test_sizes_around_every_limit(world, scale):
    sizes = scale.sizes(0, 1, 2, 7, 127, 128, 129, 4096, 8088, 8191, 8192, 8193, 8296, 65536,
                        (1 << 20) - 1, 8 << 20, (16 << 20) - 1, 16 << 20, (16 << 20) + 1,
                        (16 << 20) + 5, 64 << 20)
    assert world(2, every_size, sizes, timeout=80)[1] == sum(sizes)


@pytest.mark.timeout(180)
def test_beyond_four_gigabytes(device, world, scale):           # C2
    if scale.bytes < 64 << 20:
        sizes = [scale.bytes]
    else:
        sizes = [2**32 + 5]
    world(2, ends_of_a_huge_message, sizes, timeout=120)


def ends_of_a_huge_message(comm, sizes):
    marks = min(1 << 20, sizes[-1] // 8)
    for n in sizes:
        buf = np.zeros(n, "u1")
        places = [0, n // 3, n - min(n, marks)]
        places += [at - marks // 2 for at in (2**31, 2**32) if at < n - marks]
        if comm.rank == 0:
            for at in places:
                buf[at:at + marks] = pattern(len(buf[at:at + marks]))
            comm.send(buf, 1)
        else:
            assert comm.recv(buf, 0) == n
            for at in places:
                assert (buf[at:at + marks] == pattern(len(buf[at:at + marks]))).all(), (n, at)


def small_eager_limit(comm, sizes):
    every_size(comm, sizes)
    assert comm.config.eager_limit == 64


def test_another_eager_limit(world):
    world(2, small_eager_limit, [0, 63, 64, 65, 128, 5000], env={"ROCECOMM_EAGER_LIMIT": "64"})


def empty_messages(comm):                                       # C3
    for empty in (np.empty(0), np.empty((2, 0)), b""):
        if comm.rank == 0:
            comm.send(empty, 1)
            comm.send(b"0123456789abcdef", 1)
        else:
            assert comm.recv(np.empty(0), 0) == 0
            after = bytearray(16)
            assert comm.recv(after, 0) == 16 and after == b"0123456789abcdef"


def test_empty_messages_keep_their_place(world):
    world(2, empty_messages)


def truncation(comm):                                           # C1
    for n in (2000, 100000):
        for early in (False, True):
            if comm.rank == 0:
                if early:
                    time.sleep(0.1)
                comm.send(np.ones(n, "u1"), 1)
                comm.send(np.arange(3.0), 1)
                comm.recv(np.empty(1, "i4"), 1)
            else:
                if not early:
                    time.sleep(0.1)
                base = np.full(n, 7, "u1")
                with pytest.raises(MessageTruncatedError) as caught:
                    comm.recv(base[:1000], 0)
                assert (caught.value.sent, caught.value.capacity) == (n, 1000)
                assert str(n) in str(caught.value) and "1000" in str(caught.value)
                assert (base == 7).all()
                good = np.empty(3)
                assert comm.recv(good, 0) == 24 and good.tolist() == [0, 1, 2]
                comm.send(np.int32([5]), 0)


def test_too_large_a_message(world):
    world(2, truncation)


def dtypes(comm):                                               # C8
    if comm.rank == 0:
        comm.send(np.arange(10, dtype="u1"), 1)
        comm.send(np.ones(10, "f4"), 1)
        comm.send(np.ones(30000, "f4"), 1)
        comm.send(np.ones(10, ">f4"), 1)
        comm.send(np.ones(4, "f4"), 1)
    else:
        target = np.full(10, 2**64 - 1, "u8")
        assert comm.recv(target, 0) == 10
        assert target.view("u1")[:10].tolist() == list(range(10))
        assert (target[2:] == 2**64 - 1).all()
        for n in (10, 30000, 10):
            wrong = np.full(n, 3, "i4") if n != 10 else np.full(n, 3, "f8")
            with pytest.raises(MismatchError, match="float|dtype|bytes"):
                comm.recv(wrong, 0)
            assert (wrong == 3).all()
        right = np.zeros(8, "f4")
        assert comm.recv(right, 0) == 16 and right.tolist() == [1] * 4 + [0] * 4


def test_bytes_match_every_dtype_and_others_must_be_equal(world):
    world(2, dtypes)


CONFUSED = (  # sent as, expected as; same size of item, same kind at first sight
    ("M8[D]", "M8[s]"), ("M8[s]", "M8[2s]"), ("m8[ns]", "m8[us]"), ("M8[D]", "m8[D]"), (">M8[D]", "M8[D]"),
    (">i4", "i4"), (">i4", ">f4"), (">i4", ">u4"), (">f8", ">c8"), ("?", "i2"), ("U2", "U4"),
    ("float8_e4m3fn", "float8_e5m2"), ("int4", "int2"), ("int4", "uint4"), ("bfloat16", "f2"))


def element(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def confused(comm):
    """C8: what looks alike is told apart, and both names are said."""
    for sent, expected in CONFUSED:
        sent, expected = element(sent), element(expected)
        if comm.rank == 0:
            for n in (8, 40000):        # through a slot, and by rendezvous
                comm.isend(np.ones(n, "u1").view(sent) if n == 8 else np.zeros(n, sent), 1).wait()
            comm.send(np.zeros(4, sent), 1)
        else:
            for n in (8, 40000):
                target = np.zeros(n, expected)
                with pytest.raises(MismatchError, match="sent"):
                    comm.recv(target, 0)
                assert not target.view("u1").any()
            assert comm.probe(0).nbytes == 4 * sent.itemsize
            assert comm.recv(np.zeros(4, sent), 0) == 4 * sent.itemsize     # its own dtype is fine


def test_units_byte_orders_and_small_floats_are_told_apart(world):
    world(2, confused)


# -------------------------------------------------------------------------- buffers, theme A

def kinds_of_buffers(comm):
    f_order = np.asfortranarray(np.arange(6).reshape(2, 3))
    broadcast = np.broadcast_to(np.float32(3), (1000,))
    base = np.arange(24, dtype="i4").reshape(4, 6)
    if comm.rank == 0:
        for bad in (base.T, base[:, ::2], base[::-1], f_order, broadcast, np.array(["a", None], object)):
            with pytest.raises(BufferError):
                comm.send(bad, 1)
        with pytest.raises(TypeError):
            comm.send(5, 1)
        comm.send(base[:1], 1)
        comm.send(base[:, :1].copy()[:, 0], 1)
        comm.send(np.frombuffer(b"abcd" * 1000, "u1"), 1)
        comm.send(np.array(7.5), 1)
        comm.send(np.array(["2020-01-01", "2021-06-15"], "M8[D]"), 1)
    else:
        for bad in (b"\0" * 24, np.broadcast_to(np.zeros(1), (8,)), base[:, ::2]):
            with pytest.raises(BufferError):
                comm.recv(bad, 0)
        fixed = np.zeros(6)
        fixed.flags.writeable = False
        with pytest.raises(BufferError):
            comm.recv(fixed, 0)
        row, column = np.empty((1, 6), "i4"), np.empty(4, "i4")
        comm.recv(row, 0)
        comm.recv(column, 0)
        assert row.tolist() == [[0, 1, 2, 3, 4, 5]] and column.tolist() == [0, 6, 12, 18]
        text = bytearray(4000)
        assert comm.recv(text, 0) == 4000 and text == b"abcd" * 1000
        text.extend(b"x")                       # nothing holds it any more
        scalar = np.zeros(())
        comm.recv(scalar, 0)
        assert scalar == 7.5
        days = np.zeros(2, "M8[D]")
        comm.recv(days, 0)
        assert days.tolist()[1].isoformat() == "2021-06-15"


def test_kinds_of_buffers(world):
    world(2, kinds_of_buffers)


def temporaries(comm, rounds):                                  # B3
    import gc
    other = 1 - comm.rank
    for i in range(rounds):
        x = np.full(20000, i, "i4")
        sending = comm.isend(x * 2, other)
        into = comm.irecv(np.empty(20000, "i4"), other)
        if i % 50 == 0:
            gc.collect()
        noise = [np.full(20000, -1, "i4") for _ in range(5)]
        assert sending.wait() == 80000 and into.wait() == 80000
        del noise


def test_requests_keep_their_buffers(world, scale):
    world(2, temporaries, scale.rounds(300, 20))


def resizing(comm):                                             # B8, rule 3
    if comm.rank == 0:
        held, array = bytearray(100000), np.zeros(100000, "u1")
        pending = [comm.irecv(held, 1, tag=1), comm.irecv(array, 1, tag=2)]
        with pytest.raises(BufferError):
            held.extend(b"x" * 10**6)
        with pytest.raises(ValueError):
            array.resize(10**6, refcheck=False)
        comm.send(b"go", 1)
        comm.wait_all(pending)
        held.extend(b"x")
        del pending
        comm.trim()                             # nor does the registration cache
        array.resize(10**6, refcheck=False)
        assert held[:100000] == b"\5" * 100000 and (array[:100000] == 6).all()
    else:
        comm.recv(bytearray(2), 0)
        comm.send(np.full(100000, 5, "u1"), 0, tag=1)
        comm.send(np.full(100000, 6, "u1"), 0, tag=2)


def test_memory_under_transfer_cannot_be_resized(world):
    world(2, resizing)


def allocated(comm, n):
    a = rocecomm.empty(n, "u1")
    assert not a.any()
    if comm.rank == 0:
        a[:] = pattern(n)
        comm.send(a, 1)
        comm.send(a[: n // 2], 1)
    else:
        b = np.zeros(n, "u1")
        comm.recv(b, 0)
        assert (b == pattern(n)).all()
        comm.recv(a[: n // 2], 0)
        assert (a[: n // 2] == pattern(n // 2)).all() and not a[n // 2:].any()
    shape = rocecomm.empty((3, 4), np.float32)
    assert shape.shape == (3, 4) and shape.dtype == np.float32
    view = shape[1:]
    del shape
    view[:] = 1                                                 # the memory lives with its views
    assert rocecomm.empty((0, 4)).shape == (0, 4)


def test_memory_of_the_device(world):
    world(2, allocated, 1 << 20)


# ------------------------------------------------------------------------- arguments, C12 F10

def arguments(comm):
    data = np.zeros(4)
    for peer in (-1, comm.size, comm.size + 5, 2**40, -2**70):
        for call in (comm.send, comm.recv, comm.isend, comm.irecv):
            with pytest.raises(ValueError, match="rank"):
                call(data, peer)
    for peer in (1.0, True, None, "1", np.float64(1)):
        for call in (comm.send, comm.recv, comm.isend, comm.irecv):
            with pytest.raises(TypeError, match="rank"):
                call(data, peer)
    for tag in (-1, 2**63, 2**70):
        with pytest.raises(ValueError, match="tag"):
            comm.send(data, 0, tag=tag)
    for tag in (1.0, "x", None, True):
        with pytest.raises(TypeError, match="tag"):
            comm.recv(data, 0, tag=tag)
    for timeout in (-1, float("nan"), 1e12):
        with pytest.raises(ValueError, match="timeout"):
            comm.recv(data, 0, timeout=timeout)
    for timeout in ("5", True, b"1"):
        with pytest.raises(TypeError, match="timeout"):
            comm.send(data, 0, timeout=timeout)
    other = 1 - comm.rank
    sending = comm.isend(data, np.int64(other), tag=np.uint8(3))
    comm.recv(data, other, tag=2 + 1)
    sending.wait(None)
    with pytest.raises(TypeError):
        comm.isend(data)


def test_impossible_arguments_are_refused_at_once(world):
    world(2, arguments)


def clean_exit(comm):
    return repr(comm)


def test_objects_cannot_be_copied(world):
    world(1, nothing_is_pickled)


def nothing_is_pickled(comm):                                   # D9
    request = comm.irecv(np.zeros(1), 0, tag=9)
    for thing in (comm, request):
        for way in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match="process"):
                way(thing)
    assert request.cancel()
