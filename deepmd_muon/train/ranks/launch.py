"""Which process of a run this one is: from the environment that torchrun or srun sets."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from deepmd_muon.train.errors import TrainingError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables that torchrun and the launchers of MPI set; srun ends its processes itself.
_LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun", "PMIX_RANK": "mpirun", "PMI_RANK": "mpirun"}
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among those of a run.

    Attributes
    ----------
    rank, local, size
        Its number, its number on this machine, and how many there are.
    host, port
        Where they find each other.
    srun
        Whether srun alone says all this; it may show each process its own GPU only.
    agent
        Whether torchrun keeps the store at which they meet; otherwise rank 0 does.
    launcher
        torchrun or mpirun, without which this process should not go on; empty where it may outlive its parent.
    """

    rank: int
    local: int
    size: int
    host: str
    port: int
    srun: bool = False
    agent: bool = False
    launcher: str = ""

    @property
    def hosts(self) -> bool:
        """Whether this process keeps the store."""
        return self.rank == 0 and not self.agent

    @property
    def meeting(self) -> str:
        """The address of the rendezvous, for messages."""
        return f"{self.host}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place; None when it is alone.

    WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT decide where the first is set (torchrun, mpirun scripts).
    Otherwise a task of srun takes SLURM_NTASKS, SLURM_PROCID and SLURM_LOCALID; its meeting point is MASTER_ADDR and
    MASTER_PORT where they are set, else the first node of the step and a port made of the job's number.

    Raises
    ------
    TrainingError
        When a variable is missing, no number or out of range.
    """
    launcher = next((name for variable, name in _LAUNCHERS.items() if variable in environment), "")
    if "WORLD_SIZE" in environment:
        if _number(environment, "WORLD_SIZE") == 1:
            return None
        _require(environment, _TORCHRUN, "start with torchrun")
        rank, local, size = (_number(environment, name) for name in _TORCHRUN[:3])
        host, port = environment["MASTER_ADDR"], _port(environment)
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _checked(Place(rank, local, size, host, port, agent=agent, launcher=launcher))
    if not _is_task(environment) or _number(environment, "SLURM_NTASKS") == 1:
        return None
    _require(environment, _SRUN, "start with srun or torchrun")
    rank, local, size = (_number(environment, name) for name in _SRUN)
    host, port = _slurm_address(environment), _slurm_port(environment)
    return _checked(Place(rank, local, size, host, port, srun=True, launcher=launcher))


def _checked(place: Place) -> Place:
    """Refuse a number that no process of the run can have."""
    if not 0 <= place.rank < place.size:
        raise TrainingError(
            f"rank {place.rank} is not one of {place.size} processes, which are 0 to {place.size - 1}"
        )
    if not 0 <= place.local < place.size:
        raise TrainingError(
            f"local rank {place.local} is not one of {place.size} processes, 0 to {place.size - 1}"
        )
    return place


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process: a batch script knows the job's tasks, too, but belongs to no step."""
    if "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return False
    return "SLURM_JOB_ID" not in environment or bool(
        {"SLURM_STEP_ID", "SLURM_STEPID"} & environment.keys()
    )


def _slurm_address(environment: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environment:
            return first_node(environment[name])
    raise TrainingError(
        "srun has set no SLURM_STEP_NODELIST: set MASTER_ADDR to the name of the first node"
    )


def _slurm_port(environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return _port(environment)
    if "SLURM_JOB_ID" not in environment:
        raise TrainingError(
            "srun has set no SLURM_JOB_ID: set MASTER_PORT to a free port of the first node"
        )
    # Steps of one job that run beside each other on one node must not meet.
    step = environment.get("SLURM_STEP_ID", "0")
    return (
        15000
        + (_number(environment, "SLURM_JOB_ID") + 101 * int(step if step.isdigit() else 0)) % 15000
    )


def first_node(nodes: str) -> str:
    """Return the first name of Slurm's short form, e.g. node007 of ``node[007-012,020],login1``."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes.strip())
    assert found is not None  # every part of the pattern may be empty
    return "".join(part or "" for part in found.groups())


def _require(environment: Mapping[str, str], names: tuple[str, ...], advice: str) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        size = environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS")
        raise TrainingError(
            f"there are {size} processes, but {', '.join(missing)} is not set; {advice}"
        )


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise TrainingError(f"MASTER_PORT must be from 1 to 65535; found {port}")
    return port


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise TrainingError(f"{name} must be a whole number; found {environment[name]!r}") from None
