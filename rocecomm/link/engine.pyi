"""The messaging core of one communicator. Internal API: `collectives` and `ps` sit on it.

Ranks are world ranks. Buffers are `rocecomm.verbs.buffer.Buffer`s (or anything that
`acquire` takes); `offset` and `nbytes` choose a part of one, in bytes.
"""
from collections.abc import Iterable
from typing import Any

from ..config import Config
from ..verbs.qp import QP
from .request import Request
from .setup import Links

CLOSE_LIMIT: float

class Signature:
    """What all ranks of a group must agree on for one collective. Made by `coll_begin`."""
    seq: int
    op: int
    dtype: int
    count: int
    reduction: int
    root: int
    group: int
    def __str__(self) -> str: ...

class Engine(Links):
    def __init__(self, config: Config, group: Any, context: Any = None, port: int | None = None) -> None:
        """Opens the device (or takes `context` and `port`) and connects to all ranks of `group`."""

    # ---- collectives: messages that carry a signature, in a tag space of their own
    def coll_begin(self, op: int | str, dtype: int | str, count: int, reduction: int | str = 0,
                   root: int = -1, group: int = 1) -> Signature:
        """Numbers the next collective of `group` (1: all ranks) and makes its signature known.

        `op`, `reduction`: names or positions in `wire.OPERATIONS`, `wire.REDUCTIONS`;
        `dtype`: a name or `wire.dtype_code`. From now on every message of that number
        with another signature is a MismatchError here and, through an abort message, on all
        ranks. Raises MismatchError at once if such a message is already here or the group
        was aborted; PeerDeadError if a rank of the world is gone.
        """
    def coll_isend(self, sig: Signature, buf: Any, dst: int, step: int = 0,
                   offset: int = 0, nbytes: int = -1) -> Request:
        """Starts to send part of `buf` to `dst`. `step` (< 2**24) tells the messages of one
        collective between one pair apart; equal steps match in order."""
    def coll_irecv(self, sig: Signature, buf: Any, src: int, step: int = 0,
                   offset: int = 0, nbytes: int = -1) -> Request:
        """Starts to receive into part of `buf` (the exact size is not required, more is an error)."""
    def abort(self, sig_or_group: Signature | int, text: str, error: BaseException | None = None) -> None:
        """Tells all ranks that the group failed; every pending and later collective of it
        raises RocecommError with `text`; TimeoutError or PeerDeadError, with its peer, if `error`
        is one. Never raises."""

    # ---- plain messages in a private space (parameter server: spaces >= 2**31)
    def isend(self, buf: Any, dst: int, tag: int = 0, space: int = 0,
              offset: int = 0, nbytes: int = -1) -> Request: ...
    def irecv(self, buf: Any, src: Any, tag: int = 0, space: int = 0,
              offset: int = 0, nbytes: int = -1) -> Request: ...

    # ---- waiting
    def wait_all(self, requests: Iterable[Request], timeout: Any = ...) -> None:
        """Waits for all; `timeout` in seconds, None for ever, default the communicator's.
        The first error is raised after all have ended or, on a timeout, at once; the
        requests stay alive then."""
    def wait_any(self, requests: list[Request], timeout: Any = ...) -> int:
        """The index of a request that has ended (its `wait()` returns at once)."""
    def progress(self) -> int:
        """Moves all pending traffic once; the number of completions seen."""
    def counters(self) -> dict:
        """`bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`,
        `seconds` (inside blocking calls), `connections` (ranks for whom queue pairs were made), and
        others that tests look at."""
    def trim(self) -> None:
        """Empties the registration cache."""
    def describe(self) -> dict:
        """What wire-up agreed on: rank -> wireup.Agreement."""
    def queue_pairs(self) -> dict[int, QP]:
        """The queue pair to every other rank that was connected at init, for tests and debugging."""
    def datagrams(self) -> dict | None:
        """Where peers connect on first use, for tests and debugging: `qp`, the queue pair for datagrams,
        `instance`, that of this communicator, `sent` and `refused`, numbers of datagrams; else None."""
    def peers(self) -> list[dict]:
        """State of every connection, for debugging."""
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
