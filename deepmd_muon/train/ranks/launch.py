"""Find the place of this process in its run from the environment that torchrun or srun sets."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import signal
from collections.abc import Mapping

from deepmd_muon.train.errors import TrainingError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# Variables that torchrun and the launchers of MPI set; srun ends its processes itself.
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "PMIX_RANK", "PMI_RANK")
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in its run.

    Attributes
    ----------
    rank, local, size
        Its number, its number on this machine, and how many processes there are.
    host, port
        Where they meet.
    srun
        Whether srun alone says all this; it may show each process its own GPU only.
    agent
        Whether torchrun keeps the store at which they meet; otherwise rank 0 does.
    launched
        Whether torchrun or mpirun started this process, which should not outlive it.
    """

    rank: int
    local: int
    size: int
    host: str
    port: int
    srun: bool = False
    agent: bool = False
    launched: bool = False

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

    If WORLD_SIZE is set (torchrun, scripts for mpirun), it decides with RANK, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT. Otherwise a task of srun takes SLURM_NTASKS, SLURM_PROCID and
    SLURM_LOCALID. Its tasks meet at MASTER_ADDR and MASTER_PORT if they are set, else at the first
    node of the step and a port made of the job's number.

    Raises
    ------
    TrainingError
        When a variable is missing, no number or out of range.
    """
    launched = any(variable in environment for variable in _LAUNCHERS)
    if "WORLD_SIZE" in environment:
        if _number(environment, "WORLD_SIZE") == 1:
            return None
        _require(environment, _TORCHRUN, "start with torchrun")
        return _checked(
            Place(
                rank=_number(environment, "RANK"),
                local=_number(environment, "LOCAL_RANK"),
                size=_number(environment, "WORLD_SIZE"),
                host=environment["MASTER_ADDR"],
                port=_port(environment),
                agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                launched=launched,
            )
        )
    if not _is_task(environment) or _number(environment, "SLURM_NTASKS") == 1:
        return None
    _require(environment, _SRUN, "start with srun or torchrun")
    return _checked(
        Place(
            rank=_number(environment, "SLURM_PROCID"),
            local=_number(environment, "SLURM_LOCALID"),
            size=_number(environment, "SLURM_NTASKS"),
            host=_slurm_address(environment),
            port=_slurm_port(environment),
            srun=True,
            launched=launched,
        )
    )


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent process ends, at which a run saves and ends.

    If its launcher is killed, a rank would keep running in the background. Does nothing without
    Linux.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _checked(place: Place) -> Place:
    """Refuse a number that no process of the run can have."""
    if not 0 <= place.rank < place.size:
        raise TrainingError(
            f"rank {place.rank} is not one of {place.size} processes, which are 0 to "
            f"{place.size - 1}"
        )
    if not 0 <= place.local < place.size:
        raise TrainingError(
            f"local rank {place.local} is not one of {place.size} processes, 0 to {place.size - 1}"
        )
    return place


def _is_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process.

    A batch script sees the job's tasks, too, but no step.
    """
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
    # Simultaneous steps of one job on one node must not meet.
    step_id = environment.get("SLURM_STEP_ID", "0")
    step = int(step_id) if step_id.isdigit() else 0  # it may be a word
    return 15000 + (_number(environment, "SLURM_JOB_ID") + 101 * step) % 15000


def first_node(nodes: str) -> str:
    """Return the first name of Slurm's short form, e.g. node007 of ``node[007-012,020],login1``."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes.strip())
    assert match is not None  # every part of the pattern may be empty
    return "".join(text or "" for text in match.groups())


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
