"""Starts the ranks of test worlds by forking a clean process that has imported already.

Importing numpy, pytest and hypothesis takes seconds in the virtual machine, and every
rank of every world needs them. One zygote per test session imports them once, opens no
device, runs no test and starts no thread; each rank is a fork of it, as clean as a fresh
interpreter. Ranks are the zygote's children: it reaps them and reports their exit status.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

PRELOAD = ("numpy", "pytest", "hypothesis", "rocecomm")


def die_with_parent():
    """The kernel kills this process when the thread that started it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Fork:
    """A rank: what tests need of subprocess.Popen."""

    def __init__(self, zygote, pid):
        self._zygote, self.pid, self.returncode = zygote, pid, None

    def poll(self):
        """Exit status (negative: signal) if it has ended, else None."""
        if self.returncode is None:
            self.returncode = self._zygote.status(self.pid)
        return self.returncode

    def wait(self, timeout):
        """Waits for the end; subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank, pid {self.pid}", timeout)
            time.sleep(0.002)
        return self.returncode


class Zygote:
    """The parent's handle. One request at a time: fork, or the ends since last asked."""

    def __init__(self, env, cwd):
        ours, theirs = socket.socketpair()
        self._proc = subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno())], env=env, cwd=cwd,
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent)
        theirs.close()
        self._file = ours.makefile("rw")
        ours.close()
        self._ended = {}

    def alive(self):
        return self._proc.poll() is None

    def _ask(self, **request):
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise RuntimeError(f"the zygote of the test worlds ended with {self._proc.wait(5)}")
        return json.loads(line)

    def fork(self, argv, env, out, err):
        """Starts one rank: runs worlds.child(*argv) with the environment, output to files."""
        return Fork(self, self._ask(argv=argv, env=env, out=str(out), err=str(err))["pid"])

    def status(self, pid):
        if str(pid) not in self._ended:
            self._ended.update(self._ask(ended=True)["ended"])
        return self._ended.pop(str(pid), None)

    def close(self):
        self._file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._proc.wait(5)
            return
        self._proc.kill()
        self._proc.wait()


def become_rank(request):
    """In the fork: what a fresh interpreter would have. Never returns."""
    os.setsid()
    die_with_parent()
    for target, path in ((1, request["out"]), (2, request["err"])):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        import worlds

        worlds.child(*request["argv"])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code)


def leave(code):
    """Ends as the interpreter does, atexit included, but not through the zygote's frames."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(fd):
    """The zygote itself: answers requests until the other end closes."""
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            __import__(name)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    file = channel.makefile("rw")
    ended = {}
    while line := file.readline():
        request = json.loads(line)
        if "argv" in request:
            pid = os.fork()
            if pid == 0:
                channel.detach()
                os.close(fd)
                become_rank(request)
            answer = {"pid": pid}
        else:
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    ended[found[0]] = os.waitstatus_to_exitcode(found[1])
            answer, ended = {"ended": ended}, {}
        file.write(json.dumps(answer) + "\n")
        file.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
