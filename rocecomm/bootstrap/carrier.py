"""The store of torchrun's agent, which tells the ranks where their own store is.

Its port is MASTER_PORT and the agent holds it, so rocecomm never binds it. It is spoken
to with torch's own client; torchrun implies torch.
"""

import datetime
import time

from ..errors import JoinError
from .deadline import backoff


class TorchCarrier:
    """``set`` and ``get`` over the agent's TCPStore."""

    def __init__(self, address, prefix, deadline):
        host, port = address
        try:
            from torch.distributed import PrefixStore, TCPStore
        except ImportError as error:
            raise JoinError(
                f"this process was started by torchrun, but torch cannot be imported "
                f"({error}), and only torch speaks to its store: install torch, or set "
                "ROCECOMM_STORE and ROCECOMM_SECRET") from error
        try:
            store = TCPStore(host, port, world_size=None, is_master=False,
                             timeout=datetime.timedelta(seconds=deadline.slice(300.0) + 1),
                             wait_for_workers=False)
        except (RuntimeError, ValueError, OSError) as error:
            raise JoinError(f"torchrun's store at {host}:{port} cannot be reached "
                            f"({error}): check MASTER_ADDR and MASTER_PORT") from error
        self._store = PrefixStore(prefix, store)

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key, deadline):
        """The value (bytes); JoinError naming rank 0, which sets it, at the deadline."""
        for pause in backoff(0.002, 0.05):
            if self._store.check([key]):
                return self._store.get(key)
            if deadline.expired():
                raise JoinError(f"rank 0 did not come within {deadline}: torchrun's store "
                                "has no address of it", missing=[0])
            time.sleep(deadline.slice(pause))
