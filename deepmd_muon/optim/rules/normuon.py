"""NorMuon: divide each neuron's update by its running root mean square; keep the norm.

For each row o of the polar factor O of a block with n columns, with a second moment v that starts
at 0::

    v ← β₂ v + (1 − β₂) Σ o² / n
    ô = o / (√v + ε)                    ε = 1e-10
    O ← Ô ‖O‖ / (‖Ô‖ + ε)               Frobenius norms

Rows are neurons if weights are stored (out, in), as torch stores them. If the setting `layout` is
'in_out', as for DeePMD's weights, columns are the neurons and take the place of rows.

Z. Li et al., arXiv:2510.05491 (2025). The norm is kept as in the authors' code, so that `scaling`
means the same as without this rule; their paper sets it to 0.2 sqrt(rows · columns), which
'match_rms' with 0.2 gives for full rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import BlockState, MatrixRule, StateTensor

EPSILON = 1e-10


@dataclasses.dataclass(frozen=True)
class NorMuon(MatrixRule):
    """NorMuon as a rule: one second moment per neuron."""

    name = "normuon"
    beta: float = 0.95  # decay β₂ of the second moments
    neurons: Axis = "rows"  # the lines that are neurons

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> NorMuon | None:
        """Return the rule that settings switch on, or None."""
        neurons: Axis = "columns" if settings.layout == "in_out" else "rows"
        return cls(settings.normuon_beta, neurons) if settings.normuon else None

    @classmethod
    def forms(cls) -> tuple[NorMuon, ...]:
        """Return the rule with every set of state tensors that it may have."""
        return cls(neurons="rows"), cls(neurons="columns")

    @property
    def key(self) -> str:
        """Key of the second moment in the state."""
        # Moments of rows mean nothing for columns, so another layout starts with new ones.
        return f"second_moment_of_{self.neurons}"

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return the second moment."""
        return {self.key: StateTensor(self.neurons, "moment")}

    @property
    def _dim_of_elements(self) -> int:
        """The dimension of (b, rows, columns) that runs over the elements of a neuron."""
        return 2 if self.neurons == "rows" else 1

    def _sums(self, polar: Sequence[Tensor]) -> list[Tensor]:
        """Return each neuron's sum of squares, float64 (b, neurons), equal in every batching."""
        dim = self._dim_of_elements
        return [torch.linalg.vector_norm(o, dim=dim, dtype=torch.float64).square_() for o in polar]

    def advance(
        self, polar: Sequence[Tensor], state: BlockState, measured: Sequence[Tensor] | None
    ) -> BlockState:
        """Move the second moments towards the mean squares of the neurons."""
        advanced = []
        for v, sums, o in zip(state[self.key], self._sums(polar), polar, strict=True):
            means = sums / o.shape[self._dim_of_elements]
            advanced.append(v.double().lerp(means, 1.0 - self.beta).to(v.dtype))
        return {self.key: advanced}

    def factors(self, polar: Sequence[Tensor], state: BlockState) -> list[Tensor]:
        """Return the factor of every neuron: it divides by √v and keeps the norm of the matrix."""
        factors = []
        for o, sums, v in zip(polar, self._sums(polar), state[self.key], strict=True):
            inverse = 1.0 / (v.double().sqrt() + EPSILON)
            norm = sums.sum(dim=1, keepdim=True).sqrt()
            changed_norm = (sums * inverse.square()).sum(dim=1, keepdim=True).sqrt()
            factor = (inverse * norm / (changed_norm + EPSILON)).to(o.dtype)
            factors.append(factor.unsqueeze(self._dim_of_elements))
        return factors
