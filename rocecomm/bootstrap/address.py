"""Host names, ports and network interfaces."""

import fcntl
import ipaddress
import socket
import struct
import threading

from ..errors import ConfigError, JoinError

_SIOCGIFADDR = 0x8915


def parse_address(text, name="ROCECOMM_STORE"):
    """``(host, port)`` of ``host:port``, ``[::1]:port`` or ``::1`` style with brackets."""
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""                    # a bare IPv6 address: where does the port begin?
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name} is {text!r}, but it must be host:port with a port from 0 "
                          "to 65535; an IPv6 address goes in brackets, [::1]:4000",
                          name=name, value=text)
    return host, int(port)


def format_address(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host, port, deadline):
    """The socket addresses of a name: list of ``(family, address)``.

    Raises JoinError if there is none, at the latest when the deadline passes.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return _lookup(host, port)
    except ValueError:
        pass
    # getaddrinfo cannot be interrupted and has no timeout of its own.
    result = []

    def ask():
        try:
            result.append(_lookup(host, port))
        except (OSError, UnicodeError) as error:
            result.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(0.2)                              # also when one only polls
    while thread.is_alive() and not deadline.expired():
        thread.join(deadline.slice(0.1))
    if result and isinstance(result[0], list):
        return result[0]
    cause = result[0] if result else f"no answer within {deadline}"
    raise JoinError(f"the host name {host!r} of the store's address cannot be resolved "
                    f"({cause}): check ROCECOMM_STORE or MASTER_ADDR, or use an IP address")


def _lookup(host, port):
    found = []
    for family, _, _, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        if family in (socket.AF_INET, socket.AF_INET6) and (family, address) not in found:
            found.append((family, address))
    return found


def announced_addresses(ifname=None):
    """This host's addresses that other hosts may reach: IPv4 before IPv6, no loopback,
    no link-local. ``ifname`` filters as ROCECOMM_SOCKET_IFNAME does. JoinError if none."""
    names = [name for _, name in socket.if_nameindex() if _allowed(name, ifname)]
    found = [address for name in names for address in _ipv4(name)]
    found += _ipv6(names)
    usable = [text for text in found
              if not (ipaddress.ip_address(text).is_loopback
                      or ipaddress.ip_address(text).is_link_local)]
    if not usable:
        raise JoinError(
            "this host has no address that other hosts could reach, on "
            f"{', '.join(names) or 'no interface'}"
            f"{f' (ROCECOMM_SOCKET_IFNAME={ifname})' if ifname else ''}: "
            "name an interface that has one in ROCECOMM_SOCKET_IFNAME")
    return usable[:8]


def _allowed(name, rule):
    if not rule:
        return True
    exclude = rule.startswith("^")
    exact = rule.lstrip("^").startswith("=")
    listed = rule.lstrip("^=").split(",")
    hit = name in listed if exact else any(name.startswith(part) for part in listed)
    return hit != exclude


def _ipv4(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", name.encode()[:15], socket.AF_INET, b"")
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return []                             # the interface has no IPv4 address
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6(names):
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:
        return []
    return [str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows
            if row[5] in names]
