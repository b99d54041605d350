"""rocecomm: direct RDMA messaging for Python.

    import rocecomm
    comm = rocecomm.init()
    comm.send(array, dst=1)

Importing opens no device, starts no thread, and changes nothing in the process.
"""

from .communicator import ANY_SOURCE, ANY_TAG, Communicator, init
from .config import Config
from .errors import (
    ClosedError,
    CompletionError,
    ConfigError,
    DeviceNotFoundError,
    JoinError,
    MessageTruncatedError,
    MismatchError,
    PeerDeadError,
    RocecommError,
    TimeoutError,
    VerbsError,
)
from .link.arrays import empty
from .link.region import RegisteredBuffer, RemoteBuffer
from .link.request import Request
from .link.status import Status

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "ClosedError", "Communicator", "CompletionError", "Config",
    "ConfigError", "DeviceNotFoundError", "JoinError", "MessageTruncatedError",
    "MismatchError", "PeerDeadError", "RegisteredBuffer", "RemoteBuffer", "Request",
    "RocecommError", "Status", "TimeoutError", "VerbsError", "empty", "init",
]
