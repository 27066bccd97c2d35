"""Cautious weight decay: weights that the update moves away from zero do not decay.

For weights p and the update u, which is subtracted::

    p ← p − lr λ p · [u p ≥ 0] − lr u

L. Chen et al., arXiv:2510.12402 (2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.interface import MatrixRule


@dataclasses.dataclass(frozen=True)
class CautiousDecay(MatrixRule):
    """Cautious weight decay as a rule; it has no state."""

    name = "cautious_decay"

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> CautiousDecay | None:
        """Return the rule that settings switch on, or None."""
        return cls() if settings.cautious_decay else None

    def decays(self, weights: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Return True where weight and update do not have opposite signs."""
        # By signs, because the product of small numbers may underflow to zero.
        return [torch.sign(u) * torch.sign(p) >= 0 for p, u in zip(weights, updates, strict=True)]
