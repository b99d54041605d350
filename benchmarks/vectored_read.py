"""Many small pieces in one call: ``comm.readv`` and ``comm.writev`` against a C loop of process_vm_readv.

The C loop hands 1024 pieces to each system call. Both work on the same memory of the same two processes,
in turn: places of the peer's region in random order, and places of our buffer one behind the other. The
peer sleeps.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import figures, processes  # noqa: E402

SIZES = {"4 KiB": 4096, "256 B": 256}
PIECES = 100_000
SOURCE, BUILD = Path(__file__).with_suffix(".c"), ROOT / "build/bench-vectored"

TITLE = "Vectorised transfers"
TEXT = ("100,000 pieces, moved by one `comm.readv` or `comm.writev` with numpy arrays of offsets, against a "
        "C loop of `process_vm_readv` (`writev`) with 1024 pieces in a call: the same memory and the same "
        "random order, in turn. Millions of pieces per second.")


def name_of(verb, size):
    return f"{verb} 100,000 x {size}"


ROWS = tuple(name_of(verb, size) for size in SIZES for verb in ("readv", "writev"))
TARGETS = {name_of("readv", "4 KiB"): ">= 0.9x"}


def build():
    """The C loop as a library; figures.Missing without a compiler."""
    library = BUILD / "vectored_read.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = os.environ.get("CC", "gcc")
        if not shutil.which(compiler.split()[0]):
            raise figures.Missing(f"the C loop needs a compiler: {compiler} is not installed")
        BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run([*compiler.split(), "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", str(SOURCE), "-o",
                        str(library)], check=True)
    return library


def measure(rounds, device="soft0", wanted=lambda name: True):
    library = build()
    folder = tempfile.mkdtemp(prefix="rocecomm-bench-")
    env = {"ROCECOMM_SOFT_DIR": folder, "ROCECOMM_WORLD_SIZE": "2", "ROCECOMM_IB_HCA": device,
           "ROCECOMM_JOB_ID": f"bench-vectored-{os.getpid()}"}
    command = [sys.executable, __file__, str(library)]
    commands = [(command, {**env, "ROCECOMM_RANK": str(rank)}) for rank in (0, 1)]
    try:
        with processes.Ranks("readv", 2, commands) as ranks:
            peer = ranks.ask({"do": "open"})[1]
            for label, size in SIZES.items():
                for verb in ("readv", "writev"):
                    name = name_of(verb, label)
                    if not wanted(name):
                        continue
                    ours, theirs = [], []
                    for i in range(rounds + 1):         # the first one warms up
                        found = ranks.ask({"do": "turn", "verb": verb, "size": size, "peer": peer})[0]
                        if i:
                            ours.append(found["ours"])
                            theirs.append(found["raw"])
                    yield figures.row(name, "M/s", ours, theirs, "process_vm in C", TARGETS.get(name))
            ranks.ask({"do": "close"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class End:
    """One rank; rank 0 moves the pieces."""

    def open(self):
        import numpy as np

        import rocecomm
        self.np, self.comm = np, rocecomm.init()
        self.memory = np.full(PIECES * max(SIZES.values()), 1 + self.comm.rank, np.uint8)
        self.region = self.comm.register(self.memory)
        return {"pid": os.getpid(), "addr": self.memory.ctypes.data,
                "descriptor": self.region.descriptor().hex()}

    def turn(self, verb, size, peer):
        if self.comm.rank:
            return {}
        np, n = self.np, PIECES
        here = np.arange(n, dtype=np.int64) * size
        there = np.random.default_rng(7).permutation(n).astype(np.int64) * size
        library = ctypes.CDLL(sys.argv[1])
        pointer = ctypes.c_void_p
        library.move_pieces.argtypes = [ctypes.c_int, ctypes.c_int, *[pointer] * 4, *[ctypes.c_int64] * 2]
        remote = self.comm.open(bytes.fromhex(peer["descriptor"]))
        move = getattr(self.comm, verb)
        start = time.perf_counter()
        error = library.move_pieces(verb == "writev", peer["pid"], self.memory.ctypes.data, here.ctypes.data,
                                    peer["addr"], there.ctypes.data, n, size)
        between = time.perf_counter()
        if error:
            raise OSError(error, "process_vm")
        move(self.region, remote, here, there, size)
        end = time.perf_counter()
        return {"raw": n / (between - start) / 1e6, "ours": n / (end - between) / 1e6}

    def close(self):
        self.comm.close()


def main():
    end = End()
    processes.serve(int(os.environ["ROCECOMM_RANK"]),
                    {"open": end.open, "turn": end.turn, "close": end.close})


if __name__ == "__main__":
    main()
