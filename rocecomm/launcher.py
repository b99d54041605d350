"""``rocecomm run``: start the ranks of a job on this host, and leave nothing behind.

Every rank leads a process group of its own. So Ctrl-C at the terminal reaches only the
launcher, which passes it on once, and what a rank started itself can be ended with it.
A rank that ended is not reaped until the end: its number cannot be given to another
process while it is still needed to signal its group.
"""

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_LEFTOVER_SECONDS = 1.0


def command_for(program, arguments, module=False, label=False):
    """The argument vector of a rank: a module, a Python file, or any other program."""
    # Unbuffered only where lines are put together again: Python writes a line in pieces
    # then, and those of several ranks would mix.
    python = [sys.executable, "-u"] if label else [sys.executable]
    if module:
        return [*python, "-m", program, *arguments]
    if program.endswith(".py"):
        return [*python, program, *arguments]
    return [program, *arguments]


def environment(rank, size, job, base=None):
    """What tells a rank who it is."""
    env = dict(os.environ if base is None else base)
    env.update(ROCECOMM_RANK=str(rank), ROCECOMM_WORLD_SIZE=str(size),
               ROCECOMM_LOCAL_RANK=str(rank), ROCECOMM_JOB_ID=job)
    if size > 1:
        # As torchrun does: several ranks with a thread for every core each are slower.
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


class Job:
    """The ranks of one ``rocecomm run``. ``run()`` returns the exit status."""

    def __init__(self, size, command, grace=5.0, label=False):
        self.size, self.command, self.grace, self.label = size, command, grace, label
        self.processes, self.codes = [], {}
        self.status = None
        self._end = None            # when to become less polite
        self._selector = selectors.DefaultSelector()
        self._signals = []

    def run(self):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        old = {number: signal.signal(number, self._note) for number in FORWARDED}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, self._drain)
        try:
            self._start()
            while len(self.codes) < self.size:
                self._turn()
        finally:
            self._finish()
            signal.set_wakeup_fd(wakeup)
            for number, handler in old.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(reader)
            os.close(writer)
        return self.status or 0

    # --- inside

    def _note(self, number, _frame):
        self._signals.append(number)

    @staticmethod
    def _drain(fd):
        with contextlib.suppress(BlockingIOError):
            while os.read(fd, 512):
                pass

    def _start(self):
        job = secrets.token_hex(16)
        # Whole lines of the ranks, not parts of two in one. A terminal is left to them: they may
        # ask it for its width, or draw on it.
        pipes = [subprocess.PIPE if self.label or (self.size > 1 and not stream.isatty()) else None
                 for stream in (sys.stdout, sys.stderr)]
        for rank in range(self.size):
            try:
                process = subprocess.Popen(
                    self.command, env=environment(rank, self.size, job),
                    stdin=subprocess.DEVNULL, stdout=pipes[0], stderr=pipes[1],
                    start_new_session=True, preexec_fn=_die_with(os.getpid()))
            except OSError as error:
                self._say(f"cannot start {self.command[0]!r}: {error.strerror}")
                self.status = 126 if isinstance(error, PermissionError) else 127
                self._signal_all(signal.SIGKILL)
                self.size = rank
                return
            self.processes.append(process)
            with contextlib.suppress(OSError):           # an old kernel: we look often
                fd = os.pidfd_open(process.pid)
                self._selector.register(fd, selectors.EVENT_READ, self._ended)
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if stream is not None:
                    os.set_blocking(stream.fileno(), False)
                    self._selector.register(stream, selectors.EVENT_READ,
                                            _Lines(self.label and rank, stream, target,
                                                   self._selector))

    def _ended(self, fd):
        self._selector.unregister(fd)
        os.close(fd)

    def _turn(self):
        wait = 0.25 if self._end is None else min(0.25, max(0.0, self._end - time.monotonic()))
        for key, _ in self._selector.select(wait):
            key.data(key.fileobj)
        while self._signals:
            self._forward(self._signals.pop(0))
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                code = _exit_code(process.pid)
                if code is not None:
                    self.codes[rank] = code
                    if code:
                        self._failed(rank, code)
        if self._end is not None and time.monotonic() >= self._end:
            self._escalate()

    def _forward(self, number):
        if number in ENDING and self.status is None:
            self.status = 128 + number
            self._end, self._next = time.monotonic() + self.grace, signal.SIGTERM
            if number == signal.SIGTERM:
                self._next = signal.SIGKILL
        elif number in ENDING:
            number, self._end = signal.SIGKILL, time.monotonic() + self.grace
            self._next = signal.SIGKILL
        if number in (*ENDING, signal.SIGKILL):
            self._signal_all(number)
        else:                                   # what a rank started did not ask for it
            for rank, process in enumerate(self.processes):
                if rank not in self.codes:
                    os.kill(process.pid, number)

    def _failed(self, rank, code):
        how = f"status {code}" if code < 128 or code - 128 not in list(signal.Signals) \
            else f"signal {signal.Signals(code - 128).name}"
        if self.status is not None:
            return                              # we are ending already
        self.status = code
        living = self.size - len(self.codes)
        others = f"{living} others have" if living > 1 else "the other one has"
        self._say(f"rank {rank} of {self.size} ended with {how}"
                  + (f"; {others} {self.grace:g} s to end" if living else ""))
        self._end, self._next = time.monotonic() + self.grace, signal.SIGTERM

    def _escalate(self):
        living = [r for r in range(self.size) if r not in self.codes]
        if living:
            ranks = ", ".join(map(str, living))
            self._say(f"ending rank{'s' if len(living) > 1 else ''} {ranks} with "
                      f"{signal.Signals(self._next).name}")
        self._signal_all(self._next)
        self._end, self._next = time.monotonic() + min(2.0, self.grace), signal.SIGKILL

    def _signal_all(self, number):
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                _signal_group(process.pid, number)

    def _finish(self):
        """Nothing of the ranks' process groups is alive afterwards."""
        groups = {process.pid for process in self.processes}
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:          # only after an error of our own
                _signal_group(process.pid, signal.SIGKILL)
        end = time.monotonic() + _LEFTOVER_SECONDS
        while _members(groups) and time.monotonic() < end:
            time.sleep(0.02)
        for group in _members(groups):
            _signal_group(group, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Lines):
                key.data(key.fileobj)
                key.data.finish()

    @staticmethod
    def _say(text):
        print(f"rocecomm run: {text}", file=sys.stderr, flush=True)


def _exit_code(pid):
    """The exit status of an ended child, left unreaped; 128 + signal; None if it lives."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status + (0 if result.si_code == os.CLD_EXITED else 128)


def _signal_group(group, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _members(groups):
    """Groups among ``groups`` with a process that has not ended."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue                        # it ended while we looked
            if int(fields[2]) in groups and fields[0] not in (b"Z", b"X"):
                found.add(int(fields[2]))
    return found


def _die_with(parent):
    """For the child, before it runs its program: it ends when the launcher does, even if
    that is killed."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare():
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    return prepare


#: Bytes of a line that are kept until its end comes.
_LONGEST_LINE = 1 << 20


class _Lines:
    """Copies whole lines of one stream, each with the rank before it (`rank` False: without)."""

    def __init__(self, rank, stream, target, selector):
        self.prefix = b"" if rank is False else f"[{rank}] ".encode()
        self.stream, self.target, self.selector = stream, target, selector
        self.rest = b""
        self.open = True

    def __call__(self, stream):
        while self.open:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.selector.unregister(stream)
                self.finish()
                return
            *lines, self.rest = (self.rest + data).split(b"\n")
            self._write(b"".join(self.prefix + line + b"\n" for line in lines))
            if len(self.rest) > _LONGEST_LINE:
                self._write(self.prefix + self.rest)
                self.rest = b""

    def finish(self):
        if self.open:
            self.open = False
            if self.rest:
                self._write(self.prefix + self.rest + b"\n")
            self.stream.close()

    def _write(self, data):
        if data:
            self.target.flush()
            self.target.buffer.write(data)
            self.target.flush()
