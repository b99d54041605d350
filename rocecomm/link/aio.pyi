"""Awaiting in asyncio event loops."""
from typing import Any

class Watcher:
    """One event loop's watch over one communicator's completion channel."""
    loop: Any

class Awaiter:
    """One `await`: the iterator that a task drives."""
    def __iter__(self) -> Awaiter: ...
    def __next__(self) -> Any: ...
