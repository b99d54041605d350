"""How a failure of one joining rank reaches the others: as JSON, never as a pickle."""

import json

from ..errors import JoinError, TimeoutError

_DETAILS = ("missing", "doubled", "surplus")


class Aborted(Exception):
    """A store was aborted; ``args[0]`` is the reason (bytes). Internal to bootstrap."""


def late(key, deadline, where):
    return TimeoutError(f"nobody set {key!r} in {where} within {deadline}")


def pack(error):
    """A JoinError as bytes."""
    details = {name: list(getattr(error, name)) for name in _DETAILS}
    return json.dumps({"message": str(error)[:4000], "setting": error.setting,
                       **details}).encode()


def unpack(reason):
    """The JoinError that :func:`pack` made; whatever came instead still gives one."""
    try:
        content = json.loads(reason)
        details = {name: [int(rank) for rank in content[name]] for name in _DETAILS}
        return JoinError(str(content["message"]), setting=content["setting"], **details)
    except (ValueError, TypeError, KeyError, RecursionError):
        return JoinError("another rank gave up joining and its reason cannot be read")


def died(rank, pid=None):
    who = f"rank {rank}" + (f" (process {pid})" if pid else "")
    return pack(JoinError(f"{who} ended while the ranks were joining: see its own output "
                          "for the cause", missing=[rank]))
