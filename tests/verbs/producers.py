"""A DLPack producer made by hand with ctypes, so that every field can be set and every
call of its deleter is counted."""

import ctypes

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# PyDLL: the deleter runs with the GIL held by its caller, as DLPack wants
DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DLType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", DLDevice), ("ndim", ctypes.c_int32),
                ("dtype", DLType), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class Old(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", DELETER)]


class New(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("manager", ctypes.c_void_p), ("deleter", DELETER), ("flags", ctypes.c_uint64),
                ("tensor", DLTensor)]


class Producer:
    """An object with __dlpack__ over `memory` (a ctypes or bytearray-backed address)."""

    def __init__(self, address, shape, strides=None, byte_offset=0, code=2, bits=32, lanes=1,
                 device=(1, 0), versioned=False, version=(1, 0), flags=0, keep=None,
                 modern=True):
        self.deleted = 0
        self.made = 0
        self.keep = keep
        self.device = device
        self.versioned = versioned
        self.modern = modern
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._deleter = DELETER(self._delete)
        self.managed = New() if versioned else Old()
        if versioned:
            self.managed.major, self.managed.minor = version
            self.managed.flags = flags
        self.managed.deleter = self._deleter
        t = self.managed.tensor
        t.data, t.ndim, t.byte_offset = address, len(shape), byte_offset
        t.device.type, t.device.id = device
        t.dtype.code, t.dtype.bits, t.dtype.lanes = code, bits, lanes
        t.shape = self._shape
        if self._strides is not None:
            t.strides = self._strides

    def _delete(self, pointer):
        self.deleted += 1

    def capsule(self):
        self.made += 1
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(self.managed), name, None)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.modern:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.capsule()


class Modest(Producer):
    """A producer from before DLPack 1.0: no keyword arguments."""

    def __dlpack__(self, stream=None):
        return self.capsule()
