#!/usr/bin/env python3
"""make bench-softnic: perftest on soft0 against raw C loops, turn by turn in one run.

    python benchmarks/softnic/run.py [--rows PATTERN] [--rounds N] [--json FILE]
                                     [--markdown FILE] [--with FILE] [--check] [--list]

Every row runs one perftest command on soft0 and its baseline, a few lines of C without any
library (benchmarks/softnic/*.c), alternately: raw, device, raw, device. Each end is pinned to a
CPU of its own. Printed are medians over the rounds with the 10th and 90th percentile, the
median of the rounds' ratios, and the target. MB are 10^6 bytes (perftest's own are 2^20).
Absolute figures move with the machine; ratios of one run count. ``--check`` makes a missed
target exit status 1; a program that fails always does. ``--markdown`` puts the table into
a page, between the two comment lines that mark its place there; ``--with`` adds rows that
an earlier run wrote with ``--json``.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import page
import perftest
from rows import ROWS, VOLUME

HERE = Path(__file__).resolve().parent
BUILD = perftest.ROOT / "build/bench-softnic"
SIZE_OF_MAPPED_FILE = 64 << 20


def build():
    """Compiles the baselines that are missing or older than their source."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for source in HERE.glob("*.c"):
        binary = BUILD / source.stem
        newest = max(p.stat().st_mtime for p in (source, HERE / "raw.h"))
        if not binary.exists() or binary.stat().st_mtime < newest:
            subprocess.run([os.environ.get("CC", "gcc"), "-O2", "-g", "-std=gnu11", "-Wall", "-Wextra",
                            "-D_GNU_SOURCE", str(source), "-o", str(binary)], check=True)


def ready():
    """Builds the baselines and returns the two CPUs to use; ends the program if something is missing."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        sys.exit("bench-softnic: two CPUs are needed")
    if not shutil.which("ib_send_lat"):
        sys.exit("bench-softnic: perftest is not installed; make bench-softnic installs it")
    if not perftest.LIBRARY.exists():
        sys.exit("bench-softnic: libsoftnic.so is not built; make bench-softnic builds it")
    build()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that nothing stays behind
    return cpus


class Bench:
    """The CPUs and the scratch folder of one run; measures single figures."""

    def __init__(self, folder, cpus):
        self.folder, self.cpus = Path(folder), cpus
        (self.folder / "fabric").mkdir(mode=0o700)
        self.files = []
        for which in ("server", "client"):
            path = self.folder / f"mapped-{which}"
            with open(path, "wb") as f:
                os.posix_fallocate(f.fileno(), 0, SIZE_OF_MAPPED_FILE)
            self.files.append(path)

    def raw(self, row):
        words = {"cpu": self.cpus[1], "peer": self.cpus[0], "folder": self.folder}
        program, *args = (word.format(**words) for word in row.raw)
        try:
            done = subprocess.run([str(BUILD / program), *args], stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=perftest.LIMIT)
        except subprocess.TimeoutExpired:
            raise perftest.Failed(f"{program}: no end within {perftest.LIMIT} s") from None
        if done.returncode:
            raise perftest.Failed(f"{program}: exit status {done.returncode}: {done.stderr.strip()}")
        answer = json.loads(done.stdout)
        return answer["usec"] if row.unit == "usec" else answer["bytes_per_s"] / 1e6

    def device(self, row):
        cpus = (self.cpus[1],) * 2 if row.one_cpu else self.cpus
        extra = [(f"--mmap={path}",) for path in self.files] if row.mapped else ((), ())
        figures = perftest.pair(row.command, cpus=cpus, extra=extra,
                                env={"ROCECOMM_SOFT_DIR": str(self.folder / "fabric")})
        if row.column not in figures:
            raise perftest.Failed(f"{row.command[0]}: no column {row.column}, but {sorted(figures)}")
        value = figures[row.column]
        return value * (1 << 20) / 1e6 if row.unit == "MB/s" else value

    def measure(self, row, rounds):
        """Runs one row; returns it as a dictionary."""
        raws, devices = [], []
        for _ in range(rounds):
            if row.raw:
                raws.append(self.raw(row))
            devices.append(self.device(row))
        values = [d / r for d, r in zip(devices, raws, strict=True)] if raws else devices
        value = statistics.median(values)
        return {"row": row.name, "command": row.words, "unit": row.unit,
                "raw program": row.raw[0] if row.raw else None,
                "raw": spread(raws), "device": spread(devices),
                "ratio": value if raws else None, "value": value, "target": row.target,
                "pass": row.passes(value), "rounds": rounds}


def spread(values):
    """Median and percentiles of a few figures; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]   # noqa: E731
    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9), "all": values}


HEAD = ("row", "unit", "raw", "p10..p90", "soft0", "p10..p90", "ratio", "target", "")
WIDTHS = (30, 5, 8, 15, 8, 15, 6, 8, 4)


def line(words):
    return "  ".join(w.ljust(n) if i < 2 or i > 7 else w.rjust(n)
                     for i, (w, n) in enumerate(zip(words, WIDTHS, strict=True))).rstrip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="regular expression on the rows' names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--markdown", help="put the table into this page")
    parser.add_argument("--with", dest="earlier", help="rows of an earlier --json, for the page")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    args = parser.parse_args()
    rows = [row for row in ROWS if re.search(args.rows, row.name)]
    if args.list or not rows:
        print("\n".join(f"{row.name:30} {row.words}" for row in rows or ROWS))
        return 0 if rows else 2
    cpus = ready()
    results, broken = [], 0
    print(f"perftest on soft0 against raw loops, {args.rounds} rounds, CPUs {cpus[0]} and {cpus[1]}, "
          f"{VOLUME >> 30} GiB per bandwidth figure, load {os.getloadavg()[0]:.1f}")
    print(line(HEAD), flush=True)
    with tempfile.TemporaryDirectory(prefix="rocecomm-bench-", dir="/dev/shm") as folder:
        bench = Bench(folder, cpus)
        for row in rows:
            try:
                results.append(bench.measure(row, args.rounds))
            except perftest.Failed as failure:
                broken += 1
                print(f"{row.name:30}  ERROR {failure}", flush=True)
                continue
            print(line(page.cells(results[-1])), flush=True)
    missed = sum(not r["pass"] for r in results)
    print(f"{len(results) - missed} of {len(rows)} rows pass, {missed} miss their target"
          + (f", {broken} failed" if broken else ""))
    if args.earlier:
        have = {r["row"] for r in results}
        results += [r for r in json.loads(Path(args.earlier).read_text()) if r["row"] not in have]
        order = [row.name for row in ROWS]
        results.sort(key=lambda r: order.index(r["row"]))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    if args.markdown:
        page.write(args.markdown, results, cpus)
    return 1 if broken or (args.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
