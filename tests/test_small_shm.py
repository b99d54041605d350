"""soft0 with a /dev/shm that is small, read-only or missing: it works, or says what to do (case G6).

Each runs in a mount namespace of its own, so it needs root (or a user namespace).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-mr"]
SMALL = "mount -t tmpfs -o size=%s none /dev/shm"
READ_ONLY = "mount -t tmpfs -o ro none /dev/shm"
MISSING = "d=$(mktemp -d) && mount -t tmpfs none $d && mkdir $d/empty && " \
          "export ROCECOMM_SOFT_DIR=$d/not-there"

EXCHANGE = """
import sys, numpy as np, rocecomm
with rocecomm.init() as comm:
    to, of = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    data, got = np.full(int(sys.argv[1]), comm.rank, "u1"), np.zeros(int(sys.argv[1]), "u1")
    comm.sendrecv(data, to, got, of)
    assert (got == of).all()
    comm.barrier()
    if comm.rank == 0:
        print("exchanged")
"""


def run(setup, *command, timeout=100):
    """Runs a command after `setup` (shell text) in a mount namespace; it may not end by a signal."""
    env = {k: v for k, v in os.environ.items() if k != "ROCECOMM_SOFT_DIR"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([*NAMESPACE, "bash", "-c", f'{setup} && "$@"; exit $?', "bash", *command],
                          text=True, capture_output=True, timeout=timeout, env=env)
    assert 0 <= done.returncode < 128, done.stdout + done.stderr
    assert "SIGBUS" not in done.stderr and "Bus error" not in done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def namespace():
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none",
                                                      "/mnt"], capture_output=True).returncode:
        pytest.skip("a mount namespace is not permitted here")


def ranks(n, size, script):
    return sys.executable, "-m", "rocecomm", "run", "-n", str(n), str(script), str(size)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "exchange.py"
    path.write_text(EXCHANGE)
    return path


@pytest.mark.parametrize("staging", ["", "1"], ids=["normal", "staging"])
def test_64_mib_is_plenty(script, scale, staging):
    """Docker's default carries 8 ranks and messages as large as itself."""
    setup = SMALL % "64m" + f" && export ROCECOMM_SOFT_STAGING={staging}"
    done = run(setup, *ranks(scale.ranks, scale.bytes, script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exchanged" in done.stdout


@pytest.mark.parametrize("n", [2, 4, 8])
def test_1_mib_works_or_says_why(script, n):
    done = run(SMALL % "1m", *ranks(n, 100000, script))
    if done.returncode == 0:
        assert "exchanged" in done.stdout
        return
    assert n > 2, done.stderr
    for word in ("no room for another", "bytes in /dev/shm/rocecomm-", "KiB of 1024 free", "--shm-size"):
        assert word in done.stderr


@pytest.mark.parametrize("setup, cause", [(READ_ONLY, "Read-only file system"),
                                          (MISSING, "No such file or directory")],
                         ids=["read-only", "missing"])
def test_no_place_to_meet(script, setup, cause):
    done = run(setup, *ranks(2, 1000, script))
    assert done.returncode == 1
    for word in (cause, "rocecomm-", "ROCECOMM_SOFT_DIR", "soft0"):
        assert word in done.stderr
    done = run(setup, sys.executable, "-m", "rocecomm", "info")
    assert cause in done.stdout + done.stderr


@pytest.mark.parametrize("setup, cause", [(READ_ONLY, "Read-only file system"),
                                          (MISSING, "No such file or directory")],
                         ids=["read-only", "missing"])
def test_stock_program_is_told(setup, cause):
    """Under LD_PRELOAD nobody asks for the reason, so it is on stderr."""
    if not shutil.which("ibv_devinfo"):
        pytest.skip("ibv_devinfo is not installed (ibverbs-utils)")
    library = ROOT / "rocecomm/softnic/libsoftnic.so"
    done = run(setup, "env", f"LD_PRELOAD={library}", "ibv_devinfo")
    assert "Failed to open device" in done.stdout + done.stderr
    assert f"softnic: cannot create {'/' if setup is READ_ONLY else ''}" in done.stderr
    assert cause in done.stderr
    done = run(SMALL % "1m", "env", f"LD_PRELOAD={library}", "ibv_devinfo")
    assert done.returncode == 0 and "softnic:" not in done.stderr
