"""A parameter server: workers push gradients, servers aggregate, update and hand out values.

    from rocecomm import ps
    if comm.rank == 0:
        ps.Server(comm, optimizer=ps.SGD(lr=0.1, momentum=0.9)).run()
    else:
        with ps.Worker(comm) as worker:
            worker.init("weights", weights)
            worker.push_pull("weights", gradient, out=weights)
"""

from .optimizers import SGD, Add
from .protocol import UnknownKeyError
from .server import Server
from .worker import Worker

__all__ = ["Add", "SGD", "Server", "UnknownKeyError", "Worker"]
