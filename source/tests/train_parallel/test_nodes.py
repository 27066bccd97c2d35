"""Two nodes train one model, by the scripts of examples/slurm and a srun of the tests; one and three ranks go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compared import assert_same
from test_train_parallel import HALF, STEPS, alone, content, write_system
from torch.distributed.run import get_args_parser
from train_ranks import Job, free_ports, run_jobs

from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.train.ranks.launch import Place, find_place

TOP = Path(__file__).parents[3]
SCRIPTS = TOP / "examples" / "slurm"
NODES = 2
# What Slurm's srun does here: it starts the tasks, tells each its place, and ends with the worst status.
SRUN = """#!{python}
import os, subprocess, sys
nodes, each = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["TASKS_PER_NODE"])
tasks = []
for rank in range(nodes * each):
    place = {{"PROCID": rank, "NODEID": rank // each, "LOCALID": rank % each, "NTASKS": nodes * each, "STEP_ID": 0}}
    own = {{f"SLURM_{{name}}": str(value) for name, value in place.items()}}
    tasks.append(subprocess.Popen(sys.argv[1:], env={{**os.environ, **own, "SLURM_STEP_NODELIST": "127.0.0.1"}}))
sys.exit(max(task.wait() for task in tasks))
"""
# Stands for a program that the scripts start: it notes its words and its environment.
NOTE = """#!{python}
import json, os, sys
with open(f"task{{os.environ['SLURM_PROCID']}}.json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of all trainings and their data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", "cpu")
        found = tmp_path_factory.mktemp("nodes")
        write_system(found / "train", 24)
        write_system(found / "valid", 5)
        yield found


def six_batches(place, ranks, **training):
    """Return an input whose steps take six batches on this many ranks."""
    return content(place, 1, accumulate_grad_batches=6 // ranks, **training)


def submit(script, folder, programs, *, tasks_per_node=1, port=0, **environment):
    """Run a script as sbatch does, on two nodes that are this machine."""
    commands = folder / "bin"
    commands.mkdir()
    nodes = f"#!{sys.executable}\nprint('127.0.0.1')\nprint('unknown.invalid')\n"
    for name, text in {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": nodes,
        **programs,
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": str((port or 15001) - 15000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "6",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", SCRIPTS / script, "input.json"],
        cwd=folder,
        env={
            **kept,
            **job,
            "SLURM_JOB_NUM_NODES": str(NODES),
            "TASKS_PER_NODE": str(tasks_per_node),
            "PATH": f"{commands}:{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def test_one_torchrun_a_node_starts_a_process_for_each_gpu(tmp_path):
    submit(
        "torchrun.sbatch",
        tmp_path,
        {"torchrun": NOTE.format(python=sys.executable)},
        SLURM_GPUS_ON_NODE="4",
    )
    for node in range(NODES):
        words, environment = json.loads((tmp_path / f"task{node}.json").read_text())
        given = get_args_parser().parse_args(words)
        assert (given.nnodes, given.nproc_per_node, given.node_rank) == ("2", "4", node)
        assert (given.master_addr, given.master_port) == ("127.0.0.1", 15001)
        assert (given.module, given.training_script) == (True, "deepmd_muon")
        assert given.training_script_args == ["--pt", "train", "input.json", "--restart", "auto"]
        assert environment["OMP_NUM_THREADS"] == "1"  # six processors for four processes


def test_tasks_of_srun_know_their_place(tmp_path):
    submit(
        "srun.sbatch", tmp_path, {"python": NOTE.format(python=sys.executable)}, tasks_per_node=2
    )
    for rank in range(4):
        words, environment = json.loads((tmp_path / f"task{rank}.json").read_text())
        assert words == ["-m", "deepmd_muon", "--pt", "train", "input.json", "--restart", "auto"]
        assert find_place(environment) == Place(rank, rank % 2, 4, "127.0.0.1", 15001, srun=True)
        assert environment["OMP_NUM_THREADS"] == environment["SRUN_CPUS_PER_TASK"] == "6"


def check_restarts(place, whole, on_three):
    """One process and three continue the half of a run of two nodes; all end as the run that went on."""
    source = whole / f"model.ckpt-{HALF}.pt"
    alone(place / f"{whole.name}_on1", six_batches(place, 1), restart=str(source))
    on_three(place / f"{whole.name}_on3", six_batches(place, 3), str(source))
    expected = read_checkpoint(whole / f"model.ckpt-{STEPS}.pt")
    for ranks in (1, 3):
        found = read_checkpoint(place / f"{whole.name}_on{ranks}" / f"model.ckpt-{STEPS}.pt")
        assert_same(expected, found, 1e-10)
        assert found["deepmd_muon"]["training_data"] == expected["deepmd_muon"]["training_data"]
        assert found["deepmd_muon"]["training_data"]["step"] == 6 * STEPS


def test_one_and_three_ranks_continue_a_run_of_two_nodes(place):
    job = Job(place / "two", six_batches(place, 2), launcher="nodes")
    assert run_jobs(2, [job]) == [["0"] * 2]

    def on_three(folder, given, source):
        assert run_jobs(3, [Job(folder, given, {"restart": source})]) == [["0"] * 3]

    check_restarts(place, job.folder, on_three)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["torchrun.sbatch", "srun.sbatch"])
def test_the_scripts_train_on_two_nodes(place, script):
    """Two launchers with one rank each, and three ranks of one launcher."""
    folder = place / script.partition(".")[0]
    folder.mkdir()
    (folder / "input.json").write_text(json.dumps(six_batches(place, 2)))
    torchrun = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    path = f"{TOP}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = {"PROCESSES_PER_NODE": "1", "DEVICE": "cpu", "PYTHONPATH": path}
    log = submit(
        script, folder, {"torchrun": torchrun, "python": python}, port=free_ports(1)[0], **settings
    )
    assert log.count("training done; the model is model.ckpt-6.pt") == 1
    assert log.count("% in sums over ranks") == 1

    def on_three(folder, given, source):
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(given))
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "3",
            "-m",
            "deepmd_muon",
            "--pt",
        ]
        command += ["train", "input.json", "--restart", source]
        environment = {**os.environ, "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True
        )

    check_restarts(place, folder, on_three)
