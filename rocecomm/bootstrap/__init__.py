"""How the ranks of a job find each other.

:func:`join` reads who started the process (``environ``), opens a store that all ranks
reach (``stores``), and checks that everybody is there once and agrees (``roster``).

The stores: files for ranks on one host (``filestore``), a TCP store that rank 0 serves
within its own calls (``server``, ``client``, ``frames``) for several hosts, with
torchrun's own store to carry its address (``carrier``), or an object of the user's.
"""

import dataclasses
import itertools
import os
import threading

from ..config import USE_CONFIG, Config
from ..errors import ClosedError, JoinError
from . import roster, trouble
from .deadline import Deadline
from .environ import Launch, check_range, detect
from .stores import open_store

__all__ = ["Group", "GroupStore", "Launch", "detect", "join"]


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks that met.

    ``job_id`` (16 random bytes) and ``secret`` (32 bytes) are the same on all ranks and
    new for every join. ``store`` carries the wire-up; close it at the end of ``init``.
    """

    rank: int
    world_size: int
    local_rank: int
    job_id: bytes
    secret: bytes = dataclasses.field(repr=False)
    store: "GroupStore" = dataclasses.field(repr=False, compare=False)
    launcher: str = "alone"


class GroupStore:
    """The group's key-value store: ``set``, ``get``, ``wait``, ``abort``, ``close``.

    Keys are texts of up to 80 bytes, values bytes of up to 1 MiB.
    """

    def __init__(self, store, deadline):
        self._store, self._deadline = store, deadline

    def set(self, key, value):
        """Publish ``value`` (bytes) under ``key`` to all ranks."""
        with _translated():
            self._store.set("g/" + key, value)

    def get(self, key, timeout):
        """The value of ``key``. Waits up to ``timeout`` seconds (None: for ever), then
        raises TimeoutError; JoinError if a rank died or gave up meanwhile."""
        with _translated():
            return self._store.get("g/" + key, timeout)

    def wait(self, keys, timeout):
        """Wait until all ``keys`` are set; raises as ``get`` does."""
        with _translated():
            self._store.wait(["g/" + key for key in keys], timeout)

    def abort(self, reason):
        """Tell the other ranks that this one gives up: their ``get`` and ``wait`` raise
        JoinError with ``reason`` (a sentence)."""
        self._store.abort(trouble.pack(JoinError(str(reason))))

    def close(self):
        """Leave. Rank 0 of a TCP store serves until all have left, within the join
        timeout. Closing twice is harmless."""
        store, self._store = self._store, _CLOSED
        left = self._deadline.remaining()
        store.close(None if self._deadline.timeout is None else max(1.0, left))


class _Closed:
    def close(self, timeout=0.0):
        pass

    def abort(self, reason):
        pass

    def __getattr__(self, name):
        raise ClosedError("the store of the group was closed at the end of init")


_CLOSED = _Closed()


class _translated:
    """Aborted stores raise the JoinError that the other rank had."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, trouble.Aborted):
            raise trouble.unpack(error.args[0]) from None


#: Seconds that a store stays after joining failed, for ranks that are still on their way.
LINGER = 1.0

# A process may join several times; its n-th group meets the others' n-th.
_lock = threading.Lock()
_joined: dict = {}
_attempts: dict = {}


def join(config=None, rank=None, world_size=None, store=None, timeout=USE_CONFIG):
    """Meet the other ranks; returns a :class:`Group`.

    ``rank`` and ``world_size``: by default what the launcher says (``rocecomm run``,
    torchrun, mpirun, srun), and a world of one if there is none. ``store``: None (files on
    one host, ROCECOMM_STORE or torchrun's word otherwise), ``"host:port"``,
    ``"file:/folder"``, or an object with ``set`` and ``get``. ``timeout``: seconds; 0 joins
    only if all others wait already, None waits for ever.

    Raises JoinError naming the missing, doubled or surplus rank or the setting about which
    ranks disagree, on every rank; ConfigError for settings that cannot be used.
    """
    config = Config.from_env() if config is None else config
    deadline = Deadline(config.join_timeout if timeout is USE_CONFIG else timeout)
    launch = detect(config, os.environ, rank, world_size)
    own = (launch.key, launch.rank, launch.world_size)
    with _lock:
        generation = _joined.get(own, 0)
        attempt = next(_attempts.setdefault(own, itertools.count()))
    try:
        base, shared_secret = open_store(config, launch, store, generation, attempt, deadline)
    except JoinError:
        check_range(launch)                # a surplus rank may find that all have left
        raise
    try:
        job_id, secret, local_rank = roster.meet(base, launch, config, deadline,
                                                 shared_secret)
    except BaseException as error:
        if generation and isinstance(error, JoinError) and error.missing:
            error.args = (f"{error}; this process has joined the job before, so a rank that was "
                          "started anew does not meet it: give all ranks a new job_id "
                          "(ROCECOMM_JOB_ID)",)
        # A rank that comes a little later should hear the same reason.
        base.close(0.5, deadline.slice(LINGER) if isinstance(error, JoinError) else 0.0)
        raise
    with _lock:
        _joined[own] = generation + 1
    config.logger().debug("rank %d of %d joined (%s), local rank %d, through %s", launch.rank,
                         launch.world_size, launch.launcher, local_rank, base.where)
    return Group(launch.rank, launch.world_size, local_rank, job_id, secret,
                 GroupStore(base, deadline), launch.launcher)
