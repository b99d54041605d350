"""Requests: transfers in flight."""
from collections.abc import Generator
from typing import Any

class Request:
    """A send or receive in flight. It holds the buffer until the transfer has ended.

    Dropping a request does not cancel it: the engine keeps it until it has ended.
    Cannot be pickled or copied.
    """
    def wait(self, timeout: Any = ...) -> int:
        """Waits; returns the bytes that were sent or received. `timeout` in seconds, None:
        for ever, 0: poll once; default the communicator's. Raises the transfer's error, each
        time the same; TimeoutError leaves the request alive and the buffer held."""
    def __await__(self) -> Generator[Any, None, int]:
        """In an asyncio coroutine: as `wait()` with the communicator's timeout, without blocking
        the event loop. Cancelling the task cancels the request as `cancel()` does, unless
        other tasks await it too."""
    def test(self) -> bool:
        """Moves traffic once; whether the request has ended (also with an error)."""
    def cancel(self) -> bool:
        """Whether the request was withdrawn: a receive that has not matched yet. A send
        answers False and is asked back from the receiver; `wait` tells how it ended."""
    @property
    def done(self) -> bool: ...
    @property
    def nbytes(self) -> int:
        """Bytes transferred so far known; 0 before the end."""
    @property
    def source(self) -> int:
        """Rank of the sender (of the receiver for a send), -1 while ANY_SOURCE is unmatched."""
    @property
    def tag(self) -> int: ...
    @property
    def error(self) -> BaseException | None: ...
