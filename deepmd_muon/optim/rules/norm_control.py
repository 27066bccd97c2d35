"""Norm control: a step keeps only a part of the growth of a matrix's norm.

For weights W of a block with the update U::

    W′ = W − lr U
    W ← W′ t / ‖W′‖     t = ‖W‖ + b (‖W′‖ − ‖W‖) if the norm grows, else ‖W′‖; b is `norm_brake`

This is the radial brake of NVIDIA's Emerging-Optimizers, for growth only. Weights that are zero are not constrained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.interface import MatrixRule, together

# Weights that a step shrinks below this fraction of their norm are not scaled up to the whole norm.
_LEAST = 1e-3


@dataclasses.dataclass(frozen=True)
class NormControl(MatrixRule):
    """Norm control as a rule; it has no state."""

    name = "norm_control"
    inputs = ("weight",)
    brake: float = 0.5  # fraction b of the norm's growth that remains

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> NormControl | None:
        """Return the rule that settings switch on, or None."""
        return None if settings.norm_control == "none" else cls(settings.norm_brake)

    def constrain(
        self, updates: Sequence[Tensor], weights: Sequence[Tensor], lr: float | Tensor
    ) -> Sequence[Tensor]:
        """Return the updates that lead to weights of the norms t."""
        return together(lambda u, w: (self._constrained(u, w, lr),), updates, weights)[0]

    def _constrained(self, u: Tensor, w: Tensor, lr: float | Tensor) -> Tensor:
        """Return t/‖W′‖ U + (1 − t/‖W′‖)/lr W, without a division by lr, which may be 0."""
        squares, products, sizes = (
            (a * b).sum(dim=(1, 2), keepdim=True, dtype=torch.float64)
            for a, b in ((w, w), (w, u), (u, u))
        )
        # ‖W′‖² = ‖W‖² (1 + lr x)
        x = torch.where(squares > 0, (lr * sizes - 2.0 * products) / squares, 0.0)
        grown = (1.0 + lr * x).clamp_min(_LEAST**2).sqrt()
        brake = torch.where(x > 0, self.brake, 1.0)
        factor = (1.0 + brake * (grown - 1.0)) / grown
        radial = (1.0 - brake) * x / ((grown + 1.0) * grown)
        return factor.to(u.dtype) * u + radial.to(u.dtype) * w
