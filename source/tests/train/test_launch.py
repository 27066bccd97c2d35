"""Who this process is, from what torchrun and srun set."""

from __future__ import annotations

import datetime
import socket
import time

import pytest
import torch.distributed as dist

from deepmd_muon.train import parallel
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.launch import Place, find_place, first_node

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09],x1",
}


def test_torchrun():
    assert find_place(TORCHRUN) == Place(3, 1, 4, "env://")
    assert find_place({**SRUN, **TORCHRUN, "WORLD_SIZE": "8"}) == Place(3, 1, 8, "env://")


def test_srun_finds_the_first_node_and_a_port_of_the_job():
    assert find_place(SRUN) == Place(3, 1, 4, f"tcp://gpu07:{15000 + (123456 + 202) % 15000}")
    assert find_place({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "77"}) == Place(3, 1, 4, "tcp://head:77")
    other_step = find_place({**SRUN, "SLURM_STEP_ID": "3"})
    assert other_step.meeting != find_place(SRUN).meeting


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", **{k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}},
        {**SRUN, "SLURM_NTASKS": "1"},
        # A batch script that starts the command without srun: one process, whatever the job has tasks for.
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},
        # A shell that salloc opened.
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "5"},
    ],
)
def test_a_process_that_is_alone(environment):
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "2 processes, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "one"}, "RANK must be a whole number; found 'one'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_LOCALID is not set; start with srun or torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "set MASTER_ADDR to the name"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "a"},
            "set MASTER_PORT to a free port",
        ),
    ],
)
def test_what_is_missing_is_named(environment, message):
    with pytest.raises(TrainingError, match=message):
        find_place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[007-012,020],login1", "node007"),
        ("r[3,5]n1", "r3n1"),
        ("gpu-a[01]", "gpu-a01"),
    ],
)
def test_first_node(nodes, first):
    assert first_node(nodes) == first


def become_one_of_two(monkeypatch, rank):
    """Set what torchrun would tell this process, where the other one never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_do_not_come_are_missed(monkeypatch, rank):
    become_one_of_two(monkeypatch, rank)
    monkeypatch.setattr(parallel, "_MEETING_TIMEOUT", datetime.timedelta(seconds=1))
    message = f"rank {rank} has not met all 2 processes at MASTER_ADDR and MASTER_PORT within 1 s"
    with pytest.raises(TrainingError, match=message), parallel.joined():
        pass


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_hears_nothing_of_the_others_tells_what_is_wrong(monkeypatch, rank):
    become_one_of_two(monkeypatch, rank)
    monkeypatch.setattr(parallel, "_TELLING_TIMEOUT", datetime.timedelta(seconds=1))
    begin = time.monotonic()
    with parallel.first_tells("wrong") as mine:
        waited = time.monotonic() - begin
    assert mine
    assert (waited > 0.5) == (rank == "1")
    monkeypatch.delenv("RANK")  # nor does who does not know who it is
    with parallel.first_tells("wrong") as mine:
        assert mine


def test_the_last_exchange_of_ranks_outlives_the_run(monkeypatch):
    """A thread of gloo that were the last to hold it when the interpreter ends would abort the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exchange, made = dist.all_reduce, []

    def all_reduce(*args, **options):
        made.append(exchange(*args, **options))
        return made[-1]

    monkeypatch.setattr(parallel, "find_place", lambda: Place(0, 0, 1, f"tcp://127.0.0.1:{port}"))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with parallel.joined(5.0):
        pass
    assert made[-1] is not None
    assert made[-1] is parallel._HELD[-1]
    assert not dist.is_initialized()
