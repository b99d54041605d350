#!/usr/bin/env python3
"""asyncio ping-pong: rocecomm against bare pipes, turn by turn in one run.

    python benchmarks/asyncio_pingpong.py [--device soft0] [--size 8] [--rounds 7] [--count 3000]
                                          [--loop asyncio|uvloop] [--spin SECONDS] [--json [FILE]]

Two processes. rocecomm: both sides `await comm.isend(...)` and `await comm.irecv(...)`. The
rival is the least that asyncio can do between two processes: `os.write` into a pipe, and
`loop.add_reader` with `os.read` and a future on the other side. Half round trip in microseconds,
median and best over the rounds. `--spin 0` lets rocecomm never poll before it sleeps.

`--json` prints (or writes to FILE) one object: ``{"size": 8, "loop": "asyncio", "rocecomm": {"median":
us, "best": us}, "pipes": {...}, "ratio": rocecomm's median / pipes' median}``.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Pipe:
    """One end of a pair of pipes in an event loop."""

    def __init__(self, loop, read_fd, write_fd, size):
        self.loop, self.read_fd, self.write_fd, self.size = loop, read_fd, write_fd, size
        self.waiter = None
        loop.add_reader(read_fd, self.readable)

    def readable(self):
        data = os.read(self.read_fd, self.size)
        waiter, self.waiter = self.waiter, None
        waiter.set_result(data)

    def recv(self):
        self.waiter = self.loop.create_future()
        return self.waiter

    def send(self, data):
        os.write(self.write_fd, data)


async def over_pipes(pipe, rank, data, count):
    start = time.perf_counter()
    for _ in range(count):
        if rank == 0:
            pipe.send(data)
            await pipe.recv()
        else:
            await pipe.recv()
            pipe.send(data)
    return (time.perf_counter() - start) / count / 2


async def over_rocecomm(comm, rank, out, into, count):
    other = 1 - rank
    start = time.perf_counter()
    for _ in range(count):
        if rank == 0:
            await comm.isend(out, other)
            await comm.irecv(into, other)
        else:
            await comm.irecv(into, other)
            await comm.isend(out, other)
    return (time.perf_counter() - start) / count / 2


async def child(rank, fds, options):
    """One of the two processes; rank 0 prints the times."""
    import numpy as np

    import rocecomm

    settings = {} if options.spin is None else {"spin": options.spin}
    comm = rocecomm.init(**settings)
    pipe = Pipe(asyncio.get_running_loop(), *fds, options.size)
    out, into = np.zeros(options.size, "u1"), np.zeros(options.size, "u1")
    times = {"rocecomm": [], "pipes": []}
    for turn in range(options.rounds + 1):
        count = options.count if turn else options.count // 10      # the first only warms up
        mine = await over_rocecomm(comm, rank, out, into, count)
        theirs = await over_pipes(pipe, rank, bytes(options.size), count)
        if turn:
            times["rocecomm"].append(mine * 1e6)
            times["pipes"].append(theirs * 1e6)
    comm.close()
    if rank == 0:
        print(json.dumps(times))


def measure(options):
    there, back = os.pipe(), os.pipe()
    fds = [(back[0], there[1]), (there[0], back[1])]
    with tempfile.TemporaryDirectory() as folder:
        procs = []
        for rank in range(2):
            env = {**os.environ, "ROCECOMM_RANK": str(rank), "ROCECOMM_WORLD_SIZE": "2",
                   "ROCECOMM_JOB_ID": f"bench-{Path(folder).name}", "PYTHONPATH": str(ROOT)}
            if options.device:
                env["ROCECOMM_IB_HCA"] = options.device
            procs.append(subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--child", str(rank), *map(str, fds[rank])],
                env=env, pass_fds=fds[rank], stdout=subprocess.PIPE if rank == 0 else None, text=True))
        try:
            text = procs[0].communicate(timeout=120)[0]
            if any(p.wait(20) for p in procs):
                sys.exit("a rank failed")
        finally:
            for p in procs:
                p.kill()
            for fd in (*there, *back):
                os.close(fd)
    return json.loads(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device")
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--spin", type=float)
    parser.add_argument("--json", nargs="?", const="-")
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run = asyncio.run
        if options.loop == "uvloop":
            import uvloop

            run = uvloop.run
        run(child(options.child[0], options.child[1:], options))
        return
    times = measure(options)
    result = {"size": options.size, "loop": options.loop}
    for name, all_ in times.items():
        result[name] = {"median": statistics.median(all_), "best": min(all_)}
    result["ratio"] = result["rocecomm"]["median"] / result["pipes"]["median"]
    if options.json == "-":
        print(json.dumps(result))
    elif options.json:
        Path(options.json).write_text(json.dumps(result))
    else:
        print(f"{options.size} B, half round trip in us, {options.loop}: ", end="")
        for name in times:
            print(f"{name} {result[name]['median']:.1f} (best {result[name]['best']:.1f}), ", end="")
        print(f"ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
