"""What workers and servers say to each other.

Every request is a short JSON header from the worker; then, where there is one, the array
itself as a message of its own, straight between the user's memory and the server's. The
server answers with a JSON header, and with the value where one was asked for. Each worker
has one request in flight at each server.

    init       key, dtype, shape  + array ->  ok once all workers have called it
    describe   key, for (which operation) ->  dtype, shape
    push       key, dtype, shape  + array ->  ok once the array was taken
    pull       key, dtype, shape          ->  ok + array, with this worker's pushes in it
    push_pull  key, dtype, shape  + array ->  ok + array
    bye                                   ->  ok
"""

import json

from ..config import as_integer
from ..errors import MismatchError, PeerDeadError, RocecommError, TimeoutError, brief

#: Message spaces from here up are ours; each parameter server of a communicator has one.
SPACE = 1 << 31
HEADER_LIMIT = 2048
HEADER, REPLY, DATA = range(3)          # tags


class UnknownKeyError(RocecommError, LookupError):
    """A key that no worker has initialised. ``key``."""

    _fields = ("key",)


class Refused(Exception):
    """A server's answer that becomes ``error`` at the worker."""

    def __init__(self, error):
        super().__init__(str(error))
        self.error = error


_KINDS = {"unknown": UnknownKeyError, "mismatch": MismatchError, "dead": PeerDeadError,
          "late": TimeoutError, "type": TypeError, "protocol": RocecommError}


def pack(**fields):
    """A header as bytes; ValueError if it is too long (a key of a thousand letters)."""
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > HEADER_LIMIT:
        raise ValueError(f"a request of {len(data)} bytes is too long, the limit is "
                         f"{HEADER_LIMIT}: use a shorter key")
    return data


def unpack(data):
    """The header's fields; RocecommError if it is none."""
    try:
        fields = json.loads(bytes(data))
        if isinstance(fields, dict):
            return fields
    except (ValueError, RecursionError):
        pass
    raise RocecommError(f"a parameter server message of {len(data)} bytes is no header: do "
                        "all ranks run the same version?")


def pack_error(error):
    kind = next(name for name, cls in _KINDS.items() if isinstance(error, cls))
    return pack(error=kind, message=str(error)[:1500], peer=getattr(error, "peer", None))


def raise_error(fields, key):
    """Raise what the server refused with, if it did."""
    kind = fields.get("error")
    if kind is None:
        return
    cls = _KINDS.get(kind, RocecommError)
    if cls is UnknownKeyError:
        raise cls(fields["message"], key=key)
    if cls in (PeerDeadError, MismatchError, TimeoutError):
        raise cls(fields["message"], peer=fields["peer"])
    raise cls(fields["message"])


def check_key(key):
    """Keys are texts or integers (numpy's too)."""
    if isinstance(key, str):
        return key
    number = as_integer(key)
    if number is None:
        raise TypeError(f"a key is a text or an integer, not {brief(key)}")
    return number


def describe(dtype, shape):
    return f"{dtype} of shape {tuple(shape)}"


def check_same(key, dtype, shape, known_dtype, known_shape, what):
    """MismatchError unless both are alike."""
    if (dtype, tuple(shape)) != (known_dtype, tuple(known_shape)):
        raise MismatchError(
            f"{what} of key {key!r}: the array is {describe(dtype, shape)}, but the key holds "
            f"{describe(known_dtype, known_shape)}; pass an array of that kind")
