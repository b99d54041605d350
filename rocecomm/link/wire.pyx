# cython: language_level=3
"""Numbers and names of the wire header; see wire.pxd for its layout."""
from libc.string cimport memset, memcpy

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
_KINDS = {"bool": "b", "int": "i", "uint": "u", "float": "f", "complex": "c",
          "bfloat": "e", "void": "V", "datetime": "M", "timedelta": "m"}


cdef uint16_t code_of(str name) except? 0xFFFF:
    code = _codes.get(name)
    if code is None:
        code = _codes[name] = _make_code(name)
    return <uint16_t>code


def _make_code(str name):
    if not name:
        return 0
    if name[0] in "<>" and name[-1].isdigit():
        return ord("s") << 8 | (int(name.lstrip("<>ifuc") or 0) & 0xFF)     # foreign byte order
    base = name.split("[")[0]
    letters = base.rstrip("0123456789")
    kind = _KINDS.get(letters)
    if kind is None:
        return ord("V") << 8            # structures, text: bytes are bytes
    if letters == "bool":
        return ord("b") << 8 | 1
    if letters in ("datetime", "timedelta"):
        return ord(kind) << 8 | 8
    if letters == "void":
        return ord("V") << 8
    return ord(kind) << 8 | (int(base[len(letters):] or 0) // 8 & 0xFF)


def dtype_code(name):
    """The 16-bit code of a dtype name such as ``"float32"`` or ``"bfloat16"``."""
    return code_of(str(name))


def dtype_name(int code):
    """The name of a dtype code; ``"bytes"`` for what has none."""
    if code >> 8 in (0, ord("V")):
        return "bytes"
    for word, kind in _KINDS.items():
        if ord(kind) == code >> 8:
            if word in ("bool", "datetime", "timedelta"):
                return word if word == "bool" else word + "64"
            return f"{word}{(code & 0xFF) * 8}"
    return f"dtype {code:#06x}"


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
