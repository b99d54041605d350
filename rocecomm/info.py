"""``rocecomm info``: what is here, what would be used, and why."""

from .bootstrap import detect
from .config import Config, unknown_variables
from .errors import RocecommError
from .link.gid import TYPE_NAMES, GidEntry, choose_gid, format_gid
from .link.wireup import choose_device


def show_config(environ=None):
    """Every setting with its value, source and meaning, then what nothing reads."""
    import os
    environ = os.environ if environ is None else environ
    rows = Config.from_env(environ).describe()
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for *cells, meaning in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
              + "  " + meaning)
    for name, near in unknown_variables(environ):
        print(f"{name} is set, but nothing reads it"
              + (f": did you mean {near}?" if near else ""))


def show_devices():
    """The devices with ports and GIDs, and the choice."""
    import os

    from . import __version__
    from .verbs import devices
    config = Config.from_env()
    launch = detect(config, os.environ)
    print(f"rocecomm {__version__}, rank {launch.rank} of {launch.world_size} "
          f"({launch.launcher})")
    for device in devices():
        try:
            with device.open() as context:
                _show_device(device, context, config)
        except RocecommError as error:
            print(f"{device.name}: {error}")
    try:
        context, port = choose_device(config)
    except RocecommError as error:
        print(f"no device to use: {error}")
        return 1
    with context:
        name = f"{context.name} port {port}"
        try:
            choice = choose_gid(_table(context, port), config.gid_index, port=name)
        except RocecommError as error:
            print(f"{name} would be used, but: {error}")
            return 1
    why = config.sources.get("device", "the first with an active RoCE port, else soft0")
    print(f"would use {name} ({why}), GID {choice.index} {format_gid(choice.gid)} "
          f"({choice.reason})")


def _show_device(device, context, config):
    attributes = context.query_device()
    print(f"{device.name}  (by {device.provider})")
    print(f"  node GUID {attributes.node_guid}, firmware {attributes.fw_ver or 'unknown'}, "
          f"queue pairs up to {attributes.max_qp}, regions up to {attributes.max_mr}")
    for number in range(1, attributes.phys_port_cnt + 1):
        port = context.query_port(number)
        print(f"  port {number}: {_short(port.state)}, {_short(port.link_layer)}, "
              f"MTU {_short(port.active_mtu)} of {_short(port.max_mtu)}, "
              f"messages up to {port.max_msg_sz} bytes")
        table = _table(context, number)
        try:
            chosen = choose_gid(table, config.gid_index).index
        except RocecommError:
            chosen = None
        for entry in table:
            if any(entry.gid):
                mark = "*" if entry.index == chosen else " "
                print(f"   {mark} GID {entry.index}: {format_gid(entry.gid)}  "
                      f"{TYPE_NAMES.get(entry.type, entry.type)}")


def _table(context, port):
    return [GidEntry(entry.index, entry.gid, int(entry.gid_type))
            for entry in context.query_gid_table(port)]


def _short(value):
    """``ACTIVE`` of IBV_PORT_ACTIVE, ``4096`` of IBV_MTU_4096; a number as it is."""
    return value.name.rpartition("_")[2] if hasattr(value, "name") else str(value)
