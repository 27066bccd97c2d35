"""Schedules of momentum, decay and betas change numbers, and compile nothing again."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_builders import train
from torch import nn

from deepmd_muon.optim import InvalidSettingError, MuonConfig
from deepmd_muon.optim.step import CompiledStep

SCHEDULED = {
    "momentum": [0.85, 0.9, 0.95],
    "weight_decay": [0.0, 0.1, 0.3],
    "adam_betas": [(0.8, 0.9), (0.9, 0.95), [0.95, 0.99]],
    "adam_lr_ratio": [1.0, 0.5, 0.25],
    "lr_adjust_coeff": [0.2, 0.1, 0.4],
    "adam_weight_decay": [None, 0.2, 0.1],
    "adam_eps": [1e-8, 1e-4, 1e-2],
}


def make(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Embedding(6, 4))
    config = MuonConfig(scaling="match_rms", vector_route="adamw", **settings)
    optimizer = config.build(model, 0.05)
    return model, optimizer


@pytest.fixture
def preparations(monkeypatch):
    """Count how often a step is compiled."""
    counts = []
    prepare = CompiledStep.prepare

    def counting(self, *args):
        counts.append(1)
        prepare(self, *args)

    monkeypatch.setattr(CompiledStep, "prepare", counting)
    return counts


@pytest.mark.parametrize("key", SCHEDULED)
@pytest.mark.parametrize("settings", [{}, {"cautious_decay": True, "normuon": True}])
def test_a_schedule_steps_as_an_optimizer_of_each_value_and_compiles_once(
    key, settings, preparations
):
    model, optimizer = make(**settings)
    train(model, optimizer, 1, start=0)
    compiled = len(preparations)
    for number, value in enumerate(SCHEDULED[key], start=1):
        twin, fresh = copy.deepcopy((model, optimizer))
        for group in (*optimizer.param_groups, *fresh.param_groups):
            group[key] = value
        preparations.clear()
        train(model, optimizer, 1, start=number)
        assert not preparations
        train(twin, fresh, 1, start=number)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
    assert compiled == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 1.5), ("adam_betas", (0.9, -1.0)), ("adam_betas", 0.9), ("weight_decay", "0.1")],
)
def test_a_wrong_value_of_a_schedule_is_refused(key, value):
    model, optimizer = make()
    train(model, optimizer, 1, start=0)
    optimizer.param_groups[0][key] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidSettingError, match=r"momentum|adam_beta2|adam_betas|weight_decay"):
        train(model, optimizer, 1, start=1)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
