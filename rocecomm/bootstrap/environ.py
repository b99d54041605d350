"""Who started this process, as a function of the environment.

Looked at in this order: arguments, ``ROCECOMM_*`` (``rocecomm run``), torchrun, Open MPI,
Slurm, MPICH and its kin; nothing at all means a world of one. torchrun comes before the others because it
runs inside their jobs, Open MPI before Slurm for the same reason.
"""

import os
from typing import NamedTuple

from ..config import as_integer
from ..errors import ConfigError, JoinError, brief


class Launch(NamedTuple):
    """What the launcher said.

    ``key`` tells this job apart from the user's other jobs on this host, earlier ones
    included; ``one_host`` is None where the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    key: str
    one_host: bool | None
    torch_store: tuple | None = None      # (host, port) of the torchrun agent's store


def detect(config, environ, rank=None, world_size=None):
    """The :class:`Launch` for this process.

    Raises TypeError or ValueError for arguments that are no rank or size, ConfigError
    for an environment that contradicts itself, JoinError for a rank outside the world.
    """
    rank = _index(rank, "rank")
    world_size = _index(world_size, "world_size")
    if world_size == 0:
        raise ValueError("world_size must be at least 1, not 0")
    found = _from_rocecomm(config, environ) or _from_torchrun(environ) \
        or _from_open_mpi(environ) or _from_slurm(environ) or _from_hydra(environ)
    if rank is None and world_size is None:
        found = found or Launch("alone", 0, 1, 0, "alone", True)
    elif found is not None and (rank is None or world_size is None):
        found = found._replace(rank=found.rank if rank is None else rank,
                               world_size=world_size or found.world_size)
    elif rank is None or world_size is None:
        given, other = ("rank", "world_size") if world_size is None else ("world_size",
                                                                          "rank")
        raise ConfigError(f"{given} was given without {other}, and no launcher says it: "
                          f"pass both, or start the program with 'rocecomm run -n N'",
                          name=other)
    elif found is not None and found.world_size == world_size:
        found = found._replace(
            rank=rank, local_rank=found.local_rank if found.rank == rank else None)
    else:
        found = Launch("arguments", rank, world_size, None,
                       found.key if found else "parent-" + parent_identity(),
                       found.one_host if found else None)
    if config.job_id is not None:
        found = found._replace(key="job-" + config.job_id)
    if config.local_rank is not None:
        found = found._replace(local_rank=config.local_rank)
    return found


def check_range(launch):
    """Raises JoinError if the rank lies outside the world."""
    if launch.rank >= launch.world_size:
        raise JoinError(
            f"rank {launch.rank} cannot join a world of {launch.world_size}: its ranks are "
            f"0 to {launch.world_size - 1} (from {launch.launcher}); one process too many, "
            "or a wrong rank or world size", surplus=[launch.rank])


def parent_identity():
    """The parent process, told apart from later ones with the same number."""
    parent = os.getppid()
    return f"{parent}-{start_time(parent)}"


def ancestor_identity(variable):
    """The nearest ancestor that was started without an environment variable, which is the
    launcher that set it: the same for all its ranks, through any wrapper script. None if
    /proc does not say."""
    wanted = variable.encode() + b"="
    pid = os.getppid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
            if not any(word.startswith(wanted) for word in words):
                return f"{pid}-{start_time(pid)}"
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return None
    return None


def start_time(pid):
    """When a process started, in clock ticks since boot; "0" if it cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command, in parentheses, may hold anything; fields count after it.
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return "0"


def _index(value, what):
    if value is None:
        return None
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{what} must be an integer, not {brief(value)}")
    if not 0 <= number < 1 << 20:
        raise ValueError(f"{what} must lie between 0 and {(1 << 20) - 1}, not {number}")
    return number


def _number(environ, name, default=None):
    text = environ.get(name)
    if text is None or text == "":
        if default is not None:
            return default
        raise ConfigError(f"the launcher set no {name}, which the rank of this process "
                          "depends on: pass rank and world_size, or set ROCECOMM_RANK and "
                          "ROCECOMM_WORLD_SIZE", name=name)
    if not text.strip().isdecimal():
        raise ConfigError(f"{name} is {text!r}, but it must be a number from 0 up",
                          name=name, value=text)
    return int(text)


def _optional(environ, name):
    return _number(environ, name) if environ.get(name) else None


def _from_rocecomm(config, environ):
    if config.rank is None and config.world_size is None:
        return None
    if config.rank is None or config.world_size is None:
        name = "ROCECOMM_RANK" if config.rank is None else "ROCECOMM_WORLD_SIZE"
        raise ConfigError(f"{name} is not set although its partner is: set both "
                          "ROCECOMM_RANK and ROCECOMM_WORLD_SIZE", name=name)
    return Launch("rocecomm run", config.rank, config.world_size, config.local_rank,
                  "parent-" + parent_identity(), None)


def _from_torchrun(environ):
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")
            and (environ.get("MASTER_ADDR") or environ.get("TORCHELASTIC_RUN_ID"))):
        return None
    world = _number(environ, "WORLD_SIZE")
    local = _optional(environ, "LOCAL_WORLD_SIZE")
    address = (environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "0"))
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    one_host = None if local is None else local == world
    key = "torch-{}-{}-{}-{}".format(
        environ.get("TORCHELASTIC_RUN_ID", "none"), *address,
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # On one host the agent's process tells the job apart, and torch need not be imported.
    launcher = ancestor_identity("TORCHELASTIC_RUN_ID") if agent and one_host else None
    store = (address[0], _number(environ, "MASTER_PORT")) if agent and not launcher else None
    return Launch("torchrun" if agent else "RANK and WORLD_SIZE", _number(environ, "RANK"),
                  world, _optional(environ, "LOCAL_RANK"), f"{key}-{launcher}", one_host,
                  store)


def _from_open_mpi(environ):
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    world = _number(environ, "OMPI_COMM_WORLD_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") \
        or parent_identity()
    return Launch("mpirun", _number(environ, "OMPI_COMM_WORLD_RANK"), world,
                  _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), "pmix-" + job,
                  _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world) == world)


def _from_slurm(environ):
    # The batch script itself has SLURM_PROCID=0 and SLURM_NTASKS but is no task of a
    # step; only srun sets the step id.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    world = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    key = "slurm-{}.{}-{}".format(
        environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"],
        environ.get("SLURM_RESTART_COUNT", "0"))
    return Launch("srun", _number(environ, "SLURM_PROCID"), world,
                  _optional(environ, "SLURM_LOCALID"), key, nodes == "1")


def _from_hydra(environ):
    # The process manager of MPICH, MVAPICH and Intel MPI.
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    world = _number(environ, "PMI_SIZE")
    return Launch("mpiexec", _number(environ, "PMI_RANK"), world,
                  _optional(environ, "MPI_LOCALRANKID"),
                  f"hydra-{ancestor_identity('PMI_RANK') or parent_identity()}",
                  _number(environ, "MPI_LOCALNRANKS", world) == world)
