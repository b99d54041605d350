"""Many pieces by one call of readv and writev, against a C loop of process_vm_readv on the same memory.

Rank 0 reads pieces of rank 1's registered array into pieces of its own, offsets shuffled on both sides.
The C loop (pieces.c) is called in the same process on the same arrays, 1024 pieces a system call, in
turn with ours. Rank 1 sleeps meanwhile: nobody helps to copy.
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import figures, processes  # noqa: E402

#: label: (operation, pieces, bytes of each)
CASES = {"readv 100,000 x 4 KiB": ("read", 100_000, 4096), "writev 100,000 x 4 KiB": ("write", 100_000, 4096),
         "readv 100,000 x 256 B": ("read", 100_000, 256)}
TARGETS = {"readv 100,000 x 4 KiB": ">= 0.9x"}

TITLE = "Pieces: vectorised one-sided operations"
TEXT = ("One call of `readv` or `writev` with numpy arrays of offsets, shuffled on both sides, against a C "
        "loop of `process_vm_readv` (or `process_vm_writev`) with 1024 pieces a call on the same memory.")


def name_of(label):
    return f"{label} : process_vm"


ROWS = tuple(map(name_of, CASES))


def library():
    """pieces.c as a shared library, built if it is missing or old."""
    source = Path(__file__).with_name("pieces.c")
    built = ROOT / "build/bench/pieces.so"
    if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
        built.parent.mkdir(parents=True, exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run([os.environ.get("CC", "gcc"), "-O2", "-g", "-std=gnu11", "-Wall", "-Wextra",
                            "-fPIC", "-shared", str(source), "-o", str(part)], check=True)
        except OSError as why:
            raise figures.Missing(f"no C compiler for pieces.c: {why}") from None
        part.rename(built)
    return built


class Rank:
    """One of the two processes."""

    def __init__(self, rank):
        import numpy as np

        import rocecomm

        self.np, self.rank = np, rank
        self.comm = rocecomm.init()
        self.c = ctypes.CDLL(str(library())).pieces
        self.c.restype = ctypes.c_int64
        i64, p = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
        self.c.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, p, p, i64, i64]

    def prepare(self, pieces, length):
        """Arrays, their registration, and where they are."""
        np, comm = self.np, self.comm
        self.data = np.random.default_rng(self.rank).integers(0, 256, pieces * length, np.uint8)
        self.want = np.random.default_rng(1).integers(0, 256, pieces * length, np.uint8)
        self.region = comm.register(self.data)
        mine = np.array([self.data.ctypes.data, os.getpid()], np.int64)
        theirs = np.zeros(2, np.int64)
        descriptor = np.frombuffer(self.region.descriptor(), np.uint8)
        there = np.zeros(len(descriptor), np.uint8)
        comm.sendrecv(mine, 1 - self.rank, theirs, 1 - self.rank)
        comm.sendrecv(descriptor, 1 - self.rank, there, 1 - self.rank)
        self.remote, (self.address, self.pid) = comm.open(there.tobytes()), theirs.tolist()
        rng = np.random.default_rng(7)
        self.offsets = [rng.permutation(pieces) * length for _ in range(2)]
        self.length = length
        return {}

    def done(self):
        self.region.close()
        del self.data, self.want, self.remote
        return {}

    def move(self, op, how):
        """Rank 0 moves all pieces once; seconds. Reads are verified against what rank 1 made."""
        if self.rank == 1:
            return {}
        local, remote = self.offsets
        if op == "read":
            self.data[:] = 0
        start = time.perf_counter()
        if how == "rocecomm":
            (self.comm.readv if op == "read" else self.comm.writev)(
                self.region, self.remote, local, remote, self.length)
        else:
            as_c = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)) for a in (local, remote)]
            moved = self.c(op == "write", self.pid, self.data.ctypes.data, self.address, *as_c, self.length,
                           len(local))
            if moved != len(local) * self.length:
                raise OSError(f"process_vm moved {moved} bytes")
        took = time.perf_counter() - start
        if op == "read":
            for a, b in zip(local[::997], remote[::997], strict=True):
                if not self.np.array_equal(self.data[a:a + self.length], self.want[b:b + self.length]):
                    raise AssertionError(f"{how}: wrong bytes at {a}")
        return {"s": took}


def measure(rounds, device="soft0", wanted=lambda name: True):
    library()
    env = {"ROCECOMM_WORLD_SIZE": "2", "ROCECOMM_IB_HCA": device,
           "ROCECOMM_JOB_ID": f"bench-pieces-{os.getpid()}"}
    with processes.Ranks("pieces", 2, [([sys.executable, __file__, rank], {**env, "ROCECOMM_RANK": rank})
                                       for rank in ("0", "1")]) as ranks:
        for label, (op, pieces, length) in CASES.items():
            if not wanted(name_of(label)):
                continue
            ranks.ask({"do": "prepare", "pieces": pieces, "length": length})
            found = {"rocecomm": [], "C": []}
            for turn in range(rounds + 1):
                for how, figures_ in found.items():
                    took = ranks.ask({"do": "move", "op": op, "how": how})[0]["s"]
                    if turn:                # the first touches all pages
                        figures_.append(pieces * length / took / 1e6)
            ranks.ask({"do": "done"})
            yield figures.row(name_of(label), "MB/s", found["rocecomm"], found["C"],
                              f"C: process_vm_{op}v", TARGETS.get(label))


if __name__ == "__main__":
    me = Rank(int(sys.argv[1]))
    processes.serve(me.rank, {"prepare": me.prepare, "move": me.move, "done": me.done})
    me.comm.close()
