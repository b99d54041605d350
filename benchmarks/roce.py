#!/usr/bin/env python3
"""make bench-roce: rocecomm on kernel Soft-RoCE against perftest and gloo, in a virtual machine.

    python benchmarks/roce.py [--rounds 7] [--rows REGEX] [--json FILE] [--markdown PAGE]

Boots the machine with tools/vm.sh and runs this module there as a group of rows (run.py). Each round
runs perftest's own program and rocecomm in turn; gloo is TCP on the loopback interface of the same
machine. Code runs 10 to 20 times slower in there than outside: only the ratios count.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import figures, page, processes  # noqa: E402
from benchmarks.rivals import Gloo, Rocecomm  # noqa: E402
from benchmarks.softnic import perftest  # noqa: E402

OUT = ROOT / "build/bench-roce"
TIMEOUT = 900           # seconds for the machine, boot included
LIMIT = 300             # for one program in it: importing torch takes over a minute
MIB = 1 << 20
CPUS = (0, 1)
GID = ("-x", "1")       # RoCE v2 over IPv4
COUNT, WINDOW = 1000, 16

TITLE = "send and recv on rxe0"
TEXT = (f"8 B: half a round trip, {COUNT} a round. 1 MiB: windows of {WINDOW} `isend` and `irecv`, "
        "against the lesser of `ib_read_bw` and `ib_send_bw` of that round. Each of these processes on "
        "a CPU of its own. gloo is TCP in the same machine.")
LATENCY, BANDWIDTH, TCP = (f"rxe0 {what}" for what in (
    "send/recv 8 B : ib_send_lat", "window 1 MiB : ib_read_bw, ib_send_bw", "send/recv 8 B : gloo"))
ROWS = (LATENCY, BANDWIDTH, TCP)


def program(name, device, size, count, column):
    """One figure of a program of perftest."""
    command = (name, "-s", str(size), "-n", str(count), *GID)
    return perftest.pair(command, device=device, cpus=CPUS, limit=LIMIT)[column]


def latency(ranks, count=COUNT):
    answers = ranks.ask({"do": "pingpong", "size": 8, "count": count}, LIMIT)
    return answers[0]["s"] / count / 2 * 1e6


def bandwidth(ranks, count=2):
    answers = ranks.ask({"do": "window", "size": MIB, "window": WINDOW, "count": count}, LIMIT)
    return WINDOW * MIB * count / answers[0]["s"] / 1e6


def measure(rounds, device="rxe0", wanted=lambda name: True):
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Rocecomm.start(device, LIMIT))
        for pid, cpu in zip(ours.pids(), CPUS, strict=True):        # as perftest's processes
            os.sched_setaffinity(pid, {cpu})
        if wanted(LATENCY):
            mine, theirs = [], []
            for _ in range(rounds):
                theirs.append(program("ib_send_lat", device, 8, COUNT, "t_avg[usec]"))
                mine.append(latency(ours))
            yield figures.row(LATENCY, "us", mine, theirs, "ib_send_lat", "<= 1.5x")
        if wanted(BANDWIDTH):
            mine, theirs = [], []
            for _ in range(rounds):
                theirs.append(min(program(name, device, MIB, 40, "BW average[MB/sec]") * MIB / 1e6
                                  for name in ("ib_read_bw", "ib_send_bw")))
                mine.append(bandwidth(ours))
            try:
                yield figures.row(BANDWIDTH, "MB/s", mine, theirs, "ib_read_bw, ib_send_bw", ">= 0.9x")
            except figures.Missing as why:
                yield str(why)
        if wanted(TCP):
            try:
                gloo = stack.enter_context(Gloo.start(device, LIMIT))
            except (figures.Missing, processes.Failed) as why:
                yield str(why)
                return
            mine, theirs = [], []
            for _ in range(rounds):
                theirs.append(latency(gloo, 20))
                mine.append(latency(ours))
            yield figures.row(TCP, "us", mine, theirs, "gloo", "<= 0.05x")


def descendants(pid):
    """A process and all that it started, the innermost first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[::-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--markdown", help="put the table into this page")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    found = OUT / "figures.json"
    found.unlink(missing_ok=True)
    # the guest can write no byte code
    subprocess.run([sys.executable, "-m", "compileall", "-q", "rocecomm", "benchmarks"], cwd=ROOT, check=True)
    copy = "torch torchgen typing_extensions.py sympy mpmath networkx jinja2 filelock fsspec" \
        if re.search(args.rows, TCP) else ""
    command = [str(ROOT / "tools/vm.sh"), "--timeout", str(TIMEOUT), "--out", str(OUT), "--copy", copy, "--",
               "python", str(ROOT / "benchmarks/run.py"), "--groups", "roce", "--device", "rxe0",
               "--rounds", str(args.rounds), "--rows", args.rows, "--json", str(found)]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that no machine stays behind
    vm = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    try:
        status = vm.wait()
    finally:
        if vm.poll() is None:
            for pid in descendants(vm.pid):
                os.kill(pid, signal.SIGTERM)
    if not found.exists():
        sys.exit(f"bench-roce: no figures came back (exit status {status}); logs are in {OUT}")
    result = json.loads(found.read_text())
    if args.json:
        Path(args.json).write_text(found.read_text())
    if args.markdown:
        page.write(args.markdown, "make bench-roce", page.block(
            [(sys.modules[__name__], result["rows"], result["failures"])], result["machine"]))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
