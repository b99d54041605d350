"""Lists of buffers as one message: `send([a, b, c], dst)`."""

import numpy as np
import pytest

from rocecomm import ANY_TAG, MessageTruncatedError, MismatchError, RocecommError, TimeoutError


def cut(array, rng, most):
    """Views of `array` that make it up, some of them empty."""
    at = sorted(rng.integers(0, len(array) + 1, rng.integers(0, most)).tolist())
    kind = (list, tuple)[rng.integers(2)]
    return kind(array[a:b] for a, b in zip([0, *at], [*at, len(array)], strict=True))


def every_cut(comm, sizes, rounds):
    other = 1 - comm.rank
    for n in sizes:
        for i in range(rounds):
            rng = np.random.default_rng([n, i])
            out = rng.integers(0, 256, n, "u1")
            got = np.full(n + 9, 77, "u1")
            most = int(rng.choice((1, 2, 5, 60)))
            a, b = cut(out, rng, most), cut(got, rng, int(rng.choice((1, 2, 5, 60))))
            if i % 3 == 0:
                a = out                                         # a list meets a plain buffer
            elif i % 3 == 1:
                b = got
            if i % 2 == comm.rank:
                comm.send(a, other, tag=i)
                assert comm.recv(b, other, tag=i) == n
            else:
                pending = comm.irecv(b, other, tag=ANY_TAG)
                assert pending.wait() == n and pending.nbytes == n
                comm.isend(a, other, tag=i).wait()
            assert (got[:n] == out).all() and (got[n:] == 77).all(), (n, i, most)
            got[:] = 77
            assert comm.sendrecv(a, other, b, other, 5, 5) == n
            assert (got[:n] == out).all() and (got[n:] == 77).all(), (n, i, most)
    for connection in comm._engine.peers():
        assert not any(connection[what] for what in ("sends", "announced", "posted", "pulls", "reading"))


def test_lists_of_every_size_and_cut(world, scale):
    sizes = scale.sizes(0, 1, 9, 300, 600, 8000, 8192, 8193, 20000, 300000, 20 << 20)
    world(2, every_cut, sizes, scale.rounds(9, 2), timeout=50)


@pytest.mark.parametrize("limits", [
    {"ROCECOMM_SOFT_MAX_MSG": "4096"}, {"ROCECOMM_EAGER_LIMIT": "0"},
    {"ROCECOMM_UNEXPECTED_LIMIT": "0", "ROCECOMM_PEER_CREDITS": "2", "ROCECOMM_RECV_POOL": "16"}])
def test_lists_at_the_limits(world, scale, limits):
    world(2, every_cut, [0, 700, 4000, 4096, 12289, 100000], scale.rounds(9, 2), env=limits)


def many_pieces(comm, n):
    # longer than what an announcement holds, than a read of the table, with pieces of a few bytes
    if comm.rank == 0:
        values = np.arange(n, dtype="i4")
        comm.send([values[i:i + 1] for i in range(n)], 1)
        with pytest.raises(ValueError, match="16384"):
            comm.send([b"x"] * 16385, 1)
        comm.send([b"x"] * 100, 1)
    else:
        got = np.zeros(n, "i4")
        comm.recv([got[:1], got[1:n // 2], got[n // 2:]], 0)
        assert (got == np.arange(n)).all()
        assert comm.recv(bytearray(100), 0) == 100


def test_a_list_of_many_pieces(world, scale):
    most = 16384 if scale.share == 1 else 2500
    world(2, many_pieces, most, timeout=60)
    world(2, many_pieces, 2500, env={"ROCECOMM_SOFT_MAX_MSG": "4096"})


def rules(comm, n):
    ones, more = np.ones(n, "f4"), np.full(n, 2, "f4")
    if comm.rank == 0:
        comm.send([ones, more], 1)                              # float32
        comm.send([ones, np.arange(n), b"abc"], 1)              # bytes
        comm.send([ones, more, np.empty(0, "f8")], 1)           # empty ones do not count
        comm.send([np.empty(0), b""], 1)
        comm.send([], 1)
        comm.send([ones], 1)                                    # as if it were no list
        comm.send([ones, more], 1)
        comm.send([ones, more], 1)
        comm.send(np.zeros(1), 1)
    else:
        got, wrong = np.zeros(2 * n, "f4"), np.full(2 * n, 7, "i4")
        with pytest.raises(MismatchError, match="float32"):
            comm.recv([wrong[:1], wrong[1:]], 0)
        assert (wrong == 7).all()
        parts = [np.zeros(n, "f4"), np.zeros(n, "i8"), bytearray(3)]
        assert comm.probe(0).dtype == "bytes"
        assert comm.recv(parts, 0) == 12 * n + 3
        assert (parts[0] == 1).all() and (parts[1] == np.arange(n)).all() and parts[2] == b"abc"
        parts[2].extend(b"x")                                   # nobody holds it any more
        assert comm.recv(got, 0) == 8 * n and (got[:n] == 1).all() and (got[n:] == 2).all()
        assert comm.recv([], 0) == 0
        assert comm.recv([np.empty(0, "i2")], 0) == 0
        assert comm.recv([got[:n]], 0) == 4 * n
        got[:] = 9
        with pytest.raises(MessageTruncatedError) as caught:
            comm.recv([got[:n], got[n:-1]], 0)
        assert (caught.value.sent, caught.value.capacity) == (8 * n, 8 * n - 4)
        with pytest.raises(MessageTruncatedError):
            comm.recv([], 0)
        assert (got == 9).all()
        assert comm.recv([np.zeros(1)], 0) == 8
    for bad, words in (([1, 2, 3], "numpy.asarray"), ([[ones]], "nested"), ((2.5,), "numpy.asarray"),
                       ([ones, "text"], "element 1"), ([ones, np.ones((4, 4))[:, 1]], "element 1")):
        for call in (comm.send, comm.isend, comm.recv, comm.irecv):
            with pytest.raises((TypeError, BufferError), match=words):
                call(bad, 1 - comm.rank)
    with pytest.raises(BufferError, match="element 0"):
        comm.recv([b"abc", bytearray(3)], 1 - comm.rank)


def test_rules_of_lists(world):
    world(2, rules, 10)
    world(2, rules, 5000)


def to_oneself(comm):
    for n in (10, 100000):
        for i in range(6):
            rng = np.random.default_rng([n, i])
            out, got = rng.integers(0, 256, n, "u1"), np.zeros(n + 3, "u1")
            a, b = cut(out, rng, 5) if i % 3 else out, cut(got, rng, 5) if i % 3 < 2 else got
            if i < 3:
                pending = comm.irecv(b, 0)
                comm.send(a, 0)
                assert pending.wait() == n
            else:
                pending = comm.isend(a, 0)
                assert comm.recv(b, 0) == n
                assert pending.wait() == n
            assert (got[:n] == out).all() and not got[n:].any()


def test_lists_to_oneself(world):
    world(1, to_oneself)


def announced_and_empty(comm, n):
    if comm.rank == 0:
        sends = [comm.isend(b"" if i % 2 else [b"a", b"b"], 1) for i in range(n)]
        while not comm.counters["announced_small"]:             # the receiver holds all it may
            comm.progress()
        sends.append(comm.isend(b"", 1, tag=1))
        comm.wait_all(sends)
    else:
        comm.recv([], 0, tag=1)         # overtakes what was announced
        for i in range(n):
            into = [bytearray(1), bytearray(1)]
            assert comm.recv(into, 0) == (0 if i % 2 else 2)
            assert into == ([b"\0", b"\0"] if i % 2 else [b"a", b"b"])


def test_an_empty_message_that_was_announced(world):
    world(2, announced_and_empty, 100, env={
        "ROCECOMM_UNEXPECTED_LIMIT": "0", "ROCECOMM_EAGER_LIMIT": "65536", "ROCECOMM_PEER_CREDITS": "2"})


def taken_back(comm):
    pieces = [np.full(60000, i, "u1") for i in range(30)]
    if comm.rank == 0:
        with pytest.raises(TimeoutError):
            comm.send(pieces, 1, timeout=0.2)
        pending = comm.isend(pieces, 1)
        assert pending.cancel() is False
        comm.recv(bytearray(1), 1, tag=1)
        with pytest.raises(RocecommError, match="cancelled"):
            pending.wait(20)
        with pytest.raises(RocecommError, match="sendrecv"):
            comm.send(pieces, 1)                                # both send first
        pending = comm.isend(pieces, 1)
        del pieces[:]
        comm.send(b"go", 1, tag=2)
        pending.wait()
        comm.send(np.arange(5), 1)
    else:
        import time
        time.sleep(1.5)
        assert comm.iprobe(0) is None or comm.iprobe(0).nbytes == 1800000
        comm.send(b"x", 0, tag=1)
        with pytest.raises(RocecommError, match="sendrecv"):
            comm.send(pieces, 0)
        comm.recv(bytearray(2), 0, tag=2)
        got = [np.zeros(900001, "u1"), np.zeros(899999, "u1")]
        assert comm.recv(got, 0) == 1800000
        assert (np.concatenate(got).reshape(30, -1) == np.arange(30)[:, None]).all()
        late = comm.irecv([np.zeros(4), np.zeros(4)], 0, tag=3)
        assert late.cancel()
        with pytest.raises(TimeoutError):
            comm.recv([np.zeros(4), np.zeros(4)], 0, tag=3, timeout=0.1)
        assert comm.recv([np.zeros(2, int), np.zeros(4, int)], 0) == 40
    comm.barrier()


def test_lists_that_are_taken_back(world):
    world(2, taken_back)


def registered_pieces(comm):
    data = np.full(50000, comm.rank, "u1")
    with comm.register(data) as region:
        other = 1 - comm.rank
        for n in (10, 40000):
            got, plain = np.full(n + 50000, 9, "u1"), np.full(n, 5, "u1")
            assert comm.sendrecv([plain, region], other, got, other) == n + 50000
            assert (got[:n] == 5).all() and (got[n:] == other).all()
            comm.barrier()
            assert comm.sendrecv(got, other, [plain, region], other) == n + 50000
            assert (plain == 5).all() and (data == comm.rank).all()


def test_registered_buffers_in_lists(world):
    world(2, registered_pieces)
