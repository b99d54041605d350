"""Bounds of everything that goes through a store."""

from ..errors import brief

MAX_KEY = 255
MAX_VALUE = 1 << 20
MAX_KEYS = 1 << 20
MAX_TOTAL = 1 << 30


def check_key(key):
    """The key as bytes."""
    if not isinstance(key, str):
        raise TypeError(f"a key of the store is a str, not {brief(key)}")
    data = key.encode()
    if not 0 < len(data) <= MAX_KEY // 3:         # file names hold it in hexadecimal
        raise ValueError(f"a key of the store has 1 to {MAX_KEY // 3} bytes, not "
                         f"{len(data)}")
    return data


def check_value(key, value):
    """The value as bytes."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"the value of {key!r} must be bytes, not {type(value).__name__}")
    value = bytes(value)
    if len(value) > MAX_VALUE:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes, and the store "
                         f"takes up to {MAX_VALUE}")
    return value
