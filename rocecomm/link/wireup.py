"""How two ranks become connected: what they tell each other, and what follows from it.

Each rank publishes one blob (JSON, bounded) through the group's store; then each computes the same
agreement from both blobs: the smaller MTU, the outstanding reads that both devices
carry, the GIDs. `Endpoint` is the blob, `agree` the pure function, `connect` moves a queue pair.
"""

import dataclasses
import json
import os
import secrets
import socket
import sys

from ..config import WIRE_VERSION
from ..enums import LinkLayer, PortState
from ..errors import DeviceNotFoundError, JoinError
from ..verbs.attrs import AHAttr
from ..verbs.device import devices, open_device
from .gid import GidEntry, choose_gid, format_gid

__all__ = ["Agreement", "Endpoint", "agree", "choose_device", "connect", "exchange", "host_name"]

_MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
MTU_CODE = {size: code for code, size in _MTU_BYTES.items()}
BLOB_LIMIT = 1 << 20


def choose_device(config):
    """``(Context, port number)``: the one that was named, else the first active RoCE port of
    libibverbs' devices, else soft0. Raises DeviceNotFoundError with what is missing."""
    if config.device:
        name, _, port = config.device.partition(":")
        if port and not port.isdigit():
            raise DeviceNotFoundError(f"device {config.device!r}: {port!r} is not a port number",
                                      device=config.device)
        context = open_device(name)
        number = int(port or 1)
        state = context.query_port(number).state
        if state != PortState.IBV_PORT_ACTIVE:
            context.close()
            raise DeviceNotFoundError(
                f"device {name}, port {number}: port down ({PortState(state).name}); set its network "
                "interface up, or choose another device", device=name)
        return context, number
    for device in devices():
        if device.provider != "libibverbs":
            continue
        try:
            context = device.open()
        except DeviceNotFoundError:
            continue                    # listed but unusable: the next one may be fine
        for number in range(1, context.query_device().phys_port_cnt + 1):
            port = context.query_port(number)
            if (port.state == PortState.IBV_PORT_ACTIVE
                    and port.link_layer == LinkLayer.IBV_LINK_LAYER_ETHERNET):
                return context, number
        context.close()
    return open_device("soft0"), 1


def host_name():
    """Which machine this is: ranks with the same answer share its cores."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return socket.gethostname()


def process_name():
    """This process in words that others on this host can look up: number, start time, and the
    namespace in which the number counts."""
    try:
        return f"{os.getpid()} {_stat(os.getpid())[19]} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, IndexError):
        return ""


def stopped(name):
    """Whether the process that calls itself ``name`` is stopped (SIGSTOP, a debugger); False also
    if that cannot be told."""
    try:
        number, started, space = name.split()
        state = _stat(int(number))
        return (state[0] in "Tt" and state[19] == started
                and os.readlink("/proc/self/ns/pid") == space)
    except (OSError, ValueError, IndexError):
        return False


def alive(name):
    """Whether the process that calls itself ``name`` runs on this host; False also if that cannot be told."""
    try:
        number, started, space = name.split()
        state = _stat(int(number))
        return state[0] not in "ZX" and state[19] == started and os.readlink("/proc/self/ns/pid") == space
    except (OSError, ValueError, IndexError):
        return False


def neighbour(mine, theirs):
    """(number, start time) under which this process can look another one up in /proc, from both
    processes' names; (0, 0) if it cannot."""
    try:
        number, started, space = theirs.split()
        return (int(number), int(started)) if space == mine.split()[2] else (0, 0)
    except (ValueError, IndexError):
        return 0, 0


def _stat(number):
    """The fields of /proc/NUMBER/stat behind the name, from the state (field 3) on: proc(5)."""
    with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as f:
        return f.read().rpartition(")")[2].split()


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """What a rank tells the others about itself."""

    rank: int
    device: str
    instance: int                   # random, names this communicator of this process
    mtu: int                        # bytes
    reads_out: int                  # how many reads its device may have in flight
    reads_in: int                   # how many it can serve
    max_message: int                # bytes of one work request
    gids: tuple                     # (index, 32 hex digits, type) of entries that hold an address
    gid_index: int | None           # the user's choice
    qps: tuple                      # (queue pair number, first packet number) for each rank
    lanes: tuple                    # (outward number, inward number, first packet number) likewise
    eager: int                      # slots it sets aside for each peer
    ctrl: int
    slot_size: int
    status_addr: int
    status_rkey: int
    host: str
    process: str = ""               # `process_name` there
    call: tuple = ()                # where it takes datagrams: (queue pair number, key), or ()
    byteorder: str = sys.byteorder
    version: int = WIRE_VERSION

    def pack(self):
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def unpack(cls, data, rank):
        """From what rank ``rank`` published; JoinError if it is of another version or kind."""
        if len(data) > BLOB_LIMIT:
            raise JoinError(f"rank {rank} published an endpoint of {len(data)} bytes, more than "
                            f"{BLOB_LIMIT}; it is not one of ours")
        try:
            fields = json.loads(bytes(data))
            version, order = fields["version"], fields["byteorder"]
        except (ValueError, TypeError, KeyError) as error:
            raise JoinError(f"rank {rank} published an endpoint that cannot be read "
                            f"({type(error).__name__}); is it the same rocecomm?") from None
        if version != WIRE_VERSION:
            raise JoinError(f"rank {rank} speaks protocol version {version}, this rank "
                            f"{WIRE_VERSION}; install the same rocecomm on all hosts",
                            setting="protocol version")
        if order != sys.byteorder:
            raise JoinError(f"rank {rank} runs on a {order}-endian machine, this rank on a "
                            f"{sys.byteorder}-endian one; they cannot exchange messages",
                            setting="byte order")
        try:
            fields["gids"] = tuple((int(i), str(g), int(t)) for i, g, t in fields["gids"])
            fields["qps"] = tuple((int(q), int(p)) for q, p in fields["qps"])
            fields["lanes"] = tuple((int(o), int(i), int(p)) for o, i, p in fields["lanes"])
            fields["call"] = tuple(int(n) for n in fields.get("call", ()))
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise JoinError(f"rank {rank} published an endpoint with a bad field: {error}") from None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What both ends of a connection use; computed alike by both."""

    mtu: int                        # bytes, the smaller of both
    reads: int                      # reads this side may have in flight
    serves: int                     # reads the other side may have in flight
    max_message: int
    gid_index: int
    gid: bytes
    peer_gid: bytes
    reason: str
    process: str = ""               # the peer's `process_name`, if it runs on this host


def agree(mine, theirs, mtu_limit=None):
    """The :class:`Agreement` between two :class:`Endpoint` s."""
    if mine.slot_size != theirs.slot_size:
        raise JoinError(
            f"rank {theirs.rank} has receive slots of {theirs.slot_size} bytes, this rank of "
            f"{mine.slot_size}; set ROCECOMM_EAGER_LIMIT alike on all ranks",
            setting="ROCECOMM_EAGER_LIMIT")
    here, there = _table(mine), _table(theirs)
    choice = choose_gid(here, mine.gid_index, [entry.gid for entry in there],
                        f"{mine.device} of rank {mine.rank}")
    other = choose_gid(there, theirs.gid_index, [entry.gid for entry in here],
                       f"{theirs.device} of rank {theirs.rank}")
    if choice.type != other.type:
        raise JoinError(
            f"rank {mine.rank} uses GID {format_gid(choice.gid)} of type {choice.type}, rank "
            f"{theirs.rank} GID {format_gid(other.gid)} of type {other.type}; choose entries of the "
            "same RoCE version with ROCECOMM_IB_GID_INDEX", setting="ROCECOMM_IB_GID_INDEX")
    mtu = min(mine.mtu, theirs.mtu)
    return Agreement(
        mtu=mtu,
        reads=max(1, min(mine.reads_out, theirs.reads_in)),
        serves=max(1, min(theirs.reads_out, mine.reads_in)),
        max_message=min(mine.max_message, theirs.max_message),
        gid_index=choice.index, gid=choice.gid, peer_gid=other.gid, reason=choice.reason,
        process=theirs.process if theirs.host == mine.host else "")


def _table(endpoint):
    return [GidEntry(index, bytes.fromhex(gid), kind) for index, gid, kind in endpoint.gids]


def mtu_bytes(port, limit):
    """The path MTU a port can use, at most ``limit`` (None: no limit), in bytes."""
    size = _MTU_BYTES[int(port.active_mtu)]
    return size if limit is None else min(size, limit)


def packet_number():
    """A random first packet sequence number: late packets of an old connection do not fit."""
    return secrets.randbits(24)


def exchange(store, endpoint, size, timeout):
    """All ranks' endpoints, in rank order. ``timeout`` in seconds or None."""
    store.set(f"link/{endpoint.rank}", endpoint.pack())
    found = []
    for rank in range(size):
        if rank == endpoint.rank:
            found.append(endpoint)
        else:
            found.append(Endpoint.unpack(store.get(f"link/{rank}", timeout), rank))
    return found


def connect(qp, mine, theirs, agreement, config, port):
    """Moves a queue pair in INIT to ready-to-send, to the peer's."""
    dest_qp, rq_psn = theirs.qps[mine.rank]
    _, sq_psn = mine.qps[theirs.rank]
    timeout, retry = transport_timer(config)
    qp.to_rtr(
        dest_qp, path_mtu=MTU_CODE[agreement.mtu], rq_psn=rq_psn,
        max_dest_rd_atomic=agreement.serves, min_rnr_timer=1,
        ah_attr=AHAttr(dgid=agreement.peer_gid, sgid_index=agreement.gid_index, port_num=port,
                       sl=config.service_level, traffic_class=config.traffic_class, hop_limit=64))
    # Credits keep the receiver ready; the endless RNR retry is only the net below.
    qp.to_rts(sq_psn=sq_psn, timeout=timeout, retry_cnt=retry, rnr_retry=7,
              max_rd_atomic=agreement.reads)


def start_line(config, mine, port, agreements, size):
    """What a rank works with, in one line for the log. ``agreements``: rank -> Agreement."""
    if agreements:
        gids = {(a.gid_index, format_gid(a.gid)) for a in agreements.values()}
        mtus = {a.mtu for a in agreements.values()}
    else:
        choice = choose_gid(_table(mine), mine.gid_index, port=f"{mine.device} of rank {mine.rank}")
        gids, mtus = {(choice.index, format_gid(choice.gid))}, {mine.mtu}
    timeout, retries = transport_timer(config)
    return (f"rank {mine.rank} of {size} on {mine.device} port {port}, GID "
            f"{', '.join(f'{index} {gid}' for index, gid in sorted(gids))}, MTU "
            f"{', '.join(map(str, sorted(mtus)))}, traffic class {config.traffic_class}, service level "
            f"{config.service_level}, transport timeout {timeout} with {retries} retries, progress "
            f"{config.progress}")


def transport_timer(config):
    """``(timeout, retry_cnt)``: what is left of ``dead_after`` when a heartbeat was posted as
    late as can be, with some slack. Seven retries mean "for ever" to kernel Soft-RoCE, which
    would never report a death, so there are at most six."""
    budget = max(0.05, 0.8 * (config.dead_after - beat_interval(config)))
    retries = min(6, config.ib_retry_cnt)
    return config.replace(dead_after=budget, ib_retry_cnt=retries).transport_retry()


def beat_interval(config):
    """Seconds between heartbeats to a peer that is waited for."""
    return min(1.0, config.dead_after / 4)
