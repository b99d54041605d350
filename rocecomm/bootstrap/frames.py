"""Bytes on the store's connections: the handshake and the frames after it.

Handshake, every field of fixed length, the server speaks first:

    server   MAGIC  nonce_s(16)
    client   MAGIC  group(16)  rank(4)  nonce_c(16)  HMAC(secret, "client"...)
    server   status(1)  HMAC(secret, "server"...)

Both proofs cover both nonces, the group and the rank; "client" and "server" keep one
from serving as the other. A stranger is told a nonce and nothing else.

After it: ``length(4) tag(16) payload``, where the tag is an HMAC under a key of this
connection over direction, counter and payload, so that nothing can be put in, left out
or repeated.
"""

import hashlib
import hmac
import struct

from .limits import MAX_VALUE

# The version of this handshake. That of everything else is compared once the ranks have
# met, so that all of them can be told.
MAGIC = b"rocecomm-join-1\n"
NONCE = 16
HELLO = struct.Struct(f"<{len(MAGIC)}s16sI{NONCE}s32s")
GREETING = len(MAGIC) + NONCE
VERDICT = 1 + 32
OK, OTHER_GROUP, DENIED = range(3)

TAG = 16
HEAD = struct.Struct(f"<I{TAG}s")
MAX_PAYLOAD = MAX_VALUE + 1024


def digest(key, *parts):
    """HMAC-SHA256 over the parts, each with its length before it."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac.digest()


def proof(secret, role, nonce_s, nonce_c, group, rank):
    return digest(secret, role, nonce_s, nonce_c, group, struct.pack("<I", rank))


class BadFrame(Exception):
    """A frame that is too long or not authentic: the connection is of no use."""


class Channel:
    """Frames and parses the payloads of one authenticated connection. No I/O."""

    def __init__(self, secret, nonce_s, nonce_c, server):
        self._key = digest(secret, b"session", nonce_s, nonce_c)
        self._roles = (b"s", b"c") if server else (b"c", b"s")
        self._counts = [0, 0]
        self._buffer = bytearray()

    def pack(self, payload):
        return HEAD.pack(len(payload), self._tag(0, payload)) + payload

    def feed(self, data):
        """Append received bytes; yields complete payloads. BadFrame ends it."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            length, tag = HEAD.unpack_from(self._buffer)
            if length > MAX_PAYLOAD:
                raise BadFrame(f"a frame of {length} bytes")
            if len(self._buffer) < HEAD.size + length:
                return
            payload = bytes(self._buffer[HEAD.size:HEAD.size + length])
            del self._buffer[:HEAD.size + length]
            if not hmac.compare_digest(tag, self._tag(1, payload)):
                raise BadFrame("a frame that is not authentic")
            yield payload

    def _tag(self, way, payload):
        count = self._counts[way]
        self._counts[way] += 1
        return digest(self._key, self._roles[way], struct.pack("<Q", count), payload)[:TAG]


# --- requests and answers

SET, CLAIM, GET, ABORT, BYE = range(1, 6)
DONE, LATE, ABORTED, REFUSED = range(4)

_REQUEST = struct.Struct("<BIdB")        # operation, number, timeout, key length
_ANSWER = struct.Struct("<BI")           # status, number


def pack_request(operation, number, key=b"", value=b"", timeout=0.0):
    return _REQUEST.pack(operation, number, timeout, len(key)) + key + value


def unpack_request(payload):
    """``(operation, number, key, value, timeout)``; BadFrame if it is none."""
    if len(payload) < _REQUEST.size:
        raise BadFrame("a short request")
    operation, number, timeout, length = _REQUEST.unpack_from(payload)
    key = payload[_REQUEST.size:_REQUEST.size + length]
    if len(key) != length or not SET <= operation <= BYE or not timeout >= 0.0:
        raise BadFrame("a malformed request")
    return operation, number, key, payload[_REQUEST.size + length:], timeout


def pack_answer(status, number, value=b""):
    return _ANSWER.pack(status, number) + value


def unpack_answer(payload):
    if len(payload) < _ANSWER.size:
        raise BadFrame("a short answer")
    return (*_ANSWER.unpack_from(payload), payload[_ANSWER.size:])
