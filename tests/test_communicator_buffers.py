"""Kinds of memory, through the Communicator: theme A.

| case | test |
|---|---|
| A1, A4, A5, A7, A8, A10, A11, A12, A15 | test_kinds_of_memory: layouts, small_floats, orders, offsets, ... |
| A3 | test_read_only_memory_is_sent_and_never_written |
| A14 | test_capsules_are_used_once |
| A13, and torch's part of A4, A7, A8, A10, A14, A15 | test_torch_tensors |

Cases share a world where they can: starting one costs seconds in the virtual machine.
"""

import os

import numpy as np
import pytest
from verbs.pair import SANITIZED
from verbs.producers import Modest, Producer

import rocecomm


def refused(comm, thing, receiving=True, match=None, error=BufferError):
    """Every call refuses `thing` before anything leaves."""
    sent = comm.counters["messages_sent"]
    other = 1 - comm.rank
    calls = [lambda: comm.send(thing, other), lambda: comm.isend(thing, other),
             lambda: comm.sendrecv(thing, other, np.zeros(1), other), lambda: comm.register(thing)]
    if receiving:
        calls += [lambda: comm.recv(thing, other), lambda: comm.irecv(thing, other),
                  lambda: comm.sendrecv(np.zeros(1), other, thing, other)]
    for call in calls:
        with pytest.raises(error, match=match):
            call()
    assert comm.counters["messages_sent"] == sent


def arrives(comm, thing, into=None):
    """What rank 0 sends is what rank 1 finds; returns the receiver's array."""
    if comm.rank == 0:
        comm.send(thing, 1)
        return thing
    into = np.zeros_like(thing) if into is None else into
    want = thing.nbytes if hasattr(thing, "nbytes") else len(thing)
    assert comm.recv(into, 0) == want
    return into


def layouts(comm):                                              # A1, A10
    a = np.arange(24, dtype="i4").reshape(4, 6)
    views = [a.T, a[:, ::2], a[::-1], a[1:3, 2:5], np.broadcast_to(np.float32(3), (1000,)),
             memoryview(bytearray(24))[::2]]
    for view in views:
        refused(comm, view, match="stride|shape|contiguous")
        assert (arrives(comm, a) == a).all()                    # the next one works
    assert arrives(comm, a[:1]).tolist() == [[0, 1, 2, 3, 4, 5]]
    column = a[:, :1].copy()[:, 0]
    assert arrives(comm, column).tolist() == [0, 6, 12, 18]
    for target in (np.broadcast_to(np.zeros(1), (8,)), a[::-1], a.T):
        with pytest.raises(BufferError):
            comm.all_reduce(target)
    assert (a == np.arange(24).reshape(4, 6)).all()


def read_only(comm, path, sizes):                               # A3
    for n in sizes:
        values = (np.arange(n) % 251).astype("u1")
        if comm.rank == 0:
            values.tofile(f"{path}-{n}")
            mapped = np.memmap(f"{path}-{n}", mode="r")
            for thing in (mapped, np.frombuffer(values.tobytes(), "u1"), values.tobytes(), mapped[:]):
                comm.send(thing, 1)
                comm.isend(thing, 1).wait()
        else:
            for _ in range(8):
                got = np.zeros(n, "u1")
                assert comm.recv(got, 0) == n and (got == values).all(), n
    fixed, text = np.zeros(8, "u1"), b"\0" * 8
    fixed.flags.writeable = False
    other = 1 - comm.rank
    for target in (fixed, text, np.frombuffer(text, "u1"), memoryview(text)):
        for call in (comm.recv, comm.irecv):
            with pytest.raises(BufferError, match="read-only"):
                call(target, other)
        with pytest.raises(BufferError, match="read-only"):
            comm.register(target, "w")
        with pytest.raises(BufferError, match="read-only"):
            comm.all_reduce(target)
    comm.sendrecv(b"12345678", other, bytearray(8), other)
    assert text == b"\0" * 8 and not fixed.any()
    # what the kernel did not register went out from copies, of which none is left
    assert comm._engine.staged == 0 and comm._engine.staged_most <= 2 * max(sizes)


def test_read_only_memory_is_sent_and_never_written(world, scale, tmp_path):
    world(2, read_only, str(tmp_path / "file"), scale.sizes(4000, 100_000, 5_000_000))


def check_sum(comm, values):
    """The sum, or an error that names the type; never 257, or bits added as integers."""
    try:
        total = comm.all_reduce(values)
    except TypeError as error:
        assert "bfloat16" in str(error)
    else:
        assert [float(x) for x in total] == [2.0, 256.0]


def small_floats(comm):                                         # A4
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a = np.array([1.0, 256.0, -2.5, np.inf], ml_dtypes.bfloat16)
    got = arrives(comm, a)
    assert got.tobytes() == a.tobytes()
    check_sum(comm, np.array([[1, 256], [1, 1]][comm.rank], ml_dtypes.bfloat16))
    other = 1 - comm.rank
    with pytest.raises(rocecomm.MismatchError, match="bfloat16"):
        sending = comm.isend(a, other)
        comm.recv(np.zeros(4, "i2"), other)
    sending.wait()


def torch_small_floats(comm):                                   # A4
    import torch
    t = torch.tensor([1.0, 256.0, -2.5], dtype=torch.bfloat16)
    got = arrives(comm, t, torch.zeros(3, dtype=torch.bfloat16))
    assert torch.equal(got, t)
    check_sum(comm, torch.tensor([[1, 256], [1, 1]][comm.rank], dtype=torch.bfloat16))


def orders(comm):                                               # A5
    want = np.array([[0, 1, 2], [3, 4, 5]])
    a = np.asfortranarray(want) if comm.rank else want.copy()
    if comm.rank == 1:
        for call in (lambda: comm.send(a, 0), lambda: comm.all_reduce(a), lambda: comm.recv(a, 0)):
            with pytest.raises(BufferError, match="transposed"):
                call()
        a = np.ascontiguousarray(a)
        comm.send(a, 0)
    else:
        got = np.zeros((2, 3), want.dtype)
        comm.recv(got, 1)
        assert (got == want).all()
    assert (comm.all_reduce(a) == 2 * want).all()


def written_by_the_peer(comm, reg, values):
    """The other rank writes `values` at the start of what `reg` registers."""
    other = 1 - comm.rank
    theirs = bytearray(64)
    comm.sendrecv(reg.descriptor(), other, theirs, other)
    comm.write(values, bytes(theirs))
    comm.sendrecv(b"", other, bytearray(0), other)              # both have written


def offsets(comm, versioned):                                   # A7
    base = np.arange(16, dtype="f4")
    p = Producer(base.ctypes.data, (4,), byte_offset=16, versioned=versioned, keep=base)
    if comm.rank == 1:
        got = np.zeros(4, "f4")
        comm.recv(got, 0)
        assert got.tolist() == [4, 5, 6, 7]
    else:
        comm.send(p, 1)
    with comm.register(p) as reg:
        written_by_the_peer(comm, reg, np.full(4, -1, "f4"))
    assert base.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, *range(8, 16)]


def torch_offsets(comm):                                        # A7
    import torch
    t = torch.arange(16.)
    assert arrives(comm, t[4:8], torch.zeros(4)).tolist() == [4, 5, 6, 7]
    with comm.register(t[4:8]) as reg:
        written_by_the_peer(comm, reg, torch.full((4,), -1.0))
    assert t.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, *range(8, 16)]


def scalars(comm):                                              # A8
    assert arrives(comm, np.array(7.5)) == 7.5
    total = comm.all_reduce(np.array([1.5, 2.5][comm.rank]))
    assert total == 4.0 and total.shape == ()
    base = np.arange(3, dtype="f4")
    old = Modest(base.ctypes.data, (3,), strides=None, keep=base)
    if comm.rank == 0:
        comm.send(old, 1)
    else:
        got = np.zeros(3, "f4")
        assert comm.recv(got, 0) == 12 and got.tolist() == [0, 1, 2]


def torch_scalars(comm):                                        # A8
    import torch
    got = arrives(comm, torch.tensor(7.5), torch.tensor(0.0))
    assert got.item() == 7.5 and got.shape == ()


def structures(comm):                                           # A11
    for bad in (np.array(["a", None], object), np.zeros(2, [("x", "f4"), ("o", "O")])):
        refused(comm, bad, match="object")
        with pytest.raises(BufferError, match="object"):
            comm.all_reduce(bad)
    plain = np.zeros(2, [("x", "f4"), ("y", "i4")])
    plain["x"], plain["y"] = [1, 2], [3, 4]
    got = arrives(comm, plain)
    assert got["x"].tolist() == [1, 2] and got["y"].tolist() == [3, 4]
    with pytest.raises(TypeError, match="'x'"):
        comm.all_reduce(plain)
    with pytest.raises(TypeError, match="str"):
        comm.all_reduce(np.array(["ab"]))


def datetimes(comm):                                            # A12
    days = np.array(["2020-01-01", "2021-06-15"], "M8[D]")
    assert (arrives(comm, days) == days).all()
    with pytest.raises(TypeError, match="datetime64"):
        comm.all_reduce(days)
    with pytest.raises(TypeError, match="timedelta64"):
        comm.all_reduce(days - days)


def parameters(comm):                                           # A13
    import torch
    p = torch.nn.Parameter(torch.ones(4) * (comm.rank + 1))
    at = p.data_ptr()
    with torch.no_grad():
        arrives(comm, p, p)
    assert p.tolist() == [1, 1, 1, 1] and p.requires_grad and p.data_ptr() == at
    with comm.register(p) as reg:
        written_by_the_peer(comm, reg, torch.full((4,), 5.0))
    assert p.tolist() == [5, 5, 5, 5] and p.requires_grad
    (p.sum() * (comm.rank + 1)).backward()
    comm.all_reduce(p.grad)
    assert p.grad.tolist() == [3, 3, 3, 3]
    computed = p * 2
    assert comm.register(computed).access == comm.register(computed, "r").access     # read only
    for call in (lambda: comm.recv(computed, 0), lambda: comm.register(computed, "w")):
        with pytest.raises(BufferError, match="detach"):
            call()
    arrives(comm, computed, torch.zeros(4))


def capsules(comm, rounds):                                     # A14
    base = np.arange(4, dtype="f4")
    for versioned in (False, True):
        for use in (comm.register, lambda p: comm.isend(p, 0).cancel(), lambda p: comm.irecv(p, 0).cancel()):
            p = Producer(base.ctypes.data, (4,), versioned=versioned, keep=base)
            capsule = p.capsule()
            held = use(capsule)
            for again in (comm.register, lambda p: comm.send(p, 0)):
                with pytest.raises(BufferError, match="used already"):
                    again(capsule)
            del held, capsule
            assert p.deleted == 1
        bad = Producer(base.ctypes.data, (4,), versioned=versioned, keep=base, code=3)
        for _ in range(rounds):
            with pytest.raises(BufferError):
                comm.register(bad)
            with pytest.raises(BufferError):
                comm.isend(bad, 0)
        assert bad.deleted == bad.made == 2 * rounds


def test_capsules_are_used_once(world, scale):
    world(1, capsules, scale.rounds(2500, 50))


def on_a_gpu(comm):                                             # A15
    for place, name in (((2, 1), "cuda:1"), ((10, 0), "rocm:0")):
        p = Producer(4096, (4,), device=place)
        refused(comm, p, match=f"{name}.*copy it to the host")
        with pytest.raises(BufferError, match=name):
            comm.all_reduce(p)
        assert p.made == p.deleted


def torch_gpu(comm):                                            # A15
    import torch
    refused(comm, torch.zeros(3, device="meta"), match="meta")
    if torch.cuda.is_available():
        refused(comm, torch.zeros(4, device="cuda"), match=r"cuda:0.*tensor\.cpu")


def kinds(comm):
    layouts(comm)
    small_floats(comm)
    orders(comm)
    offsets(comm, False)
    offsets(comm, True)
    scalars(comm)
    structures(comm)
    datetimes(comm)
    on_a_gpu(comm)


def test_kinds_of_memory(world):
    world(2, kinds)


# ------------------------------------------------- torch, in one world: importing it takes seconds

def come_and_go(comm, rounds):                                  # A14
    import torch

    def some(n):
        for i in range(n):
            t = torch.empty(1 << 18)
            reg = comm.register(t if i % 2 else t.__dlpack__())
            if i % 3:
                reg.close()
            del reg, t

    some(50)
    before = resident()
    some(rounds)
    assert SANITIZED or resident() - before < 50 << 20


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def torch_tensors(comm, rounds):
    torch_small_floats(comm)
    torch_offsets(comm)
    torch_scalars(comm)
    torch_expanded(comm)
    parameters(comm)
    torch_gpu(comm)
    if comm.rank == 0:
        come_and_go(comm, rounds)


def torch_expanded(comm):                                       # A10
    import torch
    refused(comm, torch.zeros(1).expand(8), match="expanded")
    with pytest.raises(BufferError, match="expanded"):
        comm.all_reduce(torch.zeros(1).expand(8))


@pytest.mark.timeout(120)
def test_torch_tensors(world, scale):
    pytest.importorskip("torch")
    world(2, torch_tensors, scale.rounds(10_000, 200), timeout=90)
