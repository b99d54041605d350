"""The examples under every launcher (a launcher's tests are skipped only if it is absent).

The demo runs on the device under test; the launchers differ in nothing that a device
could notice, so their tests use soft0.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def launch(*command, device="soft0", timeout=100, **env):
    """Run a command as a user would, without what this test session has set."""
    skip = ("ROCECOMM_RANK", "ROCECOMM_WORLD", "ROCECOMM_JOB", "OMPI_", "PMIX_", "SLURM_")
    full = {k: v for k, v in os.environ.items() if not k.startswith(skip)}
    full.update(PYTHONPATH=str(ROOT), ROCECOMM_IB_HCA=device, OMP_NUM_THREADS="1",
                OPENBLAS_NUM_THREADS="1", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", **env)
    slow = float(os.environ.get("ROCECOMM_TEST_SLOW", "1"))
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=full, text=True,
                          capture_output=True, timeout=timeout * slow)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name):
    path = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def check_training(text, device, ranks, mode, epochs):
    assert f"{ranks} rank{'s' * (ranks > 1)} on {device}, mode {mode}" in text
    rows = re.findall(r"^epoch +(\d+)  loss (\d\.\d+)  test accuracy (\d\.\d+)$", text, re.M)
    assert [int(row[0]) for row in rows] == list(range(1, epochs + 1))
    assert float(rows[-1][1]) < float(rows[0][1])
    final = re.search(r"final test accuracy ([\d.]+), in a single process ([\d.]+); "
                      r"weights differ by at most ([\d.e+-]+)", text)
    assert float(final[1]) >= 0.95 and final[1] == final[2] and float(final[3]) <= 1e-9
    moved = re.search(r"sent ([\d.]+) MB and received ([\d.]+) MB; ([\d.]+) s of ([\d.]+) s", text)
    assert float(moved[3]) <= float(moved[4])
    if ranks > 1:
        assert float(moved[1]) > 1 and float(moved[2]) > 1


DIGITS = "examples/train_digits.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["allreduce", "ps"])
def test_digits_under_rocecomm_run(device, mode):
    pytest.importorskip("sklearn")
    text = launch(sys.executable, "-m", "rocecomm", "run", "-n", 4, DIGITS, "--mode", mode,
                  "--epochs", 4, device=device)
    check_training(text, device, 4, mode, 4)


@pytest.mark.parametrize("mode", ["allreduce", "ps"])
def test_digits_alone(mode):
    pytest.importorskip("sklearn")
    text = launch(sys.executable, DIGITS, "--epochs", 3, "--mode", mode)
    check_training(text, "soft0", 1, mode, 3)


@pytest.mark.timeout(120)
def test_digits_under_torchrun():
    pytest.importorskip("sklearn")
    text = launch(tool("torchrun"), "--nproc-per-node", 4, "--master-port", 0, DIGITS,
                  "--epochs", 4)
    check_training(text, "soft0", 4, "allreduce", 4)


@pytest.mark.timeout(120)
def test_digits_under_mpirun():
    pytest.importorskip("sklearn")
    text = launch(tool("mpirun"), "--oversubscribe", "-n", 4, sys.executable, DIGITS,
                  "--epochs", 4,
                  OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                  PRTE_ALLOW_RUN_AS_ROOT="1", PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    check_training(text, "soft0", 4, "allreduce", 4)


JOINER = """
import numpy, rocecomm
with rocecomm.init() as comm:
    total = comm.all_reduce(numpy.full(3, comm.rank + 1.0))
    print(f"<{comm.rank} {comm.size} {comm.group.local_rank} {comm.group.launcher} {total[0]}>")
"""


@pytest.mark.stress
@pytest.mark.timeout(120)
def test_two_torchrun_agents_meet_over_tcp(tmp_path):
    """As on two hosts: the agents' store carries the address and secret of rank 0's own."""
    torchrun = tool("torchrun")
    if not has_address():
        pytest.skip("this host has no address but loopback to announce")
    (tmp_path / "job.py").write_text(JOINER)
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROCECOMM_IB_HCA": "soft0",
           "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(
        [torchrun, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2",
         "--master-addr", "127.0.0.1", "--master-port", str(port), str(tmp_path / "job.py")],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in range(2)]
    try:
        outputs = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    text = "".join(out for out, _ in outputs)
    assert sorted(re.findall("<(.*?)>", text)) == [f"{r} 4 {r % 2} torchrun 10.0"
                                                   for r in range(4)], outputs


def has_address():
    from rocecomm.bootstrap.address import announced_addresses
    from rocecomm.errors import JoinError
    try:
        return bool(announced_addresses())
    except JoinError:
        return False


@pytest.mark.timeout(120)
def test_gradient_sync():
    pytest.importorskip("torch")
    text = launch(sys.executable, "-m", "rocecomm", "run", "-n", 3, "examples/gradient_sync.py",
                  60)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 3
    assert "2 workers and a server on soft0 agree on all parameters" in text


@pytest.mark.parametrize("ranks", [2, 4])
def test_asyncio_service(device, ranks):
    text = launch(sys.executable, "-m", "rocecomm", "run", "-n", ranks, "examples/asyncio_service.py",
                  device=device)
    assert f"served {40 * (ranks - 1)} questions of {ranks - 1} clients" in text
    for rank in range(1, ranks):
        assert f"rank {rank}: 40 answers, sum " in text
