"""Latency of send and recv by message size for all competitors, as a picture.

    python benchmarks/plot.py FIGURES.json OUT.svg        # figures: run.py --json

Needs matplotlib (``tools/setup.sh plot``). ``run.py --plot`` draws what it has just measured.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.figures import Missing  # noqa: E402
from benchmarks.messages import SIZES, name_of  # noqa: E402

COLOURS = {"rocecomm": "#b5374a", "mpi4py": "#1f6fb4", "ucxx": "#2e8b57", "pyzmq": "#d9730d",
           "gloo": "#777777"}


def curves(rows):
    """{competitor: {bytes: half round trip in us}} of the rows of benchmarks/messages.py."""
    found = {}
    for row in rows:
        for label, size in SIZES.items():
            if row["against"] and row["name"] == name_of(label, row["against"]):
                found.setdefault("rocecomm", {})[size] = row["ours"]["median"]
                found.setdefault(row["against"], {})[size] = row["theirs"]["median"]
    return found


def draw(rows, out):
    """Writes the picture to ``out`` (svg, png). Raises Missing without matplotlib or rows of send/recv."""
    found = curves(rows)
    if not found:
        raise Missing("no rows of send/recv to draw")
    try:
        import matplotlib
    except ImportError:
        raise Missing("matplotlib is not installed (tools/setup.sh plot)") from None
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rocecomm", "font.size": 9,
                                "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, points in found.items():
        sizes = sorted(points)
        style = {"color": COLOURS.get(name, "black"), "label": name, "marker": ".",
                 "linewidth": 2.2 if name == "rocecomm" else 1.2, "zorder": 3 if name == "rocecomm" else 2}
        axes[0].plot(sizes, [points[s] for s in sizes], **style)
        axes[1].plot(sizes, [s / points[s] / 1e3 for s in sizes], **style)
    units = ((1 << 20, "M"), (1 << 10, "K"))
    for ax, title in zip(axes, ("half round trip in µs", "bytes / half round trip, in GB/s"), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_locator(FixedLocator(list(SIZES.values())))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda b, _: next(
            (f"{b / unit:g}{letter}" for unit, letter in units if b >= unit), f"{b:g}")))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.grid(True, color="#e5e5e5", linewidth=0.6)
        ax.set_xlabel("message size in bytes")
        ax.set_title(title, loc="left")
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None} if str(out).endswith(".svg") else None)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], sys.argv[2])
