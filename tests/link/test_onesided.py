"""One-sided operations: bounds, alignment, access rights, pieces, notifications (D1, D2, D4, D7, D8)."""

import numpy as np
import pytest
from regions import swap

import rocecomm
from rocecomm import CompletionError, TimeoutError
from rocecomm.link import wireup

# ------------------------------------------------------------------------------ D1, D2

def out_of_bounds(comm):
    outer = np.full(16384, 0xAA, "u1")
    page = outer[6000:6000 + 4096]
    remote = swap(comm, comm.register(page))
    if comm.rank == 0:
        eight, back = np.arange(8, dtype="u1"), np.zeros(8, "u1")
        for offset in (4092, 4096, -8, 2**64 - 4, 2**63, 2**64 - 8):
            for call in (comm.write, comm.read, comm.iwrite, comm.iread):
                with pytest.raises(ValueError, match="4096 bytes of rank 1"):
                    call(eight, remote, offset)
        with pytest.raises(ValueError, match="4096"):
            comm.write(np.zeros(4097, "u1"), remote)
        with pytest.raises(ValueError, match="4096"):
            comm.write(b"", remote, 4097)
        for bad in (1.0, "1", None, True):
            with pytest.raises(TypeError, match="offset"):
                comm.write(eight, remote, bad)
        assert comm.write(b"", remote, 4096) == 0 == comm.read(np.zeros(0), remote, 4096)
        assert not back.any()
        comm.barrier()
        comm.barrier()
        comm.write(eight, remote, 4088)                # still usable
        assert comm.read(back, remote, 4088) == 8 and (back == eight).all()
        assert comm.counters["lane_repairs"] == 0      # nothing bad was ever posted
    else:
        comm.barrier()
        assert (outer == 0xAA).all()
        comm.barrier()
    comm.barrier()
    if comm.rank == 1:
        assert (outer[:10088] == 0xAA).all() and (outer[10096:] == 0xAA).all()
        assert page[4088:].tolist() == list(range(8))


def test_out_of_bounds(world):                          # D1
    world(2, out_of_bounds)


def atomics(comm):
    page = np.zeros(512, "u8")
    odd = np.frombuffer(bytearray(64), "u1")[1:]
    remote = swap(comm, comm.register(page))
    skew = swap(comm, comm.register(odd))
    short = swap(comm, comm.register(np.zeros(1, "i4")))
    if comm.rank == 0:
        refused = [(remote, 1), (remote, 4), (remote, 4092), (remote, 4096), (remote, -8), (short, 0)]
        refused += [(skew, k) for k in range(8) if k != -skew_of(skew) % 8]
        for region, offset in refused:
            with pytest.raises(ValueError):
                comm.fetch_add(region, offset, 1)
            with pytest.raises(ValueError):
                comm.compare_swap(region, offset, 0, 1)
        for bad in (-1, 2**64):
            with pytest.raises(ValueError, match="64"):
                comm.fetch_add(remote, 8, bad)
            with pytest.raises(ValueError, match="64"):
                comm.compare_swap(remote, 8, bad, 0)
            with pytest.raises(ValueError, match="64"):
                comm.compare_swap(remote, 8, 0, bad)
        with pytest.raises(TypeError):
            comm.fetch_add(remote, 8, 1.5)
        assert comm.fetch_add(remote, 8, 5) == 0
        assert comm.fetch_add(remote, 8, 2**64 - 1) == 5
        assert comm.compare_swap(remote, 8, 4, 2**64 - 1) == 4
        assert comm.compare_swap(remote, 8, 4, 7) == 2**64 - 1
        requests = [comm.ifetch_add(remote, 16, 1) for _ in range(300)]
        assert comm.wait_all(requests) == [8] * 300
        assert [q.value for q in requests] == list(range(300)) == [q.wait() for q in requests]
        swapped = comm.icompare_swap(remote, 16, 300, 1)
        assert swapped.wait(5) == 300
    comm.barrier()
    if comm.rank == 1:
        assert page[:3].tolist() == [0, 2**64 - 1, 1] and not page[3:].any() and not odd.any()


def skew_of(remote):
    """How far a region's start is from a multiple of 8, found by what is refused."""
    return int.from_bytes(remote.descriptor()[32:40], "little") % 8


def test_atomics_want_eight_aligned_bytes(world):       # D2
    world(2, atomics)


def adders(comm, n):
    """All ranks add to a cell of rank 0, itself included."""
    cell = np.zeros(2, "u8")
    reg = comm.register(cell)
    word = np.frombuffer(reg.descriptor(), "u1").copy()
    if comm.rank == 0:
        for other in range(1, comm.size):
            comm.send(word, other)
    else:
        comm.recv(word, 0)
    seen = [comm.fetch_add(word.tobytes(), 0, 1) for _ in range(n)]
    while comm.compare_swap(word.tobytes(), 8, comm.rank, comm.rank + 1) != comm.rank:
        pass                                            # in turn
    comm.barrier()
    assert seen == sorted(set(seen))
    if comm.rank == 0:
        assert cell.tolist() == [n * comm.size, comm.size]
    return seen


def test_atomics_of_several_ranks_add_up(world, scale):
    n = scale.rounds(500, 30)
    seen = world(3, adders, n)
    assert sorted(sum(seen, [])) == list(range(3 * n))


# ----------------------------------------------------------------------------------- D4

def rights(comm):
    table = {}
    for access in ("", "r", "w", "a", "rw", "rwa"):
        page = np.arange(8, dtype="u8")
        remote = swap(comm, comm.register(page, access))
        if comm.rank == 0:
            back = np.zeros(1, "u8")
            calls = {"write": lambda r=remote: comm.write(np.full(1, 77, "u8"), r, 8),
                     "read": lambda r=remote, b=back: comm.read(b, r, 16),
                     "fetch_add": lambda r=remote: comm.fetch_add(r, 24, 5),
                     "compare_swap": lambda r=remote: comm.compare_swap(r, 32, 4, 9)}
            for name, call in calls.items():
                try:
                    call()
                    table[access, name] = True
                except ValueError as error:
                    assert "access" in str(error) and "rank 1" in str(error)
                    table[access, name] = False
            assert back[0] == (2 if "r" in access else 0)
        comm.barrier()
        if comm.rank == 1:
            want = np.arange(8, dtype="u8")
            if "w" in access:
                want[1] = 77
            if "a" in access:
                want[3], want[4] = 8, 9
            assert (page == want).all()
    return table


def test_exactly_the_granted_rights(world):             # D4
    table, _ = world(2, rights)
    assert table == {(access, name): letter in access for access in ("", "r", "w", "a", "rw", "rwa")
                     for name, letter in (("write", "w"), ("read", "r"), ("fetch_add", "a"),
                                          ("compare_swap", "a"))}


# ------------------------------------------------------------------------------- pieces

def pieces(comm, n, size):
    rng = np.random.default_rng(7)
    page = np.zeros(n * size, "u1")
    reg = comm.register(page)
    remote = swap(comm, reg)
    comm.barrier()
    if comm.rank == 0:
        local = rng.integers(0, 255, n * size, "u1")
        order, place = rng.permutation(n) * size, rng.permutation(n) * size
        assert comm.writev(local, remote, order, place, size) == n * size
        back = np.zeros_like(local)
        assert comm.readv(back, remote, place, place, np.full(n, size)) == n * size
        want = np.zeros_like(local)
        for a, b in zip(order, place, strict=True):
            want[b:b + size] = local[a:a + size]
        assert (back == want).all()
        lengths = rng.integers(0, size + 1, n)          # some are empty
        lengths[0] = lengths[-1] = 0
        part = np.zeros_like(local)
        total = comm.readv(part, remote, order, place, lengths.astype("u2"))
        assert total == lengths.sum()
        for a, b, k in zip(order, place, lengths, strict=True):
            assert (part[a:a + k] == want[b:b + k]).all() and not part[a + k:a + size].any()
        with comm.register(local) as mine:              # also from registered memory
            comm.iwritev(mine, remote, place, place, lengths).wait()
        assert comm.writev(local, remote, [], [], 5) == 0
        assert comm.readv(local, remote, [1, 2], [3, 4], 0) == 0
        assert comm.readv(local, remote, [1], [3], [1]) == 1
    comm.barrier()


def test_pieces(world, scale):
    world(2, pieces, scale.rounds(3000, 100), 24)


def bad_pieces(comm):
    page = np.full(1000, 0xAA, "u1")
    remote = swap(comm, comm.register(page))
    if comm.rank == 0:
        local = np.zeros(500, "u1")
        good = [0, 100, 200]
        for here, there, lengths, text in (
                ([0, 100, 450], good, 51, r"piece 2, 51 bytes at local_offsets\[2\] = 450"),
                (good, [0, 950, 200], [50, 51, 1], r"piece 1, 51 bytes at remote_offsets\[1\] = 950"),
                ([-1, 0, 0], good, 5, "piece 0"), (good, [0, -1, 0], 5, "piece 1"),
                (good, [0, 2**63 - 1, 0], 5, "piece 1"),
                (good, np.array([0, 0, 2**64 - 1], "u8"), 5, "remote_offsets"),
                (good, good, [1, -1, 1], r"lengths\[1\]"), (good, good, -1, "lengths"),
                (good, good, [1, 2**63 - 1, 1], "piece 1"), (good, good, 2**61, "piece 0"),
                (good, [0, 1], 5, "same length"), (good, good, [1, 2], "same length")):
            for call in (comm.writev, comm.readv, comm.iwritev, comm.ireadv):
                with pytest.raises(ValueError, match=text):
                    call(local, remote, np.array(here), np.array(there), np.array(lengths)
                         if isinstance(lengths, list) else lengths)
        for bad in (np.zeros(3), np.zeros((1, 3), int), np.array(["a"] * 3), 5):
            with pytest.raises(TypeError, match="offsets"):
                comm.writev(local, remote, bad, good, 1)
            with pytest.raises(TypeError, match="offsets"):
                comm.writev(local, remote, good, bad, 1)
        with pytest.raises(TypeError):
            comm.writev(local, remote, good, good, 1.5)
        assert comm.counters["one_sided"] == 0
    comm.barrier()
    assert (page == 0xAA).all()


def test_every_piece_is_checked_first(world):
    world(2, bad_pieces)


def in_flight_arrays(comm):
    """Changing the arrays after the start changes nothing: they were copied."""
    page = np.zeros(1 << 20, "u1")
    remote = swap(comm, comm.register(page))
    if comm.rank == 0:
        here = np.arange(2048) * 512
        request = comm.iwritev(np.ones(1 << 20, "u1"), remote, here, here, 512)
        here[:] = -10**12
        assert request.wait() == 1 << 20
    comm.barrier()
    assert comm.rank == 0 or page.all()


def test_offsets_belong_to_the_request(world):
    world(2, in_flight_arrays)


# ----------------------------------------------------------------------------------- D7

def many_reads(comm, n):
    page = np.random.default_rng(comm.rank).integers(0, 255, 4 << 20, "u1")
    remote = swap(comm, comm.register(page))
    theirs = np.random.default_rng(1 - comm.rank).integers(0, 255, 4 << 20, "u1")
    places = np.random.default_rng(9).integers(0, (4 << 20) - 4096, n)
    into = np.zeros((n, 4096), "u1")
    requests = [comm.iread(into[i], remote, int(place)) for i, place in enumerate(places)]
    comm.wait_all(requests)
    for i, place in enumerate(places):
        assert (into[i] == theirs[place:place + 4096]).all()
    comm.barrier()
    return {r: a.reads for r, a in comm._engine.describe().items()}


def test_many_reads_in_flight(world, scale):            # D7
    world(2, many_reads, scale.rounds(1000, 60))


def unequal_reads(peers, n):
    limit = (16, 1)[peers.rank]

    class Limited(wireup.Endpoint):
        def __init__(self, **fields):
            if fields["rank"] == peers.rank:
                fields.update(reads_out=limit, reads_in=limit)
            super().__init__(**fields)

    wireup.Endpoint = Limited
    with rocecomm.init(device=peers.device) as comm:
        return list(many_reads(comm, n).values())


def test_unequal_limits_of_reads(world, scale):         # D7
    assert world(2, unequal_reads, scale.rounds(300, 30), plain=True) == [[1], [1]]


# ----------------------------------------------------------------------------------- D8

def notified(comm, n):
    page = np.zeros(4096, "u1")
    remote = swap(comm, comm.register(page))
    values = [0, 1, 0x89ABCDEF, 0xFFFFFFFF]
    if comm.rank == 0:
        for bad in (2**32, -1):
            with pytest.raises(ValueError, match="notify"):
                comm.write(b"x", remote, notify=bad)
        with pytest.raises(TypeError, match="notify"):
            comm.write(b"x", remote, notify=1.5)
        for value in values:
            assert comm.write(b"", remote, notify=value) == 0
        for i in range(n):                              # nobody has waited yet
            comm.iwrite(bytes([i & 255]) * 8, remote, 8 * (i % 512), notify=i)
        big = comm.iwrite(np.full(4096, 9, "u1"), remote, notify=42)
        comm.send(b"done", 1)
        big.wait()
        assert comm.wait_notify(rocecomm.ANY_SOURCE, 2, with_source=True) == [(1, 5), (1, 6)]
    else:
        comm.recv(bytearray(4), 0)
        got = comm.wait_notify(0)
        assert got == [0] and type(got[0]) is int
        with pytest.raises(TimeoutError, match="rank 0"):
            comm.wait_notify(0, n + 5, timeout=0.1)     # takes nothing
        assert comm.wait_notify(0, 3) == values[1:] and 2309737967 in values
        assert comm.wait_notify(rocecomm.ANY_SOURCE, n) == list(range(n))
        assert comm.wait_notify(0) == [42] and (page == 9).all()
        with pytest.raises(TimeoutError):
            comm.wait_notify(0, timeout=0)
        for bad in (0, -1, 65537):
            with pytest.raises(ValueError, match="count"):
                comm.wait_notify(0, bad)
        for value in (5, 6):
            comm.write(b"", remote, notify=value)
    comm.barrier()


def test_notifications(world, scale):                   # D8
    world(2, notified, scale.rounds(2000, 200))


def to_oneself(comm):
    page = np.zeros(1 << 16, "u1")
    with comm.register(page) as reg:
        own = comm.open(reg.descriptor())
        assert comm.write(b"hello", own, 3) == 5 and bytes(page[3:8]) == b"hello"
        back = bytearray(5)
        assert comm.read(back, own, 3) == 5 and back == b"hello"
        assert [comm.fetch_add(own, 16, 2), comm.compare_swap(own, 16, 2, 8)] == [0, 2]
        assert page[16:24].view("u8")[0] == 8
        for i in range(100):
            comm.iwrite(b"z", own, 100 + i, notify=i)
        assert comm.wait_notify(comm.rank, 100) == list(range(100)) and (page[100:200] == 122).all()
        where = np.arange(0, 60000, 4)
        comm.writev(np.full(4 * len(where), 3, "u1"), own, where, where, 4)
        assert (page[:60000] == 3).all()
        with pytest.raises(ValueError):
            comm.write(b"xx", own, 65535)
    for _ in range(3):
        with pytest.raises(CompletionError, match="rank 0"):
            comm.write(b"late", own)
    with comm.register(page) as reg:
        comm.write(b"again", reg.descriptor())
        assert bytes(page[:5]) == b"again"
    with pytest.raises(TimeoutError):
        comm.wait_notify(0, timeout=0.05)


def test_operations_on_oneself(world):
    world(1, to_oneself)
