#!/usr/bin/env python3
"""make bench: rocecomm side by side with its competitors, turn by turn in one run.

    python benchmarks/run.py [--rows REGEX] [--rounds N] [--device soft0]
                             [--json FILE] [--with FILE] [--markdown FILE] [--plot FILE] [--check] [--list]

Every group of rows is a module of benchmarks/ (README.md there says how one is written). In every
round all competitors take their turn, and sleep while the others are measured. Printed are medians
over the rounds with the 10th and 90th percentile, the median of the rounds' ratios, and the target.
Absolute figures move with the machine; ratios of one run count. ``--markdown`` puts the tables into
a page, between the two comment lines that mark their place; ``--plot`` draws latency by size (needs
matplotlib). ``--check`` makes a missed target exit status 1; a row that fails always does.
"""

import argparse
import importlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)      # in place of benchmarks/ itself, whose names are not to be imported

from benchmarks import figures, page  # noqa: E402

#: the groups of ``make bench``, in the page's order
GROUPS = ("messages", "progress_thread", "both_ends", "bandwidth", "verbs_python", "asyncio_pingpong",
          "vectored_read", "memory")


def load(names):
    """The group modules."""
    return [importlib.import_module(f"benchmarks.{name}") for name in names
            if (ROOT / "benchmarks" / f"{name}.py").exists()]


def run(modules, rounds, device, pattern):
    """Measures and prints; returns [(module, rows, failures)] and whether a group failed."""
    results, broken = [], False
    wanted = lambda name: re.search(pattern, name) is not None   # noqa: E731
    print(page.line(page.HEAD), flush=True)
    for module in modules:
        if not any(map(wanted, module.ROWS)):
            continue
        rows, failures, start = [], [], time.monotonic()
        print(f"-- {module.TITLE}", flush=True)
        try:
            for row in module.measure(rounds, device, wanted):
                if isinstance(row, str):        # why a row could not be measured
                    failures.append(row)
                    print(f"not measured: {row}", flush=True)
                    continue
                rows.append(row)
                print(page.line(figures.cells(row)) + (f"  {row['note']}" if row["note"] else ""), flush=True)
        except figures.Missing as why:
            failures.append(str(why))
            print(f"not measured: {why}", flush=True)
        except Exception as failure:  # noqa: BLE001 (shown, and the exit status; the other groups go on)
            failures.append(f"{module.TITLE} failed: {failure}")
            print(f"FAILED: {failure}", flush=True)
            broken = True
        print(f"   {time.monotonic() - start:.0f} s", flush=True)
        results.append((module, rows, failures))
    return results, broken


def completed(modules, results, earlier):
    """``results`` with the rows of an earlier run that they lack, in the modules' order."""
    merged = []
    for module in modules:
        rows = [row for m, rows, _ in results if m is module for row in rows]
        have = {row["name"] for row in rows}
        rows += [row for row in earlier if row["name"] in module.ROWS and row["name"] not in have]
        failures = [text for m, _, failures in results if m is module for text in failures]
        if rows or failures:
            merged.append((module, sorted(rows, key=lambda row: module.ROWS.index(row["name"])), failures))
    return merged


def parser():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", default="", help="regular expression on the rows' names")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--device", default="soft0")
    p.add_argument("--json", help="write all figures to this file")
    p.add_argument("--markdown", help="put the tables into this page")
    p.add_argument("--plot", help="draw latency by size into this file (svg or png)")
    p.add_argument("--with", dest="earlier", action="append", default=[], metavar="FILE",
                   help="rows of an earlier --json, for those that are not measured now")
    p.add_argument("--groups", default=",".join(GROUPS), help="modules of benchmarks/, by commas")
    p.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    p.add_argument("--list", action="store_true", help="only list the rows")
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    modules = load(args.groups.split(","))
    if args.list:
        print("\n".join(name for module in modules for name in module.ROWS if re.search(args.rows, name)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that nothing stays behind
    start = time.monotonic()
    head = f"Machine: {page.machine(args.device)}."
    busy = f"load average at the start {os.getloadavg()[0]:.1f}"
    print(f"{head}\n{args.rounds} rounds, {busy}")
    results, broken = run(modules, args.rounds, args.device, args.rows)
    for path in args.earlier:
        results = completed(modules, results, json.loads(Path(path).read_text())["rows"])
    rows = [row for _, rows, _ in results for row in rows]
    failures = [failure for *_, failures in results for failure in failures]
    judged = [row for row in rows if row["pass"] is not None]
    missed = [row for row in judged if not row["pass"]]
    print(f"{len(judged) - len(missed)} of {len(judged)} rows with a target pass, {len(missed)} miss it, "
          f"{len(failures)} could not be measured; {time.monotonic() - start:.0f} s")
    head += f" Medians of {args.rounds} rounds, in brackets the 10th and 90th percentile; {busy}."
    if args.json:
        Path(args.json).write_text(json.dumps(
            {"machine": head, "device": args.device, "rounds": args.rounds, "failures": failures,
             "rows": [{"group": module.__name__.rpartition(".")[2], **row}
                      for module, rows, _ in results for row in rows]}, indent=1) + "\n")
    if args.markdown:
        page.write(args.markdown, "make bench", page.block(results, head))
    if args.plot:
        from benchmarks import plot
        plot.draw(rows, args.plot)
    if not rows:
        return 2
    return 1 if broken or (args.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
