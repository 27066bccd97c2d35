"""A cap of the singular values of weights, for the experiment on stability.

The soft cap of Newhouse et al., "Training Transformers with Enforced Lipschitz Constants" (arXiv:2507.13338). For a
block with the weights W and the update U, with odd polynomials of the singular values::

    X = (W − lr U) / c
    W ← c (Y + α Y³),   Y = X − α X³        so that X ← X − 3 α² X⁵ + 3 α³ X⁷ − α⁴ X⁹
    α² = k / (3 (1 + k)⁵),   k = lr ‖U‖ / c

An update cannot lift a singular value above c any further, and smaller ones hardly change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim import MatrixRule, register_rule


@dataclasses.dataclass(frozen=True)
class SpectralCap(MatrixRule):
    """The cap as a rule; it has no state."""

    name = "spectral_cap"
    inputs = ("weight",)
    cap: float = 6.0  # c

    def constrain(
        self, updates: Sequence[Tensor], weights: Sequence[Tensor], lr: float | Tensor
    ) -> Sequence[Tensor]:
        """Return the updates that lead to capped weights; without a division by lr, which may be 0."""
        return [self._capped(u, w, lr) for u, w in zip(updates, weights, strict=True)]

    def _capped(self, u: Tensor, w: Tensor, lr: float | Tensor) -> Tensor:
        # All singular values of an update are about equal.
        size = torch.linalg.matrix_norm(u, keepdim=True) / min(u.shape[-2:]) ** 0.5 / self.cap
        per_rate = size / (3.0 * (1.0 + lr * size) ** 5)  # α²/lr
        alpha = (lr * per_rate).sqrt()
        x = (w - lr * u) / self.cap
        tall = x.shape[-2] >= x.shape[-1]
        square = x.mT @ x if tall else x @ x.mT

        def two_powers_more(y: Tensor) -> Tensor:
            return y @ square if tall else square @ y

        fifth = two_powers_more(two_powers_more(x))
        seventh = two_powers_more(fifth)
        ninth = two_powers_more(seventh)
        return u + self.cap * per_rate * (3.0 * fifth - 3.0 * alpha * seventh + alpha**2 * ninth)


register_rule(SpectralCap())
