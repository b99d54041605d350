"""Buffers: what becomes address, nbytes, dtype, writability; what is refused, and how."""

import array
import copy
import ctypes
import gc
import mmap
import pickle

import ml_dtypes
import numpy as np
import pytest
from verbs.producers import Modest, Producer

from rocecomm.verbs import acquire


def address(arr):
    return arr.__array_interface__["data"][0]


def same_bytes(buffer, expected):
    return bytes(memoryview(buffer)) == bytes(expected)


# ------------------------------------------------------------------ what is accepted
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32",
                                   "int64", "uint64", "float16", "float32", "float64",
                                   "longdouble", "complex64", "complex128"])
def test_numpy_dtypes(dtype):
    a = np.arange(6).astype(dtype).reshape(2, 3)
    b = acquire(a, True)
    assert (b.address, b.nbytes, b.itemsize, b.shape) == (address(a), a.nbytes, a.itemsize, (2, 3))
    assert b.dtype == np.dtype(dtype).name and b.device == "cpu" and not b.readonly
    assert b.obj is a and len(b) == a.nbytes


@pytest.mark.parametrize("make, nbytes, dtype", [
    (lambda: b"abcd", 4, "uint8"),
    (lambda: bytearray(b"abcde"), 5, "uint8"),
    (lambda: memoryview(b"abcdef")[2:], 4, "uint8"),
    (lambda: array.array("i", [1, 2, 3]), 12, "int32"),
    (lambda: array.array("d", [1.5]), 8, "float64"),
    (lambda: (ctypes.c_int16 * 5)(), 10, "int16"),
    (lambda: memoryview(np.zeros((2, 2), ">i4")), 16, ">i4"),
])
def test_buffer_protocol(make, nbytes, dtype):
    obj = make()
    b = acquire(obj)
    assert (b.nbytes, b.dtype) == (nbytes, dtype)
    assert same_bytes(b, memoryview(obj).cast("B") if nbytes and dtype != ">i4" else bytes(nbytes))


def test_mmap_is_held():
    m = mmap.mmap(-1, 8192)
    m[:4] = b"wxyz"
    with acquire(m, True) as b:
        assert b.nbytes == 8192 and bytes(memoryview(b)[:4]) == b"wxyz"
        with pytest.raises(BufferError):
            m.close()
    m.close()


def test_memmap_read_only(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    a = np.memmap(path, mode="r")
    b = acquire(a)
    assert b.readonly and b.dtype == "uint8" and same_bytes(b, range(200))
    with pytest.raises(BufferError, match="read-only"):
        acquire(a, True)


# A1: the bytes that lie in memory are not the values the view shows
@pytest.mark.parametrize("view", ["a.T", "a[:, ::2]", "a[::-1]", "a[1:3, 2:5]", "a[:, 0]",
                                  "np.rollaxis(np.zeros((2, 3, 4)), 2)"])
def test_strided_is_refused(view):
    a = np.arange(24, dtype="i4").reshape(4, 6)
    v = eval(view, {"a": a, "np": np})
    for writable in (False, True):
        with pytest.raises(BufferError, match="contiguous|Fortran|reversed"):
            acquire(v, writable)
    with pytest.raises(BufferError):
        acquire(memoryview(v))
    b = acquire(np.ascontiguousarray(v))
    assert same_bytes(b, v.tobytes())


@pytest.mark.parametrize("view", ["a[:1]", "a[:, :1].copy()[:, 0]", "a[1:3]", "a[2:2]",
                                  "a[0:1, 1:3]", "a[:0, ::2]", "a[1:2, 3:4].T"])
def test_size_one_axes_are_contiguous(view):
    a = np.arange(24, dtype="i4").reshape(4, 6)
    v = eval(view, {"a": a, "np": np})
    for obj in (v, memoryview(v)):
        b = acquire(obj)
        assert b.nbytes == v.nbytes and b.shape == v.shape and same_bytes(b, v.tobytes())


# A3
def test_read_only_as_target():
    for obj in (b"\0" * 8, np.frombuffer(b"abcd" * 10, "u1"), memoryview(b"abcd"),
                memoryview(bytearray(4)).toreadonly()):
        assert acquire(obj).readonly
        with pytest.raises(BufferError, match="read-only"):
            acquire(obj, True)
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    assert acquire(frozen).nbytes == 32
    with pytest.raises(BufferError, match="read-only.*copy"):
        acquire(frozen, True)


# A4
def test_bfloat16():
    a = np.array([1.0, 256.0, -2.5], ml_dtypes.bfloat16)
    b = acquire(a, True)
    assert (b.dtype, b.itemsize, b.nbytes, b.address) == ("bfloat16", 2, 6, address(a))
    assert acquire(np.array(1.0, ml_dtypes.bfloat16)).shape == ()
    assert acquire(np.zeros((2, 0), ml_dtypes.bfloat16)).nbytes == 0
    assert acquire(np.zeros(3, ml_dtypes.float8_e4m3fn)).dtype == "float8_e4m3fn"
    with pytest.raises(BufferError):
        acquire(np.zeros(6, ml_dtypes.bfloat16)[::2])


# A5
def test_fortran_order():
    f = np.asfortranarray([[0, 1, 2], [3, 4, 5]])
    with pytest.raises(BufferError, match="Fortran.*ascontiguousarray"):
        acquire(f)
    assert same_bytes(acquire(np.ascontiguousarray(f)), np.arange(6).tobytes())
    assert acquire(np.asfortranarray([[1, 2, 3]])).nbytes == 24     # both orders at once


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_byte_offset(versioned):
    base = np.arange(16, dtype="f4")
    p = Producer(address(base), (4,), byte_offset=16, versioned=versioned, keep=base)
    b = acquire(p, True)
    assert b.address == address(base) + 16 and b.nbytes == 16 and b.dtype == "float32"
    assert same_bytes(b, base[4:8].tobytes())
    memoryview(b)[:4] = np.float32(99).tobytes()
    assert base.tolist() == [0, 1, 2, 3, 99] + list(range(5, 16))


# A8
def test_zero_dimensions_and_null_strides():
    a = np.array(7.5)
    assert (acquire(a, True).shape, acquire(a).nbytes) == ((), 8)
    assert acquire(memoryview(np.array(7.5))).shape == ()
    base = np.arange(3, dtype="f4")
    p = Modest(address(base), (3,), strides=None, keep=base)
    assert same_bytes(acquire(p), base.tobytes())
    scalar = Producer(address(base), (), keep=base)
    assert acquire(scalar).shape == () and acquire(scalar).nbytes == 4


def test_nothing_to_send():
    for obj in (np.empty(0), np.empty((2, 0)), b"", bytearray(),
                np.empty((0, 4))[:, ::2], memoryview(b"")):
        assert acquire(obj).nbytes == 0
    p = Producer(None, (0, 3))
    assert acquire(p).nbytes == 0 and acquire(p).shape == (0, 3)


# A10
def test_broadcast():
    v = np.broadcast_to(np.float32(3), (1000,))
    with pytest.raises(BufferError, match="broadcast"):
        acquire(v)
    base = np.zeros(1, "f4")
    with pytest.raises(BufferError, match="not contiguous"):
        acquire(Producer(address(base), (8,), strides=(0,), keep=base))


# A11
def test_objects_and_structures():
    for a in (np.array(["a", None], object), np.zeros(2, [("x", "f4"), ("o", "O")]),
              np.array(["long" * 20], np.dtypes.StringDType())):
        with pytest.raises(BufferError, match="Python objects"):
            acquire(a)
    with pytest.raises(BufferError, match="Python objects"):
        acquire(memoryview(np.array([1, None], object)))
    plain = np.zeros(2, [("x", "f4"), ("Origin", "i4")])
    b = acquire(plain, True)
    assert b.nbytes == 16 and b.dtype == str(plain.dtype)
    assert acquire(memoryview(plain)).nbytes == 16          # an O in a name is no object
    assert acquire(np.array(["ab"])).nbytes == 8
    with pytest.raises(BufferError, match="mask"):
        acquire(np.ma.masked_array([1, 2], [0, 1]))


# A12
def test_datetimes():
    a = np.array(["2020-01-01", "2021-06-15"], "M8[D]")
    b = acquire(a, True)
    assert (b.dtype, b.nbytes, b.address) == ("datetime64[D]", 16, address(a))
    assert acquire(np.zeros(3, "m8[us]")).dtype == "timedelta64[us]"
    assert acquire(np.zeros(2, ">f8")).dtype == ">f8"


# A14
@pytest.mark.parametrize("versioned", [False, True])
def test_capsule_deleter_runs_once(versioned):
    base = np.zeros(4, "f4")
    p = Producer(address(base), (4,), versioned=versioned, keep=base)
    b = acquire(p)
    assert p.deleted == 0
    b.close()
    b.close()
    assert p.deleted == 1
    del b
    gc.collect()
    assert p.deleted == 1
    dropped = acquire(p)
    del dropped
    assert p.deleted == 2 == p.made


@pytest.mark.parametrize("options", [
    dict(code=3, bits=64), dict(code=99), dict(bits=4), dict(strides=(2,)), dict(strides=(-1,)),
    dict(versioned=True, version=(2, 0)), dict(shape=(-1,)), dict(shape=(1 << 40, 1 << 40)),
])
def test_refused_tensor_is_deleted_once(options):
    base = np.zeros(16, "f4")
    p = Producer(address(base), options.pop("shape", (4,)), keep=base, **options)
    for i in range(1, 4):
        with pytest.raises(BufferError):
            acquire(p)
        assert p.deleted == p.made == i


def test_read_only_and_copied_flags():
    base = np.zeros(4, "f4")
    p = Producer(address(base), (4,), versioned=True, flags=1, keep=base)
    assert acquire(p).readonly
    with pytest.raises(BufferError, match="read-only"):
        acquire(p, True)
    c = Producer(address(base), (4,), versioned=True, flags=2, keep=base)
    assert acquire(c).nbytes == 16
    with pytest.raises(BufferError, match="copy"):
        acquire(c, True)
    assert p.deleted == p.made and c.deleted == c.made


def test_numpy_capsule_is_used_once():
    a = np.arange(4.0)
    capsule = a.__dlpack__()
    assert acquire(capsule).address == address(a)
    with pytest.raises(BufferError, match="used already"):
        acquire(capsule)
    with pytest.raises(TypeError, match="no DLPack tensor"):
        import datetime
        acquire(datetime.datetime_CAPI)


def test_old_producer_without_keywords():
    base = np.arange(4, dtype="f4")
    assert same_bytes(acquire(Modest(address(base), (4,), keep=base)), base.tobytes())
    picky = Producer(address(base), (4,), keep=base, modern=False)
    assert same_bytes(acquire(picky), base.tobytes())


# A15
@pytest.mark.parametrize("place, name", [((2, 1), "cuda:1"), ((10, 0), "rocm:0"),
                                          ((13, 0), "cuda_managed:0"), ((8, 0), "metal:0")])
def test_memory_on_a_gpu(place, name):
    p = Producer(4096, (4,), device=place)
    with pytest.raises(BufferError, match=f"{name}.*copy it to the host"):
        acquire(p)
    assert p.made == 0          # refused before anything was exported
    with pytest.raises(BufferError, match=name):
        acquire(p.capsule())
    assert p.deleted == 1


def test_cuda_array_interface():
    class OnGPU:
        __cuda_array_interface__ = {}
    with pytest.raises(BufferError, match="GPU"):
        acquire(OnGPU())


def test_pinned_host_memory_counts_as_host():
    base = np.arange(4, dtype="f4")
    b = acquire(Producer(address(base), (4,), device=(3, 0), keep=base), True)
    assert b.device == "cuda_host" and same_bytes(b, base.tobytes())


@pytest.mark.parametrize("obj", [None, 3, 1.5, "text", [1, 2], (1,), {}, object(), print])
def test_no_buffer_at_all(obj):
    with pytest.raises(TypeError, match=f"an? {type(obj).__name__} holds no memory"):
        acquire(obj)


def test_series_like_gets_a_hint():
    class Column:
        def __array__(self, dtype=None, copy=None):
            return np.zeros(3)
    with pytest.raises(TypeError, match="numpy.asarray"):
        acquire(Column())


def test_dlpack_that_fails():
    class Broken:
        def __dlpack__(self, **options):
            raise RuntimeError("out of tensors")
    with pytest.raises(BufferError, match="out of tensors"):
        acquire(Broken())


# B8 and rule 3: the block cannot move while it is held
def test_resize_is_refused_while_held():
    ba, aa = bytearray(4096), array.array("i", [1, 2, 3])
    with acquire(ba, True), acquire(aa, True):
        with pytest.raises(BufferError):
            ba.extend(b"x" * 10**6)
        with pytest.raises(BufferError):
            aa.extend([1] * 1000)
    ba.extend(b"x" * 10**6)
    aa.extend([1] * 1000)
    assert len(ba) == 4096 + 10**6


@pytest.mark.parametrize("dtype", ["f4", "M8[s]", "bfloat16"])
def test_ndarray_resize_is_refused_while_held(dtype):
    a = np.zeros(1000, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    b = acquire(a, True)
    with pytest.raises(ValueError):
        a.resize(10**6, refcheck=False)
    assert b.address == address(a)
    b.close()
    a.resize(10**6, refcheck=False)
    assert a.size == 10**6


def test_resize_of_the_owner_of_a_view_is_refused():
    owner = np.zeros(1000)
    b = acquire(owner[10:20], True)
    with pytest.raises(ValueError):
        owner.resize(10**6, refcheck=False)
    b.close()
    del b
    owner.resize(10**6, refcheck=False)


def test_held_memory_outlives_the_name():
    a = np.arange(100000, dtype="i8")
    b = acquire(a)
    del a
    gc.collect()
    junk = [np.full(100000, 7, "i8") for _ in range(4)]
    assert same_bytes(b, np.arange(100000, dtype="i8").tobytes()) and junk


def test_no_reference_is_left_behind():
    import sys
    objs = [np.zeros(100), bytearray(100), array.array("d", [1]),
            np.zeros(3, "M8[s]")]
    for obj in objs:
        before = sys.getrefcount(obj)
        for _ in range(50):
            acquire(obj, True)
        assert sys.getrefcount(obj) == before


# lifetime of the Buffer itself
def test_close_copy_pickle():
    b = acquire(bytearray(8), True)
    view = memoryview(b)
    with pytest.raises(BufferError, match="still"):
        b.close()
    view.release()
    b.close()
    b.close()
    assert b.closed and b.address == 0
    with pytest.raises(BufferError, match="released"):
        memoryview(b)
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            act(acquire(b"x"))
    with pytest.raises(TypeError, match="acquire"):
        type(b)()


def test_buffer_of_a_buffer():
    a = np.arange(6, dtype="f4").reshape(2, 3)
    inner = acquire(a, True)
    b = acquire(inner, True)
    assert (b.address, b.shape, b.dtype, b.itemsize) == (address(a), (2, 3), "float32", 4)
    with pytest.raises(BufferError):
        inner.close()
    b.close()
    inner.close()


def test_acquire_does_not_import_torch():
    import subprocess
    import sys
    code = ("import sys, numpy, rocecomm.verbs as v; v.acquire(numpy.zeros(3)); v.acquire(b'x'); "
            "assert 'torch' not in sys.modules, 'torch was imported'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_ten_thousand_refused_tensors():
    """A14: each deleter runs exactly once, accepted or refused; nothing grows."""
    base = np.zeros(1 << 18, "f4")
    good = Producer(address(base), (1 << 18,), keep=base)
    opaque = Producer(address(base), (1 << 18,), code=3, bits=64, versioned=True, keep=base)
    for _ in range(5000):
        acquire(good, True)
        with pytest.raises(BufferError, match="opaque"):
            acquire(opaque)
    gc.collect()
    assert good.deleted == good.made == opaque.deleted == opaque.made == 5000


def test_speed_of_the_common_case():
    """Taking hold of an array is cheap enough to do for every small message."""
    import time
    a = np.zeros(8, "f4")
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            acquire(a, True)
        best = min(best, (time.perf_counter() - start) / 500)
    print(f"acquire: {best * 1e9:.0f} ns")
    assert best < 50e-6
