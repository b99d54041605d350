"""rdma-core's own test suite on soft0: no test that once passed may fail or be skipped.

The list of what must pass is ``conformance.txt``; ``make conformance`` compares with rxe0.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = '''\
import os, signal, time, unittest

class Suite(unittest.TestCase):
    def test_1_passes(self):
        pass
    def test_2_skips(self):
        self.skipTest("not here")
    def test_3_crashes(self):
        os.kill(os.getpid(), signal.SIGKILL)     # not SIGSEGV, which ASan reports
    def test_4_fails(self):
        self.assertEqual(1, 2)
    def test_5_hangs(self):
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    def test_6_leaves(self):
        os._exit(3)
    def test_7_passes(self):
        pass

class Unready(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("no class")
    def test_any(self):
        pass
'''


@pytest.fixture(scope="module")
def conformance():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import conformance
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return conformance


@pytest.mark.timeout(120)
def test_what_passed_still_passes(conformance, tmp_path, scale):
    try:
        suite = conformance.unpack(tmp_path)
    except conformance.Missing as missing:
        pytest.skip(str(missing))
    got = conformance.run_soft0(suite, tmp_path / "soft0.jsonl", limit=10 * scale.time,
                                timeout=100 * scale.time, preload=os.environ.get("LD_PRELOAD", "").split(),
                                quiet=True)
    must = conformance.recorded()
    here = [test for test in must if test in got]
    assert len(here) > 50 and len(here) >= 0.9 * len(must), f"only {len(here)} of {len(must)} tests exist"
    short = {test: conformance.cell(got, test) for test in here if got[test]["verdict"] != "passed"}
    log = (tmp_path / "soft0.jsonl.log").read_text(errors="replace") if short else ""
    assert not short, log[-8000:]


def test_a_crash_or_hang_costs_one_test(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "args_parser.py").write_text("class parser: args = None\n")
    (tests / "test_it.py").write_text(SUITE)
    out = tmp_path / "out.jsonl"
    subprocess.run([sys.executable, str(ROOT / "tools/pyverbs_suite.py"), "--suite", str(tmp_path),
                    "--device", "none", "--out", str(out), "--limit", "2"], check=True, timeout=50)
    got = {r["id"].removeprefix("tests.test_it."): (r["verdict"], r["reason"])
           for r in map(json.loads, out.read_text().splitlines())}
    assert got == {
        "Suite.test_1_passes": ("passed", ""),
        "Suite.test_2_skips": ("skipped", "not here"),
        "Suite.test_3_crashes": ("crashed", "SIGKILL"),
        "Suite.test_4_fails": ("failed", "AssertionError: 1 != 2"),
        "Suite.test_5_hangs": ("hung", "no end within 2 s"),
        "Suite.test_6_leaves": ("crashed", "the process ended with 3"),
        "Suite.test_7_passes": ("passed", ""),
        "Unready.test_any": ("skipped", "no class"),
    }


def test_worse_is_seen(conformance):
    def results(*verdicts):
        return {f"t{i}": {"verdict": v, "reason": ""} for i, v in enumerate(verdicts)}

    rxe = results("passed", "passed", "passed", "skipped", "skipped", "error", "skipped")
    soft = results("passed", "skipped", "failed", "passed", "crashed", "hung")
    assert conformance.below(soft, rxe) == ["t1", "t2", "t4", "t6"]
