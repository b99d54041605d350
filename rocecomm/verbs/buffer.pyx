"""Anything that holds bytes becomes address, nbytes, dtype and writability.

`acquire(obj, writable)` tries, in this order: a torch tensor (without importing torch), a
numpy array, the buffer protocol, DLPack. Nothing is ever copied. The export is held until
the Buffer is released, and what could move the block meanwhile (numpy's and torch's
resize) is made to fail. What cannot be sent as it lies in memory raises BufferError; what
is no buffer at all raises TypeError.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport (PyBUF_FORMAT, PyBUF_INDIRECT, PyBUF_WRITABLE,
                             PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
                             PyObject_GetBuffer)
from cpython.object cimport PyObject
from libc.string cimport strchr
from rocecomm.verbs cimport dlpack

import sys
import weakref

import numpy as np

cnp.import_array()

cdef extern from "Python.h":
    object PyWeakref_NewRef(object, PyObject *)

cdef object ndarray = np.ndarray
cdef object masked_array = np.ma.MaskedArray
cdef object weakref_ref = weakref.ref

# one-letter codes of the struct module (native sizes), as numpy names them
_CODES = {"?": "bool", "b": "int8", "B": "uint8", "c": "bytes1", "e": "float16",
          "f": "float32", "d": "float64", "g": np.dtype("g").name, "F": "complex64",
          "D": "complex128", "G": np.dtype("G").name}
_SIGNED, _UNSIGNED = "hilqn", "HILQN"


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Buffer:
    """Memory of an object, held: see `acquire`. ``len(buffer)`` is its size in bytes.

    ``address`` (int), ``nbytes``, ``dtype`` (numpy's name, "bfloat16", ...), ``itemsize``,
    ``shape``, ``device`` ("cpu" or "cuda_host"), ``readonly``, ``obj`` (what was passed,
    None once released).
    It offers its bytes through the buffer protocol, so ``memoryview(buffer)`` works.
    """

    def __init__(self):
        raise TypeError("a Buffer is made by rocecomm.verbs.acquire(obj, writable)")

    def __dealloc__(self):
        self.release_now()

    cdef void hold(self) noexcept:
        self.holds += 1

    cdef void unhold(self) noexcept:
        self.holds -= 1

    cdef int release_now(self) except -1:
        if self.is_released:
            return 0
        self.is_released = True
        self.ptr = NULL
        if self.has_view:
            self.has_view = False
            PyBuffer_Release(&self.view)
        if self.dl != NULL:
            dlpack.delete(self.dl, self.dl_versioned)
            self.dl = NULL
        self.guard = None
        self.exporter = None
        self.obj = None
        return 0

    def close(self):
        """Gives the memory back to its exporter; twice is fine.

        Raises BufferError while a registration uses the memory.
        """
        if self.holds and not self.is_released:
            raise BufferError(
                f"the memory of this {type(self.obj).__name__} ({self.nbytes} bytes) is still "
                f"registered or exported {self.holds} time(s); close those first")
        self.release_now()

    release = close

    @property
    def closed(self):
        """True once the memory was given back."""
        return self.is_released

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __len__(self):
        return self.nbytes

    @property
    def address(self):
        """Address of the first byte (0 when there are none or it was released)."""
        return <size_t> self.ptr

    @property
    def nbytes(self):
        """Size in bytes: items times item size."""
        return self.nbytes

    @property
    def readonly(self):
        """True if the exporter forbids writing."""
        return self.readonly

    @property
    def shape(self):
        """Shape of what was passed, a tuple of ints."""
        if self.is_plain and not self.is_released:
            return self.obj.shape
        if self.dims is None:
            self.dims = (self.nbytes // self.itemsize if self.itemsize else 0,)
        return self.dims

    @property
    def dtype(self):
        """Name of the element type: numpy's ("float32", "datetime64[D]"), "bfloat16", ..."""
        if self.dtype_name is None:
            self.dtype_name = self.obj.dtype if self.is_plain and not self.is_released else "uint8"
        if not isinstance(self.dtype_name, str):
            self.dtype_name = dtype_text(self.dtype_name)
        return self.dtype_name

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.is_released:
            raise BufferError("this Buffer was released")
        PyBuffer_FillInfo(view, self, self.ptr, self.nbytes, self.readonly, flags)
        self.holds += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.holds -= 1

    def __reduce__(self):
        raise TypeError("a Buffer cannot be copied or pickled: it stands for memory of this "
                        "process; send the object it was made from instead")

    def __repr__(self):
        state = "released" if self.is_released else f"{self.nbytes} bytes of {self.dtype}"
        return f"<Buffer {state}{', read-only' if self.readonly else ''}>"


@cython.auto_pickle(False)
cdef class Lender:
    """Base of objects that hold memory and lend it: see `acquire`."""

    cdef Buffer lend(self, bint writable):
        raise NotImplementedError


cdef Buffer acquire(object obj, bint writable):
    """Takes hold of the memory of `obj`; see the module's text."""
    cdef Buffer b = Buffer.__new__(Buffer)
    cdef type kind = type(obj)
    b.obj = obj
    b.device = "cpu"
    if kind is ndarray:
        from_numpy(b, obj, writable)
        return b
    if kind is bytes or kind is bytearray or kind is memoryview:
        from_protocol(b, obj, writable)
        return b
    if isinstance(obj, Lender):
        return (<Lender>obj).lend(writable)
    torch = sys.modules.get("torch")
    if torch is not None:
        tensor = getattr(torch, "Tensor", None)     # None while torch is being imported
        if tensor is not None and isinstance(obj, tensor):
            from_torch(b, torch, obj, writable)
            return b
    if isinstance(obj, ndarray):
        from_numpy(b, obj, writable)
    elif isinstance(obj, Buffer):
        from_protocol(b, obj, writable)
        b.dims, b.dtype_name, b.itemsize = obj.shape, obj.dtype, obj.itemsize
        b.device = obj.device
    elif PyObject_CheckBuffer(obj):
        from_protocol(b, obj, writable)
    elif dlpack.is_capsule(obj) or hasattr(kind, "__dlpack__"):
        from_dlpack(b, obj, writable)
    else:
        refuse_type(obj)
    return b


def py_acquire(obj, writable=False):
    """``rocecomm.verbs.acquire(obj, writable=False)`` -> Buffer that holds obj's memory.

    Accepts numpy arrays, torch CPU tensors, everything with the buffer protocol (bytes,
    bytearray, memoryview, array.array, mmap, ...) and DLPack (objects and capsules).
    Raises BufferError for memory that is not contiguous in C order, read-only (when
    `writable`), on a GPU, or holding Python objects; TypeError for what is no buffer.
    """
    return acquire(obj, bool(writable))


# --------------------------------------------------------------------------- numpy
cdef int from_numpy(Buffer b, object arr, bint writable) except -1:
    dtype = arr.dtype
    if dtype.hasobject:
        raise BufferError(
            f"an array of dtype {dtype} holds references to Python objects, which mean nothing "
            f"in another process; convert it to a numeric dtype first")
    if type(arr) is not ndarray and isinstance(arr, masked_array):
        raise BufferError("a masked array would lose its mask; pass array.filled(value) or "
                          "array.data, and the mask in a message of its own")
    flags = arr.flags
    if writable and not flags.writeable:
        raise BufferError(
            f"a read-only array of shape {arr.shape}, dtype {dtype} cannot be written to; pass "
            f"a writable array, for example array.copy()")
    if not flags.c_contiguous:
        refuse_strides(arr.shape, arr.strides, dtype.itemsize, f"array of dtype {dtype}",
                       "numpy.ascontiguousarray(array)", writable)
    b.dims = arr.shape
    b.dtype_name = dtype
    b.itemsize = dtype.itemsize
    lender = arr
    # numpy exports neither datetimes nor the types of other packages (bfloat16): lend bytes
    if dtype.kind in "mMV" or dtype.isbuiltin != 1 or arr.ndim > 32:
        if arr.nbytes:
            lender = arr.reshape(-1).view(np.uint8)
        else:
            lender = np.empty(0, np.uint8)
        b.exporter = lender
    b.guard = guard_numpy(arr)
    take_view(b, lender, writable)
    return 0


cdef Buffer acquire_plain(object obj):
    """Of an ndarray there is nothing more to hold than a reference: numpy does not count exports,
    and asked for one it describes the array anew each time, for longer than a small message takes."""
    cdef Buffer b = Buffer.__new__(Buffer)
    cdef cnp.ndarray arr = <cnp.ndarray>obj
    cdef object base = obj
    b.obj = obj
    b.device = "cpu"
    b.ptr = <char *>cnp.PyArray_DATA(arr)
    b.nbytes = cnp.PyArray_NBYTES(arr)
    b.itemsize = cnp.PyArray_ITEMSIZE(arr)
    b.readonly = not cnp.PyArray_FLAGS(arr) & cnp.NPY_ARRAY_WRITEABLE
    b.is_plain = True
    while cnp.PyArray_BASE(<cnp.ndarray>base) != NULL and cnp.PyArray_Check(<object>cnp.PyArray_BASE(<cnp.ndarray>base)):
        base = <object>cnp.PyArray_BASE(<cnp.ndarray>base)
    b.guard = PyWeakref_NewRef(base, NULL)
    return b


cdef object guard_numpy(object arr):
    """A weak reference on the array that owns the block makes ndarray.resize() refuse,
    even with refcheck=False."""
    base = arr
    while True:
        below = base.base
        if below is None or not isinstance(below, ndarray):
            return weakref_ref(base)
        base = below


cdef int take_view(Buffer b, object lender, bint writable) except -1:
    """Takes the buffer export of something known to be C-contiguous."""
    PyObject_GetBuffer(lender, &b.view, PyBUF_WRITABLE if writable else 0)
    b.has_view = True
    b.ptr = <char *> b.view.buf
    b.nbytes = b.view.len
    b.readonly = b.view.readonly
    return 0


# --------------------------------------------------------------------------- torch
cdef int from_torch(Buffer b, object torch, object t, bint writable) except -1:
    if t.device.type != "cpu":
        hint = "it has no data at all" if t.device.type == "meta" else "pass tensor.cpu()"
        raise BufferError(f"a tensor on device {t.device} is not in CPU memory, the only memory "
                          f"this version can register; {hint}")
    if t.layout is not torch.strided or t.is_quantized:
        hint = "int_repr(), and scale and zero point apart" if t.is_quantized else \
            "to_dense() or its parts"
        raise BufferError(f"a tensor of layout {t.layout}, dtype {t.dtype} is not one plain block "
                          f"of memory; pass tensor.{hint}")
    if t.is_conj() or t.is_neg():
        raise BufferError("a lazily conjugated or negated tensor does not hold its values in "
                          "memory; pass tensor.resolve_conj().resolve_neg()")
    cdef bint computed = t.requires_grad and not t.is_leaf
    if writable and computed:
        raise BufferError(
            "a tensor that autograd computed (requires_grad, not a leaf) cannot be written to "
            "behind autograd's back; pass tensor.detach() if that is what you want")
    dtype = str(t.dtype).removeprefix("torch.")
    shape = tuple(t.shape)
    if not t.is_contiguous():
        refuse_strides(shape, tuple(s * t.element_size() for s in t.stride()), t.element_size(),
                       f"tensor of dtype {dtype}", "tensor.contiguous()", writable)
    t = t.detach()
    try:
        lent = t.numpy()        # from here on torch refuses to resize the storage
    except (TypeError, RuntimeError):
        twin = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64,
                16: torch.complex128}[t.element_size()]
        lent = t.view(twin).numpy()
    if t.numel() and not lent.flags.c_contiguous:
        refuse_strides(shape, lent.strides, lent.itemsize, f"tensor of dtype {dtype}",
                       "tensor.contiguous()", writable)
    b.exporter = lent
    take_view(b, lent, writable)
    b.dims, b.dtype_name, b.itemsize = shape, dtype, t.element_size()
    b.readonly = b.readonly or computed     # nobody writes there behind autograd's back
    return 0


# --------------------------------------------------------------------------- DLPack
cdef int from_dlpack(Buffer b, object obj, bint writable) except -1:
    cdef dlpack.Lent lent
    b.dims, b.dtype_name, b.device = dlpack.take(obj, writable, &lent)
    b.dl = lent.managed
    b.dl_versioned = lent.versioned
    b.ptr = lent.ptr
    b.nbytes = lent.nbytes
    b.readonly = lent.readonly
    b.itemsize = lent.itemsize
    return 0


# --------------------------------------------------------------------------- PEP 3118
cdef int from_protocol(Buffer b, object obj, bint writable) except -1:
    cdef Py_ssize_t i
    cdef Py_ssize_t expected
    cdef bint dense = True
    cdef Py_buffer *v = &b.view
    try:
        PyObject_GetBuffer(obj, v, PyBUF_FORMAT | PyBUF_INDIRECT)
    except (BufferError, ValueError) as error:
        raise BufferError(f"the {type(obj).__name__} does not lend its memory: {error}") from None
    b.has_view = True
    b.ptr = <char *> v.buf
    b.nbytes = v.len
    b.readonly = v.readonly
    b.itemsize = v.itemsize
    name = type(obj).__name__
    try:
        if v.format != NULL and strchr(v.format, c"O") != NULL and \
                holds_objects(v.format.decode("utf-8", "replace")):
            raise BufferError(f"{dlpack.a(name)} of format {v.format.decode()!r} holds references to Python "
                              f"objects, which mean nothing in another process")
        if writable and v.readonly:
            raise BufferError(f"a read-only {name} of {v.len} bytes cannot be written to; pass a "
                              f"bytearray or a writable array")
        if v.suboffsets != NULL:
            for i in range(v.ndim):
                if v.suboffsets[i] >= 0:
                    raise BufferError(f"{dlpack.a(name)} with suboffsets is not one block of memory; copy "
                                      f"it first")
        if v.ndim == 0:
            shape = ()
        elif v.shape != NULL:
            shape = tuple([v.shape[i] for i in range(v.ndim)])
        else:
            shape = ((v.len // v.itemsize if v.itemsize else 0),)
        if v.strides != NULL and v.len:
            expected = v.itemsize
            for i in range(v.ndim - 1, -1, -1):
                if v.shape[i] > 1 and v.strides[i] != expected:
                    dense = False
                expected *= v.shape[i]
            if not dense:
                refuse_strides(shape, tuple([v.strides[i] for i in range(v.ndim)]), v.itemsize,
                               name, "bytes(obj) or numpy.ascontiguousarray(obj)", writable)
        b.dims = shape
        b.dtype_name = format_name(v.format, v.itemsize)
    except BaseException:
        b.has_view = False
        PyBuffer_Release(v)
        raise
    return 0


cdef bint holds_objects(str text) except -1:
    """True if a PEP 3118 format has an 'O' outside of field names."""
    return "O" in "".join(part for i, part in enumerate(text.split(":")) if i % 2 == 0)


cdef str format_name(const char *fmt, Py_ssize_t itemsize):
    if fmt == NULL:
        return "uint8"
    text = fmt.decode("utf-8", "replace")
    code = text.lstrip("@=<>!^")
    swapped = text[:1] in (">", "!") if sys.byteorder == "little" else text[:1] == "<"
    if code in _CODES:
        name = _CODES[code]
    elif code and code[0] in _SIGNED and len(code) == 1:
        name = f"int{8 * itemsize}"
    elif code and code[0] in _UNSIGNED and len(code) == 1:
        name = f"uint{8 * itemsize}"
    elif code[:1] == "Z" and code[1:] in ("f", "d"):
        name = f"complex{8 * itemsize}"
    else:
        return text
    return np.dtype(name).newbyteorder(">" if sys.byteorder == "little" else "<").str \
        if swapped and itemsize > 1 else name


cdef str dtype_text(object dtype):
    """numpy's name; the type string where the byte order is foreign; the fields if any."""
    if dtype.fields is not None or dtype.subdtype is not None:
        return str(dtype)
    return dtype.name if dtype.isnative else dtype.str


# --------------------------------------------------------------------------- refusals
cdef int refuse_strides(object shape, object strides, Py_ssize_t itemsize, str what, str remedy,
                        bint writable) except -1:
    """Raises the BufferError that fits a layout that is not C-contiguous."""
    real = [(n, s) for n, s in zip(shape, strides) if n != 1]
    forward, expected = True, itemsize
    for n, s in real:
        forward, expected = forward and s == expected, expected * n
    if forward:
        why = ("in Fortran order (its first axis is the dense one), and sending its memory would "
               "deliver it transposed")
    elif any(s == 0 for _, s in real):
        why = "broadcast or expanded (an axis has stride 0, several elements are one memory cell)"
    elif any(s < 0 for _, s in real):
        why = "reversed (an axis has a negative stride)"
    else:
        why = "not contiguous (it has gaps or a changed axis order)"
    way = f"receive into a contiguous one and copy from it" if writable else f"pass {remedy}"
    raise BufferError(f"{dlpack.a(what)}, shape {tuple(shape)}, strides {tuple(strides)} bytes is {why}; "
                      f"{way}")


cdef int refuse_type(object obj) except -1:
    name = type(obj).__name__
    if hasattr(type(obj), "__cuda_array_interface__"):
        raise BufferError(f"{dlpack.a(name)} is in GPU memory, and this version can only register CPU "
                          f"memory; copy it to the host first")
    hint = ""
    if hasattr(type(obj), "__array__") or isinstance(obj, (list, tuple, int, float, complex)):
        hint = "; numpy.asarray(obj) makes an array of it"
    elif isinstance(obj, str):
        hint = "; obj.encode() makes bytes of it"
    raise TypeError(
        f"{dlpack.a(name)} holds no memory that can be sent: expected a numpy array, a torch tensor, an "
        f"object with the buffer protocol (bytes, bytearray, memoryview, array.array, mmap) or "
        f"with __dlpack__{hint}")
