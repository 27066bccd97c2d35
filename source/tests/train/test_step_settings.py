"""With each setting changed, steps that wait for nothing are those that read on the host, or the run says why not.

What a CUDA graph replays is the function that these tests call; `test_capture_settings_gpu.py` captures it.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from compared import assert_same
from step_changes import STEPS, inputs_of_branches, inputs_with_changes, settings_of

from deepmd_muon.loss import ComparedAtoms, build_loss
from deepmd_muon.train import TrainingError
from deepmd_muon.train.learning_rate import learning_rate
from deepmd_muon.train.step.stepper import HostStepper, RateTable, build_stepper
from deepmd_muon.train.strategy import choose_strategy
from deepmd_muon.train.strategy.fully_sharded import FullySharded

CPU = torch.device("cpu")


@pytest.fixture
def inputs(small_input, tmp_path):
    """Inputs of one model by the setting that differs."""
    return inputs_with_changes(small_input(), tmp_path / "data")


def chosen(training, monkeypatch):
    """Return the strategy of one of two ranks, without the exchange that its construction begins."""
    monkeypatch.setattr(
        "deepmd_muon.train.strategy.replicated.init_device_mesh", lambda *_, **__: None
    )
    monkeypatch.setattr("deepmd_muon.train.strategy.fully_sharded.sharding_mesh", lambda *_: None)
    monkeypatch.setattr(FullySharded, "__init__", lambda *_, **__: None)
    ranks = SimpleNamespace(size=2, rank=0, device=CPU)
    model = torch.nn.Linear(1, 1)
    model.why_foreign = None
    return choose_strategy(training, ranks, model)


def test_settings_that_need_the_host_are_named(inputs, two_branches, monkeypatch):
    reasons = {}
    for name, content in {**inputs, **inputs_of_branches(two_branches())}.items():
        training = settings_of(content).training
        reason = chosen(training, monkeypatch).reads_on_host
        if reason is not None:
            reasons[name.removeprefix("training: ")] = reason
    assert {name: reason.split()[0] for name, reason in reasons.items()} == {
        "zero_stage 2": "training/zero_stage",
        "zero_stage 3": "training/zero_stage",
        "data_parallel_replicate_degree 2, zero_stage 2": "training/zero_stage",
        "stratified True": "training/stratified",
    }


def test_a_reason_ends_a_run_that_demands_capture(small_input):
    strategy = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cuda")),
        reads_on_host="training/some is true",
        model=torch.nn.Linear(1, 1),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for capture in ("on", "auto", "off"):
        content = small_input(training={"capture": capture})
        parts = {"loss": None, "optimizer": optimizer, "ema": None, "scalars": None}
        parts |= {"strategy": strategy, "training": settings_of(content).training}
        if capture == "on":
            with pytest.raises(TrainingError, match="training/some is true"):
                build_stepper(**parts)
        else:
            assert isinstance(build_stepper(**parts), HostStepper)


def test_each_schedule_on_the_device_is_that_of_the_host(inputs):
    schedules = {name: x for name, x in inputs.items() if name.startswith("learning_rate")}
    rates = {}
    for name, content in schedules.items():
        rate = learning_rate(settings_of(content).learning_rate, STEPS)
        table = RateTable(
            lambda step, rate=rate: (rate(step), 0.5 * rate(step)), torch.float64, CPU
        )
        rates[name] = []
        for step in range(STEPS):
            table.expect(step)
            table.read()
            assert (table.lr.item(), table.lr_fraction.item()) == (rate(step), 0.5 * rate(step))
            rates[name].append(rate(step))
    assert len({tuple(values) for values in rates.values()}) > 0.6 * len(rates)


def test_each_loss_takes_the_fraction_on_the_device(inputs):
    """Prefactors follow the learning rate: read on the host, or a tensor that is never read."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"energy": (3,), "force": (3, 4, 3), "virial": (3, 9)}
    prediction = {name: drawn(*shape) for name, shape in shapes.items()}
    prediction["atom_energy"] = drawn(3, 4)
    labels = {name: drawn(*shape) for name, shape in shapes.items()}
    labels |= {name: drawn(3, 4) for name in ("atom_ener", "atom_ener_coeff")}
    labels["atom_pref"] = drawn(3, 4).abs()
    atoms = ComparedAtoms(torch.zeros(3, 4, dtype=torch.int64))
    values = set()
    for name, content in inputs.items():
        if name.startswith("loss"):
            loss = build_loss(settings_of(content).loss, ["O", "H"])
            value, metrics = loss(prediction, labels, 0.3, atoms)
            fraction = torch.tensor(0.3, dtype=torch.float64)
            again, same_metrics = loss(prediction, labels, fraction, atoms)
            torch.testing.assert_close(again, value, rtol=1e-14, atol=0.0, msg=name)
            torch.testing.assert_close(same_metrics, metrics, rtol=1e-14, atol=0.0, msg=name)
            values.add(float(value))
    assert len(values) > 15


@pytest.mark.slow
def test_steps_that_wait_for_nothing_are_those_of_the_host(
    inputs, two_branches, train, load, on_device, monkeypatch
):
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    inputs |= inputs_of_branches(two_branches())
    inputs = {name: x for name, x in inputs.items() if "tensorboard" not in name}  # optional

    def weights(content, name):
        assert train(content) == 0, name
        return load(f"{content['training'].get('save_ckpt', 'model.ckpt')}.pt")

    on_host = {name: weights(content, name) for name, content in inputs.items()}
    on_device()
    different = []
    for name, content in inputs.items():
        try:
            assert_same(on_host[name], weights(content, name), 1e-6, ("model", "ema"))
        except AssertionError as error:  # noqa: PERF203 (all are named)
            different.append(f"{name}: {error}")
    assert not different
