#!/usr/bin/env python3
"""send/recv ping-pong: rocecomm against mpi4py, turn by turn in one run.

    python benchmarks/latency.py [--device soft0] [--sizes 8,1024,65536] [--rounds 7]
                                 [--peers rocecomm,mpi4py] [--json FILE]

Half round trip in microseconds, median and best over the rounds, with two processes and numpy
arrays. The competitors take turns in every round, so that what else the machine does
hits both. Each runs in processes of its own (mpi4py under mpirun, skipped with a note if
it is not installed). Absolute figures move with the machine: compare within one run.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = "8,1024,8192,65536,1048576,16777216,67108864"


def rounds_for(size):
    """Ping-pongs per measurement: about 50 ms worth."""
    return max(3, min(5000, int(2e8 / (size + 40000))))


def rocecomm_pair(rank):
    sys.path.insert(0, str(ROOT))
    import rocecomm

    comm = rocecomm.init()
    return comm.send, comm.recv, comm.close


def mpi_pair(rank):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return comm.Send, comm.Recv, lambda: None


PAIRS = {"rocecomm": rocecomm_pair, "mpi4py": mpi_pair}


def child(name, folder):
    """One of the two processes of a competitor. Both read sizes from a FIFO each, so that
    nobody polls while the other competitor is measured; rank 0 writes times."""
    import numpy as np

    rank = int(os.environ.get("ROCECOMM_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    send, recv, close = PAIRS[name](rank)
    buffers = {}
    if rank == 0:
        print("ready", flush=True)
    for line in open(Path(folder) / f"orders-{rank}"):
        size = int(line)
        if size not in buffers:
            buffers[size] = np.arange(size, dtype=np.uint8), np.zeros(size, np.uint8)
        out, into = buffers[size]
        into[:] = 0
        count = rounds_for(size)
        for warm in (max(1, count // 20), count):
            start = time.perf_counter()
            if rank == 0:
                for _ in range(warm):
                    send(out, 1)
                    recv(into, 1)
            else:
                for _ in range(warm):
                    recv(into, 0)
                    send(out, 0)
            took = time.perf_counter() - start
        if not (into == out).all():
            sys.exit(f"{name}: wrong bytes at size {size}")
        if rank == 0:
            print(took / count / 2 * 1e6, flush=True)
    close()


class Competitor:
    """The processes of one competitor, and a pipe to its rank 0."""

    def __init__(self, name, device, folder):
        self.name = name
        folder = Path(folder) / name
        folder.mkdir()
        for rank in (0, 1):
            os.mkfifo(folder / f"orders-{rank}")
        command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self.others = []
        if name == "rocecomm":
            env.update(ROCECOMM_WORLD_SIZE="2", ROCECOMM_IB_HCA=device,
                       ROCECOMM_JOB_ID=f"latency-{os.getpid()}")
            self.others = [subprocess.Popen(command, env={**env, "ROCECOMM_RANK": "1"},
                                            stdin=subprocess.DEVNULL)]
            env["ROCECOMM_RANK"] = "0"
        else:
            mpirun = Path(sys.executable).with_name("mpirun")
            mpirun = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
            if not mpirun or subprocess.run([sys.executable, "-c", "import mpi4py"],
                                            capture_output=True).returncode:
                raise FileNotFoundError("mpi4py with mpirun is not installed")
            command = [mpirun, "-n", "2", "--allow-run-as-root", "--oversubscribe",
                       "--bind-to", "none", *command]
        self.main = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.PIPE, text=True)
        if self.main.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{name} did not start")
        self.orders = [open(folder / f"orders-{rank}", "w") for rank in (0, 1)]

    def measure(self, size):
        for order in self.orders:
            order.write(f"{size}\n")
            order.flush()
        answer = self.main.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended while measuring {size} bytes")
        return float(answer)

    def close(self):
        for order in self.orders:
            order.close()
        for proc in (self.main, *self.others):
            try:
                proc.wait(20)
            except subprocess.TimeoutExpired:
                proc.kill()
                proc.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="soft0")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default="rocecomm,mpi4py")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.folder)
    competitors, folder = [], tempfile.mkdtemp(prefix="rocecomm-latency-")
    try:
        for name in args.peers.split(","):
            try:
                competitors.append(Competitor(name, args.device, folder))
            except FileNotFoundError as missing:
                print(f"{name}: left out, {missing}", file=sys.stderr)
        rows = []
        print(f"half round trip in us, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
              f"device {args.device}, load {os.getloadavg()[0]:.1f}")
        print(f"{'bytes':>10}" + "".join(f"{c.name + ' median':>18}{'best':>10}" for c in competitors)
              + ("     ratio" if len(competitors) == 2 else ""))
        for size in map(int, args.sizes.split(",")):
            times = {c.name: [] for c in competitors}
            for _ in range(args.rounds):
                for competitor in competitors:
                    times[competitor.name].append(competitor.measure(size))
            row = {"bytes": size, **{name: {"median": statistics.median(t), "best": min(t)}
                                     for name, t in times.items()}}
            rows.append(row)
            line = f"{size:>10}" + "".join(
                f"{row[c.name]['median']:>18.2f}{row[c.name]['best']:>10.2f}" for c in competitors)
            if len(competitors) == 2:
                a, b = (row[c.name]["median"] for c in competitors)
                line += f"{a / b:>10.2f}"
            print(line, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    finally:
        for competitor in competitors:
            competitor.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
