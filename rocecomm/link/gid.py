"""Which entry of a port's GID table to use, as a pure function.

A RoCE port has one GID for each address of its network interface and each RoCE
version, and index 0 is most often the wrong one: a link-local address, a RoCE v1 entry,
or empty. The order here is: RoCE v2 before v1; a global address before a link-local one;
an address in the peers' subnet; IPv4 before IPv6; the longest common prefix with a
peer; the lower index. An index that the user names overrides all of it.
"""

import ipaddress
from typing import NamedTuple

from ..errors import ConfigError, DeviceNotFoundError

__all__ = ["IB", "ROCE_V1", "ROCE_V2", "GidEntry", "GidChoice", "choose_gid",
           "format_gid", "parse_gid"]

# Values of ibv_gid_entry.gid_type.
IB, ROCE_V1, ROCE_V2 = 0, 1, 2
TYPE_NAMES = {IB: "IB", ROCE_V1: "RoCE v1", ROCE_V2: "RoCE v2"}

_V4_PREFIX = bytes(10) + b"\xff\xff"


class GidEntry(NamedTuple):
    """One row of a GID table. ``gid`` is 16 bytes, ``type`` one of the constants above,
    ``netdev`` the interface's name where known, ``prefix`` the length of the subnet's
    prefix in bits of the address family where known (24 and 64 are assumed)."""

    index: int
    gid: bytes
    type: int = ROCE_V2
    netdev: str | None = None
    prefix: int | None = None


class GidChoice(NamedTuple):
    """The chosen entry and why, in words."""

    index: int
    gid: bytes
    type: int
    reason: str


def parse_gid(text):
    """16 bytes of ``"fe80::1"``, ``"::ffff:10.0.0.1"`` or plain ``"10.0.0.1"``."""
    address = ipaddress.ip_address(text)
    return _V4_PREFIX + address.packed if address.version == 4 else address.packed


def format_gid(gid):
    """The address as people write it: ``fe80::1``, ``::ffff:10.0.0.1``."""
    if is_v4(gid):
        return f"::ffff:{ipaddress.ip_address(gid[12:])}"
    return str(ipaddress.ip_address(bytes(gid)))


def is_v4(gid):
    """Whether the GID is an IPv4-mapped address."""
    return gid[:12] == _V4_PREFIX


def choose_gid(table, index=None, peers=(), port="the port"):
    """Choose from ``table``, an iterable of :class:`GidEntry` or tuples like it.

    ``index``: the user's choice (None: choose). ``peers``: GIDs (16 bytes each) of the
    ranks to be reached. ``port``: how errors call the port. Returns a
    :class:`GidChoice`. Raises ConfigError if ``index`` is not in the table or empty,
    DeviceNotFoundError if no entry holds an address.
    """
    table = [GidEntry(*entry) for entry in table]
    for entry in table:
        if len(entry.gid) != 16:
            raise ValueError(f"GID {entry.index} has {len(entry.gid)} bytes, not 16")
    if index is not None:
        return _by_index(table, index, port)
    usable = [entry for entry in table if _has_address(entry.gid)]
    if not usable:
        raise DeviceNotFoundError(
            f"none of the {len(table)} GIDs of {port} holds an address: give the port's "
            "network interface an IP address and set it up, or choose another device")
    best = max(usable, key=lambda entry: _score(entry, peers))
    return GidChoice(best.index, best.gid, best.type, _reason(best, usable, peers))


def _by_index(table, index, port):
    for entry in table:
        if entry.index == index:
            if _has_address(entry.gid):
                return GidChoice(index, entry.gid, entry.type, "asked for by index")
            found = "is empty"
            break
    else:
        found = "does not exist"
    usable = ", ".join(f"{entry.index} ({format_gid(entry.gid)})" for entry in table
                       if _has_address(entry.gid))
    raise ConfigError(
        f"GID index {index} of {port} {found}; its table of {len(table)} has addresses "
        f"at {usable or 'no index at all'}: set ROCECOMM_IB_GID_INDEX to one of them or "
        "leave it unset", name="ROCECOMM_IB_GID_INDEX", value=index)


def _has_address(gid):
    # A port without address has all zeros, or a subnet prefix with a zero interface id.
    if is_v4(gid):
        return gid[12:] != bytes(4)
    return gid[8:] != bytes(8)


def _is_local(gid):
    """Link-local or loopback: reaches no further than the link or the host."""
    if is_v4(gid):
        return gid[12:14] == b"\xa9\xfe" or gid[12] == 127
    return (gid[0] == 0xFE and gid[1] & 0xC0 == 0x80) or gid == bytes(15) + b"\x01"


def _common_bits(a, b):
    """Length of the common prefix within the address family, -1 for different ones."""
    if is_v4(a) != is_v4(b):
        return -1
    skip = 12 if is_v4(a) else 0
    difference = int.from_bytes(a[skip:], "big") ^ int.from_bytes(b[skip:], "big")
    return (16 - skip) * 8 - difference.bit_length()


def _nearness(entry, peers):
    """``(how many peers are in the entry's subnet, longest common prefix)``."""
    prefix = entry.prefix or (24 if is_v4(entry.gid) else 64)
    common = [_common_bits(entry.gid, bytes(peer)) for peer in peers]
    return sum(bits >= prefix for bits in common), max(common, default=0)


def _score(entry, peers):
    in_subnet, common = _nearness(entry, peers)
    return (entry.type, not _is_local(entry.gid), in_subnet, is_v4(entry.gid), common,
            -entry.index)


def _reason(best, usable, peers):
    if len(usable) == 1 and not _is_local(best.gid):
        return f"the only address, {TYPE_NAMES.get(best.type, best.type)}"
    if _is_local(best.gid):
        return "the last resort: a link-local address, no global one of this RoCE version"
    parts = [TYPE_NAMES.get(best.type, str(best.type)), "global",
             "IPv4" if is_v4(best.gid) else "IPv6"]
    if _nearness(best, peers)[0]:
        parts.append("in the peers' subnet")
    return ", ".join(parts)
