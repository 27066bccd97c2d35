"""Settings of the element-wise routes and of schedules by size, each against what it stands for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_builders import parameters, random
from torch import nn

from deepmd_muon.optim import (
    AdamConfig,
    AdamWConfig,
    HybridMuon,
    HybridMuonConfig,
    InvalidSettingError,
    MuonConfig,
)
from deepmd_muon.optim.groups.group_settings import unfolded
from deepmd_muon.optim.update.adam import correct_rounded_lr

SHAPES = {"a.bias": (7,), "b.weight": (5, 4), "c.scale": ()}
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def stepped(params, optimizer):
    for step in range(3):
        for i, p in enumerate(params.values()):
            p.grad = 1e-4 * random(*p.shape, seed=10 * step + i, dtype=torch.float64)
        optimizer.step()
    return [p.detach().clone() for p in params.values()]


def test_the_mode_of_a_group_is_taken_in_any_case():
    w, v, x = (nn.Parameter(torch.ones(2, 3, 4)) for _ in range(3))
    optimizer = HybridMuon(
        [{"params": [("w", w)]}, {"params": [("v", v)], "muon_mode": "FLAT"}], muon_mode="2D"
    )
    optimizer.add_param_group({"params": [("x", x)]})
    assert [group["muon_mode"] for group in optimizer.param_groups] == ["2d", "flat", "2d"]
    assert [entry.route for entry in optimizer.routing] == ["adamw", "muon", "adamw"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01, dtype=torch.float64)])
def test_every_implementation_of_the_adam_routes_is_torchs_with_its_epsilon(implementation, lr):
    params, twins = (parameters(SHAPES, torch.float64) for _ in range(2))
    optimizer = HybridMuon(
        params.items(),
        lr,
        adam_betas=(0.8, 0.9),
        weight_decay=0.1,
        adam_eps=1e-3,
        adam_implementation=implementation,
        adam_patterns=["a.*"],
        adamw_patterns=["b.*", "c.*"],
    )
    (a, *rest) = twins.values()
    peers = [
        torch.optim.Adam([a], 0.01, (0.8, 0.9), eps=1e-3),
        torch.optim.AdamW(rest, 0.01, (0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ]
    found = stepped(params, optimizer)

    class Both:
        def step(self):
            for peer in peers:
                peer.step()

    for mine, theirs in zip(found, stepped(twins, Both()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("config", [AdamConfig, AdamWConfig])
def test_adam_configurations_hand_epsilon_and_implementation_to_torch(config):
    model = nn.Linear(3, 2)
    options = [
        config(adam_eps=1e-5, adam_implementation=name).build(model).defaults
        for name in IMPLEMENTATIONS
    ]
    assert [each["eps"] for each in options] == [1e-5] * 3
    assert [(each["fused"], each["foreach"]) for each in options] == [
        (True, None),
        (None, True),
        (False, False),
    ]
    with pytest.raises(InvalidSettingError, match="adam_eps: must be > 0"):
        config(adam_eps=0.0)


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig])
def test_vectors_take_the_route_of_the_setting(config):
    model = nn.ModuleDict({"body": nn.Linear(4, 6), "norm": nn.LayerNorm(6)})
    vectors = ("body.bias", "norm.weight", "norm.bias")
    for settings, expected in (({}, "adam"), ({"vector_route": "adamw"}, "adamw")):
        optimizer = config(**settings).build(model)
        routes = {entry.name: entry.route for entry in optimizer.routing}
        assert routes == {"body.weight": "muon", **dict.fromkeys(vectors, expected)}


def test_a_schedule_for_large_matrices_is_checked_saved_and_restored():
    params = [("w", nn.Parameter(torch.eye(3)))]
    with pytest.raises(InvalidSettingError, match="large_schedule: must be"):
        HybridMuon(params, large_schedule=5)
    optimizer = HybridMuon(params, large_schedule=[(2, -1.5, 0.5)], large_matrix_dim=2)
    group = unfolded(optimizer.state_dict()["param_groups"][0])
    assert (group["large_schedule"], group["large_matrix_dim"]) == ([[2.0, -1.5, 0.5]], 2)
    params[0][1].grad = torch.eye(3)
    optimizer.step()
    assert math.isfinite(params[0][1].detach().sum().item())


def test_parameters_are_not_printed_to_be_checked(monkeypatch):
    """Words for a mismatch are made when they are read: printing a tensor of a GPU waits for it."""

    def refuse(self):
        raise AssertionError("a parameter was printed")

    monkeypatch.setattr(nn.Parameter, "__repr__", refuse)
    optimizer = HybridMuon([("weight", nn.Parameter(torch.ones(3, 3)))], lr=1e-3)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("route", [{}, {"adam_patterns": ["*"]}, {"adamw_patterns": ["*"]}])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_with_one_element_is_a_learning_rate(route, shape):
    found = []
    for lr in (0.1, torch.full(shape, 0.1, dtype=torch.float64)):
        p = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        optimizer = HybridMuon([("w", p)], lr, adam_lr_ratio=0.5, **route)
        for step in range(2):
            p.grad = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
            optimizer.step()
            if step == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append(p.detach())
    assert torch.allclose(*found, rtol=1e-14, atol=0)


def test_a_step_with_a_rounded_rate_becomes_one_with_the_exact_rate():
    lr = torch.tensor(0.1, dtype=torch.float64)
    before, update = (
        torch.linspace(1, 2, 9, dtype=torch.float64),
        torch.linspace(-3, 5, 9, dtype=torch.float64),
    )
    p = before - lr.float().double() * update
    assert not torch.allclose(p, before - lr * update, rtol=1e-10, atol=0)
    correct_rounded_lr([p], [before], lr)
    assert torch.allclose(p, before - lr * update, rtol=1e-15, atol=1e-16)
    still = before.clone()
    correct_rounded_lr([still], [before], torch.zeros((), dtype=torch.float64))
    assert torch.equal(still, before)
