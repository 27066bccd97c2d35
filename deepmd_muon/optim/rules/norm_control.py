"""Norm control: a step changes the direction of the weights, and their norm only as far as a setting allows.

For weights W of a block, or of one of its neurons, with the update U::

    W′ = W − lr U
    W ← W′ t / ‖W′‖

    'hyperball'       t = ‖W‖ of each matrix
    'rows'            t = ‖W‖ of each neuron
    'radial_brake'    t = ‖W‖ + b (‖W′‖ − ‖W‖) of a matrix that grows, else ‖W′‖; b is `norm_brake`

Hyperball is MuonH (K. Wen, "Fantastic pretraining optimizers 2.1", 2025) without its division of the update by its
norm: the size of a step is that of `scaling`, so that learning rates mean the same as without this rule. The radial
brake is that of NVIDIA's Emerging-Optimizers, for growth only. Muown (arXiv:2605.10797) trains the norm of each neuron
as a separate variable; 'rows' keeps it constant. With 'hyperball' and 'rows' weights do not decay. Weights that are
zero are not constrained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import MatrixRule, together

# Weights that a step shrinks below this fraction of their norm are not scaled up to the whole norm.
_LEAST = 1e-3


@dataclasses.dataclass(frozen=True)
class NormControl(MatrixRule):
    """Norm control as a rule; it has no state."""

    name = "norm_control"
    inputs = ("weight",)
    brake: float | None = None  # fraction b of the norm's growth that remains; None keeps the norm
    neurons: Axis | None = None  # rows or columns keep their norms; None for whole matrices

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> NormControl | None:
        """Return the rule that settings switch on, or None."""
        if settings.norm_control == "none":
            return None
        if settings.norm_control == "radial_brake":
            return cls(brake=settings.norm_brake)
        neurons: Axis = "columns" if settings.layout == "in_out" else "rows"
        return cls(neurons=neurons if settings.norm_control == "rows" else None)

    def constrain(self, updates: Sequence[Tensor], weights: Sequence[Tensor], lr: float | Tensor) -> Sequence[Tensor]:
        """Return the updates that lead to weights of the norms t."""
        return together(lambda u, w: (self._constrained(u, w, lr),), updates, weights)[0]

    def _constrained(self, u: Tensor, w: Tensor, lr: float | Tensor) -> Tensor:
        """Return t/‖W′‖ U + (1 − t/‖W′‖)/lr W, without a division by lr, which may be 0."""
        dim = {"rows": (2,), "columns": (1,), None: (1, 2)}[self.neurons]
        squares, products, sizes = (
            (a * b).sum(dim=dim, keepdim=True, dtype=torch.float64) for a, b in ((w, w), (w, u), (u, u))
        )
        # ‖W′‖² = ‖W‖² (1 + lr x)
        x = torch.where(squares > 0, (lr * sizes - 2.0 * products) / squares, 0.0)
        grown = (1.0 + lr * x).clamp_min(_LEAST**2).sqrt()
        brake = 0.0 if self.brake is None else torch.where(x > 0, self.brake, 1.0)
        factor = (1.0 + brake * (grown - 1.0)) / grown
        radial = (1.0 - brake) * x / ((grown + 1.0) * grown)
        return factor.to(u.dtype) * u + radial.to(u.dtype) * w

    def decays(self, weights: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor] | None:
        """Return False everywhere if norms are kept: nothing decays."""
        return [torch.zeros_like(u, dtype=torch.bool) for u in updates] if self.brake is None else None
