"""Fixtures of all tests: the device under test, its scale, worlds, and what must hold after.

``ROCECOMM_TEST_DEVICE`` names the device (default ``soft0``), ``ROCECOMM_TEST_SLOW`` is a
factor for all time limits (a virtual machine, a sanitizer), and ``ROCECOMM_TEST_SIZES``
is ``full`` or ``small``. ``ROCECOMM_TEST_REPORT=FILE`` writes how many tests with the
``device`` fixture ran, as JSON, and FILE.log each test's time as it ends.
``ROCECOMM_TEST_ONLY_DEVICE=1`` leaves out the tests that use no device;
``ROCECOMM_TEST_WITHOUT=torch`` makes importing torch fail.
"""

import atexit
import dataclasses
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import worlds

DEVICE = os.environ.get("ROCECOMM_TEST_DEVICE", "soft0")
REPORT = os.environ.get("ROCECOMM_TEST_REPORT")
SLOW = float(os.environ.get("ROCECOMM_TEST_SLOW", "1"))
WITHOUT = os.environ.get("ROCECOMM_TEST_WITHOUT", "").split()


class _Hidden:
    """A finder in sys.meta_path: importing what is in WITHOUT fails as if it were absent."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in WITHOUT:
            raise ModuleNotFoundError(f"{name} is left out by ROCECOMM_TEST_WITHOUT", name=name)


if WITHOUT:
    sys.meta_path.insert(0, _Hidden)
SMALL = os.environ.get("ROCECOMM_TEST_SIZES", "full") == "small"
ROOT = Path(__file__).resolve().parent.parent


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


@pytest.fixture
def soft_world():
    """As ``world``, always on soft0: for what no device could notice. Not run in `make test-roce`."""

    def run(n, what, *args, timeout=40.0, **options):
        return worlds.run_world(n, what, *args, device="soft0", timeout=timeout * SLOW, **options)

    return run


# --- time limits --------------------------------------------------------------------


def pytest_configure(config):
    config.addinivalue_line("markers", "roce: needs kernel Soft-RoCE or a NIC; run by make test-roce")
    config.addinivalue_line("markers", "stress: long; run by make stress, or when asked for with -m")
    faulthandler.enable()


def pytest_collection_modifyitems(config, items):
    if os.environ.get("ROCECOMM_TEST_ONLY_DEVICE"):
        keep = [i for i in items if uses_device(i) or "roce" in i.path.parts]
        config.hook.pytest_deselected(items=[i for i in items if i not in keep])
        items[:] = keep
    if not config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("stress")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    base = float(config.getini("timeout") or 60)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit = float(mark.args[0]) if mark and mark.args else base
        item.add_marker(pytest.mark.timeout(limit * SLOW), append=False)


# --- nothing is left in shared memory -----------------------------------------------

# Worlds of this session meet in a folder of their own: other programs of this user are not
# disturbed, and what is left in it is ours. Ranks and scripts inherit the variable.
SHM_ROOT = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SHM = Path(tempfile.mkdtemp(prefix=f"rocecomm-test-{os.getpid()}-", dir=SHM_ROOT))
os.environ["ROCECOMM_SOFT_DIR"] = str(SHM)


@atexit.register
def _leave(owner=os.getpid()):
    """A session that only collects tears no fixture down."""
    if os.getpid() == owner:
        shutil.rmtree(SHM, ignore_errors=True)


for _old in SHM.parent.glob("rocecomm-test-[0-9]*-*"):  # of sessions that were killed
    if not Path(f"/proc/{_old.name.split('-')[2]}").exists() and _old.stat().st_uid == os.getuid():
        shutil.rmtree(_old, ignore_errors=True)

# a killed process cleans nothing up: its memory is reclaimed by whoever comes next
NEXT_START = """
import rocecomm
with rocecomm.init(rank=0, world_size=1, device="soft0"):
    pass
"""


@pytest.fixture(scope="session", autouse=True)
def shared_memory_is_clean():
    """Fails the session if its processes left more in shared memory than a start cleans up."""
    yield
    left = [p for p in SHM.rglob("*") if p.is_file() or p.is_fifo()]
    try:
        if left:
            subprocess.run([sys.executable, "-c", NEXT_START], cwd=ROOT, check=True, timeout=60 * SLOW)
            left = [p for p in SHM.rglob("*") if p.is_fifo() or (p.is_file() and p.stat().st_size > 4096)]
        assert not left, f"left in shared memory: {sorted(map(str, left))}"
    finally:
        shutil.rmtree(SHM, ignore_errors=True)


# --- how many device tests ran ------------------------------------------------------

_outcomes = {}


def uses_device(item):
    return "device" in getattr(item, "fixturenames", ())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if uses_device(item):
        if report.when == "call" or report.skipped or report.failed:
            _outcomes[item.nodeid] = report.outcome
    # line by line, so that it says where the time went even if the session is cut off
    if REPORT and (report.when == "call" or report.outcome != "passed"):
        with open(f"{REPORT}.log", "a") as log:
            log.write(f"{report.duration:8.2f} {report.outcome} {item.nodeid}\n")


def pytest_sessionfinish(session, exitstatus):
    if REPORT:
        ran = sum(o != "skipped" for o in _outcomes.values())
        summary = {"device": DEVICE, "total": len(_outcomes), "ran": ran,
                   "skipped": sorted(i for i, o in _outcomes.items() if o == "skipped"),
                   "collected": session.testscollected, "exit": int(exitstatus)}
        Path(REPORT).write_text(json.dumps(summary, indent=1))


def pytest_terminal_summary(terminalreporter):
    ran = sum(o != "skipped" for o in _outcomes.values())
    terminalreporter.write_line(
        f"device under test: {DEVICE}; {ran} of {len(_outcomes)} tests that use it ran")
