"""mpi4py on Open MPI: Send and Recv of buffers."""

import os
import shutil
import sys
from pathlib import Path

from benchmarks import figures

from .base import Rival


class Mpi(Rival):
    name = "mpi4py"
    module = "mpi4py"
    install = "tools/setup.sh mpi"

    @classmethod
    def commands(cls, device):
        mpirun = Path(sys.executable).with_name("mpirun")
        mpirun = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
        if not mpirun:
            raise figures.Missing(f"mpi4py: there is no mpirun ({cls.install})")
        return [([mpirun, "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                  *cls.child()], {})]

    @classmethod
    def rank(cls):
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    def __init__(self):
        super().__init__()
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD

    def send(self, buf):
        self.comm.Send(buf, self.other)

    def recv(self, buf):
        self.comm.Recv(buf, self.other)

    def isend(self, buf):
        return self.comm.Isend(buf, self.other)

    def irecv(self, buf):
        return self.comm.Irecv(buf, self.other)

    def wait(self, requests):
        self.mpi.Request.Waitall(requests)
