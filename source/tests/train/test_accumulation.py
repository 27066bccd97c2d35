"""Gradient accumulation: a step on several batches is the step on one batch that holds them all."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from compared import assert_same

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import DataLoader, NeighborCache, Plan, open_systems
from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model
from deepmd_muon.train import NonFiniteError, RunError
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.batches.streamed import AccumulatedFeed, BatchFeed, StreamedBatches
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.step.guard import HostGuard
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.strategy.base import Alone

SYSTEM = Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "train" / "fcc32"
CPU = torch.device("cpu")


def exact(small_input, batch_size, accumulate, **training):
    """An input in float64 throughout whose batches come from one system of an even number of frames."""
    content = copy.deepcopy(small_input())
    content["model"]["descriptor"] |= {"precision": "float64", "sel": [60]}
    content["model"]["fitting_net"]["precision"] = "float64"
    content["model"]["data_stat_nbatch"] = 1000  # every frame, whatever the batch
    content["optimizer"] |= {"precision": "float64", "lr_adjust_coeff": 0.18}
    content["training"] |= {
        "training_data": {"systems": [str(SYSTEM)], "batch_size": batch_size},
        "accumulate_grad_batches": accumulate,
        "enable_ema": True,
        "ema_decay": 0.9,
        "gradient_max_norm": 5.0,
        **training,
    }
    return content


def prepare(small_input):
    """Return model, loss, and two batches of one frame with the batch of both."""
    given = normalize(exact(small_input, 1, 2))
    model = build_model(given.settings.model)
    systems = open_systems([str(SYSTEM)], model.type_map)
    loader = DataLoader(systems, 1, seed=3, cache=NeighborCache.of(model.neighbors, 1))
    batches = [
        to_device(loader.build(Plan(((0, np.array(each)),))), 1, CPU) for each in ([1], [4], [1, 4])
    ]
    return model, build_loss(given.settings.loss, model.type_map), *batches


def gradients(model, loss, batch):
    """Return loss, metrics and gradients of a step, whose update has no length."""
    step = TrainingStep(
        Alone(Ranks(CPU), model),
        loss,
        torch.optim.SGD(model.parameters()),
        HostGuard("error"),
    )
    metrics = step(batch, 0.0, 0.5)
    return metrics, {name: p.grad for name, p in model.named_parameters()}


def test_the_gradient_is_that_of_one_batch_with_all_frames(small_input):
    model, loss, first, second, both = prepare(small_input)
    metrics, wanted = gradients(model, loss, both)
    feeds = AccumulatedFeed((BatchFeed("a", first, first), BatchFeed("b", second, second)))
    each, found = gradients(model, loss, feeds)
    for name, expected in wanted.items():
        torch.testing.assert_close(
            found[name], expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max())
        )
    for name, expected in metrics.items():
        assert each[name].shape == (2,)
        # The error of energies is an average of magnitudes of frames, as squares; so are the others.
        torch.testing.assert_close(each[name].square().mean().sqrt(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("way", ["host", "resident", "streamed"])
def test_a_run_is_that_of_larger_batches(small_input, train, load, monkeypatch, on_device, way):
    whole = exact(small_input, 4, 1, disp_avg=True)
    train(whole)
    wanted, curve = load(), np.loadtxt("lcurve.out")
    if way != "host":
        on_device(streamed=way == "streamed")
    monkeypatch.setattr(
        "deepmd_muon.train.batches.windows._AHEAD", 6
    )  # no multiple of what a step takes
    train(exact(small_input, 2, 2, disp_avg=True, save_ckpt="parts"))
    found = load("parts.pt")
    assert_same(wanted, found, 1e-10, ("model", "ema"))
    rates = [content["optimizer"]["param_groups"][0]["lr"] for content in (wanted, found)]
    assert rates[0] == pytest.approx(rates[1])
    np.testing.assert_allclose(np.loadtxt("lcurve.out"), curve, rtol=2e-2)
    assert wanted["deepmd_muon"]["training_data"]["step"] == 10
    assert found["deepmd_muon"]["training_data"]["step"] == 20
    train(exact(small_input, 2, 2, save_ckpt="again"), restart="parts-5.pt")
    assert_same(found, load("again.pt"))


def test_batches_of_one_step_share_no_tensors():
    systems = open_systems([str(SYSTEM)], ["Cu"])
    options = {"seed": 5, "cache": NeighborCache(4.5, (60,), True)}
    plain = DataLoader(systems, 1, **options)
    loader = DataLoader(systems, 1, **options, batches_per_step=3)
    source = StreamedBatches(loader, 1, CPU)
    for _ in range(2):
        feeds = [source.next() for _ in range(3)]
        for feed in feeds:
            np.testing.assert_array_equal(feed.read().labels["energy"], plain.next().frames.energy)
    assert loader.state_dict() == plain.state_dict()
    source.next()
    assert loader.state_dict() == plain.state_dict()  # not until the step has all its batches
    source.close()


def test_epochs_count_all_batches(small_input, train, load):
    content = exact(small_input, 1, 2)
    del content["training"]["numb_steps"]
    train({**content, "training": {**content["training"], "numb_epoch": 0.5}})
    frames = open_systems([str(SYSTEM)], ["Cu"])[0].nframes
    assert load()["deepmd_muon"]["step"] == frames // 4


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("device", [False, True])
def test_one_bad_batch_leaves_the_step_out(
    small_input, train, load, monkeypatch, on_device, policy, device
):
    if device:
        on_device(streamed=True)
    original, count = BatchFeed.read, 0

    def read(self):
        nonlocal count
        count += 1
        batch = original(self)
        if count == 6:  # the second one of step 3
            batch.labels["energy"][:] = float("inf")
        return batch

    monkeypatch.setattr(BatchFeed, "read", read)
    content = exact(small_input, 1, 2, numb_steps=4, disp_freq=1)
    content["optimizer"]["on_nonfinite"] = policy
    if policy == "error":
        with pytest.raises(NonFiniteError, match="before update 3: the loss is inf"):
            train(content)
    else:
        train(content)
        assert load()["deepmd_muon"]["step"] == 4


def test_data_that_fail_within_a_step_leave_the_position_before_it(
    small_input, train, load, monkeypatch
):
    original, count = DataLoader.next, 0

    def next_batch(self):
        nonlocal count
        count += 1
        if count == 6:  # the second one of step 3
            raise OSError("gone")
        return original(self)

    monkeypatch.setattr(DataLoader, "next", next_batch)
    content = exact(small_input, 1, 2, numb_steps=4)
    del content["training"]["validation_data"]
    with pytest.raises(RunError, match=r"at step 3 .*gone"):
        train(content)
    own = load()["deepmd_muon"]
    assert (own["step"], own["training_data"]["step"]) == (2, 4)


def test_the_name_of_other_trainers_means_the_same(small_input):
    content = small_input(training={"gradient_accumulation_steps": 3})
    assert normalize(content).settings.training.accumulate_grad_batches == 3
    assert normalize(content).normalized["training"]["accumulate_grad_batches"] == 3
