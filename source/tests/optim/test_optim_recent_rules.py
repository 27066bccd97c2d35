"""Rules that replace the momentum or see direction, weights and state after the polar factor, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from polar_oracle import oracle
from torch import Tensor, nn

from deepmd_muon.optim import HybridMuon, MatrixRule, StateTensor, register_rule
from deepmd_muon.optim.rules import registry

BETA, LR = 0.9, 0.05
SHAPES = [(5, 9), (9, 5), (3, 4, 6)]
OF_EACH_ELEMENT = StateTensor("rows", "moment", along="columns")


def norm(x: Tensor, *dims: int) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dims or (1, 2), keepdim=True)


@dataclasses.dataclass(frozen=True)
class Mars(MatrixRule):
    """MARS-M (arXiv:2510.21800) with the last batch's gradient: variance reduction before the momentum."""

    name = "mars"
    replaces_momentum = True
    gamma: float = 0.025

    def tensors(self):
        return {"mars_momentum": OF_EACH_ELEMENT, "mars_gradient": OF_EACH_ELEMENT}

    def orient(self, blocks, state):
        momenta = []
        for g, last, m in zip(
            blocks.directions, state["mars_gradient"], state["mars_momentum"], strict=True
        ):
            c = g + self.gamma * BETA / (1 - BETA) * (g - last)
            momenta.append(m.lerp(c / norm(c).clamp_min(1.0), 1 - BETA))
        return momenta, {"mars_momentum": momenta, "mars_gradient": blocks.directions}


@dataclasses.dataclass(frozen=True)
class Contra(MatrixRule):
    """Contra-Muon (nilin, 2026): subtract the direction, divided by its spectral norm."""

    name = "contra"
    share: float = 0.3

    def transform(self, polar, directions, state):
        return [
            (1 + self.share) * o - self.share * u / torch.linalg.matrix_norm(u, 2, keepdim=True)
            for o, u in zip(polar, directions, strict=True)
        ], {}


@dataclasses.dataclass(frozen=True)
class EmaNesterov(MatrixRule):
    """EMA-Nesterov (arXiv:2605.25395): the parameters are the point ahead of θ by b · v.

    v is the average of the steps of θ: v ← γ v + (1 − γ) (θ′ − θ).
    """

    name = "ema_nesterov"
    inputs = ("weight",)
    gamma: float = 0.8
    ahead: float = 0.5

    def tensors(self):
        return {"ema_step": OF_EACH_ELEMENT}

    def finish(self, updates, weights, state, lr):
        changed, averages = [], []
        for u, v in zip(updates, state["ema_step"], strict=True):
            step = self.ahead * v - lr * u  # θ′ − θ, because θ is behind the weights by b · v
            averages.append(self.gamma * v + (1 - self.gamma) * step)
            changed.append(u - self.ahead * averages[-1] / lr)
        return changed, {"ema_step": averages}


@dataclasses.dataclass(frozen=True)
class Muown(MatrixRule):
    """Muown (arXiv:2605.10797): rows w = γ v/‖v‖; Muon steps v, Adam the magnitudes γ."""

    name = "muown"
    inputs = ("weight",)
    replaces_momentum = True
    rate: float = 0.01  # of the magnitudes
    eps: float = 1e-12

    def tensors(self):
        row = StateTensor("rows", "moment")
        return {
            "muown_momentum": OF_EACH_ELEMENT,
            "muown_length": row,  # ‖v‖
            "muown_first": row,
            "muown_second": row,
            "muown_steps": StateTensor("blocks", "float32"),
        }

    def orient(self, blocks, state):
        directions = []
        new = {key: [] for key in self.tensors()}
        for k, (g, w) in enumerate(zip(blocks.directions, blocks.weights, strict=True)):
            old = {key: state[key][k] for key in new}
            magnitude = norm(w, 2)
            unit = w / magnitude
            length = old["muown_length"].unsqueeze(2)
            length = torch.where(length > 0, length, magnitude)
            of_magnitude = (g * unit).sum(2, keepdim=True)
            of_v = magnitude / length * (g - of_magnitude * unit)
            new["muown_momentum"].append(old["muown_momentum"].lerp(of_v, 1 - BETA))
            directions.append(new["muown_momentum"][-1])
            new["muown_length"].append(length[:, :, 0])
            of_magnitude = of_magnitude[:, :, 0]
            new["muown_first"].append(old["muown_first"].lerp(of_magnitude, 0.1))
            new["muown_second"].append(old["muown_second"].lerp(of_magnitude**2, 0.05))
            new["muown_steps"].append(old["muown_steps"] + 1)
        return directions, new

    def finish(self, updates, weights, state, lr):
        changed, lengths = [], []
        for k, (u, w) in enumerate(zip(updates, weights, strict=True)):
            steps = state["muown_steps"][k].view(-1, 1).to(u.dtype)
            first = state["muown_first"][k] / (1 - 0.9**steps)
            second = state["muown_second"][k] / (1 - 0.95**steps)
            magnitude = norm(w, 2)
            v = state["muown_length"][k].unsqueeze(2) * w / magnitude - lr * u
            adam = (first / (second.sqrt() + self.eps)).unsqueeze(2)
            lengths.append(norm(v, 2)[:, :, 0])
            changed.append((w - (magnitude - self.rate * adam) * v / norm(v, 2)) / lr)
        return changed, {"muown_length": lengths}


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


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    for rule in (Mars(), Contra(), EmaNesterov(), Muown()):
        register_rule(rule)
    yield
    registry.matrix_rules.cache_clear()


@pytest.mark.usefixtures("registered")
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
