"""Which launcher started us, from the environment alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from rocecomm.bootstrap.environ import check_range, detect
from rocecomm.config import Config
from rocecomm.errors import ConfigError, JoinError

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "PMIX_NAMESPACE": "prterun-host-77@1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
         "SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}
OURS = {"ROCECOMM_RANK": "1", "ROCECOMM_WORLD_SIZE": "3", "ROCECOMM_LOCAL_RANK": "1",
        "ROCECOMM_JOB_ID": "abc"}


def found(environ, rank=None, world_size=None):
    return detect(Config.from_env(environ), environ, rank, world_size)


def test_nothing_is_a_world_of_one():
    assert found({})[:4] == ("alone", 0, 1, 0)
    assert found({"RANK": "3", "HOME": "/"}).launcher == "alone"


def test_torchrun():
    launch = found(TORCHRUN)
    assert launch[:4] == ("torchrun", 2, 4, 2)
    # On one host files do, keyed by the agent; across hosts the agent's store has the word.
    assert launch.one_host is True and launch.torch_store is None
    assert found(TORCHRUN) == launch
    across = found({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"})
    assert across.one_host is False and across.torch_store == ("node0", 29500)
    assert found({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).key != launch.key
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR",
                                                 "MASTER_PORT")}
    assert found(by_hand).torch_store is None and found(by_hand).local_rank is None


def test_open_mpi():
    launch = found(OPEN_MPI)
    assert launch[:4] == ("mpirun", 1, 4, 1) and launch.one_host is True
    assert "prterun-host-77@1" in launch.key
    assert found({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).one_host is False


def test_slurm():
    launch = found(SLURM)
    assert launch[:4] == ("srun", 3, 8, 1) and launch.one_host is False
    assert "99.0" in launch.key
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert found(batch_script).launcher == "alone"      # sbatch's own shell is no task
    assert found({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}).world_size == 4


IDENTITY = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
if len(sys.argv) == 3:                  # the launcher
    rank = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    direct = [sys.executable, "-c", sys.argv[2], sys.argv[1], "", ""]
    wrapped = ["sh", "-c", '"$0" "$@"; true', *direct]
    for command in (direct, wrapped):
        print(subprocess.run(command, env=rank, capture_output=True, text=True).stdout.strip())
    print(os.getpid())
else:                                   # a rank
    from rocecomm.bootstrap.environ import ancestor_identity
    print(ancestor_identity("TORCHELASTIC_RUN_ID"))
"""


def test_the_launchers_identity_is_found_through_wrappers():
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", IDENTITY, root, IDENTITY], text=True,
                          capture_output=True, timeout=30)
    direct, wrapped, pid = done.stdout.split()
    assert direct == wrapped and direct.split("-")[0] == pid


def test_hydra():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    launch = found(environ)
    assert launch[:4] == ("mpiexec", 1, 4, 1) and launch.one_host is True
    assert found({**environ, "MPI_LOCALNRANKS": "2"}).one_host is False
    assert found({**environ, **SLURM}).launcher == "srun"


def test_order():
    everything = {**SLURM, **OPEN_MPI, **TORCHRUN, **OURS}
    assert found(everything)[:4] == ("rocecomm run", 1, 3, 1)
    assert found({**SLURM, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert found({**SLURM, **OPEN_MPI}).launcher == "mpirun"


def test_arguments_win():
    assert found({}, 1, 2)[:3] == ("arguments", 1, 2)
    assert found({}, 1, 2).key == found({}, 0, 2).key          # one parent process
    assert found(TORCHRUN, 0, 4)[:4] == ("torchrun", 0, 4, None)
    assert found(TORCHRUN, 2, 4).local_rank == 2
    assert found(TORCHRUN, 1)[:3] == ("torchrun", 1, 4)
    assert found(OURS, 0, 2).key == found(OURS).key


def test_job_id_is_the_key_whoever_launched():
    keys = {found({**env, "ROCECOMM_JOB_ID": "x"}, *args).key
            for env, args in ((TORCHRUN, ()), (OPEN_MPI, ()), ({}, (0, 2)), (OURS, ()))}
    assert keys == {"job-x"}


@pytest.mark.parametrize("environ, rank, size, error, words", [
    ({"ROCECOMM_RANK": "1"}, None, None, ConfigError, "ROCECOMM_WORLD_SIZE is not set"),
    ({"ROCECOMM_WORLD_SIZE": "1"}, None, None, ConfigError, "ROCECOMM_RANK is not set"),
    ({}, 1, None, ConfigError, "without world_size"),
    ({}, None, 3, ConfigError, "without rank"),
    ({**TORCHRUN, "RANK": "two"}, None, None, ConfigError, "RANK is 'two'"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, None, None, ConfigError, "OMPI_COMM_WORLD_SIZE"),
    ({}, 0, 0, ValueError, "at least 1"), ({}, -1, 2, ValueError, "-1"),
    ({}, 2**40, 2, ValueError, "rank"), ({}, 1.0, 2, TypeError, "1.0"),
    ({}, True, 2, TypeError, "True"), ({}, "1", 2, TypeError, "'1'"),
])
def test_what_is_refused(environ, rank, size, error, words):
    with pytest.raises(error, match=words):
        found(environ, rank, size)


def test_numpy_integers_are_integers():
    import numpy as np
    assert found({}, np.int64(1), np.int32(2))[1:3] == (1, 2)


def test_rank_outside_the_world():
    with pytest.raises(JoinError, match="0 to 2") as caught:
        check_range(found({}, 3, 3))
    assert caught.value.surplus == (3,)
