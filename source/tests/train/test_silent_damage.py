"""What used to end a run late, or not at all, without naming its cause."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepmd_muon.argcheck import normalize
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, StatFile, open_systems
from deepmd_muon.data.checks.digest import content_digest
from deepmd_muon.section import thaw
from deepmd_muon.train import NonFiniteError, TrainingError
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state
from deepmd_muon.train.step.guard import DeviceGuard, HostGuard, SkipCount
from deepmd_muon.train.strategy.base import Reduced
from deepmd_muon.train.systems import RankView, Systems, check_same_run

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


def reduced(value):
    return Reduced([], torch.tensor(1.0), torch.tensor(value))


def guards():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return [HostGuard("skip", 10), DeviceGuard("skip", optimizer, torch.device("cpu"), 10)]


@pytest.mark.parametrize("kind", [0, 1], ids=["host", "device"])
def test_a_run_that_skips_most_steps_says_so_and_one_that_skips_all_ends(kind, caplog):
    guard = guards()[kind]
    if kind:
        guard.begin(0)

    def steps(values):
        for value in values:
            guard.admits(reduced(value), lambda: "data")

    nan = float("nan")
    with caplog.at_level(logging.WARNING, "deepmd_muon"):
        steps([1.0] * 5 + [nan] * 5)
        guard.check(10)
        assert "hardly trains" not in caplog.text
        steps([nan] * 4)
        guard.check(14)  # half an interval, judged with the next
        steps([nan] * 3 + [1.0] * 3)
        guard.check(20)
        assert "7 of the 10 steps up to update 20 were skipped" in caplog.text
        steps([nan] * 10)
        with pytest.raises(NonFiniteError, match="all of the last 10 steps"):
            guard.check(30)
    SkipCount(1).add(1, 1, 1)  # one bad step ends no run


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("stddev", np.zeros((1, 4)), "stddev has values that are not above 0"),
        ("mean", np.full((1, 4), np.nan), "mean has values that are not finite"),
        ("mean", np.zeros((2, 4)), r"mean is float64 of shape \(2, 4\)"),
        ("energy_bias", np.array([1 + 2j]), "energy_bias is complex128"),
        ("mean", None, "mean is missing"),
        ("median", np.zeros(1), "median is unknown"),
    ],
)
def test_statistics_without_sense_are_named(monkeypatch, small_input, train, name, value, problem):
    """A file whose checksums are right may still hold them."""
    content = small_input(training={"stat_file": "stat.hdf5", "numb_steps": 1})
    assert train(content) == 0
    kept = StatFile.load

    def load(self, key):
        arrays = {**kept(self, key), name: value}
        return {label: array for label, array in arrays.items() if array is not None}

    monkeypatch.setattr(StatFile, "load", load)
    with pytest.raises(DataError, match=f"stat_file stat.hdf5.*{problem}"):
        train(content)


def test_dp_test_refuses_spoiled_weights(small_input, train, load, capfd):
    train(small_input(training={"numb_steps": 1}))
    content = load()
    for name, tensor in content["model"].items():
        if name.endswith("layers.0.matrix"):
            tensor.fill_(float("nan"))
    torch.save(content, "spoiled.pt")
    assert main(["test", "-m", "spoiled.pt", "-s", str(EXAMPLE / "valid"), "-n", "1"]) == 2
    assert "not finite" in capfd.readouterr().err


@pytest.mark.parametrize("neuron", [[10**12], [1e25], [2**62, 4], [4, -8], ["4"]])
def test_a_checkpoint_of_a_model_without_sense_is_named(small_input, train, load, capfd, neuron):
    train(small_input(training={"numb_steps": 1}))
    content = load()
    content["model"]["_extra_state"]["model_params"]["fitting_net"]["neuron"] = neuron
    torch.save(content, "spoiled.pt")
    capfd.readouterr()
    assert main(["test", "-m", "spoiled.pt", "-s", str(EXAMPLE / "valid"), "-n", "1"]) == 2
    assert main(["train", "input.json", "--restart", "spoiled.pt", "-v", "ERROR"]) == 2
    said = capfd.readouterr().err
    assert len(re.findall(r"spoiled\.pt.* neuron: ", said)) == 2
    assert "Traceback" not in said


class Ranks(SimpleNamespace):
    def barrier(self, what):
        return pytest.MonkeyPatch.context()

    def gather_objects(self, mine):
        return [mine, *self.others]


def test_ranks_with_other_data_or_inputs_are_named(small_input):
    given = normalize(small_input())
    other = normalize(
        small_input(
            optimizer={"weight_decay": 0.5}, training={"numb_steps": 9, "stat_file": "elsewhere"}
        )
    )
    a, b = (open_systems(str(EXAMPLE / part), ["Cu"]) for part in ("train", "valid"))
    first, second = content_digest(a), content_digest(b)

    def digests(training, validation):
        return {"training/training_data": training, "training/validation_data": validation}

    mine = RankView(thaw(given.settings), digests(first, second))

    def check(*others):
        check_same_run(
            given, {"Default": Systems(a, b)}, Ranks(size=1 + len(others), others=others)
        )

    check(mine, mine)
    with pytest.raises(TrainingError, match="training data of rank 2 are not those of rank 0"):
        check(mine, mine._replace(digests=digests(second, second)))
    with pytest.raises(TrainingError, match="validation data of rank 1 are not those of rank 0"):
        check(mine._replace(digests=digests(first, first)))
    with pytest.raises(
        TrainingError,
        match=r"rank 1 differs .* in optimizer/weight_decay, training/numb_steps: all",
    ):
        check(mine._replace(normalized=thaw(other.settings)))


def change_a_force(folder):
    values = np.load(folder / "set.000/force.npy")
    values[2, 1] += 1e-3
    np.save(folder / "set.000/force.npy", values)


def change_a_position(folder):
    values = np.load(folder / "set.000/coord.npy")
    values[1, -1] += 1e-3
    np.save(folder / "set.000/coord.npy", values)


@pytest.mark.parametrize(
    "change", [change_a_force, change_a_position, lambda f: (f / "set.000/virial.npy").unlink()]
)
def test_data_that_differ_inside_a_system_are_seen(tmp_path, change):
    (name,) = [s.name for s in open_systems(str(EXAMPLE / "train")) if "virial" in s.labels][:1]
    shutil.copytree(name, tmp_path / "copy")
    first = content_digest(open_systems([str(EXAMPLE / "valid"), name]))
    assert content_digest(open_systems([str(EXAMPLE / "valid"), str(tmp_path / "copy")])) == first
    change(tmp_path / "copy")
    then = content_digest(open_systems([str(EXAMPLE / "valid"), str(tmp_path / "copy")]))
    assert [a == b for a, b in zip(first.systems, then.systems, strict=True)][-1] is False
    assert first.systems[:-1] == then.systems[:-1]


def test_large_data_are_sampled_and_a_change_is_seen_with_the_chance_stated(tmp_path):
    (name,) = [s.name for s in open_systems(str(EXAMPLE / "train"))][:1]
    shutil.copytree(name, tmp_path / "copy")
    (system,) = open_systems(str(tmp_path / "copy"))
    size = system.nframes * 8 * (6 * system.natoms + 19)
    before = content_digest([system], size // 3)
    assert before.share == pytest.approx(1 / 3, rel=1e-2)
    force = np.load(tmp_path / "copy/set.000/force.npy")
    seen = 0
    for frame in range(len(force)):
        changed = force.copy()
        changed[frame, 0] += 1.0
        np.save(tmp_path / "copy/set.000/force.npy", changed)
        seen += (
            content_digest(open_systems(str(tmp_path / "copy")), size // 3).systems
            != before.systems
        )
    assert len(force) / 3 <= seen <= len(force) / 3 + 3


@pytest.mark.parametrize(
    ("key", "shape"), [("step", (3,)), ("step", (0,)), ("exp_avg", (2,)), ("exp_avg_sq", (1, 3))]
)
def test_adam_states_of_other_shapes_are_refused(key, shape):
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.named_parameters())
    layer(torch.ones(3)).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    load_optimizer_state(optimizer, layer, {"optimizer": saved}, Path("model.ckpt.pt"))
    saved["state"][1][key] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=re.escape(f"{key} of bias has shape {shape}")):
        load_optimizer_state(optimizer, layer, {"optimizer": saved}, Path("model.ckpt.pt"))
