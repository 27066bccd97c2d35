"""Checkpoints as directories: what they hold, when they appear, and that nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import run_script
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from deepmd_muon.argcheck import normalize
from deepmd_muon.checkpoint_file.directory import put_together, read_into, take_apart
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.infer import Predictor
from deepmd_muon.train import TrainingError
from deepmd_muon.train.checkpoint.directories import DirectorySeries
from deepmd_muon.train.checkpoint.ownership import RunFiles
from deepmd_muon.train.checkpoint.saving import Checkpoints
from deepmd_muon.train.ranks.ranks import Ranks


def names(folder="."):
    """Checkpoints in a folder; hidden ones without the part of their names that cannot be guessed."""
    found = (
        path.name
        for path in Path(folder).iterdir()
        if "ckpt" in path.name and path.suffix != ".lock"
    )
    return sorted(re.sub(r"\.[0-9a-f]{16}\.dcp$", ".dcp", name) for name in found)


def assert_same(first, second):
    """Compare two checkpoints bit by bit, but for what differs between runs whatever they do."""
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first.keys() - {"series", "directories", "settings", "torch_rng"}:
            assert_same(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    else:
        assert first == second


def test_a_run_restarts_from_a_directory_as_if_in_one_go(small_input, train):
    averaged = {"enable_ema": True, "ema_decay": 0.9}
    train(small_input(training={**averaged, "save_ckpt": "whole"}))
    parted = small_input(
        training={**averaged, "checkpoint_format": "dcp", "save_freq": 4, "max_ckpt_keep": 2}
    )
    train(parted)
    assert names() == [
        *(
            "model.ckpt-10.dcp",
            "model.ckpt-10.pt",
            "model.ckpt-8.dcp",
            "model.ckpt.dcp",
            "model.ckpt.pt",
        ),
    ]
    assert Path("model.ckpt.dcp").readlink() == Path("model.ckpt-10.dcp")
    assert Path("checkpoint").read_text() == "model.ckpt-10.dcp\n"
    assert_same(read_checkpoint("whole-10.pt"), read_checkpoint("model.ckpt-10.dcp"))
    train(parted, restart="model.ckpt-8.dcp")
    assert_same(read_checkpoint("whole-10.pt"), read_checkpoint("model.ckpt"))
    kept = [
        name for name in names() if name.startswith("model.ckpt.2")
    ]  # later than the one that is continued
    assert kept == [f"model.ckpt.2{end}" for end in ("-10.dcp", "-10.pt", ".dcp", ".pt")]
    for name in kept:
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert names() == [
        *(
            "model.ckpt-10.dcp",
            "model.ckpt-10.pt",
            "model.ckpt-8.dcp",
            "model.ckpt.dcp",
            "model.ckpt.pt",
        ),
    ]
    # The retention goes on where it was.
    parted["training"].update(numb_steps=14, max_ckpt_keep=3)
    train(parted, restart="model.ckpt.dcp")
    assert names()[:3] == ["model.ckpt-10.dcp", "model.ckpt-10.pt", "model.ckpt-12.dcp"]
    assert not Path("model.ckpt-8.dcp").exists()
    coord, box = torch.rand(1, 32, 3).numpy() * 7, (torch.eye(3) * 7.2).numpy()[None]
    energies = [
        Predictor(path).predict(coord, box, [0] * 32).energy
        for path in ("model.ckpt-14.dcp", "model.ckpt.pt")
    ]
    assert energies[0] == energies[1]


def test_a_damaged_part_is_an_error_that_names_the_directory(small_input, train):
    given = small_input(training={"checkpoint_format": "dcp", "enable_ema": True})
    train(given)
    (part,) = Path("model.ckpt-10.dcp").glob("*.distcp")
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(
        CheckpointError, match=r"model.ckpt-10.dcp cannot be read as a checkpoint: .*__0_0.distcp"
    ):
        train(given, restart="model.ckpt-10.dcp")
    places = read_checkpoint("model.ckpt-5.dcp", leave=("ema",))["ema"]["model"]
    assert all(x.is_meta for x in places.values() if x.numel())
    targets = {
        ("ema", "model", name): torch.empty(x.shape, dtype=x.dtype)
        for name, x in places.items()
        if x.numel()
    }
    read_into(Path("model.ckpt-5.dcp"), targets)
    for (*_, name), x in targets.items():
        assert torch.equal(x, read_checkpoint("model.ckpt-5.dcp")["ema"]["model"][name])
    with pytest.raises(
        CheckpointError, match=r"model.ckpt-10.dcp cannot be read as a checkpoint: .*__0_0.distcp"
    ):
        read_into(Path("model.ckpt-10.dcp"), targets)


def test_both_forms_hold_the_same(small_input, train):
    train(small_input(training={"checkpoint_format": "both"}))
    assert names() == [
        *("model.ckpt-10.dcp", "model.ckpt-10.pt", "model.ckpt-5.dcp", "model.ckpt-5.pt"),
        *("model.ckpt.dcp", "model.ckpt.pt"),
    ]
    for step in (5, 10):
        file, directory = (read_checkpoint(f"model.ckpt-{step}.{form}") for form in ("pt", "dcp"))
        assert_same(file, directory)
        assert_same(file["deepmd_muon"]["torch_rng"], directory["deepmd_muon"]["torch_rng"])


def test_changed_routes_are_refused_from_a_directory_too(small_input, train):
    train(small_input(training={"checkpoint_format": "dcp", "numb_steps": 1}))
    with pytest.raises(CheckpointError, match="saved: route muon as 1x4x8"):
        train(small_input(optimizer={"min_matrix_dim": 7}), restart="model.ckpt.dcp")


def test_writing_goes_on_beside_training_one_at_a_time(tmp_path, monkeypatch):
    """The second save waits for the first; tensors are those of the moment of the save."""
    gate, order = threading.Event(), []
    original = FileSystemWriter.write_data

    def held_up(self, *args, **kwargs):
        order.append("begin")
        assert gate.wait(20)
        found = original(self, *args, **kwargs)
        order.append("end")
        return found

    monkeypatch.setattr(FileSystemWriter, "write_data", held_up)
    series = DirectorySeries(tmp_path / "c", 5, Ranks(torch.device("cpu")), pointer=True)
    tensor = torch.arange(6.0)
    series.save(1, {"model": {"x": tensor}, "deepmd_muon": {"step": 1}})
    tensor.zero_()
    series.poll()
    assert series.newest is None
    assert names(tmp_path) == []
    assert len(list(tmp_path.glob(".c-1.*.dcp"))) == 1
    threading.Timer(0.2, gate.set).start()
    series.save(2, {"model": {"x": tensor}, "deepmd_muon": {"step": 2}})
    assert order[:2] == ["begin", "end"]
    assert series.written == ["c-1.dcp"]
    series.finish()
    assert order == ["begin", "end"] * 2
    assert series.written == ["c-1.dcp", "c-2.dcp"]
    assert torch.equal(read_checkpoint(tmp_path / "c-1.dcp")["model"]["x"], torch.arange(6.0))
    assert torch.equal(read_checkpoint(tmp_path / "c.dcp")["model"]["x"], torch.zeros(6))
    assert (tmp_path / "checkpoint").read_text() == "c-2.dcp\n"


def test_a_write_that_fails_ends_the_run_and_leaves_the_one_before(small_input, train, monkeypatch):
    original = FileSystemWriter.write_data

    def full(self, *args, **kwargs):
        if "-10" in str(self.path):
            raise OSError(28, "No space left on device")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(
        TrainingError,
        match=r"model\.ckpt-10\.dcp could not be written: .*No space.*last good .*-5\.dcp",
    ):
        train(small_input(training={"checkpoint_format": "dcp"}))
    assert names() == ["model.ckpt-5.dcp", "model.ckpt.dcp"]
    assert read_checkpoint("model.ckpt")["deepmd_muon"]["step"] == 5


CRASH = """
import os
from torch.distributed.checkpoint.filesystem import FileSystemWriter
original = FileSystemWriter.write_data
def write_data(self, *args):
    found = original(self, *args)
    if "-10" in str(self.path):
        os._exit(9)  # parts are written, what describes them is not
    return found
FileSystemWriter.write_data = write_data
from deepmd_muon.argcheck import load
from deepmd_muon.train import run
run(load("input.json"), log_level="WARNING")
"""


def test_a_crash_while_writing_leaves_the_one_before(small_input, train, tmp_path):
    content = small_input(training={"checkpoint_format": "dcp"})
    train(small_input(training={"save_ckpt": "whole"}))
    (tmp_path / "input.json").write_text(json.dumps(content))
    (tmp_path / "crash.py").write_text(CRASH)
    assert run_script("crash.py", folder=tmp_path).returncode == 9
    (tmp_path / "crash.py").unlink()
    assert names() == [".model.ckpt-10.dcp", "model.ckpt-5.dcp", "model.ckpt.dcp", *names()[3:]]
    assert list(Path().glob(".model.ckpt-10.*.dcp/*.distcp"))
    train(content, restart="model.ckpt")
    assert_same(read_checkpoint("whole-10.pt"), read_checkpoint("model.ckpt.dcp"))
    assert not list(Path().glob(".model.ckpt-10.*"))


def test_tensors_are_taken_out_and_put_back():
    shared = torch.rand(3)
    content = {
        "model": {
            "a": shared,
            "b": shared,
            "empty": torch.zeros(0),
            "_extra_state": {"sel": [1, 2]},
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": torch.tensor(0.5)}],
        },
    }
    parts, tensors = take_apart(content)
    assert list(tensors) == ["model/a", "optimizer/state/0/step", "optimizer/param_groups/0/lr"]
    assert_same(put_together(parts, tensors), content)
    assert content["model"]["a"] is shared


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("file", [".metadata", "content.pt"])
def test_nothing_in_a_directory_is_executed(small_input, train, file):
    train(small_input(training={"checkpoint_format": "dcp", "numb_steps": 1}))
    path = Path("model.ckpt-1.dcp") / file
    if file == ".metadata":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), path)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        train(small_input(), restart="model.ckpt-1.dcp")
    assert not Path("executed").exists()


def test_a_directory_without_its_end_is_no_checkpoint(small_input, train):
    train(small_input(training={"checkpoint_format": "dcp", "numb_steps": 1}))
    Path("model.ckpt-1.dcp/.metadata").unlink()
    with pytest.raises(CheckpointError, match="it is a folder, and its checkpoint is incomplete"):
        train(small_input(), restart="model.ckpt-1.dcp")


@pytest.mark.parametrize("form", ["file", "dcp", "both"])
def test_a_place_that_cannot_be_written_is_an_error_before_the_run(tmp_path, form):
    (tmp_path / "file").write_text("")
    training = SimpleNamespace(
        save_ckpt=str(tmp_path / "file/model"), max_ckpt_keep=5, checkpoint_format=form
    )
    with pytest.raises(
        TrainingError, match=r"training/save_ckpt: cannot write checkpoints to .*file"
    ):
        Checkpoints(training, Ranks(torch.device("cpu")))


@pytest.mark.parametrize("prefix", ["model", "model.ckpt", "model[300K]"])
def test_what_a_killed_run_left_goes_and_that_of_other_runs_stays(small_input, tmp_path, prefix):
    mine = [f".{prefix}-{kind}.dcp" for kind in ("10", "removed")]
    mine += [f".{prefix}-{kind}.0123456789abcdef.dcp" for kind in ("10", "removed")]
    others = [f".{prefix}-{kind}.dcp" for kind in ("2-100", "300K-50", "a-10", "2-removed", "1e3")]
    others += [
        f"{prefix}-10.dcp",
        ".n-10.dcp",
        ".modelxckpt-10.dcp",
        ".model3-10.dcp",
        f".{prefix}-10.dcp.old",
    ]
    for name in (*mine, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    (tmp_path / f".{prefix}.0123456789abcdef.dcp").symlink_to("nowhere")
    with RunFiles(normalize(small_input(training={"save_ckpt": prefix}))).held():
        pass
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_a_run_killed_while_it_deletes_leaves_no_half_checkpoint(small_input, train, monkeypatch):
    content = small_input(
        training={"checkpoint_format": "dcp", "save_freq": 2, "max_ckpt_keep": 1, "numb_steps": 4}
    )
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        train(content)
    (removed,) = Path().glob(".model.ckpt-removed.*.dcp")
    assert (removed / ".metadata").exists()
    assert names() == [
        ".model.ckpt-removed.dcp",
        *("model.ckpt-4.dcp", "model.ckpt-4.pt", "model.ckpt.dcp", "model.ckpt.pt"),
    ]
    train(
        {**content, "training": {**content["training"], "checkpoint_format": "file"}},
        restart="model.ckpt.dcp",
    )
    assert names()[0] == "model.ckpt-4.dcp"
