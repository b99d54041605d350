"""What a probe tells of a message that waits."""

from typing import NamedTuple


class Status(NamedTuple):
    """A message that waits to be received: what ``probe`` and ``iprobe`` return."""

    source: int
    """Rank of its sender."""
    tag: int
    """Its tag."""
    nbytes: int
    """Its size in bytes."""
    dtype: str
    """Element type that it was sent as; ``"bytes"`` if it has none."""
