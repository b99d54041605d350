"""One-sided operations as Python calls them (see ``Communicator.write`` and its neighbours)."""
from .request import Request

class AtomicRequest(Request):
    """A ``fetch_add`` or ``compare_swap`` in flight; ``wait()`` and ``await`` return what the cell
    held before, an int."""
    @property
    def value(self) -> int | None:
        """The value that the cell had before; None before the end, or if it failed."""

class NoteRequest(Request):
    """An ``iwait_notify`` in flight: ``wait()`` and ``await`` return the notifications' numbers, oldest
    first, or (rank, number) pairs. It takes none before all are there; cancelled or dropped, none at
    all. ``nbytes`` and ``tag`` are 0, ``source`` is the rank asked for, -1 for ANY_SOURCE."""
