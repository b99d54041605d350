"""Worlds for tests: n processes that run one function, within a time, and are all gone after.

A test uses the fixture ``world``::

    def hello(comm, text):                  # at module level: the child imports it by file
        if comm.rank == 0:
            comm.send(text.encode(), 1)
        return comm.rank

    def test_hello(world):
        assert world(2, hello, "hi") == [0, 1]

* ``world(n, fn, *args)`` runs ``fn(comm, *args)`` in each process, ``comm`` an initialised
  communicator on the device under test, closed afterwards.
* ``world(n, fn, *args, plain=True)`` runs ``fn(peers, *args)``: no communicator, ``peers``
  is a :class:`Peers` (rank, size, put, get, all_gather, barrier) for tests of the verbs.
* ``world(n, "examples/x.py", "--flag")`` runs a script as ranks would be started by a
  launcher; the results are what each printed.

Results come back in order of rank. What a rank raised is raised again as
:class:`RankError` with rank and traceback of each that failed. After the time, or when
the test itself is given up, the Python stacks of all ranks are shown and they are killed.
A rank listed in ``mortal`` may die by a signal; its result is then ``Died(signal)``.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib.util
import inspect
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from zygote import Zygote, die_with_parent

ROOT = Path(__file__).resolve().parent.parent
GRACE = 10.0  # seconds that the others get after the first failure


def threads():
    """The names of this process's threads, as the kernel knows them; without the kernel's own
    workers (``iou-``: io_uring, which uvloop uses)."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):              # it has just ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sorted(name for name in names if not name.startswith("iou-"))


class RankError(AssertionError):
    """One or more ranks failed. ``failures``: rank -> (type name, message, traceback)."""

    def __init__(self, text, failures):
        super().__init__(text)
        self.failures = failures


@dataclasses.dataclass(frozen=True)
class Died:
    """Result of a mortal rank that a signal ended."""

    signal: int


class Peers:
    """Who else is in a plain world, and a small slow place to exchange picklable objects."""

    def __init__(self, rank, size, folder, device, timeout):
        self.rank, self.size, self.device = rank, size, device
        self.folder, self.timeout = Path(folder), timeout
        self._barriers = 0

    def _file(self, key):
        return self.folder / ("x-" + key.encode().hex())

    def put(self, key, value):
        """Publishes ``value`` under ``key`` (a string), visible at once and as a whole."""
        part = self.folder / f"part-{os.getpid()}-{secrets.token_hex(4)}"
        part.write_bytes(pickle.dumps(value))
        part.rename(self._file(key))

    def get(self, key, timeout=None):
        """Waits for ``key`` and returns its value; TimeoutError after ``timeout`` seconds."""
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        pause = 0.0005
        while True:
            with contextlib.suppress(FileNotFoundError):
                return pickle.loads(self._file(key).read_bytes())
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank}: nobody put {key!r}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def all_gather(self, key, value):
        """Every rank's ``value``, in order of rank. ``key`` is used once per world."""
        self.put(f"{key}/{self.rank}", value)
        return [self.get(f"{key}/{r}") for r in range(self.size)]

    def barrier(self):
        """Returns when every rank has come to its same-numbered barrier."""
        self._barriers += 1
        self.all_gather(f"barrier-{self._barriers}", None)


def rank_environment(rank, size, folder, device=None, env=None):
    """The environment of one rank, as ``rocecomm run`` would set it on one host."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "SLURM_"))}
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        full.pop(name, None)
    full.update(
        ROCECOMM_RANK=str(rank), ROCECOMM_WORLD_SIZE=str(size), ROCECOMM_LOCAL_RANK=str(rank),
        ROCECOMM_JOB_ID=f"test-{Path(folder).name}", ROCECOMM_TIMEOUT="60",
        ROCECOMM_JOIN_TIMEOUT="60", PYTHONFAULTHANDLER="1", PYTHONDONTWRITEBYTECODE="1",
    )
    # a test world has more ranks than the machine has cores: no thread pools in them
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        full.setdefault(name, "1")
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [full.get("PYTHONPATH")])]
    full["PYTHONPATH"] = os.pathsep.join(path)
    if device:
        full["ROCECOMM_IB_HCA"] = device
    full.update({k: str(v) for k, v in (env or {}).items()})
    return full


_zygote = None


def zygote():
    """The session's :class:`Zygote`; a new one if there is none or it has died."""
    global _zygote
    if _zygote is None or not _zygote.alive():
        _zygote = Zygote(rank_environment(0, 1, "zygote"), ROOT)
        atexit.register(_zygote.close)
    return _zygote


class World:
    """The running processes of one world. :func:`run_world` is the usual way in."""

    def __init__(self, n, what, args, *, device, plain=False, timeout=60.0, env=None,
                 env_by_rank=None, options=None, mortal=()):
        self.n, self.mortal, self.timeout = n, frozenset(mortal), timeout
        self.folder = Path(tempfile.mkdtemp(prefix="rocecomm-world-"))
        self.script = isinstance(what, str | os.PathLike)
        self.procs = []
        try:
            task = None
            if not self.script:
                task = {
                    "file": inspect.getsourcefile(what), "name": what.__qualname__,
                    "args": args, "plain": plain, "options": dict(options or {}),
                    "device": device, "timeout": timeout, "size": n,
                    "folder": str(self.folder),
                }
                if "<locals>" in what.__qualname__:
                    raise TypeError(f"{what.__qualname__} must be a module-level function")
                (self.folder / "task").write_bytes(pickle.dumps(task))
            for rank in range(n):
                rank_env = {**(env or {}), **((env_by_rank or {}).get(rank, {}))}
                full = rank_environment(rank, n, self.folder, device, rank_env)
                out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
                if not self.script:
                    self.procs.append(zygote().fork([str(self.folder), rank], full, out, err))
                    continue
                with open(out, "wb") as out, open(err, "wb") as err:
                    self.procs.append(subprocess.Popen(
                        [sys.executable, "-u", str(what), *map(str, args)],
                        stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT, env=full,
                        preexec_fn=die_with_parent, start_new_session=True))
        except BaseException:
            self.end()
            raise

    def text(self, kind, rank):
        return (self.folder / f"{kind}-{rank}").read_text(errors="replace")

    def stacks(self):
        """Asks every living rank for its Python stacks and returns them as text."""
        marks = {r: len(self.text("err", r)) for r in range(self.n)}
        living = [r for r, p in enumerate(self.procs) if p.poll() is None]
        for r in living:
            os.kill(self.procs[r].pid, signal.SIGCONT)  # a stopped rank cannot answer
            if not self.script:
                os.kill(self.procs[r].pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = []
        for r, p in enumerate(self.procs):
            state = "running" if r in living else f"ended with {p.returncode}"
            parts.append(f"--- rank {r}, pid {p.pid}, {state}\n" + self.text("err", r)[marks[r]:])
        return "\n".join(parts)

    def end(self):
        """Kills what is left, each by its own pid and group, and removes the files."""
        for p in self.procs:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    def outcome(self, rank):
        """(ok, value) or (False, (type, message, traceback)) of an ended rank."""
        code, result = self.procs[rank].returncode, self.folder / f"result-{rank}"
        if result.exists():
            return pickle.loads(result.read_bytes())
        if code < 0 and rank in self.mortal:
            return True, Died(-code)
        if self.script and code == 0:
            return True, self.text("out", rank)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        shown = (self.text("out", rank) + self.text("err", rank))[-6000:]
        return False, ("SystemExit", f"{how}, without a result", shown)

    def wait(self):
        """The results in order of rank; raises RankError as the module says."""
        end = time.monotonic() + self.timeout
        pending, good, bad = set(range(self.n)), {}, {}
        hang = ""
        while pending:
            for r in sorted(pending):
                if self.procs[r].poll() is not None:
                    pending.discard(r)
                    ok, value = self.outcome(r)
                    (good if ok else bad)[r] = value
                    if not ok:
                        end = min(end, time.monotonic() + GRACE)
            if pending and time.monotonic() > end:
                hang = (f"ranks {sorted(pending)} of {self.n} did not end within "
                        f"{self.timeout:.0f} s" + (" or after the failure" if bad else "")
                        + "\n" + self.stacks())
                break
            time.sleep(0.005)
        if bad or hang:
            text = [f"rank {r} of {self.n} raised {t}: {m}\n{tb}" for r, (t, m, tb) in sorted(bad.items())]
            raise RankError("\n".join([*text, hang] if hang else text), bad)
        return [good[r] for r in range(self.n)]


def run_world(n, what, *args, **options):
    """Starts a :class:`World`, waits for it and returns the results. See the module."""
    world = World(n, what, args, **options)
    try:
        return world.wait()
    except RankError:
        raise
    except BaseException:  # given up from outside: Ctrl-C, the test's own time limit
        print(world.stacks(), file=sys.stderr)
        raise
    finally:
        world.end()


# --- in the child -------------------------------------------------------------------


def load(file, qualname):
    """The function ``qualname`` of the Python file ``file``, imported under a private name."""
    name = "world_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def child(folder, rank):
    """Runs one rank and leaves its outcome in ``folder``."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    task = pickle.loads((Path(folder) / "task").read_bytes())
    try:
        fn = load(task["file"], task["name"])
        if task["plain"]:
            peers = Peers(rank, task["size"], folder, task["device"], task["timeout"])
            result = True, fn(peers, *task["args"])
        else:
            import rocecomm

            with rocecomm.init(**task["options"]) as comm:
                result = True, fn(comm, *task["args"])
        blob = pickle.dumps(result)
    except BaseException as err:
        result = False, (type(err).__name__, str(err), traceback.format_exc())
        blob = pickle.dumps(result)
    part = Path(folder) / f"part-{rank}"
    part.write_bytes(blob)
    part.rename(Path(folder) / f"result-{rank}")

