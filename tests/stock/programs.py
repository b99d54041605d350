"""Runs stock verbs programs, alone or as server and client, and what they must leave behind.

On a device of softnic they get the environment of ``rocecomm soft -- PROGRAM`` (that this is
the same is tested in test_soft_command.py); on any other device they run as they are, so
that Soft-RoCE can be the judge of a test in this folder.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time

from rocecomm import soft_command
from rocecomm import verbs as v

LISTEN = "0A"


CONNECTX_5 = "4119"


def is_soft(device):
    return [d.provider for d in v.devices() if d.name == device] == ["softnic"]


def environment(device, **more):
    """What a stock program finds in its environment."""
    env = dict(os.environ, **more)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    if is_soft(device):
        env = soft_command.environment(soft_command.library(), base=env)
    if "ROCECOMM_TEST_SANITIZER" in env:         # what counts of their leaks: tools/sanitizer_reports.py
        env["ASAN_OPTIONS"] = f"{env.get('ASAN_OPTIONS', '')}:detect_leaks=1"
        env["LSAN_OPTIONS"] = "exitcode=0"
    return env


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port):
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


class Ended:
    """An ended program: its exit status and all that it wrote."""

    def __init__(self, command, status, output):
        self.command, self.status, self.output = command, status, output

    def __str__(self):
        return f"$ {' '.join(self.command)}\n{self.output}[status {self.status}]"


class Started:
    """A program that runs; ``end()`` waits for it, leaving the block kills it."""

    def __init__(self, command, env, before=()):
        self.command = [str(part) for part in command]
        self._output = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen([*before, *self.command], stdin=subprocess.DEVNULL, env=env,
                                        stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._output.close()

    def until_it_listens(self, port, seconds):
        end = time.monotonic() + seconds
        while not listens(port):
            assert self.process.poll() is None, f"it ended before it listened:\n{self.ended()}"
            assert time.monotonic() < end, f"it does not listen after {seconds} s:\n{self.ended()}"
            time.sleep(0.005)

    def ended(self):
        self._output.seek(0)
        return Ended(self.command, self.process.poll(), self._output.read())

    def end(self, seconds):
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s:\n{self.ended()}") from None
        return self.ended()


class Programs:
    """Runs stock programs on one device. Every wait ends; a failure shows all output."""

    def __init__(self, device, slow, **env):
        self.device, self.seconds, self.soft = device, 45 * slow, is_soft(device)
        self.env = environment(device, **env)

    def alone(self, *command, expect=0):
        with Started(command, self.env) as program:
            ended = program.end(self.seconds)
        assert ended.status == expect, f"{ended}"
        return ended.output

    def pair(self, program, *options, server=(), client=(), device=None, before=((), ())):
        """The output of server and client, both with ``options`` and further ones of their own."""
        port = free_port()
        common = [program, "-d", device or self.device, "-p", port, *options]
        with Started([*common, *server], self.env, before[0]) as first:
            first.until_it_listens(port, self.seconds)
            with Started([*common, *client, "127.0.0.1"], self.env, before[1]) as second:
                try:
                    ends = second.end(self.seconds), first.end(self.seconds)
                except AssertionError as error:
                    raise AssertionError(f"{error}\n--- the client:\n{second.ended()}\n--- the server:\n"
                                         f"{first.ended()}") from None
        assert [e.status for e in ends] == [0, 0], "\n--- and the server:\n".join(map(str, ends))
        return ends[1].output, ends[0].output


def missing(*programs):
    return [p for p in programs if not shutil.which(p)]
