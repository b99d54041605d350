"""Finding and opening devices, and saying what is missing when one cannot be had."""

import errno
import os

from rocecomm.enums import NodeType, TransportType
from rocecomm.errors import DeviceNotFoundError, VerbsError
from rocecomm.verbs import provider as _provider
from rocecomm.verbs.context import Context

SYSFS = "/sys/class/infiniband"
NODES = "/dev/infiniband"
PROVIDERS = ("libibverbs", "softnic")


class Device:
    """A device that a provider lists: ``name``, ``provider`` (name of the library),
    ``node_type``, ``transport_type``. ``open()`` gives its Context."""

    def __init__(self, name, provider, node_type, transport_type):
        self.name = name
        self.provider = provider
        self.node_type = node_type
        self.transport_type = transport_type

    def open(self):
        """Opens the device: Context. DeviceNotFoundError says why that cannot be done."""
        try:
            return Context(_provider.get(self.provider), self.name)
        except VerbsError as error:
            raise _explain(self.name, f"it is there, but cannot be opened: {error}") from error
        except LookupError as error:
            if isinstance(error, DeviceNotFoundError):
                raise
            raise _explain(self.name, "it has gone away") from error

    def _key(self):
        return self.name, self.provider, self.node_type, self.transport_type

    def __eq__(self, other):
        return self._key() == other._key() if isinstance(other, Device) else NotImplemented

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        return f"<Device {self.name} of {self.provider}>"


def _list(name):
    """(devices of a provider, None) or ([], why there are none)."""
    try:
        found = _provider.get(name).device_list()
    except DeviceNotFoundError as error:
        hint = " (on Debian: apt-get install libibverbs1 ibverbs-providers)" \
            if name == "libibverbs" else ""
        return [], f"{error}{hint}"
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return [], "the kernel has no RDMA support loaded (module ib_uverbs)"
        return [], f"{name} cannot list devices: {os.strerror(error.errno)}"
    return [Device(device, name, _member(NodeType, node), _member(TransportType, transport))
            for device, node, transport, _ in found], None


def _member(cls, value):
    try:
        return cls(value)
    except ValueError:
        return value


def devices():
    """All devices of all providers that can be loaded: list of Device.

    A library that is missing or has no devices only means that it adds none.
    """
    out = []
    for name in PROVIDERS:
        out += _list(name)[0]
    return out


def open_device(name):
    """Opens the device called `name`: Context.

    Raises DeviceNotFoundError that says what is missing (library, kernel module, device
    node, permission, name) and which devices exist.
    """
    if not isinstance(name, str):
        raise TypeError(f"a device is named by a str, not a {type(name).__name__}")
    reasons = []
    for provider in PROVIDERS:
        found, why = _list(provider)
        for device in found:
            if device.name == name:
                return device.open()
        if why:
            reasons.append((provider, why))
    raise _explain(name, None, reasons)


def _node_of(name):
    """The character device of a kernel device, from sysfs; None if it has none."""
    base = f"{SYSFS}/{name}/device/infiniband_verbs"
    try:
        nodes = os.listdir(base)
    except OSError:
        nodes = []
        verbs = f"{os.path.dirname(SYSFS)}/infiniband_verbs"
        try:
            for node in os.listdir(verbs):
                try:
                    with open(f"{verbs}/{node}/ibdev") as f:
                        if f.read().strip() == name:
                            nodes.append(node)
                except OSError:
                    pass        # "abi_version" is a file, not a device
        except OSError:
            pass                # no such class: no kernel device has a node
    return f"{NODES}/{nodes[0]}" if nodes else None


def _explain(name, why, reasons=()):
    """The DeviceNotFoundError for `name`, with the most likely cause and what exists."""
    in_kernel = os.path.isdir(f"{SYSFS}/{name}")
    node = _node_of(name) if in_kernel else None
    if in_kernel and not os.path.isdir(NODES):
        why = (f"the kernel knows it, but {NODES} does not exist; load the module ib_uverbs, and "
               f"in a container pass the device nodes in (--device={NODES})")
    elif in_kernel and node is not None and not os.path.exists(node):
        why = (f"the kernel knows it, but its node {node} does not exist; in a container pass it "
               f"in (--device={node})")
    elif node is not None and not os.access(node, os.R_OK | os.W_OK):
        mode = oct(os.stat(node).st_mode & 0o777)
        why = (f"no permission to open its node {node} (mode {mode}, this is user "
               f"{os.geteuid()}); chmod it, or join the group that may use it")
    elif why is None:
        if in_kernel and not any(provider == "libibverbs" for provider, _ in reasons):
            why = ("the kernel knows it, but libibverbs has no driver for it (on Debian: apt-get "
                   "install ibverbs-providers)")
        else:
            why = "; ".join(["no device has this name", *(text for _, text in reasons)])
    there = ", ".join(device.name for device in devices()) or "none"
    return DeviceNotFoundError(f"device {name!r} cannot be used: {why}; devices that exist here: "
                               f"{there}", device=name)
