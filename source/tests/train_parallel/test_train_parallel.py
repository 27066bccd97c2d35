"""Several ranks train as one process with a larger batch does: a few spawns of 2, 3 and 4 ranks carry all trainings."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from compared import assert_same, tensors
from train_ranks import PATIENCE, Job, free_ports, run_commands, run_jobs
from write_systems import write_npy

from deepmd_muon.argcheck import normalize
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.model import build_model
from deepmd_muon.optim.state.schema import ALL_MOMENTS
from deepmd_muon.show.plan import plan_page
from deepmd_muon.train import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy.fully_sharded import FullySharded

STEPS, HALF = 6, 3
STAGES = (0, 1, 2, 3)
# Of four ranks: stage and number of groups that hold the whole model. `test_further_layouts` has what is left out here.
LAYOUTS_OF_FOUR = ((2, 2), (3, 2))
STAGES_OF_THREE = (1, 3)  # which cut tensors unevenly
ADAM_STAGES = (1, 3)  # on two ranks


def write_system(folder, nframes, natoms=8):
    """Atoms near the sites of a cubic lattice, with random energies, forces and virials."""
    random = np.random.default_rng(nframes)
    sites = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(-1, 3)[:natoms] * 3.6
    coord = (sites + random.uniform(-0.4, 0.4, (nframes, natoms, 3))).reshape(nframes, -1)
    arrays = {"coord": coord, "box": np.tile(7.2 * np.eye(3).ravel(), (nframes, 1))}
    for name, width in (("energy", 1), ("force", 3 * natoms), ("virial", 9)):
        arrays[name] = random.standard_normal((nframes, width))
    return write_npy(folder, [0] * natoms, [arrays], ["Cu"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of all trainings and their data; the CPU is used, also where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", "cpu")
        found = tmp_path_factory.mktemp("ranks")
        write_system(found / "train", 24)
        write_system(found / "valid", 5)
        write_system(found / "one_frame", 1)
        for natoms in (2, 5, 7):
            write_system(found / f"of_{natoms}", 6, natoms)
        yield found


def content(place, batch, stage=0, optimizer="HybridMuon", groups=1, **training):
    """A small input in float64 throughout."""
    # At small steps, so that rounding, which differs from layout to layout, does not grow over the steps.
    exact = {"precision": "float64", "lr_adjust_coeff": 0.18} if optimizer == "HybridMuon" else {}
    net = {"precision": "float64", "seed": 1}
    descriptor = {
        "type": "se_e2_a",
        "sel": "auto",
        "rcut": 4.5,
        "rcut_smth": 2.0,
        "neuron": [4, 8],
        "axis_neuron": 3,
    }
    # Three batches do not divide evenly among two or four ranks.
    seen = (
        {"batch_size": 2, "numb_btch": 3}
        if optimizer == "HybridMuon"
        else {"batch_size": 1, "numb_btch": "all"}
    )
    return {
        "model": {
            "type_map": ["Cu"],
            "data_stat_nbatch": 1000,  # every frame, whatever the batch
            "descriptor": {**descriptor, **net},
            "fitting_net": {"neuron": [6, 6], **net},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener", "start_pref_v": 0.1, "limit_pref_v": 1.0},
        "optimizer": {"type": optimizer, "weight_decay": 0.01, **exact},
        "training": {
            "training_data": {"systems": [str(place / "train")], "batch_size": batch},
            "validation_data": {"systems": [str(place / "valid")], **seen},
            "numb_steps": STEPS,
            "seed": 3,
            "disp_freq": 2,
            "save_freq": HALF,
            "zero_stage": stage,
            "data_parallel_replicate_degree": groups,
            "enable_ema": True,
            "ema_decay": 0.9,
            "gradient_max_norm": 5.0,
            **training,
        },
    }


def balanced(place, batches):
    """An input with systems of 2 to 8 atoms, whose batches ranks take by their cost; `batches` of each in a step."""
    given = content(
        place, 1, accumulate_grad_batches=batches, balance_batches=True, numb_steps=HALF
    )
    systems = [str(place / name) for name in ("of_2", "train", "of_5", "of_7")]
    given["training"]["training_data"] = {
        "systems": systems,
        "batch_size": 1,
        "auto_prob": "prob_uniform",
    }
    return given


def check_balanced(place, job, ends):
    """The ranks took the batches of one process."""
    assert set(ends) == {"0"}
    alone(place / "balanced_1", balanced(place, 6))
    one, many = (
        read_checkpoint(each / f"model.ckpt-{HALF}.pt")
        for each in (place / "balanced_1", job.folder)
    )
    assert_same(one, many, 1e-10)
    assert one["deepmd_muon"]["training_data"] == many["deepmd_muon"]["training_data"]


def alone(folder, given, **options):
    """Train in this process."""
    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run

    if "restart" not in options:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # of an earlier test, whose files would be kept beside the new ones
    folder.mkdir(parents=True, exist_ok=True)
    before, threads = os.getcwd(), torch.get_num_threads()
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        Path("input.json").write_text(json.dumps(given))
        assert run(load("input.json"), log_level="WARNING", **options) == 0
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)


def check_equal(place, world, ends, jobs, kind="HybridMuon", tolerance=1e-10):
    """Every job ended well, with the checkpoints and the learning curve of one process with the larger batch."""
    reference = place / f"alone{world}_{kind}"
    alone(reference, content(place, world, optimizer=kind))
    for job, end in zip(jobs, ends, strict=True):
        assert end == ["0"] * world, end
        for step in (HALF, STEPS):
            one, many = (
                read_checkpoint(folder / f"model.ckpt-{step}.pt")
                for folder in (reference, job.folder)
            )
            assert one.keys() == many.keys()
            only_many = many["deepmd_muon"].keys() - one["deepmd_muon"].keys()
            assert only_many == {"rng_of_ranks"}
            assert one["deepmd_muon"].keys() <= many["deepmd_muon"].keys()
            assert_same(one, many, tolerance)
            assert many["deepmd_muon"]["training_data"]["step"] == step * world
            assert many["deepmd_muon"]["validation_data"] == one["deepmd_muon"]["validation_data"]
        curves = [np.loadtxt(folder / "lcurve.out") for folder in (reference, job.folder)]
        np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3)
        wanted = {path.name for path in reference.iterdir()}
        assert {path.name for path in job.folder.iterdir()} == wanted


def again(place, source, *, world, stage, groups=1):
    """Load the last checkpoint of a run, of which no step is left to do, and save it again."""
    kind = "AdamW" if source.parent.name.startswith("adam") else "HybridMuon"
    given = content(place, 1, stage, kind, groups, save_ckpt="again")
    name = f"{source.parent.name}_on{world}_{stage}_{groups}"
    return Job(place / name, given, {"restart": str(source)})


def check_again(jobs):
    """Every tensor came back bit by bit, and so did the positions in the data and the random numbers."""
    for job in jobs:
        first, second = (
            read_checkpoint(job.options["restart"]),
            read_checkpoint(job.folder / f"again-{STEPS}.pt"),
        )
        assert_same(first, second)
        for key in ("training_data", "validation_data", "torch_rng", "step"):
            assert str(first["deepmd_muon"][key]) == str(second["deepmd_muon"][key])


def last(place, name):
    """The last checkpoint of a run of an earlier test."""
    path = place / name / f"model.ckpt-{STEPS}.pt"
    if not path.exists():
        pytest.skip("needs the checkpoints that an earlier test writes")
    return path


def test_four_ranks_equal_one_process_with_the_larger_batch(place):
    """HSDP among them."""
    jobs = [
        Job(place / f"4_{stage}_{groups}", content(place, 1, stage, groups=groups))
        for stage, groups in LAYOUTS_OF_FOUR
    ]
    wrong = Job(place / "groups", content(place, 1, 2, groups=3))
    for job in jobs:
        job.accident = "tell_plan"
    adam = Job(place / "adam_4", content(place, 1, 3, "AdamW", groups=2))
    ends = run_jobs(4, [*jobs, adam, wrong])
    for job, (stage, groups) in zip(jobs, LAYOUTS_OF_FOUR, strict=True):
        plan = (job.folder / "plan.txt").read_text()
        # What is computed for a cluster that one does not have is what the ranks had.
        assert (
            plan_page(job.folder / "input.json", 4, stage, groups, owners=True).partition("\n")[2]
            == plan
        )
        (job.folder / "plan.txt").unlink()
    check_equal(place, 4, ends[:-2], jobs)
    check_equal(place, 4, ends[-2:-1], [adam], "AdamW")
    message = "TrainingError: training/data_parallel_replicate_degree is 3, which does not divide 4 processes"
    assert all(message.partition(": ")[2] in end for end in ends[-1])


@pytest.mark.slow
def test_further_layouts_equal_one_process_with_the_larger_batch(place):
    four = [
        Job(place / f"4_{stage}_{groups}", content(place, 1, stage, groups=groups))
        for stage, groups in ((1, 1), (3, 4))
    ]
    three = [Job(place / f"3_{stage}", content(place, 1, stage)) for stage in (0, 2)]
    adam = [Job(place / f"adam_{stage}", content(place, 1, stage, "AdamW")) for stage in (0, 2)]
    check_equal(place, 4, run_jobs(4, four), four)
    check_equal(place, 3, run_jobs(3, three), three)
    check_equal(place, 2, run_jobs(2, adam), adam, "AdamW")
    eight = [
        Job(place / f"8_{stage}", content(place, 1, stage, groups=groups))
        for stage, groups in ((0, 1), (1, 1), (2, 4), (3, 2))
    ]
    check_equal(place, 8, run_jobs(8, eight), eight)


def test_three_ranks_equal_one_process_and_continue_runs_of_one_and_four(place):
    jobs = [Job(place / f"3_{stage}", content(place, 1, stage)) for stage in STAGES_OF_THREE]
    alone(place / "1", content(place, 1))
    moves = [
        again(place, last(place, "1"), world=3, stage=3),
        again(place, last(place, "4_3_2"), world=3, stage=2),
    ]
    by_cost = Job(place / "balanced_3", balanced(place, 2))
    ends = run_jobs(3, [*jobs, *moves, by_cost])
    check_equal(place, 3, ends[: len(jobs)], jobs)
    assert ends[len(jobs) : -1] == [["0"] * 3] * len(moves)
    check_again(moves)
    check_balanced(place, by_cost, ends[-1])


def test_the_sharded_section_of_an_input_reaches_the_step(place):
    """Every matrix has one owner and travels in two buckets; the result is that of one process."""
    job = Job(place / "spread", content(place, 1))
    job.content["optimizer"]["sharded"] = {
        "replication": "spread",
        "bucket_bytes": 1,
        "slots": 1,
    }
    job.accident = "tell_plan"
    ends = run_jobs(2, [job])
    plan = (job.folder / "plan.txt").read_text()
    assert "replicas share the work; 0 jobs stay, 3 travel in 2 buckets" in plan
    (job.folder / "plan.txt").unlink()
    check_equal(place, 2, ends, [job])


def test_two_ranks_equal_one_process_and_continue_runs_of_three_and_four(place):
    jobs = [Job(place / f"2_{stage}", content(place, 1, stage)) for stage in STAGES]
    adam = [
        Job(place / f"adam_{stage}", content(place, 1, stage, "AdamW")) for stage in ADAM_STAGES
    ]
    jobs[0].launcher = "srun"
    parted = [jobs[1], adam[0]]
    for job in parted:
        job.accident = "tell_state"
    moves = [
        again(place, last(place, "3_3"), world=2, stage=1),
        again(place, last(place, "4_2_2"), world=2, stage=3, groups=2),
        again(place, last(place, "adam_4"), world=2, stage=1),
    ]
    ends = run_jobs(2, [*jobs, *adam, *moves])
    for job in parted:  # at stage 1 two halves make one state, whatever the optimizer
        held = [int((path := job.folder / f"state{rank}.txt").read_text()) for rank in range(2)]
        path.with_name("state0.txt").unlink()
        path.unlink()
        saved = tensors(
            read_checkpoint(job.folder / f"model.ckpt-{STEPS}.pt")["optimizer"]["state"]
        )
        assert sum(held) == sum(
            x.numel() for key, x in saved.items() if key.rpartition("/")[2] in ALL_MOMENTS
        )
        assert max(held) < 0.6 * sum(held)
    check_equal(place, 2, ends[:4], jobs)
    check_equal(place, 2, ends[4:6], adam, "AdamW")
    assert ends[6:] == [["0"] * 2] * len(moves)
    check_again(moves)


def dpa3(place, stage, kind="HybridMuon"):
    """An input whose model has parameters that no step gives a gradient: those of edges in the last layer."""
    given = content(place, 1, stage, kind)
    edges = {
        "n_dim": 6,
        "e_dim": 4,
        "nlayers": 2,
        "e_rcut": 4.5,
        "e_rcut_smth": 2.0,
        "e_sel": 20,
        "axis_neuron": 2,
    }
    angles = {"a_dim": 4, "a_rcut": 4.0, "a_rcut_smth": 2.0, "a_sel": 10}
    given["model"]["descriptor"] = {
        "type": "dpa3",
        "repflow": edges | angles,
        "precision": "float64",
        "seed": 1,
    }
    return given


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("HybridMuon", 2), pytest.param("AdamW", 3, marks=pytest.mark.slow)],
)
def test_parameters_without_a_gradient_restart_without_state(place, kind, stage):
    whole = Job(place / f"dpa3_{kind}", dpa3(place, 0, kind))
    assert run_jobs(2, [whole]) == [["0", "0"]]
    source = whole.folder / f"model.ckpt-{HALF}.pt"
    half = Job(place / f"dpa3_{kind}_{stage}", dpa3(place, stage, kind), {"restart": str(source)})
    assert run_jobs(2, [half]) == [["0", "0"]]
    in_one_go, continued = (
        read_checkpoint(job.folder / f"model.ckpt-{STEPS}.pt") for job in (whole, half)
    )
    assert len(in_one_go["optimizer"]["state"]) < len(
        in_one_go["optimizer"]["param_groups"][0]["params"]
    )
    if kind == "HybridMuon":  # where matrices are sharded, it makes zeros for all of them
        made = continued["optimizer"]["state"]
        further = [made.pop(key) for key in made.keys() - in_one_go["optimizer"]["state"].keys()]
        assert not any(one["momentum_buffer"].any() for one in further)
    assert_same(in_one_go, continued, 1e-10)


def test_restarts_and_accidents_on_two_ranks(place):
    """A half is continued at another stage as if in one go; a NaN, a signal, an error on one rank end all."""
    source = last(place, "2_0").with_name(f"model.ckpt-{HALF}.pt")
    halves = [
        Job(place / f"half_{s}", content(place, 1, s), {"restart": str(source)}) for s in (0, 1, 3)
    ]
    poisoned = [
        Job(place / f"poisoned_{s}", content(place, 1, s, save_freq=1), accident="poison")
        for s in (0, 2)
    ]
    stopped = [
        Job(place / f"stopped_{s}", content(place, 1, s, save_freq=100), accident="interrupt")
        for s in (1, 3)
    ]
    skipping = content(place, 1)
    skipping["optimizer"]["on_nonfinite"] = "skip"
    skipped = Job(place / "skipped", skipping, accident="poison")
    cannot_write = Job(place / "file_in_the_way", content(place, 1, save_ckpt="input.json/saved"))
    # The last one: the store ends with the process of rank 0.
    failed = Job(place / "fail_first", content(place, 1, rank_timeout=2.5), accident="fail_first")
    ends = run_jobs(2, [*halves, *poisoned, *stopped, skipped, cannot_write, failed])
    ends_of_halves, ends = ends[: len(halves)], ends[len(halves) :]
    assert ends_of_halves == [["0", "0"]] * len(halves)
    whole = read_checkpoint(place / "2_0" / f"model.ckpt-{STEPS}.pt")
    for job in halves:
        assert_same(whole, read_checkpoint(job.folder / f"model.ckpt-{STEPS}.pt"), 1e-10)
    for job, end in zip(poisoned, ends[:2], strict=True):
        assert end[0] == end[1]
        assert end[0].startswith(
            "NonFiniteError: training stopped before update 3: the loss is nan"
        )
        assert end[0].endswith("the last good checkpoint is model.ckpt-2.pt")
        assert not (job.folder / "model.ckpt-3.pt").exists()
        assert read_checkpoint(job.folder / "model.ckpt")["deepmd_muon"]["step"] == 2
    for job, end in zip(stopped, ends[2:4], strict=True):
        assert end == [str(128 + signal.SIGTERM)] * 2
        assert read_checkpoint(job.folder / "model.ckpt.pt")["deepmd_muon"]["step"] == 4
    assert ends[4] == ["0", "0"]
    assert read_checkpoint(skipped.folder / "model.ckpt.pt")["deepmd_muon"]["step"] == STEPS
    message = "training/save_ckpt: cannot write checkpoints to "
    assert ends[5][0].startswith(f"TrainingError: {message}input.json: ")
    assert ends[5][1] == f"TrainingError: rank 0 stopped with {ends[5][0]}"
    assert ends[6][0].startswith(
        "RunError: training stopped at step 3 (in its step): this machine has no memory"
    )
    assert ends[6][1].startswith(
        "TrainingError: rank 1 has lost the others at step 3: rank 0 (process "
    )
    assert f"stopped with {ends[6][0]}" in ends[6][1]


def test_ranks_that_read_nothing_on_the_host_do_the_same(place):
    """As on GPUs at stages 0 and 1; requests to stop are read two steps later here, by all ranks together."""
    jobs = [
        Job(place / "device", content(place, 1), accident="on_device"),
        Job(place / "device_1", content(place, 1, 1), accident="on_device"),
        Job(place / "device_adam_1", content(place, 1, 1, optimizer="AdamW"), accident="on_device"),
    ]
    skipping = content(place, 1)
    skipping["optimizer"]["on_nonfinite"] = "skip"
    others = [
        Job(place / "device_poisoned", content(place, 1, save_freq=1), accident="poison_on_device"),
        Job(
            place / "device_stopped",
            content(place, 1, save_freq=100, numb_steps=20),
            accident="interrupt_on_device",
        ),
        Job(place / "device_skipped", skipping, accident="poison_on_device"),
    ]
    first = run_jobs(2, [*jobs, *others])
    check_equal(place, 2, first[:2], jobs[:2])
    # torch's fused AdamW reads the rate in float32.
    check_equal(place, 2, first[2:3], jobs[2:], "AdamW", 1e-6)
    poisoned, stopped, skipped = first[3:]
    assert poisoned[0] == poisoned[1]
    assert poisoned[0].startswith(
        "NonFiniteError: training stopped before update 3: the loss is nan"
    )
    part = rf"{re.escape(str(place / 'train'))} \(frames? [\d, ]+\)"
    assert re.search(f"on a batch of {part};", poisoned[0])  # of both ranks
    assert stopped == [str(128 + signal.SIGTERM)] * 2
    # Sent in the fourth step, summed in the fifth, read after the seventh.
    assert read_checkpoint(others[1].folder / "model.ckpt.pt")["deepmd_muon"]["step"] == 7
    assert skipped == ["0", "0"]
    assert read_checkpoint(others[2].folder / "model.ckpt.pt")["deepmd_muon"]["step"] == STEPS
    halves = [
        Job(
            place / "device_half",
            content(place, 1),
            {"restart": str(jobs[0].folder / f"model.ckpt-{HALF}.pt")},
        ),
        again(place, last(place, "device"), world=2, stage=1),
        Job(place / "device_die", content(place, 1, rank_timeout=2.5), accident="die_on_device"),
    ]
    halves[0].accident = "on_device"
    second = run_jobs(2, halves)
    assert second[:2] == [["0"] * 2] * 2
    wanted, found = (
        read_checkpoint(job.folder / f"model.ckpt-{STEPS}.pt") for job in (jobs[0], halves[0])
    )
    assert_same(wanted, found)
    check_again(halves[1:2])
    assert second[2][0].startswith(
        "TrainingError: rank 0 has lost the others at step 3: rank 1 (process "
    )


def test_two_ranks_that_accumulate_two_batches_equal_one_process_with_four(place):
    """At every stage, on the host and as on GPUs; one process that accumulates four continues their run."""
    two, four = {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}
    jobs = [Job(place / f"parts_{stage}", content(place, 1, stage, **two)) for stage in (0, 1, 3)]
    jobs.append(Job(place / "parts_device", content(place, 1, **two), accident="on_device"))
    by_cost = Job(place / "balanced_2", balanced(place, 3))
    ends = run_jobs(2, [*jobs, by_cost])
    assert ends == [["0"] * 2] * 5
    check_balanced(place, by_cost, ends[-1])
    check_equal(place, 4, [["0"] * 4] * 4, jobs)
    half = str(jobs[0].folder / f"model.ckpt-{HALF}.pt")
    alone(place / "parts_alone", content(place, 1, **four), restart=half)
    found, wanted = (
        read_checkpoint(place / name / f"model.ckpt-{STEPS}.pt")
        for name in ("parts_alone", "parts_0")
    )
    assert_same(found, wanted, 1e-10)
    assert found["deepmd_muon"]["training_data"] == wanted["deepmd_muon"]["training_data"]


@pytest.mark.parametrize(
    "stages",
    [{"mixed": 3, "frozen": 2}, pytest.param({"mixed": 2, "frozen": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_two_precisions_and_a_frozen_descriptor_at_stages_2_and_3(place, stages):
    """Descriptor and fitting net are gathered and scattered apart from each other."""
    mixed, frozen = copy.deepcopy(content(place, 2)), copy.deepcopy(content(place, 2))
    mixed["model"]["fitting_net"]["precision"] = "float32"
    frozen["model"]["descriptor"]["trainable"] = False
    kinds = {"mixed": (mixed, 1e-5), "frozen": (frozen, 1e-10)}
    jobs = []
    for kind, (given, _) in kinds.items():
        alone(place / f"{kind}_alone", given)
        many = copy.deepcopy(given)
        many["training"]["zero_stage"] = stages[kind]
        many["training"]["training_data"]["batch_size"] = 1
        jobs.append(Job(place / f"{kind}_{stages[kind]}", many))
    ends = run_jobs(2, jobs)
    for job, end in zip(jobs, ends, strict=True):
        assert end == ["0"] * 2, end
        kind = job.folder.name.partition("_")[0]
        one, many = (
            read_checkpoint(f / f"model.ckpt-{STEPS}.pt")
            for f in (place / f"{kind}_alone", job.folder)
        )
        assert_same(one, many, kinds[kind][1])


def test_a_unit_of_two_precisions_is_refused(place):
    given = content(place, 1)
    given["model"]["descriptor"]["sel"] = [8]
    model = build_model(normalize(given).normalized["model"])
    model.atomic_model.descriptor.extra = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    with pytest.raises(
        TrainingError, match=r"parameters of the descriptor are float32 and float64.*one precision"
    ):
        FullySharded(Ranks(torch.device("cpu")), model, mesh=None, reshard_after_forward=True)


def test_a_rank_that_fails_is_stuck_or_dies_ends_the_others_with_its_story(place):
    """The others wait for two and a half seconds here."""
    # Under HSDP the ranks talk in groups other than that of all.
    accidents = [("fail", 0, 1), ("sleep", 3, 2), ("stop", 1, 1), ("die", 2, 1)]
    jobs = [
        Job(place / name, content(place, 1, stage, groups=groups, rank_timeout=2.5), accident=name)
        for name, stage, groups in accidents
    ]
    failed, asleep, stopped, dead = run_jobs(2, jobs)
    lost = "TrainingError: rank 0 has lost the others at step 3: rank 1 (process "
    assert all(ends[0].startswith(lost) for ends in (failed, asleep, stopped, dead))
    assert failed[1].startswith(
        "RunError: training stopped at step 3 (in its step): this machine has no"
    )
    assert "rank 1 has had enough" in failed[1]
    assert f"stopped with {failed[1]}" in failed[0]
    assert "has been reading its batch (step 3) for" in asleep[0]
    assert "is dead or stopped: no sign of life for" in stopped[0]
    assert "is dead: its process has ended, last seen" in dead[0]
    for ends in (asleep, stopped):
        assert ends[1].startswith("TrainingError: rank 1 has lost the others at step 3: rank 0")
    assert dead[1] == "no answer"


@pytest.mark.slow
def test_a_rank_that_dies_where_exchanges_hang_ends_the_others(place):
    """As over NCCL, long before the limit of 60 s."""
    job = Job(place / "die_unnoticed", content(place, 1), accident="die_unnoticed")
    start = time.monotonic()
    assert run_jobs(3, [job]) == [["no answer"] * 3]
    assert time.monotonic() - start < 30.0
    for rank in (0, 2):
        reason = (job.folder / f"reason{rank}").read_text()
        assert reason.startswith(f"rank {rank} has lost the others at step 3: rank 1 (process ")
        assert "is dead: its process has ended, last seen" in reason


def test_a_rank_that_is_stopped_before_the_first_step_ends_the_others(place):
    """Work of rank 0 may take longer than ranks wait for each other, as long as it lives."""
    jobs = [
        Job(place / name, content(place, 1, rank_timeout=3.0), accident=name)
        for name in ("count_long", "stop_second")
    ]
    start = time.monotonic()
    slow, stopped = run_jobs(3, jobs)
    assert time.monotonic() - start < PATIENCE / 2  # also rank 0 ends, in the middle of its work
    assert slow == ["0"] * 3
    assert stopped[:2] == ["no answer"] * 2
    assert stopped[2].startswith("TrainingError: rank 2 has lost the others: rank 1 (process ")
    assert "is dead or stopped: no sign of life for" in stopped[2]
    assert "last seen" in stopped[2]


@pytest.mark.parametrize(
    ("accident", "opening", "seen"),
    [
        ("stop_first", "has lost the others: rank 0 (process ", "last seen counting neighbours"),
        (
            "stop_first_stepping",
            "has lost the others at step 3: rank 0 (process ",
            "last seen in its step (step 3)",
        ),
    ],
)
def test_rank_0_that_is_stopped_ends_the_others(place, accident, opening, seen):
    """It keeps the store of notes, which does not answer then."""
    (ends,) = run_jobs(
        3, [Job(place / accident, content(place, 1, rank_timeout=3.0), accident=accident)]
    )
    assert ends[0] == "no answer"
    for rank in (1, 2):
        assert ends[rank].startswith(f"TrainingError: rank {rank} {opening}")
        assert f"through which they reach each other, is dead or stopped, {seen}" in ends[rank]


def test_all_ranks_report_an_error_of_one_rank(place):
    """Other data, inputs or files than rank 0's, and a port that another program uses; nobody waits for the limit."""
    jobs = {}
    for name, training in (
        ("bad_data", {"training_data": {"systems": [str(place / "damaged")], "batch_size": 1}}),
        ("no_folder", {"validation_data": {"systems": [str(place / "nowhere")]}}),
        ("no_validation", {"validation_data": None}),
        ("other_steps", {"numb_steps": 9}),
        (
            "other_validation",
            {
                "validation_data": {
                    "systems": [str(place / "train")],
                    "batch_size": 2,
                    "numb_btch": 3,
                }
            },
        ),
    ):
        jobs[name] = Job(place / name, {}, accident="own_folder")
        for rank, changes in enumerate(({}, training)):
            own = content(place, 1)
            own["training"] = {
                key: x for key, x in {**own["training"], **changes}.items() if x is not None
            }
            (jobs[name].folder / str(rank)).mkdir(parents=True)
            (jobs[name].folder / str(rank) / "input.json").write_text(json.dumps(own))
    shutil.copytree(place / "train", place / "damaged", dirs_exist_ok=True)
    (place / "damaged/set.000/force.npy").write_bytes(b"damaged")
    jobs["port"] = Job(place / "port", content(place, 1), accident="busy_port")
    ends = dict(zip(jobs, run_jobs(2, list(jobs.values())), strict=True))
    for name, parts in (
        ("bad_data", ("SystemFormatError: ", "damaged", "set.000/force.npy")),
        ("no_folder", ("SystemNotFoundError: ", str(place / "nowhere"))),
    ):
        assert ends[name][0].startswith(
            "TrainingError: rank 0 has lost the others: rank 1 (process "
        )
        for text in ends[name]:
            assert all(part in text for part in parts)
    for name, part in (
        (
            "no_validation",
            "input of rank 1 differs from that of rank 0 in training/validation_data: ",
        ),
        ("other_steps", "input of rank 1 differs from that of rank 0 in training/numb_steps: "),
        ("other_validation", "validation data of rank 1 are not those of rank 0"),
        ("port", "choose another MASTER_PORT"),
    ):
        for text in ends[name]:
            assert text.startswith("TrainingError: ")
            assert part in text


@pytest.mark.parametrize("number", [1, pytest.param("all", marks=pytest.mark.slow)])
def test_fewer_validation_frames_than_ranks(place, number):
    seen = {
        "validation_data": {
            "systems": [str(place / "one_frame")],
            "batch_size": 1,
            "numb_btch": number,
        }
    }
    alone(place / f"one_frame_alone_{number}", content(place, 3, **seen))
    job = Job(place / f"one_frame_{number}", content(place, 1, **seen))
    assert run_jobs(3, [job]) == [["0"] * 3]
    curves = [
        np.loadtxt(place / name / "lcurve.out")
        for name in (f"one_frame_alone_{number}", job.folder.name)
    ]
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ranks_end_when_torchrun_is_killed(place, tmp_path):
    """They save first, as after SIGTERM."""
    given = content(place, 1, numb_steps=10**9, save_freq=10**9)
    del given["optimizer"]["lr_adjust_coeff"]  # for a line that only the first rank logs
    (tmp_path / "input.json").write_text(json.dumps(given))
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(**torchrun_command(tmp_path), stdout=log, stderr=log)
    ranks = []
    try:
        curve = tmp_path / "lcurve.out"
        wait_until(
            lambda: launcher.poll() is not None or (curve.exists() and curve.stat().st_size > 1000)
        )
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not any(map(is_running, ranks)))
    finally:
        launcher.kill()
        for rank in filter(is_running, ranks):
            os.kill(rank, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert "SIGTERM: finishing the step and saving" in log
    assert "has lost the others" not in log
    assert log.count("optimizer/lr_adjust_coeff is not given") == 1
    assert read_checkpoint(tmp_path / "model.ckpt.pt")["deepmd_muon"]["step"] > 0
    # A rank that misses the other one at the end may leave the file of its lock, but no lock.
    hidden = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert hidden <= {".model.ckpt.lock", ".lcurve.out.lock"}


LAST_OF_TWO = """
import os, signal, time
from pathlib import Path
from deepmd_muon.train.ranks.ranks import joined

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the kernel sends when torchrun ends
with joined() as ranks:
    if ranks.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    while not ranks.watch.store_has_ended:
        time.sleep(0.01)
    if ranks.rank == 1:
        os._exit(0)
Path("ended").touch()
"""


def test_a_rank_that_has_finished_needs_no_other_one_once_torchrun_is_dead(tmp_path):
    """A rank with its part of the last exchange closes its connections, maybe too early."""
    (tmp_path / "finish.py").write_text(LAST_OF_TWO)
    words = torchrun_command(tmp_path)
    words["args"] = [*words["args"][: words["args"].index("-m", 2)], "finish.py"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(**words, stdout=log, stderr=log)
    launcher.wait()
    ended = tmp_path / "ended"
    wait_until(lambda: ended.exists() or "lost the others" in (tmp_path / "log").read_text())
    assert ended.exists()


def torchrun_command(folder):
    """Return how torchrun starts two ranks in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [
        "--master-port",
        str(free_ports(1)[0]),
        "-m",
        "deepmd_muon",
        "--pt",
        "train",
        "input.json",
    ]
    environment = {**os.environ, "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return {"args": command, "cwd": folder, "env": environment}


def test_reports_a_wrong_input_once(place, tmp_path):
    """Pairs of ranks, each in a folder of its own: both inputs have the same mistake, two mistakes, or one has one."""
    pairs = []
    for name, numbers in (("same", (-1, -1)), ("both", (-1, -2)), ("second", (2, -2))):
        pairs.append([tmp_path / f"{name}{rank}" for rank in range(2)])
        for folder, number in zip(pairs[-1], numbers, strict=True):
            folder.mkdir()
            (folder / "input.json").write_text(
                json.dumps(content(place, 1, numb_steps=number, rank_timeout=3.0))
            )
    statuses, told = zip(*run_commands(pairs), strict=True)
    assert statuses == (2,) * 6
    message = "dp train: 1 problem in input.json:\n  training/numb_steps: must be >= 0; found {}\n"
    other = message.format(-2).replace("dp train: ", "dp train: rank 1 cannot begin: ")
    expected = [
        message.format(-1),
        "",
        message.format(-1),
        message.format(-2),
        other,
        message.format(-2),
    ]
    for text, part in zip(told, expected, strict=True):
        assert part in text
        assert text.count("dp train:") == bool(part)
