"""Outputs of a run never overwrite what it reads; a fresh run keeps the reports of an earlier one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.files import replace_link
from deepmd_muon.train import TrainingError
from deepmd_muon.train.checkpoint.ownership import newest_finite
from deepmd_muon.train.checkpoint.saving import Checkpoints
from deepmd_muon.train.errors import NonFiniteError

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
FOLDER = "data/train/cluster13"
# What is set, how an option is named, and the file that would be lost.
CLASHES = {
    "disp_file a position": ({"disp_file": f"{FOLDER}/set.000/coord.npy"}, {}),
    "disp_file types": ({"disp_file": f"{FOLDER}/type.raw"}, {}),
    "jsonl_file HDF5": ({"jsonl_file": "data.hdf5"}, {}),
    "stat_file HDF5": ({"stat_file": "./data.hdf5"}, {}),
    "log input": ({}, {"log_path": "input.json"}),
    "log data": ({}, {"log_path": f"{FOLDER}/set.000/energy.npy"}),
    "output input": ({}, {"output": "./input.json"}),
    "output a link to the input": ({}, {"output": "link.json"}),
    "output data": ({}, {"output": "data.hdf5"}),
    "profile data": ({"profiling": True, "profiling_file": f"{FOLDER}/set.000/force.npy"}, {}),
    "curve and pointer": ({"disp_file": "checkpoint"}, {}),
    "two outputs": ({"disp_file": "same", "jsonl_file": "same"}, {}),
    "log and curve": ({}, {"log_path": "lcurve.out"}),
}


@pytest.mark.parametrize("name", CLASHES)
def test_an_output_that_is_an_input_is_refused(small_input, train, name):
    shutil.copytree(EXAMPLE, "data")
    write_hdf5(open_systems("data/train"), Path("data.hdf5"))
    Path("link.json").symlink_to("input.json")
    changes, options = CLASHES[name]
    content = small_input()
    content["training"]["training_data"]["systems"] = ["data/tr*", "data.hdf5#/"]
    content["training"].update(changes)
    Path("input.json").write_text(json.dumps(content))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(TrainingError, match=r"another name"):
        train(content, **options)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_outputs_beside_the_data_are_written(small_input, train):
    shutil.copytree(EXAMPLE / "train", "data")
    content = small_input(
        training={"numb_steps": 1, "disp_file": "data/lcurve.out", "save_ckpt": "data/model"}
    )
    content["training"]["training_data"]["systems"] = ["data"]
    for _ in range(2):
        assert train(content, output="data/out.json") == 0


def test_a_checkpoint_is_not_replaced_by_the_link_of_the_run_that_starts_from_it(
    small_input, train
):
    assert train(small_input(training={"numb_steps": 1})) == 0
    shutil.copy("model.ckpt-1.pt", "mine.pt")
    content = small_input(training={"numb_steps": 2, "save_ckpt": "mine"})
    before = Path("mine.pt").read_bytes()
    starts = [
        {way: name}
        for way in ("init_model", "finetune", "restart")
        for name in ("mine.pt", "mine")  # ".pt" may be omitted
    ]
    for start in (*starts, {"restart": "auto"}):
        with pytest.raises(TrainingError, match=r"mine\.pt"):
            train(content, **start)
        assert not Path("mine.pt").is_symlink()
        assert Path("mine.pt").read_bytes() == before


def test_a_fresh_run_keeps_all_reports_of_an_earlier_one(small_input, train):
    content = small_input(training={"numb_steps": 2, "jsonl_file": "log.jsonl"})
    kept = []
    for run in range(3):
        content["training"]["seed"] = run
        assert train(content) == 0
        names = ("lcurve.out", "log.jsonl", "out.json")
        kept.append({name: Path(name).read_bytes() for name in names})
    for number in (1, 2):
        for name, was in kept[number - 1].items():
            assert Path(f"{name}.{number}").read_bytes() == was
    assert json.loads(Path("out.json.1").read_text())["training"]["seed"] == 0


def test_going_back_keeps_later_files(small_input, train, caplog):
    """A restart from an older checkpoint would overwrite later ones, and cut the reports."""
    training = {"numb_steps": 6, "save_freq": 2, "disp_freq": 1, "jsonl_file": "log.jsonl"}
    validating = {"full_validation": True, "full_val_start": 0, "validation_freq": 1}
    validating |= {"max_best_ckpt": 6, "full_val_file": "./val.log"}
    content = small_input(training=training, validating=validating)
    assert train(content) == 0
    reports = ("lcurve.out", "log.jsonl", "val.log")
    before = {
        name: Path(name).read_bytes() for name in (*reports, "model.ckpt-4.pt", "model.ckpt-6.pt")
    }
    content["learning_rate"]["start_lr"] = 1e-2
    assert train(content, restart="model.ckpt-2.pt") == 0
    assert caplog.text.count("goes back to step 2") == 1
    for name in reports:
        assert Path(f"{name}.1").read_bytes() == before[name]
        assert Path(name).read_bytes() != before[name]
    for step in (4, 6):
        assert Path(f"model.ckpt.1-{step}.pt").read_bytes() == before[f"model.ckpt-{step}.pt"]
        assert Path(f"model.ckpt-{step}.pt").read_bytes() != before[f"model.ckpt-{step}.pt"]
    assert os.readlink("model.ckpt.1.pt") == "model.ckpt.1-6.pt"
    assert os.readlink("model.ckpt.pt") == "model.ckpt-6.pt"
    assert {
        int(path.name.split("-")[1].split(".")[0]) for path in Path().glob("best.ckpt.1-*")
    } == {3, 4, 5, 6}
    assert Path("checkpoint").read_text() == "model.ckpt-6.pt\n"
    assert train(content, restart="model.ckpt.pt") == 0  # at its end: nothing is later
    assert not Path("model.ckpt.2.pt").exists()


def test_a_restart_does_not_add_to_the_reports_of_another_run(small_input, train, caplog):
    """Two runs with different save_ckpt and one disp_file, one after the other."""
    contents = {}
    for seed, name in enumerate("ab"):
        training = {"numb_steps": 4, "save_freq": 2, "disp_freq": 1, "save_ckpt": name}
        validating = {"full_validation": True, "full_val_start": 0, "validation_freq": 1}
        contents[name] = small_input(training=training | {"seed": seed}, validating=validating)
        assert train(contents[name]) == 0
    theirs = {name: Path(name).read_bytes() for name in ("lcurve.out", "val.log")}
    best = [path.read_bytes() for path in Path().glob("best.ckpt-*")]
    contents["a"]["training"]["numb_steps"] = 6
    assert train(contents["a"], restart="auto") == 0
    assert "save_ckpt b" in caplog.text
    for name, was in theirs.items():
        assert was in [path.read_bytes() for path in Path().glob(f"{name}.*")]
        assert np.loadtxt(name, comments="#")[:, 0].tolist() == [5, 6]
    assert set(best) <= {path.read_bytes() for path in Path().glob("best.ckpt.*")}


def first_weight(saved):
    return next(x for name, x in saved["model"].items() if name.endswith("layers.0.matrix"))


def average(saved):
    return next(x for x in saved["ema"]["model"].values() if x.numel())


def state_tensor(key):
    def find(saved):
        return next(state[key] for state in saved["optimizer"]["state"].values() if key in state)

    return find


# The optimizer of a run, what is spoiled in its checkpoint, the number, and how the error names it.
SPOILED = [
    ("HybridMuon", first_weight, "inf", "not finite"),
    ("HybridMuon", state_tensor("momentum_buffer"), "nan", r"\(momentum_buffer of atomic_model"),
    ("HybridMuon", state_tensor("magma_score"), "inf", r"\(magma_score of atomic_model"),
    ("HybridMuon", state_tensor("exp_avg"), "nan", r"\(exp_avg of atomic_model"),
    ("HybridMuon", state_tensor("exp_avg_sq"), "nan", r"\(exp_avg_sq of atomic_model"),
    ("HybridMuon", state_tensor("exp_avg_sq"), "-1e-9", r"\(exp_avg_sq of atomic_model"),
    ("Adam", state_tensor("exp_avg"), "nan", "NaN"),
    ("Adam", average, "nan", "NaN"),
]


@pytest.mark.parametrize(("optimizer", "find", "value", "word"), SPOILED)
def test_a_checkpoint_that_would_spoil_the_run_is_refused(
    small_input, train, optimizer, find, value, word
):
    content = small_input(
        training={"numb_steps": 2, "enable_ema": True}, optimizer={"type": optimizer}
    )
    assert train(content) == 0
    saved = read_checkpoint("model.ckpt-2.pt")
    find(saved).view(-1)[0] = float(value)
    torch.save(saved, "broken.pt")
    for way in ("restart", "init_model") if find is first_weight else ("restart",):
        with pytest.raises(CheckpointError, match=rf"broken\.pt.*{word}"):
            train(content, **{way: "broken.pt"})


@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg_sq"])
def test_a_checkpoint_with_spoiled_moments_is_not_the_last_good_one(tmp_path, key):
    def written(name, value):
        content = {
            "model": {"w": torch.ones(2)},
            "optimizer": {"state": {0: {key: torch.tensor([1.0, value])}}, "param_groups": []},
        }
        torch.save(content, tmp_path / name)
        return tmp_path / name

    saved = [written("a-1.pt", 1.0), written("a-2.pt", float("nan"))]
    assert newest_finite(saved, None) == saved[0]


def test_the_last_good_checkpoint_has_finite_weights(small_input, train, monkeypatch):
    """An update may overflow: the loss shows it one step later, after the checkpoint was written."""
    content = small_input(training={"numb_steps": 6, "save_freq": 2, "disp_freq": 1})
    save = Checkpoints.save

    def overflow_before(self, step, content):
        def spoiled():
            found = content()
            name = next(name for name in found["model"] if name.endswith("layers.0.matrix"))
            found["model"][name].fill_(float("inf")) if step == 4 else None  # the weight itself
            return found

        save(self, step, spoiled)

    monkeypatch.setattr(Checkpoints, "save", overflow_before)
    with pytest.raises(NonFiniteError, match=r"last good checkpoint is model\.ckpt-2\.pt"):
        train(content)
    assert Path("model.ckpt-4.pt").exists()


def test_the_end_of_a_run_publishes_what_a_killed_one_had_not(small_input, train):
    """As after a kill between the last checkpoint and its link."""
    content = small_input(training={"numb_steps": 4, "save_freq": 2, "max_ckpt_keep": 1})
    assert train(content) == 0
    shutil.copyfile("model.ckpt-4.pt", "model.ckpt-2.pt")
    replace_link(Path("model.ckpt.pt"), "model.ckpt-2.pt")
    Path("checkpoint").write_text("model.ckpt-2.pt\n")
    assert train(content, restart="auto") == 0
    assert os.readlink("model.ckpt.pt") == "model.ckpt-4.pt"
    assert Path("checkpoint").read_text() == "model.ckpt-4.pt\n"
    assert not Path("model.ckpt-2.pt").exists()


def test_a_restart_without_the_optimizers_state_is_refused(small_input, train):
    content = small_input(training={"numb_steps": 2})
    assert train(content) == 0
    saved = read_checkpoint("model.ckpt-2.pt")
    saved["optimizer"]["state"] = {}
    torch.save(saved, "broken.pt")
    with pytest.raises(CheckpointError, match="empty after 2 steps"):
        train(content, restart="broken.pt")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["log", "curve", "output"])
def test_a_fifo_or_device_is_refused_as_an_output(small_input, train, name):
    os.mkfifo("fifo")
    for place in ("fifo", "/dev/null"):
        content = small_input(training={"disp_file": place} if name == "curve" else {})
        options = {"log": {"log_path": place}, "output": {"output": place}}.get(name, {})
        with pytest.raises(TrainingError, match="device or FIFO"):
            train(content, **options)
