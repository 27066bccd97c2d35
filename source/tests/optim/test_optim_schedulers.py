"""Runs with schedulers that resume are bitwise those that were never stopped; settings changed on purpose stay."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_builders import assert_same, make_net, through_file
from torch.optim import lr_scheduler

from deepmd_muon.optim import HybridMuon, InvalidSettingError, MuonConfig


class WeightDecay(lr_scheduler.LRScheduler):
    """A scheduler of a third party: it changes decay, betas and rate."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch)
            group["adam_betas"] = (0.9, 0.9 + 0.01 * self.last_epoch)
        return [lr * 0.9**self.last_epoch for lr in self.base_lrs]


SCHEDULERS = {
    "OneCycleLR": lambda o, **k: lr_scheduler.OneCycleLR(o, 0.05, total_steps=12, **k),
    "OneCycleLR, three phases": lambda o, **k: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=12, three_phase=True, max_momentum=0.9, **k
    ),
    # Momentum passes the constructor's 0.95 on its way.
    "CyclicLR": lambda o, **k: lr_scheduler.CyclicLR(
        o, 0.01, 0.05, step_size_up=3, base_momentum=0.95, max_momentum=0.98, **k
    ),
    "CosineAnnealingWarmRestarts": lambda o, **k: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3, **k
    ),
    "LambdaLR": lambda o, **k: lr_scheduler.LambdaLR(o, lambda t: 0.8**t, **k),
    "SequentialLR": lambda o, **k: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [3], **k
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "WeightDecay": WeightDecay,
}
OPTIMIZERS = {
    "HybridMuon": lambda model: HybridMuon(model.named_parameters(), 0.02),
    "tensor": lambda model: HybridMuon(model.named_parameters(), torch.tensor(0.02)),
    "capturable": lambda model: HybridMuon(model.named_parameters(), 0.02, capturable=True),
    "groups": lambda model: HybridMuon(
        [
            {"params": [("a", model[0].weight), ("b", model[2].weight)]},
            {"params": [("c", model[0].bias), ("d", model[2].bias)], "lr": 0.01, "momentum": 0.8},
        ],
        0.02,
    ),
    "MuonConfig": lambda model: MuonConfig().build(model),
}


def train(model, optimizer, scheduler, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = (
            model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        )
        loss.backward()
        optimizer.step()
        scheduler.step(*[loss.item()] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


def values(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("made", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(kind, made):
    whole = make_net()
    optimizer = OPTIMIZERS[made](whole)
    scheduler = SCHEDULERS[kind](optimizer)
    stops = {}
    for step in range(8):
        if step in (0, 3, 5):
            saved = through_file({"model": whole.state_dict(), "optimizer": optimizer.state_dict()})
            stops[step] = (
                saved,
                copy.deepcopy(scheduler.state_dict()),
                copy.deepcopy(values(optimizer)),
            )
        train(whole, optimizer, scheduler, 1, start=step)
    for stop, (saved, schedule, present) in stops.items():
        resumed = make_net()
        second = OPTIMIZERS[made](resumed)
        again = SCHEDULERS[kind](second)
        resumed.load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        again.load_state_dict(schedule)
        assert values(second) == present
        train(resumed, second, again, 8 - stop, start=stop)
        assert values(second) == values(optimizer)
        assert_same((whole, optimizer), (resumed, second))


@pytest.mark.parametrize(
    "kind", ["OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts", "LambdaLR"]
)
def test_a_scheduler_made_after_the_load_goes_on(kind):
    whole = make_net()
    optimizer = HybridMuon(whole.named_parameters(), 0.02)
    scheduler = SCHEDULERS[kind](optimizer)
    train(whole, optimizer, scheduler, 4)
    saved = optimizer.state_dict()
    resumed = copy.deepcopy(whole)
    second = HybridMuon(resumed.named_parameters(), 0.02)
    second.load_state_dict(saved)
    # last_epoch is that of the step before: constructing a scheduler takes a step.
    again = SCHEDULERS[kind](second, last_epoch=scheduler.last_epoch - 1)
    again.load_state_dict(scheduler.state_dict())
    second.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    assert values(second) == values(optimizer)
    train(whole, optimizer, scheduler, 3, start=4)
    train(resumed, second, again, 3, start=4)
    assert values(second) == values(optimizer)
    assert_same((whole, optimizer), (resumed, second))


def test_settings_changed_in_the_constructor_stay_and_are_logged(caplog):
    model = make_net()
    first = HybridMuon(model.named_parameters(), 0.02, momentum=0.95, weight_decay=0.1)
    schedule = SCHEDULERS["OneCycleLR"](first)
    train(model, first, schedule, 4)
    saved = first.state_dict()
    cycled = first.param_groups[0]["momentum"]
    assert cycled != 0.95

    def loaded(**settings):
        caplog.clear()
        second = HybridMuon(
            model.named_parameters(),
            **{"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, **settings},
        )
        with caplog.at_level("INFO", logger="deepmd_muon"):
            second.load_state_dict(saved)
        return second.param_groups[0], [record.getMessage() for record in caplog.records]

    group, told = loaded()
    assert group["momentum"] == cycled
    assert told == [f"param_groups[0] momentum: {cycled!r} as saved; it was 0.95"]
    group, told = loaded(momentum=0.9, weight_decay=0.2)
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.2)
    assert told == [
        f"param_groups[0] momentum: now 0.9, saved {cycled!r}",
        "param_groups[0] weight_decay: now 0.2, saved 0.1",
    ]
    group, _ = loaded(lr=0.5)
    assert (group["initial_lr"], group["lr"]) == (0.5, first.param_groups[0]["lr"])
    group, _ = loaded()
    assert group["initial_lr"] == first.param_groups[0]["initial_lr"]


def test_a_state_without_the_constructed_values_keeps_present_settings():
    model = make_net()
    first = HybridMuon(model.named_parameters(), 0.02)
    first.param_groups[0]["momentum"] = 0.8
    saved = first.state_dict()
    del saved["param_groups"][0]["constructed"]
    second = HybridMuon(model.named_parameters(), 0.02)
    second.load_state_dict(saved)
    assert second.param_groups[0]["momentum"] == 0.95


def test_a_damaged_setting_is_refused_and_nothing_changes():
    model = make_net()
    saved = HybridMuon(model.named_parameters(), 0.02).state_dict()
    saved["param_groups"][0].update(momentum=2.0, lr=0.5)
    second = HybridMuon(model.named_parameters(), 0.02)
    before = values(second)
    with pytest.raises(InvalidSettingError, match="momentum"):
        second.load_state_dict(saved)
    assert values(second) == before


def test_copies_of_groups_are_constructed_anew():
    model = make_net()
    first = HybridMuon(model.named_parameters(), 0.02)
    first.param_groups[0]["momentum"] = 0.8
    (group,) = first.param_groups
    copied = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    second = HybridMuon([{**copied, "params": list(model.named_parameters())}], 0.02)
    assert '"momentum": 0.8' in second.param_groups[0]["constructed"]
    assert '"momentum": 0.95' in group["constructed"]
