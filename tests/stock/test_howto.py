"""docs/how-to/test-rdma-code-without-hardware.md and README: their commands and programs run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import conftest
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/test-rdma-code-without-hardware.md"


pytestmark = pytest.mark.skipif(
    "ROCECOMM_TEST_SANITIZER" in os.environ,
    reason="the page preloads the library as users do, and a sanitizer's runtime must come first")


@pytest.fixture
def newcomer(programs, tmp_path):
    """Runs a shell command as somebody does who has `rocecomm` in the PATH."""
    if not programs.soft:
        pytest.skip(f"{programs.device} is not a device of softnic")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "rocecomm"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {shlex.quote(sys.executable)} -m rocecomm "$@"\n')
    script.chmod(0o755)
    env = dict(os.environ, PATH=f"{script.parent}:{os.environ['PATH']}")

    def run(command):
        done = subprocess.run(["bash", "-ec", f"{command}\nwait"], cwd=tmp_path, env=env, text=True,
                              timeout=50 * conftest.SLOW, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout
    return run


def blocks(page, language=""):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [text for kind, text in found if kind == language]


def test_the_c_program(newcomer, tmp_path):
    (source,) = [b for b in blocks(PAGE, "c") if b.startswith("/* first.c: ")]
    (tmp_path / "first.c").write_text(source)
    command = source.splitlines()[0].removeprefix("/* first.c: ").removesuffix(" */")
    assert newcomer(command) == "soft0: 4096 bytes registered\n"
    assert newcomer("LD_PRELOAD=$(rocecomm soft --path) ./first") == "soft0: 4096 bytes registered\n"


def test_two_ends(newcomer):
    (both,) = [b for b in blocks(PAGE) if b.startswith("rocecomm soft -- ib_write_bw")]
    assert newcomer(both).count("RDMA_Write BW Test") == 2
    (readme,) = [b for b in blocks(ROOT / "README.md") if "rocecomm soft -- ib_write_bw" in b]
    info, both, own = readme.splitlines()
    assert "hca_id:\tsoft0" in newcomer(info)
    assert newcomer(both).count("RDMA_Write BW Test") == 2
    assert "soft0" in newcomer(own.replace("./your_verbs_program", "ibv_devices"))


def test_the_pytest_file(newcomer, tmp_path):
    (source,) = [b for b in blocks(PAGE, "python") if b.startswith("# test_program.py")]
    (tmp_path / "test_program.py").write_text(source)
    assert "1 passed" in newcomer(f"{sys.executable} -m pytest -q -p no:cacheprovider test_program.py")
