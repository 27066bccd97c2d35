"""Outputs of a run never overwrite what it reads; a fresh run keeps the reports of an earlier one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from deepmd_muon import files
from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.files import replace_link
from deepmd_muon.model.checkpoint_file import read_checkpoint
from deepmd_muon.model.errors import CheckpointError
from deepmd_muon.train import TrainingError
from deepmd_muon.train.errors import RunError

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
    content = small_input(training={"numb_steps": 1, "disp_file": "data/lcurve.out", "save_ckpt": "data/model"})
    content["training"]["training_data"]["systems"] = ["data"]
    for _ in range(2):
        assert train(content, output="data/out.json") == 0


def test_a_checkpoint_is_not_replaced_by_the_link_of_the_run_that_starts_from_it(small_input, train):
    assert train(small_input(training={"numb_steps": 1})) == 0
    shutil.copy("model.ckpt-1.pt", "mine.pt")
    with pytest.raises(TrainingError, match=r"mine\.pt"):
        train(small_input(training={"numb_steps": 1, "save_ckpt": "mine"}), init_model="mine.pt")


def test_a_fresh_run_keeps_all_reports_of_an_earlier_one(small_input, train):
    content = small_input(training={"numb_steps": 2, "jsonl_file": "log.jsonl"})
    kept = []
    for run in range(3):
        content["training"]["seed"] = run
        assert train(content) == 0
        kept.append({name: Path(name).read_bytes() for name in ("lcurve.out", "log.jsonl", "out.json")})
    for number in (1, 2):
        for name, was in kept[number - 1].items():
            assert Path(f"{name}.{number}").read_bytes() == was
    assert json.loads(Path("out.json.1").read_text())["training"]["seed"] == 0


def test_the_end_of_a_run_publishes_what_a_killed_one_had_not(small_input, train):
    """As after a kill between the last checkpoint and its link."""
    content = small_input(training={"numb_steps": 4, "save_freq": 2})
    assert train(content) == 0
    replace_link(Path("model.ckpt.pt"), "model.ckpt-2.pt")
    Path("checkpoint").write_text("model.ckpt-2.pt\n")
    assert train(content, restart="auto") == 0
    assert os.readlink("model.ckpt.pt") == "model.ckpt-4.pt"
    assert Path("checkpoint").read_text() == "model.ckpt-4.pt\n"


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
def test_a_fifo_that_nobody_reads_is_an_error(small_input, train, monkeypatch, name):
    monkeypatch.setattr(files, "FIFO_PATIENCE", 0.1)
    os.mkfifo("fifo")
    content = small_input(training={"numb_steps": 1, **({"disp_file": "fifo"} if name == "curve" else {})})
    options = {"log": {"log_path": "fifo"}, "output": {"output": "fifo"}}.get(name, {})
    with pytest.raises(RunError, match="FIFO that nobody reads"):
        train(content, **options)
