"""The tables as people read them: on the terminal, and between two marks of a page."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from benchmarks import figures

WIDTHS = (34, 8, 8, 15, 12, 8, 15, 6, 9, 4)
HEAD = ("row", "unit", "rocecomm", "p10..p90", "rival", "theirs", "p10..p90", "ratio", "target", "")


def line(words):
    """One line on the terminal."""
    return "  ".join(w.ljust(n) if i in (0, 1, 4, 8, 9) else w.rjust(n)
                     for i, (w, n) in enumerate(zip(words, WIDTHS, strict=True))).rstrip()


def said(command, pattern):
    """What a program prints that matches, or '?'."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    found = re.search(pattern, done.stdout + done.stderr)
    return found[1].strip() if found else "?"


def versions():
    """The competitors that are installed, with their versions."""
    have = []
    for name in ("numpy", "mpi4py", "openmpi", "torch", "pyzmq", "ucxx-cu12", "libucx-cu12"):
        try:
            have.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(have)


def machine(device):
    """One or two sentences about where this was measured."""
    model = said(["lscpu"], r"Model name:\s*(.*)")
    virtual = said(["lscpu"], r"Hypervisor vendor:\s*(.*)")
    revision = said(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], r"(\S+)")
    return (f"{model}, {len(os.sched_getaffinity(0))} CPUs"
            + (f" of a {virtual} guest" if virtual != "?" else "")
            + f", Linux {platform.release()}, Python {platform.python_version()}, {versions()}; "
            f"device {device}, revision {revision}")


def table(rows):
    """The usual table of a group."""
    lines = ["| row | unit | rocecomm | rival | theirs | ratio | target | |", "|---" * 8 + "|"]
    for r in rows:
        name, unit, ours, spread, against, theirs, their_spread, ratio, target, verdict = figures.cells(r)
        name = name.removesuffix(f" : {against}") + (f"; {r['note']}" if r["note"] else "")
        ours += f" ({spread})" if spread else ""
        theirs += f" ({their_spread})" if their_spread else ""
        lines.append(f"| {' | '.join((name, unit, ours, against, theirs, ratio, target, verdict))} |")
    return lines


def block(results, head):
    """The generated part of a page. ``results``: (module, rows, failures) each; a module may bring a
    ``table(rows)`` of its own, which returns lines."""
    lines = [head, ""]
    for module, rows, failures in results:
        lines += [f"### {module.TITLE}", "", module.TEXT, ""]
        if rows:
            lines += [*getattr(module, "table", table)(rows), ""]
        for failure in failures:
            lines += [f"Not measured: {' '.join(failure.split())}", ""]
    return "\n".join(lines).rstrip()


def marks(which):
    return f"<!-- written by {which}: begin -->", f"<!-- written by {which}: end -->"


def write(path, which, content):
    """Puts ``content`` between the marks of ``which`` (``make bench``) in a page; the rest stays."""
    begin, end = marks(which)
    text = Path(path).read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{which}: {path} lacks the lines {begin} and {end}")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    Path(path).write_text(f"{head}{begin}\n\n{content}\n\n{end}{tail}")
