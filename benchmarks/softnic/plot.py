#!/usr/bin/env python3
"""Latency and bandwidth of perftest on soft0 by message size, beside the raw loops, as a picture.

    python benchmarks/softnic/plot.py [--out docs/reference/softnic-performance.svg] [--rounds N]

Needs matplotlib (``tools/setup.sh perftest plot``). Every size is measured in turn for all
curves, N times; drawn are medians. Takes about 40 s per round.
"""

import argparse
import os
import statistics
import sys
import tempfile

import perftest
import run
from rows import KIB, MIB, Row

SIZES = (8, 64, 512, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb4", "#d9730d", "#2e8b57", "#b5374a", "#777777"
LATENCY = {     # curve: (perftest, mapped, colour, line)
    "ib_send_lat": ("ib_send_lat", False, BLUE, "-"),
    "ib_write_lat": ("ib_write_lat", False, ORANGE, "-"),
    "ib_read_lat": ("ib_read_lat", False, GREEN, "-"),
    "ib_write_lat --mmap": ("ib_write_lat", True, RED, "-"),
}
BANDWIDTH = {
    "ib_send_bw": ("ib_send_bw", False, BLUE, "-"),
    "ib_write_bw": ("ib_write_bw", False, ORANGE, "-"),
    "ib_read_bw": ("ib_read_bw", False, GREEN, "-"),
    "ib_write_bw --mmap": ("ib_write_bw", True, RED, "-"),
}


def latency_count(size):
    return str(max(200, min(10000, (256 << 20) // (size + 32 * KIB))))


def bandwidth_count(size):
    return str(max(50, min(200000, (1 << 30) // size)))


def rows_of(size):
    """(unit, curve, row, is a raw loop) for all that is measured at one size."""
    count = bandwidth_count(size)
    call = ("vmcopy", "write", str(size), count, "{cpu}", "{peer}", "sleep")
    copy = ("memcopy", str(size), count, "{cpu}", "{folder}")
    for unit, curve, raw in (("usec", "process_vm_writev", call), ("MB/s", "process_vm_writev loop", call),
                             ("MB/s", "memcpy loop", copy)):
        yield unit, curve, Row(curve, (), "", unit, 0, raw), True
    for unit, curves, column, n in (("usec", LATENCY, "t_typical[usec]", latency_count(size)),
                                    ("MB/s", BANDWIDTH, "BW average[MB/sec]", count)):
        for curve, (program, mapped, *_) in curves.items():
            row = Row(curve, (program, "-s", str(size), "-n", n), column, unit, 0, mapped=mapped)
            yield unit, curve, row, False


def measure(bench, rounds):
    """{unit: {curve: [median per size]}}"""
    panels = {"usec": {}, "MB/s": {}}
    for size in SIZES:
        found = {}
        for _ in range(rounds):
            for unit, curve, row, raw in rows_of(size):
                found.setdefault((unit, curve), []).append(bench.raw(row) if raw else bench.device(row))
        for (unit, curve), values in found.items():
            panels[unit].setdefault(curve, []).append(statistics.median(values))
        print(f"{size} bytes", file=sys.stderr)
    return panels


def draw(panels, out):
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rocecomm", "font.size": 9,
                                "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    styles = {**LATENCY, **BANDWIDTH}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for ax, (unit, curves) in zip(axes, panels.items(), strict=True):
        for curve, values in curves.items():
            *_, colour, line = styles.get(curve, (GREY, ":" if "memcpy" in curve else "--"))
            scale = 1 if unit == "usec" else 1e-3
            ax.plot(SIZES, [v * scale for v in values], line, color=colour, label=curve, marker=".")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_locator(FixedLocator(SIZES))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b / MIB:g}M" if b >= MIB else
                                                   f"{b / KIB:g}K" if b >= KIB else f"{b:g}"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.grid(True, color="#e5e5e5", linewidth=0.6)
        ax.set_xlabel("message size in bytes")
        ax.set_title("latency, one way, in µs" if unit == "usec" else "bandwidth in GB/s", loc="left")
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(perftest.ROOT / "docs/reference/softnic-performance.svg"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("plot: matplotlib is not installed; tools/setup.sh perftest plot")
    cpus = run.ready()
    with tempfile.TemporaryDirectory(prefix="rocecomm-bench-", dir="/dev/shm") as folder:
        panels = measure(run.Bench(folder, cpus), args.rounds)
    draw(panels, args.out)
    print(f"load {os.getloadavg()[0]:.1f}; written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
