"""Several ranks train as one process with a larger batch does: one spawn per number of ranks carries all trainings."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_ranks import Job, free_ports, run_jobs

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
STEPS, HALF = 6, 3
STAGES = (0, 1, 2, 3)


def content(batch, stage=0, optimizer="HybridMuon", **training):
    """A small copper input in float64 throughout."""
    exact = {"precision": "float64"} if optimizer == "HybridMuon" else {}
    net = {"precision": "float64", "seed": 1}
    data = {"systems": [str(EXAMPLE / "train" / "fcc32")], "batch_size": batch}
    return {
        "model": {
            "type_map": ["Cu"],
            "data_stat_nbatch": 1000,  # every frame, whatever the batch
            "descriptor": {
                "type": "se_e2_a",
                "sel": "auto",
                "rcut": 4.5,
                "rcut_smth": 2.0,
                "neuron": [4, 8],
                "axis_neuron": 3,
                **net,
            },
            "fitting_net": {"neuron": [6, 6], **net},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener", "start_pref_v": 0.1, "limit_pref_v": 1.0},
        "optimizer": {"type": optimizer, "weight_decay": 0.01, **exact},
        "training": {
            "training_data": data,
            "validation_data": data,
            "numb_steps": STEPS,
            "seed": 3,
            "disp_freq": 2,
            "save_freq": HALF,
            "zero_stage": stage,
            "enable_ema": True,
            "ema_decay": 0.9,
            "gradient_max_norm": 5.0,
            **training,
        },
    }


def tensors(node, path=""):
    """Every tensor of a checkpoint by its path."""
    if isinstance(node, torch.Tensor):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return {key: value for name, inner in items for key, value in tensors(inner, f"{path}/{name}").items()}


def read(path):
    return torch.load(path, weights_only=True)


def assert_same(first, second, tolerance):
    """Compare model, optimizer state and average of two checkpoints."""
    for part in ("model", "optimizer", "ema"):
        a, b = tensors(first[part]), tensors(second[part])
        assert a.keys() == b.keys()
        for path, x in a.items():
            assert (type(b[path]), b[path].dtype) == (type(x), x.dtype), path
            # Magma's scores are kept in float32.
            bound = max(tolerance, 1e-6) if tolerance and x.dtype == torch.float32 else tolerance
            torch.testing.assert_close(b[path], x, rtol=bound, atol=bound, msg=lambda text, path=path: f"{path} {text}")


def alone(folder, given, **options):
    """Train in this process."""
    from deepmd_muon.train import run

    folder.mkdir(parents=True, exist_ok=True)
    before, threads = os.getcwd(), torch.get_num_threads()
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        Path("input.json").write_text(json.dumps(given))
        assert run("input.json", log_level="WARNING", **options) == 0
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of all trainings; the CPU is used, also where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", "cpu")
        yield tmp_path_factory.mktemp("ranks")


def check_equal(place, world, ends, jobs, kind="HybridMuon"):
    """Every job ended well, with the checkpoints and the learning curve of one process with the larger batch."""
    reference = place / f"alone{world}_{kind}"
    alone(reference, content(world, optimizer=kind))
    for job, end in zip(jobs, ends, strict=True):
        assert end == ["0"] * world, end
        for step in (HALF, STEPS):
            one, many = read(reference / f"model.ckpt-{step}.pt"), read(job.folder / f"model.ckpt-{step}.pt")
            assert one.keys() == many.keys()
            assert one["deepmd_muon"].keys() == many["deepmd_muon"].keys()
            assert_same(one, many, 1e-10)
            assert many["deepmd_muon"]["training_data"]["step"] == step * world
        curves = [np.loadtxt(folder / "lcurve.out") for folder in (reference, job.folder)]
        np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3)
        written = sorted(path.name for path in job.folder.iterdir())
        assert written == sorted(path.name for path in reference.iterdir())


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_equal_one_process_with_the_larger_batch(place, world):
    jobs = [Job(place / f"{world}_{stage}", content(1, stage)) for stage in STAGES]
    if world == 2:
        jobs += [Job(place / f"adam_{stage}", content(1, stage, "AdamW")) for stage in STAGES]
    ends = run_jobs(world, jobs)
    check_equal(place, world, ends[:4], jobs[:4])
    if world == 2:
        check_equal(place, world, ends[4:], jobs[4:], "AdamW")


def moves(world, place):
    """Restarts on this number of ranks, from every stage to every other, of what the test above has saved."""
    jobs, sources = [], []
    for number, stage in enumerate(STAGES):
        source = place / f"{5 - world if world > 1 else 2}_{STAGES[number - 1]}" / f"model.ckpt-{STEPS}.pt"
        given = content(1, stage, save_ckpt="again")
        jobs.append(Job(place / f"again{world}_{stage}", given, {"restart": str(source)}))
        sources.append(source)
    return jobs, sources


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_restarts_bitwise_on_other_ranks_and_stages(place, world):
    """The last checkpoint is loaded, no step is left to do, and it is saved again: every tensor is the same."""
    jobs, sources = moves(world, place)
    if not all(source.exists() for source in sources):
        pytest.skip("needs the checkpoints that the test above writes")
    if world == 1:
        for job in jobs:
            alone(job.folder, job.content, **job.options)
    else:
        assert run_jobs(world, jobs) == [["0"] * world] * len(jobs)
    for job, source in zip(jobs, sources, strict=True):
        first, second = read(source), read(job.folder / f"again-{STEPS}.pt")
        assert_same(first, second, 0.0)
        for key in ("training_data", "validation_data", "torch_rng", "step"):
            assert str(first["deepmd_muon"][key]) == str(second["deepmd_muon"][key])


def test_restarts_and_accidents_on_two_ranks(place):
    """A half is continued at another stage as if in one go; a NaN, a signal on one rank end all alike."""
    source = place / "2_0" / f"model.ckpt-{HALF}.pt"
    if not source.exists():
        pytest.skip("needs the checkpoints that the first test writes")
    halves = [Job(place / f"half_{s}", content(1, s), {"restart": str(source)}) for s in STAGES]
    poisoned = [Job(place / f"poisoned_{s}", content(1, s, save_freq=1), accident="poison") for s in (0, 2)]
    stopped = [Job(place / f"stopped_{s}", content(1, s, save_freq=100), accident="interrupt") for s in (1, 3)]
    skipping = content(1)
    skipping["optimizer"]["on_nonfinite"] = "skip"
    skipped = Job(place / "skipped", skipping, accident="poison")
    mixed = copy.deepcopy(content(1, 2))
    mixed["model"]["fitting_net"]["precision"] = "float32"
    wrong = Job(place / "wrong", mixed)
    ends = run_jobs(2, [*halves, *poisoned, *stopped, skipped, wrong])
    assert ends[:4] == [["0", "0"]] * 4
    whole = read(place / "2_0" / f"model.ckpt-{STEPS}.pt")
    for job in halves:
        assert_same(whole, read(job.folder / f"model.ckpt-{STEPS}.pt"), 1e-10)
    for job, end in zip(poisoned, ends[4:6], strict=True):
        assert end[0] == end[1]
        assert end[0].startswith("NonFiniteError: training stopped before update 3: the loss is nan")
        assert end[0].endswith("the last good checkpoint is model.ckpt-2.pt")
        assert not (job.folder / "model.ckpt-3.pt").exists()
    for job, end in zip(stopped, ends[6:8], strict=True):
        assert end == [str(128 + signal.SIGTERM)] * 2
        assert read(job.folder / "model.ckpt.pt")["deepmd_muon"]["step"] == 4
    assert ends[8] == ["0", "0"]
    assert read(skipped.folder / "model.ckpt.pt")["deepmd_muon"]["step"] == STEPS
    assert all("the parameters are float32 and float64; zero_stage 2 and 3 need one precision" in e for e in ends[9])


@pytest.mark.parametrize("accident", ["fail", "die"])
def test_a_failing_rank_ends_the_others_with_an_error(place, accident):
    ends = run_jobs(2, [Job(place / accident, content(1), accident=accident)])[0]
    assert ends[0].startswith("RuntimeError")
    assert ends[1] == ("no answer" if accident == "die" else "MemoryError: rank 1 has had enough")


def test_torchrun_trains_and_logs_once(tmp_path):
    (tmp_path / "input.json").write_text(json.dumps(content(1, 1, numb_steps=2, seed=None)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_ports(1)[0]), "-m", "deepmd_muon", "--pt", "train", "input.json"]
    environment = {**os.environ, "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training done; the model is model.ckpt-2.pt") == 1
    assert read(tmp_path / "model.ckpt.pt")["deepmd_muon"]["step"] == 2
