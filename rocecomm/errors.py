"""Exceptions of rocecomm.

Every message is one sentence that names the operation, the peer, the device, the
sizes, what was found and what to do about it. The details are attributes as well, so
that a program need not parse the sentence. All of them can be pickled and copied,
which matters when a rank reports its error to another process.

This module imports nothing of the package.
"""

import builtins
import reprlib

__all__ = [
    "RocecommError", "VerbsError", "CompletionError", "DeviceNotFoundError",
    "ClosedError", "TimeoutError", "PeerDeadError", "JoinError",
    "MessageTruncatedError", "MismatchError", "ConfigError",
]


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def brief(value):
    """``repr(value)`` on one line, cut in the middle beyond some 60 characters: what an error says of
    a wrong argument, which may be an array of a million elements."""
    return " ".join(_short.repr(value).split())


def _rebuild(cls, message, fields, extra):
    error = cls(message, **fields)
    error.__dict__.update(extra)
    return error


class RocecommError(Exception):
    """Root of everything rocecomm raises on its own account.

    ``RocecommError(message, **details)``: the accepted details are the names in the
    class's ``_fields``; each becomes an attribute, ``None`` when it was not given.
    """

    _fields = ()

    def __init__(self, message="", **details):
        super().__init__(message)
        for name in self._fields:
            setattr(self, name, details.pop(name, None))
        if details:
            raise builtins.TypeError(
                f"{type(self).__name__} has no detail {sorted(details)[0]!r}, "
                f"only {', '.join(self._fields) or 'none'}")

    def __str__(self):
        return str(self.args[0]) if self.args else ""

    def __reduce__(self):
        fields = {name: getattr(self, name) for name in self._fields}
        extra = {k: v for k, v in self.__dict__.items() if k not in fields}
        return _rebuild, (type(self), str(self), fields, extra)


class VerbsError(RocecommError, OSError):
    """A verb returned an error number.

    ``verb`` (str, as libibverbs spells it), ``errno`` (int), ``device`` (str or None).
    """

    _fields = ("verb", "errno", "device")


class CompletionError(RocecommError):
    """A work request completed with a bad status.

    ``status`` and ``opcode`` (ints or enums of ``rocecomm.enums``), ``wr_id``,
    ``qp_num``, ``vendor_err`` (ints), ``peer`` (rank, or None below the communicator).
    """

    _fields = ("status", "opcode", "wr_id", "qp_num", "vendor_err", "peer")


class DeviceNotFoundError(RocecommError, LookupError):
    """No such device, library or device node, or no permission to use it.

    ``device`` is the name that was asked for, or None.
    """

    _fields = ("device",)


class ClosedError(RocecommError, ValueError):
    """An object was used after it had been closed."""


class TimeoutError(RocecommError, builtins.TimeoutError):
    """A deadline passed.

    ``peer`` is the rank that was waited for (None if there was no single one),
    ``peer_state`` what is known of it: ``"busy"`` (alive, but not inside a call),
    ``"stopped"``, ``"unknown"``. Also a builtin ``TimeoutError``.
    """

    _fields = ("peer", "peer_state")


class PeerDeadError(RocecommError, ConnectionError):
    """The peer is gone: its process ended or its device no longer answers.

    ``peer`` is its rank. Also a builtin ``ConnectionError``.
    """

    _fields = ("peer",)


class JoinError(RocecommError, RuntimeError):
    """The ranks could not meet.

    ``missing``, ``doubled``, ``surplus`` are tuples of ranks (empty when that was not
    the trouble); ``setting`` names the setting about which the ranks disagree.
    """

    _fields = ("missing", "doubled", "surplus", "setting")

    def __init__(self, message="", **details):
        super().__init__(message, **details)
        for name in ("missing", "doubled", "surplus"):
            setattr(self, name, tuple(getattr(self, name) or ()))


class MessageTruncatedError(RocecommError, ValueError):
    """A message was larger than the buffer that was to take it.

    ``sent`` and ``capacity`` in bytes, ``peer`` the sender's rank.
    """

    _fields = ("sent", "capacity", "peer")


class MismatchError(RocecommError, ValueError):
    """Ranks disagree: about a collective (operation, dtype, count, reduction, root,
    group), or about the dtype of a message. ``peer`` is the other rank."""

    _fields = ("peer",)


class ConfigError(RocecommError, ValueError):
    """An environment variable or an option has a value that cannot be used.

    ``name`` (as the user spelled it) and ``value``.
    """

    _fields = ("name", "value")
