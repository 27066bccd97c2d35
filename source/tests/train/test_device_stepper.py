"""Steps that wait for nothing, run eagerly on the CPU: what a CUDA graph replays is the same function."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compared import assert_same
from small_models import COPPER_DESCRIPTORS

from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.train import NonFiniteError, TrainingError
from deepmd_muon.train.batches.batch import tensors_of, to_device
from deepmd_muon.train.batches.streamed import StreamedBatches, with_full_sections
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.step.stepper import DeviceStepper, build_stepper
from deepmd_muon.train.strategy.base import Alone, Strategy
from deepmd_muon.train.strategy.fully_sharded import FullySharded
from deepmd_muon.train.strategy.replicated import Replicated

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
CPU = torch.device("cpu")


def poison(monkeypatch, *numbers):
    """Make the energies of some steps of a run infinite."""
    original, count = TrainingStep.__call__, 0

    def call(self, batch, *others):
        nonlocal count
        count += 1
        if count in numbers:
            batch.labels["energy"][:] = float("inf")
        return original(self, batch, *others)

    monkeypatch.setattr(TrainingStep, "__call__", call)


def test_a_strategy_is_captured_only_if_it_says_that_its_steps_wait_for_nothing():
    class Other(Strategy):
        pass

    assert Alone.reads_on_host is None
    assert Replicated.reads_on_host is None
    assert FullySharded.reads_on_host is not None
    other = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cuda")), reads_on_host=Other.reads_on_host
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    settings = SimpleNamespace(capture="on", enable_tf32=False)
    parts = {"loss": None, "optimizer": optimizer, "ema": None, "scalars": None}
    with pytest.raises(TrainingError, match="does not say"):
        build_stepper(strategy=other, training=settings, **parts)


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
@pytest.mark.parametrize("streamed", [False, True])
def test_weights_are_those_of_steps_that_read_on_the_host(
    small_input, train, load, on_device, optimizer, streamed
):
    content = small_input(
        optimizer={"type": optimizer},
        training={"enable_ema": True, "ema_decay": 0.9, "gradient_max_norm": 5.0, "disp_avg": True},
    )
    content["training"] |= {"adam_gradient_max_norm": 1.0, "ema_tail": 0.5 if streamed else 0.0}
    train(content)
    host, curve = load(), np.loadtxt("lcurve.out", comments="#")
    on_device(streamed=streamed)
    train(content)
    device = load()
    # Other widths of neighbour sections and a float32 learning rate move the last bits.
    assert_same(host, device, 1e-6, ("model", "ema"))
    np.testing.assert_allclose(np.loadtxt("lcurve.out", comments="#"), curve, rtol=0.02)
    assert device["deepmd_muon"]["training_data"] == host["deepmd_muon"]["training_data"]
    group = device["optimizer"]["param_groups"][0]
    assert type(group["lr"]) is float
    assert group["lr"] == pytest.approx(host["optimizer"]["param_groups"][0]["lr"], rel=1e-6)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_graph_descriptor_steps_alike_from_bounds_and_counts(
    small_input, train, load, on_device, streamed
):
    """Batches of fixed shapes bound the neighbours in angles; on the host they are counted."""
    content = small_input()
    descriptor = COPPER_DESCRIPTORS["dpa3"]
    repflow = descriptor["repflow"] | {"nlayers": 2, "e_sel": "auto", "a_sel": "auto"}
    content["model"]["descriptor"] = descriptor | {"repflow": repflow}
    content["training"] |= {"numb_steps": 3, "disp_freq": 3}
    content["training"]["training_data"]["systems"] = [str(EXAMPLE / "train" / "triclinic8")]
    content["training"]["validation_data"]["systems"] = [str(EXAMPLE / "valid" / "triclinic8")]
    train(content)
    host = load()
    on_device(streamed=streamed)
    train(content)
    assert_same(host, load(), 1e-6, ("model",))


@pytest.mark.parametrize("tail", [0.0, 0.7])
def test_restart_is_bitwise(small_input, check_restart, on_device, tail):
    on_device()
    check_restart(small_input(training={"enable_ema": True, "ema_tail": tail}), 5)


def test_from_the_first_bad_step_on_everything_is_frozen_and_that_step_is_named(
    small_input, train, load, on_device, monkeypatch
):
    on_device()
    content = small_input(
        training={"enable_ema": True, "disp_freq": 100, "save_freq": 6, "numb_steps": 20}
    )
    states = []
    original = DeviceStepper.check

    def check(self, done):
        optimizer = self._captured._step.optimizer
        params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        moments = [x.clone() for state in optimizer.state.values() for x in state.values()]
        ema = [x.clone() for x in self._captured._step.ema.averages().values()]
        states.append((done, [*params, *moments, *ema]))
        return original(self, done)

    monkeypatch.setattr(DeviceStepper, "check", check)
    poison(monkeypatch, 7)
    with pytest.raises(
        NonFiniteError,
        match=r"before update 7: the loss is inf .*cu_emt.* \(frames? \d.*model\.ckpt-6\.pt",
    ) as caught:
        train(content)
    assert caught.value.update == 7
    at_six, at_twelve = states[-2:]
    assert (at_six[0], at_twelve[0]) == (6, 12)
    for before, after in zip(at_six[1], at_twelve[1], strict=True):
        assert torch.equal(before, after)
    assert not Path("model.ckpt-12.pt").exists()


def test_skip_leaves_bad_steps_out_and_counts_them(
    small_input, train, load, on_device, monkeypatch, caplog
):
    content = small_input(
        optimizer={"on_nonfinite": "skip"}, training={"numb_steps": 6, "disp_freq": 100}
    )
    with monkeypatch.context() as patched:
        poison(patched, 3, 4)
        train(content)
    host = load()
    on_device()
    poison(monkeypatch, 3, 4)
    caplog.clear()
    train({**content, "training": {**content["training"], "save_ckpt": "device"}})
    assert_same(host, load("device.pt"), 1e-6, ("model",))
    assert "2 steps since update 1 are skipped" in caplog.text


def loader(systems, **options):
    options = {"batch_size": 2, "seed": 5, **options}
    return DataLoader(systems, cache=NeighborCache(4.5, (60,), True), **options)


def test_streamed_batches_are_those_of_the_loader():
    systems = open_systems([str(EXAMPLE / "train")], ["Cu"])
    plain, streamed = (loader(systems) for _ in range(2))
    source = StreamedBatches(streamed, 1, CPU)
    for _ in range(7):
        expected = plain.next()
        feed = source.next()
        batch = feed.read()
        assert feed.origin == batch.origin == expected.origin
        for name in ("energy", "force", "virial"):
            label = getattr(expected.frames, name)
            assert (batch.labels[name] is None) == (label is None)
            if label is not None:
                np.testing.assert_array_equal(batch.labels[name], label)
        wanted = to_device(expected, 1, CPU).structures
        found = batch.structures
        width = wanted.neighbor.shape[1]
        assert torch.equal(found.neighbor[:, :width].long(), wanted.neighbor)
        assert (found.neighbor[:, width:] == -1).all()
        for name in ("coord", "order", "sorted_type", "sorted_frame", "atype"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        if wanted.box is None:
            assert found.box is found.shift is None
        else:
            assert torch.equal(found.box, wanted.box)
            assert torch.equal(found.shift[:, :width], wanted.shift)
        assert feed.labelled_atoms({"energy", "force"}) == expected.frames.atype.size
    assert plain.state_dict() == streamed.state_dict()
    source.close()


def test_capture_needs_a_gpu(small_input, train):
    with pytest.raises(TrainingError, match=r"capture.*no GPU"):
        train(small_input(training={"capture": "on"}))


def test_full_sections_change_no_tensor():
    batch = to_device(loader(open_systems([str(EXAMPLE / "train")], ["Cu"])).next(), 1, CPU)
    full = with_full_sections(batch)
    assert (full.structures.filled == batch.structures.sections[0]).all()
    assert all(a is b for a, b in zip(tensors_of(full), tensors_of(batch), strict=True))


def test_tf32_ends_with_the_gradient(small_input, train, monkeypatch):
    seen, original = [], TrainingStep.__call__

    def call(self, *batch):
        precisions = []
        optimizer_step = self.optimizer.step
        monkeypatch.setattr(
            self.optimizer, "step", lambda: precisions.append(torch.get_float32_matmul_precision())
        )
        hook = next(self.strategy.model.parameters()).register_hook(
            lambda _: precisions.append(torch.get_float32_matmul_precision())
        )
        metrics = original(dataclasses.replace(self, tf32=True), *batch)
        hook.remove()
        monkeypatch.setattr(self.optimizer, "step", optimizer_step)
        seen.append(precisions)
        return metrics

    monkeypatch.setattr(TrainingStep, "__call__", call)
    train(small_input(training={"numb_steps": 2}))
    assert seen == [["high", "highest"]] * 2


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_branches_step_alike_without_reading_on_the_host(
    two_branches, train, load, on_device, optimizer
):
    """Branches share guard and schedule; a head that is not drawn keeps its momentum."""
    content = two_branches(numb_steps=9, enable_ema=True)
    content["optimizer"] = {"type": optimizer}
    assert train(content) == 0
    host, curve = load(), np.loadtxt("lcurve.out", comments="#")
    on_device()
    assert train(content) == 0
    device = load()
    assert_same(host, device, 1e-6, ("model", "ema"))
    for index, expected in host["optimizer"]["state"].items():
        for key, value in expected.items():
            found = torch.as_tensor(device["optimizer"]["state"][index][key])
            torch.testing.assert_close(
                found, torch.as_tensor(value), rtol=1e-5, atol=1e-5, check_dtype=False
            )
    np.testing.assert_allclose(
        np.loadtxt("lcurve.out", comments="#"), curve, rtol=0.02, equal_nan=True
    )
    assert host["deepmd_muon"]["tasks"] == device["deepmd_muon"]["tasks"]
