"""rocecomm itself."""

import os

from .base import Rival


class Rocecomm(Rival):
    name = "rocecomm"

    @classmethod
    def commands(cls, device):
        job = {"ROCECOMM_WORLD_SIZE": "2", "ROCECOMM_IB_HCA": device,
               "ROCECOMM_JOB_ID": f"bench-{os.getpid()}"}
        return [(command, {**env, **job, "ROCECOMM_RANK": env["BENCH_RANK"]})
                for command, env in super().commands(device)]

    def __init__(self):
        super().__init__()
        import rocecomm

        self.comm = rocecomm.init()

    def send(self, buf):
        self.comm.send(buf, self.other)

    def recv(self, buf):
        self.comm.recv(buf, self.other)

    def isend(self, buf):
        return self.comm.isend(buf, self.other)

    def irecv(self, buf):
        return self.comm.irecv(buf, self.other)

    def wait(self, requests):
        self.comm.wait_all(requests)

    def close(self):
        self.comm.close()
