"""Point to point between two ranks: cases of themes A, C and H for what exists."""

import copy
import pickle
import time

import numpy as np
import pytest

import rocecomm
from rocecomm import ANY_SOURCE, ANY_TAG, MessageTruncatedError, MismatchError, RocecommError


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
                        (1 << 20) - 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, (16 << 20) + 5, 64 << 20)
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


# ----------------------------------------------------------------------- matching, C5 C6

def tags_out_of_order(comm, n):
    if comm.rank == 0:
        for i in range(n):
            comm.send(np.full(100, i, "i4"), 1, tag=1)
        comm.send(b"later", 1, tag=2)
    else:
        time.sleep(0.3)
        word = bytearray(5)
        comm.recv(word, 0, tag=2, timeout=20)
        assert word == b"later"
        got = np.empty(100, "i4")
        for i in range(n):
            comm.recv(got, 0, tag=1)
            assert (got == i).all()


def test_a_later_tag_overtakes_many_messages(world, scale):
    world(2, tags_out_of_order, scale.rounds(2000, 200))


def announced_out_of_order(comm, n):
    if comm.rank == 0:
        sends = [comm.isend(np.full(5000, i, "i4"), 1, tag=i % 7) for i in range(n)]
        comm.wait_all(sends)
    else:
        time.sleep(0.2)
        got = np.empty(5000, "i4")
        for tag in (6, 3, 0, 1, 5, 2, 4):
            for i in range(tag, n, 7):
                comm.recv(got, 0, tag=tag)
                assert (got == i).all()


def test_tags_in_another_order_with_little_storage(world):
    world(2, announced_out_of_order, 200, env={
        "ROCECOMM_UNEXPECTED_LIMIT": "65536", "ROCECOMM_EAGER_LIMIT": "32768"})


def any_source(comm, each):
    if comm.rank == 0:
        seen = []
        for _ in range(each * (comm.size - 1)):
            value = np.zeros(1, "i8")
            request = comm.irecv(value, ANY_SOURCE, ANY_TAG)
            assert request.wait() == 8
            seen.append((request.source, request.tag, int(value[0])))
        for source in range(1, comm.size):
            assert [v for s, _, v in seen if s == source] == list(range(each))
        assert all(t == v + 10 for _, t, v in seen)
    else:
        for i in range(each):
            comm.send(np.int64([i]), 0, tag=10 + i)


def test_any_source_keeps_the_order_of_each(world):
    world(4, any_source, 20)


def flood(comm, n):                                             # C6
    if comm.rank == 0:
        values = np.arange(n, dtype="i8")
        sends = [comm.isend(values[i:i + 1], 1) for i in range(n)]
        comm.wait_all(sends, timeout=50)
        assert sends[-1].nbytes == 8
    else:
        got = np.empty(1, "i8")
        for i in range(n):
            if i % 100 == 0:
                time.sleep(0.001)
            comm.recv(got, 0)
            assert got[0] == i


@pytest.mark.timeout(100)
def test_flood_of_small_isends(world, scale):
    world(2, flood, scale.rounds(100000, 2000), timeout=80)


def posted_before(comm, n):
    if comm.rank == 0:
        out = np.zeros(n, "i8")
        comm.wait_all([comm.irecv(out[i:i + 1], 1) for i in range(n)])
        assert (out == np.arange(n)).all()
    else:
        for i in range(n):
            comm.send(np.int64([i]), 0)


def test_many_receives_posted_before(world, scale):
    world(2, posted_before, scale.rounds(50000, 2000), timeout=60)


def many_to_one(comm, n):
    if comm.rank == 0:
        got = np.empty(1, "i8")
        time.sleep(0.1)
        for source in reversed(range(1, comm.size)):
            for i in range(n):
                comm.recv(got, source)
                assert got[0] == source * 10**6 + i
    else:
        for i in range(n):
            comm.send(np.int64([comm.rank * 10**6 + i]), 0)


def test_many_senders_to_one_receiver(world, scale):
    world(min(6, scale.ranks), many_to_one, scale.rounds(1000, 100), timeout=60)


def slow_receiver(comm, total, piece):                          # C14
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = total // piece
    if comm.rank == 0:
        data = np.zeros(piece, "u1")
        for i in range(n):
            data[:] = i & 255
            comm.send(data, 1)
    else:
        time.sleep(1.5)
        got = np.empty(piece, "u1")
        for i in range(n):
            comm.recv(got, 0)
            assert got[0] == got[-1] == i & 255
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_slow_receiver_bounds_memory(world, scale):
    grown = world(2, slow_receiver, min(scale.bytes * 8, 512 << 20), 64 << 10, timeout=60)
    small = world(2, slow_receiver, min(scale.bytes * 4, 256 << 20), 8 << 10, timeout=60)
    assert max(grown + small) < 256 << 10, (grown, small)       # KiB


def late_receiver(comm):                                        # C5, C15
    if comm.rank == 0:
        for i in range(10):
            comm.send(np.int32([i]), 1)
    else:
        time.sleep(3)
        got = np.empty(1, "i4")
        for i in range(10):
            comm.recv(got, 0)
            assert got[0] == i


def test_a_sender_long_before_the_receiver(world):
    world(2, late_receiver)


# -------------------------------------------------------------------------- requests, C13

def requests_in_every_order(comm, n):
    import random
    other, rng = 1 - comm.rank, random.Random(7)
    size = [20000 if i % 3 == 0 else 10 for i in range(n)]
    into = [np.zeros(size[i], "i4") for i in range(n)]
    receives = [comm.irecv(into[i], other, tag=i) for i in range(n)]
    sends = [comm.isend(np.full(size[i], i, "i4"), other, tag=i) for i in range(n)]
    for i in rng.sample(range(n), n):
        assert receives[i].wait() == receives[i].wait(0) == size[i] * 4
        assert receives[i].test() and receives[i].done and receives[i].error is None
        assert (receives[i].source, receives[i].tag) == (other, i)
        assert (into[i] == i).all()
    for send in reversed(sends):
        assert send.wait() == send.nbytes
    assert "done" in repr(sends[0])


def test_requests_in_random_order_and_twice(world, scale):
    world(2, requests_in_every_order, scale.rounds(1000, 60), timeout=60)


def cancelling(comm):
    if comm.rank == 0:
        first, second = np.zeros(4), np.zeros(4)
        request = comm.irecv(first, 1, tag=1)
        assert not request.test() and request.cancel() and not request.cancel()
        with pytest.raises(RocecommError, match="cancelled"):
            request.wait()
        comm.irecv(second, 1, tag=2)                            # dropped, not cancelled
        comm.send(b"x", 1)
        comm.recv(second, 1, tag=1)
        assert (second == 3).all() or (second == 4).all()
        assert not first.any()
        while not (second == 4).all():
            comm.progress()
        big = comm.isend(np.zeros(100000), 1, tag=5)
        assert big.cancel() is False                            # asked back
        with pytest.raises(RocecommError, match="cancelled"):
            big.wait(20)
        comm.send(np.full(10, 9.0), 1, tag=5)
        assert "failed" in repr(big)
    else:
        comm.recv(bytearray(1), 0)
        comm.send(np.full(4, 3.0), 0, tag=1)
        comm.send(np.full(4, 4.0), 0, tag=2)
        time.sleep(0.3)
        comm.progress()                                         # takes part in the withdrawal
        got = np.zeros(100000)
        assert comm.recv(got, 0, tag=5) == 80
        assert (got[:10] == 9).all()


def test_cancelling(world):
    world(2, cancelling)


def waiting_for_any(comm):
    if comm.rank == 0:
        a, b = np.zeros(1), np.zeros(1)
        both = [comm.irecv(a, 1, tag=1), comm.irecv(b, 1, tag=2)]
        assert comm.wait_any(both) == 1 and b[0] == 2
        comm.send(b"x", 1)
        assert comm.wait_all(both) == [8, 8] and a[0] == 1
    else:
        comm.send(np.float64([2]), 0, tag=2)
        comm.recv(bytearray(1), 0)
        comm.send(np.float64([1]), 0, tag=1)


def test_wait_any(world):
    world(2, waiting_for_any)


# ------------------------------------------------------------------------ both send, C10

def both_send_first(comm, sizes):
    other = 1 - comm.rank
    outcome = {}
    for n in sizes:
        mine, got = np.full(n, comm.rank + 1, "u1"), np.zeros(n, "u1")
        start = time.monotonic()
        try:
            comm.send(mine, other)
            comm.recv(got, other)
            assert (got == other + 1).all()
            outcome[n] = "sent"
        except RocecommError as error:
            assert str(n) in str(error) and "sendrecv" in str(error) and f"rank {other}" in str(error)
            outcome[n] = "refused"
        assert time.monotonic() - start < 10
        assert comm.sendrecv(mine, other, got, other) == n
        assert (got == other + 1).all()
        sending = comm.isend(mine, other)
        comm.recv(got, other)
        sending.wait()
    return outcome


def test_both_sides_send_first(world, scale):
    sizes = scale.sizes(1024, 64 << 10, 1 << 20, 64 << 20)
    for outcome in world(2, both_send_first, sizes, timeout=60):
        assert outcome.pop(1024) == "sent"
        assert set(outcome.values()) == {"refused"}


def posted_receive_breaks_the_cycle(comm, n):
    other = 1 - comm.rank
    for _ in range(20):
        got = np.zeros(n, "u1")
        into = comm.irecv(got, other)
        comm.send(np.full(n, comm.rank + 1, "u1"), other, timeout=20)
        into.wait(20)
        assert (got == other + 1).all()


def test_no_false_alarm_when_a_receive_is_posted(world):
    world(2, posted_receive_breaks_the_cycle, 200000)


def ring_of_sends(comm, n):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(n, "u1")
    with pytest.raises((rocecomm.TimeoutError, rocecomm.PeerDeadError)):
        comm.send(np.ones(n, "u1"), right, timeout=1)
    time.sleep(1.5)                                             # all have given up
    assert comm.sendrecv(np.full(n, comm.rank, "u1"), right, got, left) == n
    assert (got == left).all()


def test_a_ring_of_large_sends_times_out_and_goes_on(world):
    world(4, ring_of_sends, 1 << 20, timeout=60)


def to_oneself(comm):
    comm.send(b"abc", comm.rank)
    word = bytearray(3)
    assert comm.recv(word, comm.rank) == 3 and word == b"abc"
    big = np.arange(1 << 18)
    out = np.zeros_like(big)
    sending = comm.isend(big, comm.rank, tag=4)
    assert comm.recv(out, comm.rank, tag=4) == big.nbytes and (out == big).all()
    assert sending.wait() == big.nbytes
    out[:] = 0
    into = comm.irecv(out, ANY_SOURCE)
    comm.send(big, comm.rank)
    assert into.wait() == big.nbytes and (out == big).all()
    with pytest.raises(RocecommError, match="oneself"):
        comm.send(big, comm.rank)
    dropped = comm.isend(big, comm.rank, tag=7)
    dropped.cancel()
    with pytest.raises(RocecommError, match="cancelled"):
        dropped.wait()
    with pytest.raises(MessageTruncatedError):
        sending = comm.isend(big, comm.rank)
        comm.recv(out[:5], comm.rank)
    assert sending.wait() == big.nbytes
    if comm.size == 2:                          # until then the other one is there
        comm.sendrecv(word, 1 - comm.rank, bytearray(3), 1 - comm.rank, 9, 9)


def test_messages_to_oneself(world):
    world(1, to_oneself)
    world(2, to_oneself)
