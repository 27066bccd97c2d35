"""Rules that replace the momentum or see direction, weights and state after the polar factor, in float64."""

from __future__ import annotations

import pytest
import torch
from polar_oracle import oracle
from recent_rules import BETA
from torch import nn

from deepmd_muon.optim import HybridMuon

LR = 0.05
SHAPES = [(5, 9), (9, 5), (3, 4, 6)]


def mars(w, gradients):
    m, last = torch.zeros_like(w), torch.zeros_like(w)
    for g in gradients:
        c = g + 0.025 * BETA / (1 - BETA) * (g - last)
        c = c / max(1.0, c.norm().item())
        m, last = BETA * m + (1 - BETA) * c, g
        w = w - LR * oracle(m[None])[0]
    return w


def contra(w, gradients):
    m = torch.zeros_like(w)
    for g in gradients:
        m = BETA * m + (1 - BETA) * g
        u = BETA * m + (1 - BETA) * g
        w = w - LR * (1.3 * oracle(u[None])[0] - 0.3 * u / torch.linalg.svdvals(u)[0])
    return w


def ema_nesterov(w, gradients):
    theta, v, m = w, torch.zeros_like(w), torch.zeros_like(w)
    for g in gradients:
        m = BETA * m + (1 - BETA) * g
        after = theta + 0.5 * v - LR * oracle((BETA * m + (1 - BETA) * g)[None])[0]
        theta, v = after, 0.8 * v + 0.2 * (after - theta)
    return theta + 0.5 * v


def muown(w, gradients):
    v, magnitude, m = w, w.norm(dim=1), torch.zeros_like(w)
    adam = torch.optim.Adam([magnitude], lr=0.01, betas=(0.9, 0.95), eps=1e-12)
    for g in gradients:
        leaves = v.clone().requires_grad_(), magnitude.clone().requires_grad_()
        rows = leaves[1][:, None] * leaves[0] / leaves[0].norm(dim=1, keepdim=True)
        of_v, magnitude.grad = torch.autograd.grad(rows, leaves, g)
        m = BETA * m + (1 - BETA) * of_v
        v = v - LR * oracle(m[None])[0]
        adam.step()
    return magnitude[:, None] * v / v.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("definition", [mars, contra, ema_nesterov, muown])
def test_rule_equals_its_definition_also_over_a_restart(definition):
    draw = torch.Generator().manual_seed(1)
    start, *gradients = (
        [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in SHAPES]
        for _ in range(5)
    )

    def make(values):
        named = {f"w{i}": nn.Parameter(value.clone()) for i, value in enumerate(values)}
        return named, HybridMuon(
            named.items(), LR, BETA, 0.0, rules=[definition.__name__], precision="float64",
            magma_muon=False, scaling="none",
        )  # fmt: skip

    params, optimizer = make(start)
    for step, of_step in enumerate(gradients):
        if step == 2:
            saved = optimizer.state_dict()
            params, optimizer = make([p.detach() for p in params.values()])
            optimizer.load_state_dict(saved)
        for p, g in zip(params.values(), of_step, strict=True):
            p.grad = g
        optimizer.step()
    for i, p in enumerate(params.values()):
        matrices = zip(*(x[i].view(-1, *x[i].shape[-2:]) for x in (start, *gradients)), strict=True)
        expected = torch.stack([definition(w, g) for w, *g in matrices]).view_as(p)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9)
