"""Gradient clipping by the norm of the Adam routes: as a function, and in the trainer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deepmd_muon.optim import HybridMuon, MuonConfig, clip_adam_grad_norm_


def make():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 3), "body": nn.Linear(3, 5), "norm": nn.LayerNorm(5)}
    )
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i + 1))
    return model, MuonConfig().build(model)


def test_only_the_adam_routes_count_and_are_scaled():
    model, optimizer = make()
    expected = math.sqrt(
        12 * 1**2 + 5 * 3**2 + 5 * 4**2 + 5 * 5**2
    )  # embedding, bias, and both of the norm
    norm = clip_adam_grad_norm_(optimizer, 2.0)
    assert norm.item() == pytest.approx(expected)
    assert model["body"].weight.grad.unique().tolist() == [2.0]
    assert model["norm"].bias.grad[0].item() == pytest.approx(5 * 2.0 / expected, rel=1e-5)
    assert clip_adam_grad_norm_(optimizer, 10.0).item() == pytest.approx(2.0, rel=1e-5)
    assert model["embed"].weight.grad[0, 0].item() == pytest.approx(2.0 / expected, rel=1e-5)


def test_parameters_without_gradients_and_other_optimizers():
    model, optimizer = make()
    for p in model.parameters():
        p.grad = None
    assert clip_adam_grad_norm_(optimizer, 1.0).item() == 0.0
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])
    for p in sgd.param_groups[0]["params"]:
        p.grad = torch.full_like(p, 2.0)
    whole = torch.nn.utils.get_total_norm([p.grad for p in sgd.param_groups[0]["params"]])
    assert torch.equal(clip_adam_grad_norm_(sgd, 1.0), whole)
    assert sgd.param_groups[0]["params"][1].grad[0, 0].item() == pytest.approx(
        2.0 / whole.item(), rel=1e-5
    )


def test_parameters_of_one_rank_are_scaled_by_themselves():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = HybridMuon([("mine.b", p), ("shared.b", q)], local_patterns=["mine.*"])
    p.grad, q.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    assert clip_adam_grad_norm_(optimizer, 10.0).item() == pytest.approx(50.0)
    assert p.grad.tolist() == [3.0, 4.0]
    torch.testing.assert_close(q.grad, torch.tensor([6.0, 8.0]))
