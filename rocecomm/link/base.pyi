"""The engine's Python side: entering and leaving it, waiting, errors, arguments."""
from ..config import Config

class Base:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def config(self) -> Config: ...
    def group_error(self, group: int, what: str = "the collective") -> Exception | None:
        """The exception with which a group failed; None if it has not."""

class Inquiry:
    """What a TimeoutError says of the peer, found out step by step."""
