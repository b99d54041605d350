"""Runs one pair of perftest programs on soft0 and reads their table."""

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "rocecomm/softnic/libsoftnic.so"
LIMIT = 30      # seconds for one program


class Failed(Exception):
    """A program failed, hung or printed no table; the message says which and what it said."""


def end(proc):
    """Ends a program and what it started; harmless if it is gone."""
    if proc.poll() is None:
        try:
            os.killpg(proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    proc.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port):
    """Whether somebody listens on this TCP port, without connecting."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def table(output):
    """The columns of the first table line, as a dictionary; perftest's own words as keys."""
    lines = output.splitlines()
    for head, line in zip(lines, lines[1:], strict=False):
        if head.strip().startswith("#bytes"):
            columns = re.findall(r"#\w+|[^\s#][^\[\n]*?\[[^\]]+\]", head)
            values = line.split()
            if len(values) >= len(columns):
                return {c: float(v) for c, v in zip(columns, values, strict=False)}
    raise Failed("no table in the output")


def pair(command, device="soft0", cpus=(0, 1), extra=((), ()), env=None, limit=LIMIT):
    """Runs ``command`` as server on ``cpus[0]`` and as client on ``cpus[1]``; returns the
    client's table. ``extra`` are further arguments of server and client."""
    port = free_port()
    env = {**os.environ, **(env or {})}
    if device.startswith("soft"):
        env["LD_PRELOAD"] = f"{env.get('LD_PRELOAD', '')} {LIBRARY}".strip()
    whole = [[*("taskset", "-c", str(cpu)), *command, *more, "-d", device, "-F", "-p", str(port)]
             for cpu, more in zip(cpus, extra, strict=True)]
    whole[1].append("127.0.0.1")
    procs, outputs = [], [tempfile.TemporaryFile("w+") for _ in range(2)]
    deadline = time.monotonic() + limit
    try:
        for args, out in zip(whole, outputs, strict=True):
            procs.append(subprocess.Popen(args, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                          stderr=subprocess.STDOUT, start_new_session=True))
            while len(procs) == 1 and not listens(port):
                if procs[0].poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"{command[0]} server: does not listen")
                time.sleep(0.01)
        while any(p.poll() is None for p in procs):
            bad = [p for p in procs if p.poll()]
            if bad or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        for proc, which in zip(procs, ("server", "client"), strict=True):
            if proc.poll() is None and time.monotonic() > deadline:
                raise Failed(f"{command[0]} {which}: no end within {limit} s")
            if proc.poll():
                raise Failed(f"{command[0]} {which}: exit status {proc.returncode}")
        outputs[1].seek(0)
        return table(outputs[1].read())
    except Failed as failure:
        said = []
        for out, which in zip(outputs, ("server", "client"), strict=True):
            out.seek(0)
            said += [f"  {which}: {line}" for line in out.read().splitlines()[-6:]]
        raise Failed("\n".join([str(failure), *said])) from None
    finally:
        for proc in procs:
            end(proc)
        for out in outputs:
            out.close()
