"""What the machine gives to large messages: bare process_vm calls by both ends against those of one end."""

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks import figures

MIB = 1 << 20
SIZES = {"1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
SOURCE = Path(__file__).with_suffix(".c")
BUILD = Path(__file__).resolve().parents[1] / "build/bench-both-ends"

TITLE = "The machine under large messages"
TEXT = ("No rocecomm here: a C program copies messages of the ping-pong above by bare `process_vm_readv` and "
        "`process_vm_writev`, both ends taking chunks of 256 KiB from a shared counter as soft0 does, "
        "against one end that copies all as Open MPI does. Where this ratio is near 1, two CPUs are no "
        "faster than one, and no library that copies so can be ahead of another.")


def name_of(size):
    return f"bare copy {size} by both ends"


ROWS = tuple(map(name_of, SIZES))


def build():
    """The program; figures.Missing without a compiler."""
    program = BUILD / "both_ends"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = os.environ.get("CC", "gcc").split()
        if not shutil.which(compiler[0]):
            raise figures.Missing(f"the C program needs a compiler: {compiler[0]} is not installed")
        BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run([*compiler, "-O2", "-Wall", "-Wextra", str(SOURCE), "-o", str(program)], check=True)
    return program


def measure(rounds, device="soft0", wanted=lambda name: True):
    program = build()
    for size, length in SIZES.items():
        if not wanted(name_of(size)):
            continue
        done = subprocess.run([program, str(length), str(rounds)], capture_output=True, text=True,
                              timeout=150)
        if done.returncode:
            yield f"{name_of(size)}: {done.stderr.strip() or done.returncode}"
            continue
        one, both = zip(*(map(float, line.split()) for line in done.stdout.splitlines()), strict=True)
        yield figures.row(name_of(size), "us", list(both), list(one), "one end")
