"""Captured training steps on a GPU: the same weights as eager ones, and everything around them as before.

Sums over neighbours use atomic additions, whose order varies from run to run; torch's deterministic algorithms give
them one order here, so that equality can be exact.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import example_rules  # noqa: F401  # registers them
import numpy as np
import pytest
import torch
from write_systems import write_npy

from deepmd_muon.train import NonFiniteError, trainer
from deepmd_muon.train.batches.frame_store import FrameStore
from deepmd_muon.train.step.stepper import MOST_GRAPHS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 12


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def steppers(monkeypatch):
    """The steppers that runs have made."""
    found, original = [], trainer.build_stepper

    def build(**options):
        found.append(original(**options))
        return found[-1]

    monkeypatch.setattr(trainer, "build_stepper", build)
    return found


@pytest.fixture
def check_capture(train, load, steppers):
    """A function that takes eager steps twice and captured ones, and compares weights and curves."""

    def check(content):
        results = []
        for capture in ("off", "off", "auto"):
            content["training"]["capture"] = capture
            assert train(content) == 0
            results.append((load(), Path("lcurve.out").read_text()))
        (first, curve), (again, _), (captured, captured_curve) = results
        assert_equal_weights(first, again)  # the eager step itself must be reproducible
        assert_equal_weights(first, captured)
        assert captured_curve == curve
        assert graphs(steppers[-1]) >= 1
        assert not graphs(steppers[0])
        assert steppers[-1]._captured.eager_reason is None
        return first, captured

    return check


@pytest.fixture
def bad_frames(monkeypatch):
    """Energies of the fourth frame of each system become infinite on the device."""
    original = FrameStore.take

    def poisoned(self, chunks):
        original(self, chunks)
        self.tensors["energy"][torch.from_numpy(self.numbering.first[:-1] + 3)] = float("inf")

    monkeypatch.setattr(FrameStore, "take", poisoned)


def graphs(stepper):
    return stepper._captured.recorded


def write_system(folder: Path, natoms: int, nframes: int, seed: int) -> str:
    """Write random copper clusters without a cell, energies and forces random, too."""
    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3)[:natoms]
    coord = 2.4 * grid + random.normal(0, 0.1, (nframes, natoms, 3))
    arrays = {"coord": coord.reshape(nframes, -1), "energy": random.normal(-natoms, 0.1, nframes)}
    arrays["force"] = random.normal(0, 0.5, (nframes, 3 * natoms))
    return write_npy(folder, [0] * natoms, [arrays], ["Cu"], nopbc=True)


def assert_equal_weights(first, second):
    for part in ("model", "ema"):
        one, other = (
            content.get(part, {}).get("model", content.get(part, {})) for content in (first, second)
        )
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize(
    "optimizer",
    [
        *({"type": "HybridMuon"}, {"type": "HybridMuon", "magma_muon": False}, {"type": "Adam"}),
        {"type": "HybridMuon", "rules": ["soap_muon", "radial_brake"]},
    ],
)
def test_captured_steps_give_the_weights_of_eager_ones(
    small_input, check_capture, optimizer, precision
):
    training = {"numb_steps": STEPS, "enable_ema": True, "ema_decay": 0.9}
    training |= {"gradient_max_norm": 5.0, "adam_gradient_max_norm": 1.0}
    training["ema_tail"] = 0.5 if optimizer["type"] == "Adam" else 0.0
    content = small_input(optimizer=optimizer, training=training)
    for part in ("descriptor", "fitting_net"):
        content["model"][part]["precision"] = precision
    check_capture(content)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dynamic_sel": True},
        {"sequential_update": True, "update_style": "res_residual"},
        {"n_multi_edge_message": 2, "a_compress_rate": 2, "a_compress_use_split": False},
    ],
    ids=["static", "dynamic", "one after another", "several messages, linear compression"],
)
def test_captured_steps_of_a_graph_descriptor_give_the_same_weights(
    small_input, check_capture, options
):
    """Angles are computed beside edges there, on another stream."""
    content = small_input(training={"numb_steps": STEPS})
    cuts = {"e_rcut": 4.5, "e_rcut_smth": 3.0, "a_rcut": 3.2, "a_rcut_smth": 2.0}
    widths = {"n_dim": 32, "e_dim": 24, "a_dim": 16, "nlayers": 3, "smooth_edge_update": True}
    repflow = {**cuts, **widths, "e_sel": "auto", "a_sel": "auto", **options}
    descriptor = {"type": "dpa3", "repflow": repflow, "seed": 1, "precision": "float32"}
    content["model"]["descriptor"] = descriptor
    check_capture(content)


@pytest.fixture(params=["at once", "when needed", "passing", "host"])
def way(request, monkeypatch):
    """How training data reach the device."""
    if request.param == "host":
        monkeypatch.setattr(
            "deepmd_muon.train.step.stepper.why_not_on_device", lambda *args: "a test wants it"
        )
    elif request.param != "at once":
        for name, atoms in (("AT_ONCE", 0), ("_FIRST_ATOMS", 40), ("_WINDOW_ATOMS", 60)):
            monkeypatch.setattr(f"deepmd_muon.train.batches.windows.{name}", atoms)
    if request.param == "passing":
        monkeypatch.setattr("deepmd_muon.train.step.stepper._RESIDENT_SHARE", 0.0)
    return request.param


def test_restart_is_bitwise(small_input, train, load, way):
    content = small_input(training={"enable_ema": True})
    train(content)
    whole = load("model.ckpt-10.pt")
    content["training"]["save_ckpt"] = "again"
    train(content, restart="model.ckpt-5.pt")
    assert_equal_weights(whole, load("again-10.pt"))


def test_the_weights_are_those_of_the_cpu(small_input, train, load, monkeypatch):
    content = small_input(optimizer={"type": "Adam"})
    train(content)
    on_gpu = load()
    monkeypatch.setenv("DEVICE", "cpu")
    train(content)
    for name, value in load()["model"].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                on_gpu["model"][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("batch_size", [1, "auto:40", "max:40", "mixed:3", "mix:60"])
def test_systems_of_several_sizes(small_input, train, load, steppers, tmp_path, batch_size):
    systems = [write_system(tmp_path / f"system{n}", n, 5, n) for n in (8, 12, 27)]
    content = small_input(loss={"start_pref_v": 0.0, "limit_pref_v": 0.0})
    content["training"]["training_data"] = {"systems": systems, "batch_size": batch_size}
    content["training"].pop("validation_data")
    content["training"]["numb_steps"] = 40
    found = []
    for capture in ("off", "auto"):
        content["training"]["capture"] = capture
        assert train(content) == 0
        found.append(load())
    assert_equal_weights(*found)
    assert 1 <= graphs(steppers[-1]) <= MOST_GRAPHS


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_from_the_first_bad_step_on_nothing_changes_and_that_step_is_named(
    small_input, train, bad_frames, optimizer
):
    training = {"disp_freq": 1000, "save_freq": 1000, "numb_steps": 300}
    content = small_input(optimizer={"type": optimizer}, training=training)
    with pytest.raises(NonFiniteError, match=r"before update \d+: the loss is inf") as caught:
        train(content)
    update = caught.value.update
    # The same order of data on the CPU: frame 3 is drawn in that step first.
    from deepmd_muon.data import DataLoader, NeighborCache, open_systems

    path = content["training"]["training_data"]["systems"][0]
    cache = NeighborCache(4.5, (60,), True)
    loader = DataLoader(open_systems([path], ["Cu"]), 2, seed=3, cache=cache)
    drawn = [set(loader.draw().parts[0][1].tolist()) for _ in range(300)]
    assert update == next(i for i, numbers in enumerate(drawn, 1) if 3 in numbers)


def test_skip_leaves_bad_steps_out(small_input, train, load, bad_frames, caplog):
    content = small_input(
        optimizer={"on_nonfinite": "skip"}, training={"disp_freq": 1000, "numb_steps": 300}
    )
    with caplog.at_level(logging.WARNING, logger="deepmd_muon"):
        assert train(content) == 0
    assert "skipped" in caplog.text
    for name, value in load()["model"].items():
        if isinstance(value, torch.Tensor):
            assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("passing", [False, True])
def test_all_ways_of_data_give_nearly_the_same_weights(
    small_input, train, load, monkeypatch, passing
):
    content = small_input()
    train(content)
    expected = load()
    for name, atoms in (("AT_ONCE", 0), ("_FIRST_ATOMS", 40), ("_WINDOW_ATOMS", 60)):
        monkeypatch.setattr(f"deepmd_muon.train.batches.windows.{name}", atoms)
    if passing:
        monkeypatch.setattr("deepmd_muon.train.step.stepper._RESIDENT_SHARE", 0.0)
    train(content)
    for name, value in load()["model"].items():
        if isinstance(value, torch.Tensor):  # sums over wider lists may end in other bits
            torch.testing.assert_close(value, expected["model"][name], rtol=1e-9, atol=1e-9)


def test_an_unused_graph_makes_room(small_input, train, monkeypatch, steppers, tmp_path):
    monkeypatch.setattr("deepmd_muon.train.step.stepper.MOST_GRAPHS", 2)
    monkeypatch.setattr("deepmd_muon.train.step.stepper._UNUSED", 1)
    systems = [write_system(tmp_path / f"system{n}", n, 5, n) for n in (8, 12, 27)]
    content = small_input(training={"numb_steps": 60})
    content["training"]["training_data"] = {"systems": systems, "batch_size": 1}
    content["training"].pop("validation_data")
    assert train(content) == 0
    assert graphs(steppers[-1]) > 2
    assert len(steppers[-1]._captured._graphs) <= 2


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(
    small_input, train, monkeypatch, caplog, steppers
):
    from deepmd_muon.train.step.step import TrainingStep

    original = TrainingStep.__call__

    def waits(self, *args):
        metrics = original(self, *args)
        float(metrics["rmse"])  # reading the device cannot be captured
        return metrics

    monkeypatch.setattr(TrainingStep, "__call__", waits)
    with caplog.at_level(logging.WARNING, logger="deepmd_muon"):
        assert train(small_input()) == 0
    assert caplog.text.count("cannot be captured") == 1
    assert steppers[-1]._captured.eager_reason
    assert not graphs(steppers[-1])


def test_a_step_launches_without_waiting(small_input, train, monkeypatch):
    """torch reports every operation that waits for the device: there is none in the replayed steps."""
    from deepmd_muon.train.step.stepper import CapturedStep

    original, replayed = CapturedStep.__call__, []

    def watched(self, feed, done):
        replayed.append(
            feed.layout in self._graphs and self._pieces == self._step.strategy.model.pieces
        )
        torch.cuda.set_sync_debug_mode("error" if replayed[-1] else "default")
        try:
            return original(self, feed, done)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CapturedStep, "__call__", watched)
    assert train(small_input(training={"numb_steps": 40, "save_freq": 100})) == 0
    assert sum(replayed) > 20


def write_alloy(folder: Path, kinds: list[int], seed: int) -> str:
    """Write four frames of a strained cubic crystal of 32 atoms with the given kinds in turn."""
    random = np.random.default_rng(seed)
    cell = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    grid = (cell + np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])).reshape(
        -1, 3
    )
    coord = 3.8 * grid + random.normal(0, 0.1, (4, 32, 3))
    arrays = {"coord": coord.reshape(4, -1), "box": np.tile(7.6 * np.eye(3).ravel(), (4, 1))}
    arrays |= {"energy": random.normal(-100, 0.5, 4), "force": random.normal(0, 0.5, (4, 96))}
    return write_npy(
        folder, [kinds[i % len(kinds)] for i in range(32)], [arrays], ["Ni", "Pd", "Al"]
    )


CUTS = {"e_rcut": 6.0, "e_rcut_smth": 5.3, "a_rcut": 4.0, "a_rcut_smth": 3.5}
COUNTED = {**CUTS, "e_sel": "auto", "a_sel": "auto"}
DYNAMIC = {**CUTS, "e_sel": 200, "a_sel": 40, "use_dynamic_sel": True, "smooth_edge_update": True}
ONE_SIDE = {"type": "se_e2_a", "sel": "auto", "type_one_side": True}
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": "auto"},
    "se_e2_a one side": ONE_SIDE,
    "se_e2_a one side, float32": {**ONE_SIDE, "precision": "float32"},
    "dpa1": {"type": "se_atten", "sel": "auto"},
    "dpa1 v2": {"type": "se_atten_v2", "sel": "auto", "attn_layer": 0},
    "dpa3": {"type": "dpa3", "repflow": COUNTED, "precision": "float32"},
    "dpa3 dynamic": {"type": "dpa3", "repflow": DYNAMIC},
}


@pytest.mark.parametrize("batch_size", [1, "auto:64"])
@pytest.mark.parametrize("descriptor", DESCRIPTORS)
def test_many_compositions_train_with_default_settings(
    train, load, tmp_path, descriptor, batch_size
):
    """Most systems lack an element of the type map, and their empty slots have nearly equal rows."""
    kinds = [[0, 1], [0, 2], [1, 2], [1], [0, 0, 2], [0, 1, 2]]
    systems = [write_alloy(tmp_path / f"s{k}", each, seed=k) for k, each in enumerate(kinds)]
    descriptor = DESCRIPTORS[descriptor]
    data = {"systems": systems, "batch_size": batch_size}
    content = {
        "model": {"type_map": ["Ni", "Pd", "Al"], "descriptor": descriptor, "fitting_net": {}},
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon"},
        "training": {"training_data": data, "numb_steps": 30, "seed": 1, "disp_freq": 10},
    }
    assert train(content) == 0
    weights = [value for value in load()["model"].values() if isinstance(value, torch.Tensor)]
    assert all(value.isfinite().all() for value in weights)
    assert np.isfinite(np.loadtxt("lcurve.out")[:, 1]).all()


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_captured_steps_of_branches_give_the_weights_of_eager_ones(
    two_branches, check_capture, steppers, optimizer, precision
):
    """Graphs of branches share memory; each updates the shared descriptor and its own head alone."""
    content = two_branches(numb_steps=40, enable_ema=True, ema_decay=0.9, gradient_max_norm=5.0)
    content["optimizer"] = {"type": optimizer}
    content["model"]["shared_dict"]["all"]["precision"] = precision
    for branch in content["model"]["model_dict"].values():
        branch["fitting_net"]["precision"] = precision
    first, captured = check_capture(content)
    for name, values in first["optimizer"]["state"].items():
        others = captured["optimizer"]["state"][name]
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[key]))
    assert all(graphs(stepper) >= 1 for stepper in steppers[-2:])
    assert all(stepper._captured.eager_reason is None for stepper in steppers[-2:])


def test_restart_of_branches_is_bitwise_and_an_idle_head_keeps_still(two_branches, train, load):
    content = two_branches(numb_steps=40, save_freq=20)
    assert train(content) == 0
    whole = load("model.ckpt-40.pt")
    content["training"]["save_ckpt"] = "again"
    assert train(content, restart="model.ckpt-20.pt") == 0
    assert_equal_weights(whole, load("again-40.pt"))
    content["training"] |= {"save_ckpt": "alone", "numb_steps": 80}
    content["training"]["model_prob"] = {"hot": 1, "cold": 0}
    assert train(content, restart="model.ckpt-40.pt") == 0
    alone = load("alone-80.pt")
    head = [
        name for name in whole["model"] if name.startswith("model.cold.atomic_model.fitting_net")
    ]
    assert head
    assert all(torch.equal(whole["model"][name], alone["model"][name]) for name in head)
    names = whole["optimizer"]["param_groups"][0]["param_names"]
    for number, values in whole["optimizer"]["state"].items():
        if names[number].startswith("cold."):
            after = alone["optimizer"]["state"][number]
            assert all(
                torch.equal(torch.as_tensor(x), torch.as_tensor(after[key]))
                for key, x in values.items()
            )
