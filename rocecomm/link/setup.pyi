"""Setting an engine up and taking it down: device, queues, memory, connections."""
from typing import Any

from ..config import Config
from .base import Base

class Links(Base):
    def open(self, config: Config, group: Any, port: int) -> None:
        """Creates everything on the device and connects to all ranks of `group`."""
    def make_memory(self) -> None: ...
    def make_endpoint(self, config: Config, group: Any, port: int, port_attr: Any, device: Any,
                      depth: int, lane: int, eager: int, ctrl: int) -> Any: ...
    def make_qp(self, depth: int, inline: int | None) -> tuple[Any, int]: ...
    def connect_peer(self, mine: Any, other: Any, config: Config, port: int) -> None: ...
