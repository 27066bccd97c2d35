"""Recent rules, registered: they replace the momentum, or see direction, weights and state after the polar factor."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepmd_muon.optim import MatrixRule, StateTensor, register_rule

BETA = 0.9  # of the momenta that the rules keep
OF_EACH_ELEMENT = StateTensor("rows", "moment", along="columns")


def norm(x: Tensor, *dims: int) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dims or (1, 2), keepdim=True)


def divided(x: Tensor, lr: float | Tensor) -> Tensor:
    """Return x / lr; 0 if lr is 0, as in a skipped step."""
    lr = torch.as_tensor(lr, dtype=x.dtype, device=x.device)
    return torch.where(lr > 0, x / lr, 0.0)


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
            changed.append(u - divided(self.ahead * averages[-1], lr))
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
            changed.append(divided(w - (magnitude - self.rate * adam) * v / norm(v, 2), lr))
        return changed, {"muown_length": lengths}


for rule in (Mars(), Contra(), EmaNesterov(), Muown()):
    register_rule(rule)
