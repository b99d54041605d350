"""Buffers of torch tensors; test_buffer.py has everything else."""

import gc
import sys

import numpy as np
import pytest
from verbs.pair import SANITIZED

from rocecomm.verbs import acquire

torch = pytest.importorskip("torch")


def same_bytes(buffer, expected):
    return bytes(memoryview(buffer)) == bytes(expected)


# A7
def test_storage_offset():
    t = torch.arange(16.)[4:8]
    b = acquire(t, True)
    assert b.address == t.data_ptr() and same_bytes(b, np.arange(4, 8, dtype="f4").tobytes())


# A13: a leaf is written in place, what autograd computed is not
def test_parameters():
    p = torch.nn.Parameter(torch.ones(4))
    b = acquire(p, True)
    memoryview(b)[:] = np.arange(4, dtype="f4").tobytes()
    assert p.tolist() == [0, 1, 2, 3] and p.requires_grad and b.address == p.data_ptr()
    computed = p * 2
    assert same_bytes(acquire(computed), np.array([0, 2, 4, 6], "f4").tobytes())
    with pytest.raises(BufferError, match="autograd.*detach"):
        acquire(computed, True)
    assert acquire(computed.detach(), True).address == computed.data_ptr()


def test_torch_refusals():
    with pytest.raises(BufferError, match="transposed|contiguous"):
        acquire(torch.zeros(3, 4).t())
    with pytest.raises(BufferError, match="meta"):
        acquire(torch.zeros(3, device="meta"))
    with pytest.raises(BufferError, match="layout"):
        acquire(torch.zeros(3, 3).to_sparse())
    with pytest.raises(BufferError, match="conj"):
        acquire(torch.tensor([1 + 2j]).conj())
    for dtype in ("float8_e4m3fn", "complex32", "uint16", "bool", "float64", "int64"):
        t = torch.zeros(4, dtype=getattr(torch, dtype))
        assert acquire(t, True).nbytes == 4 * t.element_size()
        assert acquire(t).dtype == dtype


def test_channels_last_is_not_c_order():
    t = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(BufferError, match="contiguous"):
        acquire(t)


def test_capsule_is_used_once():
    t = torch.arange(4.)
    capsule = t.__dlpack__()
    b = acquire(capsule)
    assert b.address == t.data_ptr()
    with pytest.raises(BufferError, match="used already"):
        acquire(capsule)


def test_torch_resize_is_refused_while_held():
    t = torch.zeros(4)
    b = acquire(t, True)
    with pytest.raises(RuntimeError):
        t.resize_(10**6)
    assert b.address == t.data_ptr()


def test_bfloat16():
    t = torch.tensor([1.0, 256.0, -2.5], dtype=torch.bfloat16)
    b = acquire(t, True)
    assert (b.dtype, b.itemsize, b.nbytes, b.address) == ("bfloat16", 2, 6, t.data_ptr())
    assert same_bytes(b, t.view(torch.int16).numpy().tobytes())
    assert acquire(torch.tensor(1.0, dtype=torch.bfloat16)).shape == ()


def test_zero_dimensions_and_empty():
    assert same_bytes(acquire(torch.tensor(7.5)), np.float32(7.5).tobytes())
    assert acquire(torch.tensor(7.5)).shape == ()
    assert acquire(torch.empty(0, 3)).nbytes == 0


@pytest.mark.parametrize("writable", [False, True])
def test_expanded_is_refused(writable):
    with pytest.raises(BufferError, match="expanded"):
        acquire(torch.zeros(1).expand(8), writable)
    assert acquire(torch.zeros(1).expand(1), writable).nbytes == 4


def test_cuda_tensor_names_its_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device (case A15)")
    with pytest.raises(BufferError, match="cuda:0"):
        acquire(torch.zeros(4, device="cuda"))


def test_no_reference_is_left_behind():
    t = torch.zeros(100)
    before = sys.getrefcount(t)
    for _ in range(50):
        acquire(t, True)
    gc.collect()
    assert sys.getrefcount(t) == before


def resident():
    import os
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_tensors(device, scale):
    """A14: registering and dropping tensors gives the memory back."""
    from rocecomm import verbs as v
    with v.open_device(device) as ctx:
        pd = v.PD(ctx)

        def rounds(n):
            for i in range(n):
                t = torch.empty(1 << 18)
                mr = v.MR(pd, t if i % 2 else t.__dlpack__())
                if i % 3:
                    mr.close()
                del mr, t

        rounds(20)
        before = resident()
        rounds(scale.rounds(10_000, 200))
        assert SANITIZED or resident() - before < 50 << 20
