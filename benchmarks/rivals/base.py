"""One abstract competitor. Everything that is measured with several libraries goes through this class."""

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from benchmarks import figures, processes

ROOT = Path(__file__).resolve().parents[2]


class Rival(ABC):
    """Two processes that send each other numpy arrays of bytes, with one library.

    The class attributes and :meth:`start` are the parent's; an instance lives in each of the two child
    processes. ``send`` and ``recv`` block, as the library's own do: after ``recv`` the bytes lie in ``buf``.
    """

    name = ""
    module = None           # what has to be importable, or None
    install = ""            # how one gets it

    @classmethod
    def start(cls, device="soft0", limit=processes.LIMIT):
        """The two running processes (:class:`processes.Ranks`). Where it cannot run, figures.Missing."""
        if cls.module and importlib.util.find_spec(cls.module) is None:
            raise figures.Missing(f"{cls.name} is not installed ({cls.install})")
        return processes.Ranks(cls.name, 2, cls.commands(device), limit)

    @classmethod
    def commands(cls, device):
        """[(command line, environment)] of the processes to start."""
        return [(cls.child(), {"BENCH_RANK": str(rank)}) for rank in (0, 1)]

    @classmethod
    def child(cls):
        """The command line of one rank."""
        return [sys.executable, str(ROOT / "benchmarks/rivals/child.py"), cls.name]

    @classmethod
    def rank(cls):
        """The rank of this child process."""
        return int(os.environ["BENCH_RANK"])

    def __init__(self):
        self.me = self.rank()
        self.other = 1 - self.me

    @abstractmethod
    def send(self, buf):
        """Sends an array to the other rank; returns when `buf` may be written again."""

    @abstractmethod
    def recv(self, buf):
        """Receives one message into `buf`."""

    def isend(self, buf):
        """Begins a send; what comes back goes to :meth:`wait`."""
        raise NotImplementedError

    def irecv(self, buf):
        """Begins a receive into `buf`."""
        raise NotImplementedError

    def wait(self, requests):
        """Waits for all of what isend and irecv returned."""
        raise NotImplementedError

    def close(self):  # noqa: B027 (not every library needs it)
        """Ends the connection."""


def in_folder(name):
    """A path where the two ranks of this competitor can meet."""
    return str(Path(os.environ["BENCH_FOLDER"]) / name)
