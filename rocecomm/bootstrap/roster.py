"""The ranks meet: everyone signs in, rank 0 checks the list and publishes it.

Doubled, missing and surplus ranks, world sizes and settings that differ end in the same
JoinError on every rank that is there: whoever finds the trouble aborts the store, which
wakes the others.
"""

import json
import os
import secrets
import socket

from ..errors import JoinError, TimeoutError
from . import trouble
from .environ import check_range
from .frames import digest


def meet(store, launch, config, deadline, shared_secret=None):
    """``(job_id, secret, local_rank)`` once all ranks are there and agree.

    ``shared_secret`` is the store's own secret where the store is seen by the network:
    the group's secret is then derived from it and does not travel.
    """
    try:
        check_range(launch)
        sign_in(store, launch, config)
        if launch.rank == 0:
            _check_all(store, launch, config, deadline)
        try:
            roster = json.loads(store.get("roster", _left(deadline)))
        except TimeoutError:
            raise _missing(store, launch, deadline) from None
        if roster["world_size"] != launch.world_size:
            raise _worlds(0, roster["world_size"], launch.rank, launch.world_size)
    except trouble.Aborted as aborted:
        raise trouble.unpack(aborted.args[0]) from None
    except JoinError as error:
        store.abort(trouble.pack(error))
        raise
    job_id = bytes.fromhex(roster["job_id"])
    secret = digest(shared_secret, b"group", job_id) if shared_secret \
        else bytes.fromhex(roster["secret"])
    hosts = roster["hosts"]
    local_rank = hosts[:launch.rank].count(hosts[launch.rank])
    return job_id, secret, local_rank if launch.local_rank is None else launch.local_rank


def sign_in(store, launch, config):
    """Put this rank on the list; JoinError if its place is taken."""
    mine = {"world_size": launch.world_size, "host": host_identity(),
            "name": socket.gethostname(), "pid": os.getpid(),
            "nonce": secrets.token_hex(8), "launcher": launch.launcher,
            "settings": config.wire_settings()}
    data = json.dumps(mine).encode()
    present = store.claim(f"member/{launch.rank}", data)
    if present != data:
        other = json.loads(present)
        raise JoinError(
            f"rank {launch.rank} is there twice: process {other['pid']} on "
            f"{other['name']} and process {mine['pid']} on {mine['name']}; start every "
            "rank once, each with its own number", doubled=[launch.rank])


def host_identity():
    """The same for all processes of one running machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return digest(b"rocecomm host", boot.encode(), socket.gethostname().encode()).hex()[:16]


def _left(deadline):
    return None if deadline.timeout is None else deadline.remaining()


def _check_all(store, launch, config, deadline):
    """Rank 0: wait for every rank, compare, publish the roster."""
    hosts, mine = [], config.wire_settings()
    for rank in range(launch.world_size):
        try:
            member = json.loads(store.get(f"member/{rank}", _left(deadline)))
            world_size, host, settings = (member["world_size"], str(member["host"]),
                                          dict(member["settings"]))
        except TimeoutError:
            raise _missing(store, launch, deadline) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise JoinError(f"what rank {rank} published cannot be read "
                            f"({type(error).__name__}: {error}): does it run the same version "
                            "of rocecomm?", setting="protocol version") from None
        if world_size != launch.world_size:
            raise _worlds(0, launch.world_size, rank, world_size)
        _compare(mine, rank, settings)
        hosts.append(host)
    roster = {"world_size": launch.world_size, "hosts": hosts,
              "job_id": secrets.token_hex(16),
              "secret": secrets.token_hex(32) if store.trusted else None}
    store.set("roster", json.dumps(roster).encode())


def _compare(mine, rank, theirs):
    # The version first: another one may have other settings.
    for name in sorted({*mine, *theirs}, key=lambda name: (name != "protocol version", name)):
        if mine.get(name) != theirs.get(name):
            raise JoinError(
                f"rank 0 and rank {rank} disagree about {name}: it is "
                f"{mine.get(name, 'unknown')} on rank 0 and {theirs.get(name, 'unknown')} "
                f"on rank {rank}; use the same value, and the same version of rocecomm, "
                "everywhere", setting=name)


def _worlds(one, size, other, other_size):
    return JoinError(
        f"ranks disagree about the world size: rank {one} says {size}, rank {other} says "
        f"{other_size}; give every rank the same", setting="world_size")


def _missing(store, launch, deadline):
    absent = []
    for rank in range(launch.world_size):
        try:
            store.get(f"member/{rank}", 0.0)
        except TimeoutError:
            absent.append(rank)
    if not absent:
        return JoinError(f"all {launch.world_size} ranks came, but rank 0 did not publish "
                         f"the list within {deadline}: is it stopped or overloaded?")
    shown = ", ".join(map(str, absent[:20])) + (", ..." if len(absent) > 20 else "")
    one = len(absent) == 1
    return JoinError(
        f"rank{'' if one else 's'} {shown} of {launch.world_size} did not come to "
        f"{store.where} within {deadline}: start {'it' if one else 'them'} with the same "
        "job (ROCECOMM_JOB_ID if they have no common parent process), raise the join timeout, "
        "or set ROCECOMM_STORE and ROCECOMM_SECRET if they run on several hosts",
        missing=absent)
