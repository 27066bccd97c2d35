"""SOAP before the polar factor: the momentum is divided as Adam divides it, in the eigenbases of G Gᵀ and Gᵀ G.

For each block with direction u (the momentum, or Nesterov's form of it) and gradient g, with L, R and v starting at 0
and the orthogonal matrices P and Q at I::

    û = Pᵀ u Q
    v ← β v + (1 − β) û²
    u ← P (û / (√v + ε max √v)) Qᵀ             ε = 1e-5; the polar factor of u follows
    L ← β L + (1 − β) g gᵀ,   P ← next(P, L)
    R ← β R + (1 − β) gᵀ g,   Q ← next(Q, R)

v has no bias correction, because the polar factor ignores the scale of u. Sides longer than `MAX_DIM` keep I.

SOAP (N. Vyas et al., arXiv:2409.11321) refreshes a basis by QR of L P. Here `next` follows that iteration to first
order with matrix products only, so that a CUDA graph can contain it. Let A = Pᵀ L P with diagonal d. The QR factor of A
is I + S up to second order in A's other elements. S is antisymmetric, with S_ij = A_ij / (d_j + δ max d) for d_i < d_j;
δ = 1e-5 limits the effect of rounding errors in small eigenvalues. So::

    Y = 0.83 P (I + c S),   c = min(1, 1/‖S‖)  singular values in [0.83, 1.18]
    P ← polar factor of Y                      four Newton–Schulz steps Y ← (3 Y − Y Yᵀ Y) / 2

For the running average of drifting random 240 × 240 matrices, A is as diagonal as with QR after about 100 steps.

The form is that of pull request 278 of KellerJordan/modded-nanogpt (2026), called SOAP-Muon there; its pull request 321
refreshes in every step, as here. Theirs starts from eigenvectors of the first gradient, with an absolute ε of 1e-8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.interface import BlockState, MatrixRule, StateTensor, together

# Rounding errors of the rotations are about 1e-6 of the largest element. ε keeps the division from enlarging them to
# the size of the other elements.
EPSILON = 1e-5
# Sides longer than this keep the identity: a rotation would cost more than the rest of the step.
MAX_DIM = 1024
FLOOR = 1e-5
_SHRINK = 0.83
_STEPS = 4


@dataclasses.dataclass(frozen=True)
class SoapMuon(MatrixRule):
    """SOAP before the polar factor, as a rule."""

    name = "soap_muon"
    inputs = ("gradient",)
    beta: float = 0.9  # decay of L, R and v

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> SoapMuon | None:
        """Return the rule that settings switch on, or None."""
        return cls(settings.soap_beta) if settings.soap_muon else None

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return L, P − I, R, Q − I and v."""
        left = StateTensor("rows", "moment", along="rows", at_most=MAX_DIM)
        right = StateTensor("columns", "moment", along="columns", at_most=MAX_DIM)
        return {
            "soap_left": left,
            "soap_left_basis": left,
            "soap_right": right,
            "soap_right_basis": right,
            "soap_second_moment": StateTensor("rows", "moment", along="columns"),
        }

    def prepare(
        self, directions: Sequence[Tensor], gradients: Sequence[Tensor], state: BlockState
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return the directions to orthogonalize and the new state."""
        keys = list(self.tensors())
        done, *new = together(self._step, directions, gradients, *(state[key] for key in keys))
        return done, dict(zip(keys, new, strict=True))

    def _step(
        self, u: Tensor, g: Tensor, left: Tensor, p: Tensor, right: Tensor, q: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the direction to orthogonalize, and the new L, P − I, R, Q − I and v; all (b, …)."""
        rotated = _turn(_turn(u, p).mT, q).mT
        v = v.lerp(rotated.square(), 1.0 - self.beta)
        root = v.sqrt()
        largest = root.amax(dim=(1, 2), keepdim=True)
        scaled = rotated / (root + EPSILON * largest + torch.finfo(root.dtype).tiny)
        divided = _turn(_turn(scaled, p.mT).mT, q.mT).mT
        left, p = self._side(left, p, g)
        right, q = self._side(right, q, g.mT)
        return divided, left, p, right, q, v

    def _side(self, covariance: Tensor, basis: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next covariance and basis of the rows of g."""
        if not basis.numel():
            return covariance, basis
        covariance = covariance.lerp(torch.bmm(g, g.mT), 1.0 - self.beta)
        return covariance, next_basis(covariance, basis)


def next_basis(covariance: Tensor, basis: Tensor) -> Tensor:
    """Return P − I after one step towards the eigenvectors of L, symmetric and positive semidefinite; all (b, n, n)."""
    p = basis + torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    a = torch.bmm(p.mT, torch.bmm(covariance, p))
    d = a.diagonal(dim1=1, dim2=2)
    i, j = d.unsqueeze(2), d.unsqueeze(1)
    least = FLOOR * d.amax(dim=1).view(-1, 1, 1) + torch.finfo(a.dtype).tiny
    ratio = a / (torch.maximum(i, j) + least)
    # S_ij is 0 for equal diagonal elements. One triangle gives both, so that S is exactly antisymmetric.
    upper = (ratio * torch.sign(j - i)).tril(-1)
    s = upper - upper.mT
    norm = torch.minimum(s.abs().sum(2).amax(1), torch.linalg.vector_norm(s, dim=(1, 2)) * 0.5**0.5)
    y = torch.baddbmm(p, p, s / norm.clamp_min(1.0).view(-1, 1, 1), beta=_SHRINK, alpha=_SHRINK)
    for _ in range(_STEPS):
        y = torch.baddbmm(y, y, torch.bmm(y.mT, y), beta=1.5, alpha=-0.5)
    return y - torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)


def _turn(x: Tensor, basis: Tensor) -> Tensor:
    """Return Pᵀ x, given P − I; x where there is no basis."""
    return torch.baddbmm(x, basis.mT, x) if basis.numel() else x
