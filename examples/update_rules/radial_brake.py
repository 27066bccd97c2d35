"""Radial brake: a step keeps only a part of the growth of a matrix's norm.

For weights W of a block with the update U::

    W′ = W − lr U
    W ← W′ t / ‖W′‖     t = ‖W‖ + b (‖W′‖ − ‖W‖) if the norm grows, else ‖W′‖; b is `brake`

This is the radial brake of NVIDIA's Emerging-Optimizers, for growth only. Weights that are zero are
not constrained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim import MatrixRule, register_rule

# Weights that a step shrinks below this fraction of their norm are not scaled up to the whole norm.
LEAST_SHRINKAGE = 1e-3


@dataclasses.dataclass(frozen=True)
class RadialBrake(MatrixRule):
    """The brake as a rule; it has no state."""

    name = "radial_brake"
    inputs = ("weight",)
    brake: float = 0.5  # fraction b of the norm's growth that remains

    def constrain(
        self, updates: Sequence[Tensor], weights: Sequence[Tensor], lr: float | Tensor
    ) -> Sequence[Tensor]:
        """Return the updates that lead to weights of the norms t."""
        return [self._braked(u, w, lr) for u, w in zip(updates, weights, strict=True)]

    def _braked(self, u: Tensor, w: Tensor, lr: float | Tensor) -> Tensor:
        """Return t/‖W′‖ U + (1 − t/‖W′‖)/lr W, without a division by lr, which may be 0."""
        weight_squares = _block_sums(w * w)
        update_squares = _block_sums(u * u)
        products = _block_sums(w * u)
        # ‖W′‖² = ‖W‖² (1 + lr x)
        x = (lr * update_squares - 2.0 * products) / weight_squares
        x = torch.where(weight_squares > 0, x, 0.0)
        growth = (1.0 + lr * x).clamp_min(LEAST_SHRINKAGE**2).sqrt()  # ‖W′‖/‖W‖
        brake = torch.where(x > 0, self.brake, 1.0)
        factor = (1.0 + brake * (growth - 1.0)) / growth
        radial = (1.0 - brake) * x / ((growth + 1.0) * growth)
        return factor.to(u.dtype) * u + radial.to(u.dtype) * w


def _block_sums(x: Tensor) -> Tensor:
    """Return the sum of each block of x, (b, rows, columns), as float64 (b, 1, 1)."""
    return x.sum(dim=(1, 2), keepdim=True, dtype=torch.float64)


register_rule(RadialBrake())
