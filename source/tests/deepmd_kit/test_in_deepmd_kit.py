"""HybridMuon inside deepmd-kit 3.2.0's own trainers: `pytest -m deepmd_kit` with DEEPMD_KIT_PYTHON set.

DPA-4 needs ``vesin[torch]`` beside deepmd-kit, for its neighbour lists on a CPU.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from deepmd_kit_program import MARKS, python
from small_inputs import small_input
from torch import nn

from deepmd_muon.argcheck import load
from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.routing.routes import canonical_name
from deepmd_muon.train import run as train

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("train_in_deepmd_kit.py")
FAMILIES = ("se_e2_a", "dpa1", "dpa3", "dpa4")
STAGES = (0, 1, 2)
FURTHER = {
    "schedule": "polar-express",
    "splits": ["*layers.1.matrix: columns 2"],
    "nesterov": False,
    "normuon": True,
    "normuon_beta": 0.9,
    "cautious_decay": True,
}
STATE_KEYS = ("momentum_buffer", "magma_score", "exp_avg", "exp_avg_sq")

pytestmark = [*MARKS, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """A folder with the metadata of this package, entry points included, as its installation writes it."""
    folder = tmp_path_factory.mktemp("metadata")
    code = "from setuptools import setup; import sys; setup(script_args=['-q', 'egg_info', '--egg-base', sys.argv[1]])"
    python("-c", code, folder, folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def run(metadata, tmp_path_factory):
    """A function that runs trainings in deepmd-kit, with our optimizer or without, and returns their folder."""
    folder = tmp_path_factory.mktemp("trainings")

    def start(name, jobs, *, ours, ranks=1):
        for number, job in enumerate(jobs):
            (folder / f"{name}.{number}.json").write_text(json.dumps(job.pop("content")))
            job.update(input=f"{name}.{number}.json", record=f"{job.pop('name')}.rec")
        (folder / f"{name}.jobs").write_text(json.dumps(jobs))
        environment = {
            **{key: value for key, value in os.environ.items() if key != "DEEPMD_MUON"},
            "PYTHONPATH": f"{ROOT}:{metadata}",
            "OMP_NUM_THREADS": "1",
            "DEVICE": "cpu",
            **({"DEEPMD_MUON": "1"} if ours else {}),
        }
        command = [os.environ["DEEPMD_KIT_PYTHON"], SCRIPT, folder / f"{name}.jobs"]
        processes = []
        for rank in range(ranks):
            place = (
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                if ranks > 1
                else {}
            )
            with (folder / f"{name}.{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**environment, **place},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        ended = [process.wait(timeout=1500) for process in processes]
        assert ended == [0] * ranks, (folder / f"{name}.0.log").read_text()[-4000:]
        return folder

    return start


@pytest.mark.parametrize("variable", ["", "1"])
def test_its_gen_args_has_our_keys_as_soon_as_the_variable_is_set(metadata, tmp_path, variable):
    """Any command of deepmd-kit, without a trainer, and a program that has imported its backends."""
    variables = {"PYTHONPATH": f"{ROOT}:{metadata}", "DEEPMD_MUON": variable}
    environment = {**os.environ, **variables}
    interpreter = os.environ["DEEPMD_KIT_PYTHON"]
    code = (
        "import sys, deepmd.backend; from deepmd.utils.argcheck import gen_args; "
        "kinds = {a.name: a for a in gen_args()}['optimizer'].sub_variants['type'].choice_dict; "
        "print('normuon_beta' in kinds['HybridMuon'].sub_fields, 'torch' in sys.modules)"
    )
    command = ["-m", "deepmd", "doc-train-input", "--out-type", "json"]
    programs = (["-c", code], command)
    shown, document = (
        subprocess.run(
            [interpreter, *words], env=environment, cwd=tmp_path, capture_output=True, check=True
        ).stdout.decode()
        for words in programs
    )
    assert shown.split() == [str(bool(variable)), "False"]
    assert ("normuon_beta" in document) == bool(variable)


def job(name, family="se_e2_a", restart=None, backend="pt", training=None, steps=3, **changes):
    training = {"save_ckpt": name, "numb_steps": steps, **(training or {})}
    content = small_input(family, training=training, **changes)
    return {
        "name": name,
        "content": content,
        "restart": restart and f"{restart}-3.pt",
        "backend": backend,
    }


def train_alone(folder, job, restart=None):
    """Train the same input with this package's own trainer."""
    job["content"]["training"]["save_ckpt"] = str(folder / job["name"])
    job["content"]["training"]["disp_file"] = str(folder / f"{job['name']}.lcurve")
    path = folder / f"{job['name']}.json"
    path.write_text(json.dumps(job["content"]))
    restart = restart and str(folder / f"{restart}-3.pt")
    assert (
        train(load(path), output=str(folder / "out.json"), restart=restart, log_level="WARNING")
        == 0
    )


@pytest.fixture(scope="module")
def trainings(run):
    """Trainings on one rank: by ours, by deepmd-kit's class, and each continued by the other."""
    first = [job(f"ours-{family}", family) for family in FAMILIES]
    first += [job(f"ours-again-{family}", family, f"ours-{family}", steps=4) for family in FAMILIES]
    first += [
        job("ours-float64", precision="float64"),
        job("ours-again-float64", restart="ours-float64", steps=4, precision="float64"),
        job("ours-expt", backend="pt_expt"),
        job("ours-again-expt", restart="ours-expt", backend="pt_expt", steps=4),
        job("ours-further", optimizer=FURTHER),
        job("ours-alike", optimizer={"deepmd_kit_arithmetic": True}),
    ]
    run("ours", first, ours=True)
    theirs = [job("theirs"), job("theirs-after-ours", restart="ours-se_e2_a", steps=4)]
    theirs += [job("theirs-float64", precision="float64")]
    folder = run("theirs", theirs, ours=False)
    train_alone(folder, job("alone"))
    train_alone(folder, job("alone-after-ours", steps=4), restart="ours-se_e2_a")
    last = [
        job("ours-after-theirs", restart="theirs", steps=4),
        job("ours-after-alone", restart="alone", steps=4),
    ]
    last += [
        job("ours-after-theirs-float64", restart="theirs-float64", steps=4, precision="float64")
    ]
    return run("ours-after", last, ours=True)


def recorded(folder, name):
    record = torch.load(folder / f"{name}.rec", weights_only=True)
    weights = [{canonical_name(key): value for key, value in w.items()} for w in record["weights"]]
    steps = [
        {
            **step,
            "gradients": {canonical_name(key): value for key, value in step["gradients"].items()},
        }
        for step in record["steps"]
    ]
    return steps, weights


def replay(folder, name, saved=None, **settings):
    """Give a training's gradients to our class alone; return it and its weights after each step, and deepmd-kit's."""
    steps, (start, *after) = recorded(folder, name)
    params = {key: nn.Parameter(value.clone()) for key, value in start.items()}
    optimizer = HybridMuon(params.items(), steps[0]["lr"], **settings)
    if saved is not None:
        optimizer.load_state_dict(copy.deepcopy(saved))
    ours = []
    for step in steps:
        for key, p in params.items():
            p.grad = step["gradients"].get(key)
        optimizer.param_groups[0]["lr"] = step["lr"]
        optimizer.step()
        ours.append({key: p.detach().clone() for key, p in params.items()})
    assert all(step["optimizer"].startswith("deepmd_muon.deepmd_kit.") for step in steps)
    return optimizer, ours, after


def assert_equal(ours, theirs, stage=0):
    """Bit by bit; where elements of a tensor are shared among ranks, vector instructions may round their last bit."""
    rtol = 1e-6 if stage == 2 else 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.allclose(a[name], b[name], rtol=rtol, atol=rtol * 1e-3), name


def saved_state(folder, name):
    return torch.load(folder / f"{name}-3.pt", weights_only=True)["optimizer"]


@pytest.mark.parametrize("family", [*FAMILIES, "float64", "expt"])
def test_training_and_restart_equal_the_class_alone(trainings, family):
    optimizer, ours, theirs = replay(trainings, f"ours-{family}")
    assert_equal(ours, theirs)
    assert len(theirs) == 3
    assert not torch.equal(
        *(torch.cat([p.flatten() for p in w.values()]) for w in (theirs[0], theirs[-1]))
    )
    _, again, continued = replay(trainings, f"ours-again-{family}", optimizer.state_dict())
    assert_equal(again, continued)


def test_further_settings_reach_the_optimizer(trainings):
    optimizer, ours, theirs = replay(trainings, "ours-further", **FURTHER)
    assert_equal(ours, theirs)
    group = saved_state(trainings, "ours-further")["param_groups"][0]
    assert (group["schedule"], group["nesterov"], group["splits"]) == (
        "polar-express",
        False,
        FURTHER["splits"],
    )
    assert group["routes"] == optimizer.param_groups[0]["routes"]
    state = saved_state(trainings, "ours-further")["state"]
    assert any("second_moment_of_rows" in values for values in state.values())
    normalised = json.loads((trainings / "ours.12.json.out").read_text())["optimizer"]
    assert normalised["schedule"] == "polar-express"


def test_the_compatible_arithmetic_gives_the_numbers_of_its_class(trainings):
    (ours, weights), (theirs, others) = (
        recorded(trainings, "ours-alike"),
        recorded(trainings, "theirs"),
    )
    assert [step["lr"] for step in ours] == [step["lr"] for step in theirs]
    moved = {
        name: (weights[1][name] - p, others[1][name] - p)
        for name, p in others[0].items()
        if p.numel()
    }
    for name, (a, b) in moved.items():
        assert (a - b).norm() <= 2e-2 * b.norm(), name


def test_a_checkpoint_of_our_trainer_continues_inside_deepmd_kit(trainings):
    _, ours, after = replay(trainings, "ours-after-alone", saved_state(trainings, "alone"))
    assert_equal(ours, after)


def test_a_checkpoint_from_inside_deepmd_kit_continues_with_our_trainer(trainings):
    before = saved_state(trainings, "ours-se_e2_a")
    after = torch.load(trainings / "alone-after-ours-4.pt", weights_only=True)["optimizer"]
    names = [group["param_names"] for state in (before, after) for group in state["param_groups"]]
    old, new = ({canonical_name(name): i for i, name in enumerate(listed)} for listed in names)
    assert new.keys() == old.keys()
    stepped = {name: i for name, i in new.items() if i in after["state"]}
    assert (
        len(stepped) == 11
    )  # its `compress_data` and `compress_info` are listed, empty and without state
    for name, i in stepped.items():
        values, previous = after["state"][i], before["state"][old[name]]
        if "step" in values:
            assert (int(previous["step"]), int(values["step"])) == (3, 4)
        else:  # m4 = 0.95 m3 + 0.05 g4: it moved, and is of the size it had
            m3, m4 = previous["momentum_buffer"], values["momentum_buffer"]
            assert 0 < (m4 - 0.95 * m3).norm() < 4 * m3.norm()


@pytest.mark.parametrize("name", ["", "-float64"])
def test_its_checkpoint_continues_with_ours(trainings, name):
    saved = saved_state(trainings, f"theirs{name}")
    assert "param_names" not in saved["param_groups"][0]
    _, ours, after = replay(trainings, f"ours-after-theirs{name}", saved)
    assert_equal(ours, after)
    weights = torch.load(trainings / f"theirs{name}-3.pt", weights_only=True)["model"]
    _, (start, *_) = recorded(trainings, f"ours-after-theirs{name}")
    for key, value in weights.items():
        if canonical_name(key) in start:
            assert torch.equal(value, start[canonical_name(key)])


def test_our_checkpoint_continues_with_its_class(trainings):
    steps, (start, *_) = recorded(trainings, "theirs-after-ours")
    assert {step["optimizer"] for step in steps} == {
        "deepmd.pt.optimizer.hybrid_muon.HybridMuonOptimizer"
    }
    _, weights = recorded(trainings, "ours-se_e2_a")
    for name, p in weights[-1].items():
        assert torch.equal(p, start[name])
    state = torch.load(trainings / "theirs-after-ours-4.pt", weights_only=True)["optimizer"][
        "state"
    ]
    before = saved_state(trainings, "ours-se_e2_a")["state"]
    for key, values in before.items():
        if "beta1_pow" in values:
            assert values["beta1_pow"] == pytest.approx(0.9**3)
            assert state[key]["beta1_pow"] == pytest.approx(0.9 ** (3 + len(steps)))


def test_the_log_says_which_class_runs(metadata, tmp_path):
    (tmp_path / "input.json").write_text(json.dumps(small_input("se_e2_a")))
    command = [Path(os.environ["DEEPMD_KIT_PYTHON"]).with_name("dp"), "--pt", "train", "input.json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{metadata}", "DEEPMD_MUON": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(
        r"DEEPMD INFO .*HybridMuon of deepmd-muon .* in place of deepmd-kit's", done.stderr
    )
    assert re.search(r"DEEPMD INFO .*routing of all parameters: muon 3 parameters", done.stderr)


@pytest.fixture(scope="module")
def on_two_ranks(run, trainings):
    jobs = [job(f"two-{stage}", training={"zero_stage": stage}) for stage in STAGES]
    jobs += [
        job(f"two-{a}-{b}", restart=f"two-{a}", steps=4, training={"zero_stage": b})
        for a in STAGES
        for b in STAGES
    ]
    jobs += [
        job(f"two-theirs-{stage}", restart="theirs", steps=4, training={"zero_stage": stage})
        for stage in STAGES
    ]
    return run("two", jobs, ours=True, ranks=2)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_and_restart_at_every_stage(on_two_ranks, stage):
    optimizer, ours, theirs = replay(on_two_ranks, f"two-{stage}")
    assert_equal(ours, theirs, stage)
    for other in STAGES:
        _, again, continued = replay(on_two_ranks, f"two-{stage}-{other}", optimizer.state_dict())
        assert_equal(again, continued, max(stage, other))


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_continue_its_checkpoint(on_two_ranks, stage):
    _, ours, after = replay(
        on_two_ranks, f"two-theirs-{stage}", saved_state(on_two_ranks, "theirs")
    )
    assert_equal(ours, after, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_loads_what_two_ranks_saved(on_two_ranks, stage):
    optimizer, _, _ = replay(on_two_ranks, f"two-{stage}")
    (_, *weights) = recorded(on_two_ranks, f"two-{stage}")[1]
    params = {name: nn.Parameter(value.clone()) for name, value in weights[-1].items()}
    loaded = HybridMuon(params.items())
    loaded.load_state_dict(saved_state(on_two_ranks, f"two-{stage}"))
    assert loaded.routing == optimizer.routing
    mine = dict(
        zip(
            [entry.name for entry in optimizer.routing],
            optimizer.param_groups[0]["params"],
            strict=True,
        )
    )
    for name, p in params.items():
        for key in STATE_KEYS:
            assert (key in loaded.state[p]) == (key in optimizer.state[mine[name]])
            if key in loaded.state[p]:
                torch.testing.assert_close(
                    loaded.state[p][key], optimizer.state[mine[name]][key], rtol=1e-6, atol=0
                )
