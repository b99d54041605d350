# cython: language_level=3
"""Numbers and names of the wire header; see wire.pxd for its layout."""
from libc.string cimport memset, memcpy

import re
import sys

__all__ = ["HEADER_SIZE", "OPERATIONS", "REDUCTIONS", "SHORT_SIZE", "dtype_code", "dtype_name",
           "op_code", "reduction_code", "unpack_header"]

HEADER_SIZE = sizeof(rc_header)
SHORT_SIZE = RC_SHORT

#: Codes are positions. Append only: they travel.
OPERATIONS = ("message", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast",
              "gather", "scatter", "all_to_all", "barrier", "push", "pull", "push_pull",
              "init", "group")
REDUCTIONS = ("none", "sum", "prod", "min", "max", "avg")

cdef dict _codes = {}

# kind characters as numpy's dtype.kind; 'e' stands for bfloat16
_KINDS = {"bool": "b", "int": "i", "uint": "u", "float": "f", "complex": "c", "bfloat": "e"}
_WORDS = {kind: word for word, kind in _KINDS.items()}
_TIMES = {"M": 1, "m": 17}          # datetime64 and timedelta64: first kind, one for each unit
_UNITS = ("", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_SMALL = ("float4_e2m1fn", "float4_e2m1fn_x2", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4",
          "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
          "float8_e5m2fnuz", "float8_e8m0fnu")
_FOREIGN = 0x8000                   # the bytes are in the other order than this machine's
_RAW = ord("V") << 8                # structures, byte strings: bytes are bytes
_TIME = re.compile(r"(datetime|timedelta)64(?:\[(\d*)([A-Za-z]+)\])?")
_PLAIN = re.compile(r"([a-z]+)(?:(\d+)(?:x\d+)?)?")     # float32; float32x4 is DLPack's vector of four


cdef uint16_t code_of(str name) except? 0xFFFF:
    code = _codes.get(name)
    if code is None:
        code = _codes[name] = _make_code(name)
    return <uint16_t>code


def _make_code(str name):
    if not name:
        return 0
    if name[0] in "<>":             # numpy's type string, such as ">i4": foreign byte order
        kind = name[1:2]
        if kind in _TIMES:
            word = "datetime64" if kind == "M" else "timedelta64"
            return _FOREIGN | _make_code(word + name[3:])
        if kind == "U":
            return _FOREIGN | ord("U") << 8 | (int(name[2:] or 0) & 0xFF)
        if kind in _WORDS and name[2:].isdigit():
            return _FOREIGN | ord(kind) << 8 | (int(name[2:]) & 0xFF)
        return _RAW
    if name in _SMALL:
        return ord("x") << 8 | _SMALL.index(name)
    time = _TIME.fullmatch(name)
    if time is not None:
        word, times, unit = time.groups()
        if (unit or "") not in _UNITS:
            return _RAW
        times = int(times or 1)
        return (_TIMES["M" if word == "datetime" else "m"] + _UNITS.index(unit or "")) << 8 | \
            (times if times < 256 else 0)
    plain = _PLAIN.fullmatch(name)
    if plain is None:
        return _RAW
    word, bits = plain.group(1), int(plain.group(2) or 0)
    if word == "bool":
        return ord("b") << 8 | 1
    if word == "str":
        return ord("U") << 8 | (bits // 32 & 0xFF)
    if word not in _KINDS:
        return _RAW
    return ord(_KINDS[word]) << 8 | (bits // 8 & 0x7F if bits % 8 == 0 else 0x80 | bits & 0x7F)


def dtype_code(name):
    """The 16-bit code of a dtype name such as ``"float32"`` or ``"bfloat16"``."""
    return code_of(str(name))


def dtype_name(int code):
    """The name of a dtype code, as numpy takes it; ``"bytes"`` for what has none."""
    cdef int low = code & 0xFF
    foreign = ">" if sys.byteorder == "little" else "<"
    foreign = foreign if code & _FOREIGN else ""
    code = (code & ~_FOREIGN) >> 8
    for letter, first in _TIMES.items():
        if first <= code < first + len(_UNITS):
            unit = _UNITS[code - first]
            unit = unit and f"[{low if low > 1 else '' if low else 'many '}{unit}]"
            if foreign:
                return f"{foreign}{letter}8{unit}"
            return ("datetime64" if letter == "M" else "timedelta64") + unit
    if code in (0, ord("V")):
        return "bytes"
    if code == ord("x"):
        return _SMALL[low] if low < len(_SMALL) else f"dtype x{low}"
    if foreign or code == ord("U"):
        return f"{foreign}{chr(code)}{low}"
    if code == ord("b"):
        return "bool"
    if chr(code) in _WORDS:
        return f"{_WORDS[chr(code)]}{low * 8 if low < 0x80 else low & 0x7F}"
    return f"dtype {code:#04x}{low:02x}"


def op_code(str name):
    """Position of ``name`` in OPERATIONS."""
    return OPERATIONS.index(name)


def reduction_code(name):
    """Position of ``name`` in REDUCTIONS; None means "none"."""
    return REDUCTIONS.index(name or "none")


cdef str describe_sig(const sig_t *s):
    op = OPERATIONS[s.op] if s.op < len(OPERATIONS) else f"operation {s.op}"
    text = f"{op} #{s.coll_seq} of {s.count} x {dtype_name(s.dtype)}"
    if s.reduction:
        text += f", {REDUCTIONS[s.reduction] if s.reduction < len(REDUCTIONS) else s.reduction}"
    if s.root != 0xFFFFFFFF:
        text += f", root {s.root}"
    return text + f" (group {s.group})"


def unpack_header(bytes data):
    """The header at the start of ``data`` as a dict, for tests and debugging; of a short one
    only the fields it has."""
    cdef rc_header h
    cdef size_t n
    memset(&h, 0, sizeof(rc_header))
    n = min(<size_t>len(data), sizeof(rc_header))
    memcpy(&h, <const char *>data, n)
    if n < header_size(&h) or n < RC_SHORT:
        raise ValueError(f"a header has {header_size(&h)} bytes, not {len(data)}")
    fields = {name: value for name, value in (
        ("magic", h.magic), ("version", h.version), ("kind", h.kind), ("flags", h.flags),
        ("dtype", h.dtype), ("source", h.source), ("eager_back", h.eager_back),
        ("instance", h.instance), ("tag", h.tag), ("seq", h.seq), ("ctrl_back", h.ctrl_back),
        ("group", h.group))}
    if not h.flags & FLAG_SHORT:
        fields.update({name: value for name, value in (
            ("size", h.size), ("req", h.req), ("addr", h.addr), ("rkey", h.rkey), ("gen", h.gen),
            ("coll_seq", h.coll_seq), ("count", h.count), ("op", h.op),
            ("reduction", h.reduction), ("coll_dtype", h.coll_dtype), ("root", h.root))})
    return fields
