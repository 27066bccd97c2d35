"""Settings of the element-wise routes and of schedules by size, each against what it stands for."""

from __future__ import annotations

import math

import pytest
import torch
from optim_builders import random
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

SHAPES = (("a.bias", (7,)), ("b.weight", (5, 4)), ("c.scale", ()))
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def parameters():
    return {
        name: nn.Parameter(random(*shape, seed=i, dtype=torch.float64))
        for i, (name, shape) in enumerate(SHAPES)
    }


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
    params, twins = parameters(), parameters()
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


def test_large_matrices_take_their_own_schedule():
    shapes = {
        "small.weight": (5, 40),
        "large.weight": (8, 9),
        "stack.weight": (2, 12, 8),
        "fused.weight": (16, 30),
    }
    split = ["fused.*: rows 10+6"]
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def moved(**settings):
        params = {name: nn.Parameter(x.clone()) for name, x in values.items()}
        for name, p in params.items():
            p.grad = grads[name]
        HybridMuon(params.items(), 1.0, weight_decay=0.0, splits=split, **settings).step()
        return {name: p.detach() - values[name] for name, p in params.items()}

    five, ten = moved(schedule="polar-express-5"), moved()
    mixed = moved(large_schedule="polar-express-5", large_matrix_dim=8)
    for name in ("large.weight", "stack.weight"):
        torch.testing.assert_close(mixed[name], five[name])
        assert (mixed[name] - ten[name]).abs().max() > 1e-3
    torch.testing.assert_close(mixed["small.weight"], ten["small.weight"])
    torch.testing.assert_close(mixed["fused.weight"][:10], five["fused.weight"][:10])
    torch.testing.assert_close(mixed["fused.weight"][10:], ten["fused.weight"][10:])


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
