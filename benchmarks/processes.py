"""The processes of a competitor, which sleep on a FIFO while others are measured.

In the parent, ``Ranks(...)`` starts n processes and ``ask(order)`` hands every one of them the same
order (a dictionary) and returns their answers in order of rank. In a child, :func:`serve` reads the
orders and answers each. FIFOs carry both, so what a library prints on stdout disturbs nothing, and a
child whose parent has died reads the end of its orders and ends.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

LIMIT = 60.0    # seconds for one order


class Failed(Exception):
    """A process of a competitor ended or did not answer in time; the message shows what it said."""


class Ranks:
    """n running processes. ``commands`` is one command line with its environment per process to start;
    a launcher (mpirun) is a single one that starts all n."""

    def __init__(self, name, n, commands, limit=LIMIT):
        self.name, self.n, self.limit = name, n, limit
        self.folder = Path(tempfile.mkdtemp(prefix="rocecomm-bench-"))
        self.procs, self.orders, self.answers, self.rest = [], [], [], [b""] * n
        self.log = open(self.folder / "log", "w+b")
        try:
            for rank in range(n):
                for kind, fds in (("orders", self.orders), ("answers", self.answers)):
                    os.mkfifo(self.folder / f"{kind}-{rank}")
                    fds.append(os.open(self.folder / f"{kind}-{rank}", os.O_RDWR | os.O_CLOEXEC))
            for command, env in commands:
                env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **env,
                       "BENCH_FOLDER": str(self.folder)}
                self.procs.append(subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                    start_new_session=True))
            self._collect(self.limit)           # each says once that it is ready
        except BaseException:
            self.kill()
            raise

    def _fail(self, text):
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").splitlines()[-15:]
        raise Failed("\n  ".join([f"{self.name}: {text}", *said]))

    def _collect(self, limit):
        """One line from every rank."""
        end, got = time.monotonic() + limit, {}
        while len(got) < self.n:
            waiting = [fd for rank, fd in enumerate(self.answers) if rank not in got]
            ready, _, _ = select.select(waiting, [], [], 0.2)
            for fd in ready:
                rank = self.answers.index(fd)
                self.rest[rank] += os.read(fd, 1 << 16)
                line, newline, rest = self.rest[rank].partition(b"\n")
                if newline:
                    got[rank], self.rest[rank] = json.loads(line), rest
            if not ready and any(p.poll() is not None for p in self.procs):
                self._fail(f"ended with {[p.poll() for p in self.procs]}")
            if not ready and time.monotonic() > end:
                silent = sorted(set(range(self.n)) - set(got))
                self._fail(f"ranks {silent} did not answer within {limit:.0f} s")
        return [got[rank] for rank in range(self.n)]

    def ask(self, order, limit=None):
        """Hands the order to every rank; returns their answers. Raises :class:`Failed`."""
        for fd in self.orders:
            os.write(fd, json.dumps(order).encode() + b"\n")
        return self._collect(limit or self.limit)

    def pids(self):
        """Process ids of the ranks, in order of rank."""
        return [answer["pid"] for answer in self.ask({"do": "pid"})]

    def close(self):
        """Ends the processes: by the end of their orders, else by force."""
        for fd in self.orders:
            os.close(fd)
        self.orders = []
        end = time.monotonic() + 10
        for proc in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                proc.wait(max(0.1, end - time.monotonic()))
        self.kill()

    def kill(self):
        for proc in self.procs:
            if proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(proc.pid, signal.SIGKILL)
                proc.wait()
        for fd in (*self.orders, *self.answers):
            os.close(fd)
        self.orders = self.answers = []
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def serve(rank, handlers):
    """The life of a child: answers every order by calling ``handlers[order["do"]](**the rest)``, whose
    result goes back as JSON, until the orders end."""
    folder = Path(os.environ["BENCH_FOLDER"])
    with open(folder / f"orders-{rank}") as orders, open(folder / f"answers-{rank}", "w") as answers:
        def answer(value):
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        answer("ready")
        for line in orders:
            order = json.loads(line)
            do = order.pop("do")
            answer({"pid": os.getpid()} if do == "pid" else handlers[do](**order))
