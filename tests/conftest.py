"""Fixtures of all tests: the device under test, its scale, worlds, and what must hold after.

``ROCECOMM_TEST_DEVICE`` names the device (default ``soft0``), ``ROCECOMM_TEST_SLOW`` is a
factor for all time limits (a virtual machine, a sanitizer), and ``ROCECOMM_TEST_SIZES``
is ``full`` or ``small``. ``ROCECOMM_TEST_REPORT=FILE`` writes how many tests with the
``device`` fixture ran, as JSON.
"""

import dataclasses
import faulthandler
import json
import os
from pathlib import Path

import pytest
import worlds

DEVICE = os.environ.get("ROCECOMM_TEST_DEVICE", "soft0")
SLOW = float(os.environ.get("ROCECOMM_TEST_SLOW", "1"))
SMALL = os.environ.get("ROCECOMM_TEST_SIZES", "full") == "small"
SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much a test may ask of the device and machine under test.

    ``bytes``: largest message worth sending; ``ranks``: largest world; ``time``: factor
    for every time limit; ``rounds(n)``: n repetitions on a fast machine, fewer on a slow.
    """

    bytes: int
    ranks: int
    time: float
    share: float

    def rounds(self, n, least=1):
        return max(least, int(n * self.share))

    def sizes(self, *sizes):
        """Those of ``sizes`` that fit."""
        return [s for s in sizes if s <= self.bytes]


SCALE = Scale(1 << 20, 4, SLOW, 0.05) if SMALL else Scale(64 << 20, 8, SLOW, 1.0)


@pytest.fixture(scope="session")
def device():
    """Name of the RDMA device under test."""
    return DEVICE


@pytest.fixture(scope="session")
def scale():
    """A :class:`Scale` for the device and machine under test."""
    return SCALE


@pytest.fixture
def world(device):
    """``world(n, fn, *args, ...)``: see tests/worlds.py."""

    def run(n, what, *args, timeout=40.0, device=device, **options):
        return worlds.run_world(n, what, *args, device=device, timeout=timeout * SLOW, **options)

    return run


# --- time limits --------------------------------------------------------------------


def pytest_configure(config):
    config.addinivalue_line("markers", "roce: needs kernel Soft-RoCE or a NIC; run by make test-roce")
    faulthandler.enable()


def pytest_collection_modifyitems(config, items):
    base = float(config.getini("timeout") or 60)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit = float(mark.args[0]) if mark and mark.args else base
        item.add_marker(pytest.mark.timeout(limit * SLOW), append=False)


# --- /dev/shm is left as it was found -----------------------------------------------


def shm_entries():
    """Files below /dev/shm that this user owns."""
    found = set()
    for folder, _, files in os.walk(SHM):
        for name in files:
            path = os.path.join(folder, name)
            try:
                if os.lstat(path).st_uid == os.getuid():
                    found.add(path)
            except FileNotFoundError:
                pass
    return found


@pytest.fixture(scope="session", autouse=True)
def shm_clean():
    """Fails the session if its processes left files in /dev/shm."""
    before = shm_entries()
    yield
    left = {p for p in shm_entries() - before if not in_use(p)}
    assert not left, f"left in /dev/shm: {sorted(left)}"


def in_use(path):
    """Whether a living process has the file open (another session's, for one)."""
    for fds in Path("/proc").glob("[0-9]*/fd"):
        try:
            for fd in fds.iterdir():
                if os.readlink(fd) == path:
                    return True
        except OSError:
            continue
    return False


# --- how many device tests ran ------------------------------------------------------

_outcomes = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    names = getattr(item, "fixturenames", ())
    if "device" in names or "world" in names:
        if report.when == "call" or report.skipped or report.failed:
            _outcomes[item.nodeid] = report.outcome


def pytest_sessionfinish(session, exitstatus):
    target = os.environ.get("ROCECOMM_TEST_REPORT")
    if target and not hasattr(session.config, "workerinput"):
        ran = sum(o != "skipped" for o in _outcomes.values())
        summary = {"device": DEVICE, "total": len(_outcomes), "ran": ran,
                   "skipped": sorted(i for i, o in _outcomes.items() if o == "skipped"),
                   "collected": session.testscollected, "exit": int(exitstatus)}
        Path(target).write_text(json.dumps(summary, indent=1))


def pytest_terminal_summary(terminalreporter):
    ran = sum(o != "skipped" for o in _outcomes.values())
    terminalreporter.write_line(
        f"device under test: {DEVICE}; {ran} of {len(_outcomes)} tests that use it ran")
