#!/usr/bin/python3
"""Runs rdma-core's own test suite on one device and writes each test's verdict.

    pyverbs_suite.py --suite FOLDER --device NAME --out FILE [--limit SECONDS] [--only REGEX]
                     [--list] [--seed TEXT]

Runs under the system's Python, which has pyverbs; standard library only, as the virtual
machine runs it too. FOLDER holds ``tests/`` with the suite's modules. A process per module, forked
from one that has imported them all and opened nothing. A crash or a hang costs the test that it
happened in: its verdict is "crashed" or "hung", and the module's other tests go on in a
new process. Every test starts with the same random seed.

FILE gets one line of JSON per test: ``id``, ``verdict`` (passed, skipped, failed, error,
crashed, hung), ``reason`` and ``seconds``. What the tests print goes to FILE.log.
"""

import argparse
import importlib
import json
import os
import random
import re
import select
import signal
import sys
import time
import traceback
import types
import unittest
from pathlib import Path


def load(folder, config):
    """Imports the suite's modules; returns {module name: [test, ...]}."""
    folder = Path(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    # the package's own __init__ would read the command line
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests")]
    sys.modules["tests"] = package
    importlib.import_module("args_parser").parser.args = config
    modules = {}
    for path in sorted((folder / "tests").glob("test_*.py")):
        module = importlib.import_module(f"tests.{path.stem}")
        modules[path.stem] = list(flat(unittest.defaultTestLoader.loadTestsFromModule(module)))
    return modules


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


class Report(unittest.TestResult):
    """Tells the parent, line by line, which test begins and how it ended."""

    def __init__(self, pipe, seed):
        super().__init__()
        self.pipe, self.seed, self.began = pipe, seed, 0.0
        self.told = set()

    def tell(self, **what):
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    def startTest(self, test):
        super().startTest(test)
        random.seed(self.seed)
        self.began = time.monotonic()
        print(f"--- {test.id()}", flush=True)
        self.tell(begin=test.id())

    def verdict(self, test, verdict, reason=""):
        # the first word counts: a failing subtest or tearDown is not undone by a later success
        if test.id() not in self.told:
            self.told.add(test.id())
            took = time.monotonic() - self.began if self.began else 0.0
            self.tell(id=test.id(), verdict=verdict, reason=reason, seconds=round(took, 3))

    def failing(self, test, verdict, error):
        print("".join(traceback.format_exception(*error)), flush=True)
        self.verdict(test, verdict, f"{error[0].__name__}: {error[1]}".strip())

    def addSuccess(self, test):
        super().addSuccess(test)
        self.verdict(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.verdict(test, "skipped", reason)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.failing(test, "failed", error)

    def addError(self, test, error):
        super().addError(test, error)
        self.failing(test, "error", error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.failing(test, "failed", error)


def child(tests, pipe, log, seed):
    """Runs tests in this process; does not return."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    report = Report(pipe, seed)
    try:
        unittest.TestSuite(tests).run(report)
        report.tell(end=True)
    except BaseException:       # noqa: BLE001 - a fork of the parent must not go on as one
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


class Lines:
    """Lines from a pipe, with a time limit for each."""

    def __init__(self, fd):
        self.fd, self.buffer, self.ended = fd, b"", False

    def next(self, limit):
        """The next line as an object; None at the end; raises TimeoutError."""
        deadline = time.monotonic() + limit
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self.fd, 65536)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)


def attempt(tests, log, limit, seed):
    """Runs tests in one new process; yields results, the last of which may be its crash."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        child(tests, write_end, log, seed)
    os.close(write_end)
    lines, current, hung, ended, began = Lines(read_end), None, False, False, 0.0
    try:
        while True:
            line = lines.next(limit)
            if line is None:
                break
            if "begin" in line:
                current, began = line["begin"], time.monotonic()
            elif "id" in line:
                current = None if line["id"] == current else current
                yield line
            else:
                ended = True
                break
    except TimeoutError:
        hung = True
    finally:
        os.close(read_end)
        if not ended:
            time.sleep(0.1 if not hung else 0)      # a crash's own signal comes first
        status = end(pid, kill=hung or not ended)
    if ended:
        return
    if hung:
        verdict, reason = "hung", f"no end within {limit:g} s"
    elif os.WIFSIGNALED(status):
        verdict, reason = "crashed", signal.Signals(os.WTERMSIG(status)).name
    else:
        verdict, reason = "crashed", f"the process ended with {os.WEXITSTATUS(status)}"
    yield {"id": current, "verdict": verdict, "reason": reason,
           "seconds": round(time.monotonic() - began, 3) if current else 0.0}


def end(pid, kill):
    """Waits for a child, and ends what it left of its process group; returns its status."""
    deadline = time.monotonic() + (0 if kill else 10)
    status = None
    while status is None:
        done, value = os.waitpid(pid, os.WNOHANG)
        if done:
            status = value
        elif time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        else:
            time.sleep(0.01)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    return status


def run_module(tests, log, limit, seed):
    """Yields one result for each of a module's tests."""
    left = {test.id(): test for test in tests}
    while left:
        whole = None            # a class or module that could not be set up
        before = len(left)
        for result in attempt(list(left.values()), log, limit, seed):
            if left.pop(result["id"], None) is not None:
                yield result
            else:
                whole = result
        if whole or len(left) == before:
            # nothing more would come of another process
            whole = whole or {"verdict": "error", "reason": "no verdict"}
            for name in left:
                yield {"id": name, "verdict": whole["verdict"], "reason": whole["reason"], "seconds": 0.0}
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out")
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    config = {"dev": args.device, "pci_dev": None, "port": 1, "gid": None, "gpu": 0, "gtt": False,
              "verbosity": None, "list_tests": False}
    modules = {name: [t for t in tests if re.search(args.only, t.id())]
               for name, tests in load(args.suite, config).items()}
    if args.list:
        print("\n".join(t.id() for tests in modules.values() for t in tests))
        return 0
    log = os.open(args.out + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    with open(args.out, "w") as out:
        for name, tests in modules.items():
            if not tests:
                continue
            start = time.monotonic()
            counts = {}
            for result in run_module(tests, log, args.limit, args.seed):
                counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
                out.write(json.dumps(result) + "\n")
                out.flush()
            print(f"{args.device} {name}: " + ", ".join(f"{n} {v}" for v, n in sorted(counts.items()))
                  + f" ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
