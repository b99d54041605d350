"""Import of DLPack tensors: objects with __dlpack__, and bare capsules, old and new.

A capsule is renamed before anything else is looked at, so that nobody uses it twice; from
then on its tensor is ours, and its deleter runs exactly once, with the GIL held, whether
the tensor is accepted or refused.
"""

from cpython.pycapsule cimport (PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid,
                                PyCapsule_SetName)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

# The layout of DLPack 1.x, written from its specification (dmlc.github.io/dlpack).
cdef extern from *:
    """
    #include <stdint.h>
    typedef struct { int32_t type, id; } rc_dl_device;
    typedef struct { uint8_t code, bits; uint16_t lanes; } rc_dl_type;
    typedef struct {
        void *data;
        rc_dl_device device;
        int32_t ndim;
        rc_dl_type dtype;
        int64_t *shape;
        int64_t *strides;               /* in elements, or NULL: dense in C order */
        uint64_t byte_offset;
    } rc_dl_tensor;
    typedef struct rc_dl_old {
        rc_dl_tensor tensor;
        void *manager;
        void (*deleter)(struct rc_dl_old *);
    } rc_dl_old;
    typedef struct rc_dl_new {
        struct { uint32_t major, minor; } version;
        void *manager;
        void (*deleter)(struct rc_dl_new *);
        uint64_t flags;
        rc_dl_tensor tensor;
    } rc_dl_new;
    static uint32_t rc_dl_major(rc_dl_new *m) { return m->version.major; }
    static uint32_t rc_dl_minor(rc_dl_new *m) { return m->version.minor; }
    """
    ctypedef struct rc_dl_device:
        int32_t type
        int32_t id
    ctypedef struct rc_dl_type:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct rc_dl_tensor:
        void *data
        rc_dl_device device
        int32_t ndim
        rc_dl_type dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct rc_dl_old:
        rc_dl_tensor tensor
        void (*deleter)(rc_dl_old *) noexcept
    ctypedef struct rc_dl_new:
        void (*deleter)(rc_dl_new *) noexcept
        uint64_t flags
        rc_dl_tensor tensor
    uint32_t rc_dl_major(rc_dl_new *m) noexcept
    uint32_t rc_dl_minor(rc_dl_new *m) noexcept

cdef enum:
    FLAG_READ_ONLY = 1
    FLAG_COPIED = 2

_DEVICES = {1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi",
            10: "rocm", 11: "rocm_host", 12: "ext_dev", 13: "cuda_managed", 14: "oneapi",
            15: "webgpu", 16: "hexagon", 17: "maia"}
_ON_HOST = (1, 3, 11)
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_FLOAT8 = {7: "float8_e3m4", 8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn",
           11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz", 14: "float8_e8m0fnu"}


cdef str a(str name):
    """The name with its article."""
    return f"{'an' if name.startswith(('A', 'E', 'I', 'O', 'a', 'e', 'i', 'o', 'nd')) else 'a'} {name}"


cdef bint is_capsule(object obj) noexcept:
    return PyCapsule_CheckExact(obj)


cdef void delete(void *managed, bint versioned) noexcept:
    if versioned:
        if (<rc_dl_new *> managed).deleter != NULL:
            (<rc_dl_new *> managed).deleter(<rc_dl_new *> managed)
    elif (<rc_dl_old *> managed).deleter != NULL:
        (<rc_dl_old *> managed).deleter(<rc_dl_old *> managed)


cdef object device_text(int kind, int number):
    name = _DEVICES.get(kind, f"unknown kind {kind}")
    return name if kind in _ON_HOST else f"{name}:{number}"


cdef int check_device(object what, int kind, int number) except -1:
    if kind not in _ON_HOST:
        raise BufferError(
            f"{a(what)} on device {device_text(kind, number)} is not in CPU memory, the only "
            f"memory this version can register; copy it to the host first")
    return 0


cdef object export(object obj):
    """Asks an object for its capsule, the new kind if it knows how to make one."""
    device = getattr(type(obj), "__dlpack_device__", None)
    if device is not None:      # ask first: an export on a GPU may need a stream
        kind, number = obj.__dlpack_device__()
        check_device(type(obj).__name__, int(kind), int(number))
    try:
        try:
            return obj.__dlpack__(max_version=(1, 1))
        except TypeError:       # a producer from before DLPack 1.0
            return obj.__dlpack__()
    except BufferError:
        raise
    except Exception as error:
        raise BufferError(f"the {type(obj).__name__} does not lend its memory through DLPack: "
                          f"{error}") from error


cdef tuple take(object obj, bint writable, Lent *out):
    """Fills `out` from an object or a capsule; returns (shape, dtype name, device name)."""
    cdef object capsule = obj
    cdef void *managed
    cdef bint versioned
    cdef str what = type(obj).__name__
    if not PyCapsule_CheckExact(obj):
        capsule = export(obj)
        if not PyCapsule_CheckExact(capsule):
            raise BufferError(f"__dlpack__ of {a(what)} returned a {type(capsule).__name__}, "
                              f"not a capsule")
    else:
        what = "DLPack capsule"
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = PyCapsule_GetPointer(capsule, "dltensor_versioned")
        versioned = True
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
    elif PyCapsule_IsValid(capsule, "dltensor"):
        managed = PyCapsule_GetPointer(capsule, "dltensor")
        versioned = False
        PyCapsule_SetName(capsule, "used_dltensor")
    elif PyCapsule_IsValid(capsule, "used_dltensor") or \
            PyCapsule_IsValid(capsule, "used_dltensor_versioned"):
        raise BufferError("this DLPack capsule was used already and belongs to whoever used it "
                          "first; export the tensor again")
    else:
        raise TypeError("this capsule is no DLPack tensor; expected the result of __dlpack__()")
    try:
        out.managed = managed
        out.versioned = versioned
        return describe(what, writable, out)
    except BaseException:
        delete(managed, versioned)
        raise


cdef tuple describe(str what, bint writable, Lent *out):
    cdef rc_dl_tensor *t
    cdef rc_dl_new *new
    cdef uint64_t flags = 0
    cdef Py_ssize_t expected = 1
    cdef bint dense = True
    cdef int i
    cdef int bits
    if out.versioned:
        new = <rc_dl_new *> out.managed
        if rc_dl_major(new) != 1:
            raise BufferError(f"{a(what)} of DLPack version {rc_dl_major(new)}.{rc_dl_minor(new)} "
                              f"cannot be read, only versions 1.x")
        flags = new.flags
        t = &new.tensor
    else:
        t = &(<rc_dl_old *> out.managed).tensor
    check_device(what, t.device.type, t.device.id)
    name = dtype_name(t.dtype, what)
    bits = t.dtype.bits * t.dtype.lanes
    if bits % 8 or not bits:
        raise BufferError(f"{a(what)} with elements of {bits} bits is not made of whole bytes")
    out.itemsize = bits // 8
    if t.ndim < 0 or (t.ndim and t.shape == NULL):
        raise BufferError(f"{a(what)} with {t.ndim} dimensions and no shape makes no sense")
    shape = tuple([t.shape[i] for i in range(t.ndim)])
    count = 1
    for n in shape:
        if n < 0:
            raise BufferError(f"{a(what)} of shape {shape} makes no sense")
        count *= n
    if count * out.itemsize > 0x7FFFFFFFFFFFFFFF:
        raise BufferError(f"{a(what)} of shape {shape} is larger than any memory")
    if t.strides != NULL and count:
        for i in range(t.ndim - 1, -1, -1):
            if t.shape[i] > 1 and t.strides[i] != expected:
                dense = False
            expected *= t.shape[i]
        if not dense:
            raise BufferError(
                f"{a(what)} of shape {shape}, strides {tuple([t.strides[i] for i in range(t.ndim)])} "
                f"elements is not contiguous in C order; make a contiguous one first")
    if count and t.data == NULL:
        raise BufferError(f"{a(what)} of shape {shape} has no memory")
    out.readonly = (flags & FLAG_READ_ONLY) != 0
    if writable and out.readonly:
        raise BufferError(f"a read-only {what} of shape {shape} cannot be written to")
    if writable and flags & FLAG_COPIED:
        raise BufferError(f"{a(what)} that was exported as a copy cannot be written to: the "
                          f"original would not change")
    out.ptr = <char *> t.data + t.byte_offset if t.data != NULL else NULL
    out.nbytes = count * out.itemsize
    return shape, name, device_text(t.device.type, t.device.id)


cdef object dtype_name(rc_dl_type dtype, str what):
    if dtype.code == 3:
        raise BufferError(f"{a(what)} of opaque handles holds references, which mean nothing in "
                          f"another process")
    if dtype.code == 6:
        name = "bool"
    elif dtype.code in _KINDS:
        name = f"{_KINDS[dtype.code]}{dtype.bits}"
    else:
        name = _FLOAT8.get(dtype.code)
        if name is None:
            raise BufferError(f"{a(what)} of the unknown DLPack type code {dtype.code} cannot be "
                              f"sent")
    return name if dtype.lanes == 1 else f"{name}x{dtype.lanes}"
