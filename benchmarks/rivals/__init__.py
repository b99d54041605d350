"""The competitors, each a subclass of :class:`base.Rival` in a file of its own."""

from .gloo import Gloo
from .mpi import Mpi
from .ours import Rocecomm
from .ucx import Ucxx
from .zmq_ipc import Pyzmq

RIVALS = (Rocecomm, Mpi, Gloo, Pyzmq, Ucxx)
BY_NAME = {rival.name: rival for rival in RIVALS}
