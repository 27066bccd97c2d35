"""SOAP before the polar factor: divide the momentum as Adam does, in the eigenbases of G Gᵀ and Gᵀ G.

For each block with direction u (the momentum, or Nesterov's form of it) and gradient g, with L, R
and v starting at 0 and the orthogonal matrices P and Q at I::

    û = Pᵀ u Q
    v ← β v + (1 − β) û²
    u ← P (û / (√v + ε max √v)) Qᵀ             ε = 1e-5; the polar factor of u follows
    L ← β L + (1 − β) g gᵀ,   P ← next(P, L)
    R ← β R + (1 − β) gᵀ g,   Q ← next(Q, R)

v has no bias correction, because the polar factor ignores the scale of u. Sides longer than
`MAX_DIM` keep I.

SOAP (N. Vyas et al., arXiv:2409.11321) refreshes a basis by QR of L P. Here `next_basis` follows
that iteration to first order with matrix products only, so that a CUDA graph can contain it. Let
A = Pᵀ L P with diagonal d. The QR factor of A is I + S up to second order in A's other elements.
S is antisymmetric, with S_ij = A_ij / (d_j + δ max d) for d_i < d_j; δ = 1e-5 limits the effect of
rounding errors in small eigenvalues. So::

    Y = 0.83 P (I + c S),   c = min(1, 1/‖S‖)  singular values in [0.83, 1.18]
    P ← polar factor of Y                      four Newton–Schulz steps Y ← (3 Y − Y Yᵀ Y) / 2

For the running average of drifting random 240 × 240 matrices, A is as diagonal as with QR after
about 100 steps.

The form is that of pull request 278 of KellerJordan/modded-nanogpt (2026), called SOAP-Muon there;
its pull request 321 refreshes in every step, as here. Theirs starts from eigenvectors of the first
gradient, with an absolute ε of 1e-8.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim import MatrixRule, StateTensor, register_rule

# Rounding errors of the rotations are about 1e-6 of the largest element. ε keeps the division from
# enlarging them to the size of the other elements.
EPSILON = 1e-5
# Sides longer than this keep the identity: a rotation would cost more than the rest of the step.
MAX_DIM = 1024
FLOOR = 1e-5  # δ
SHRINK = 0.83
NEWTON_SCHULZ_STEPS = 4


class SoapState(NamedTuple):
    """State of a batch of b blocks of one shape; matrices of a long side are empty."""

    left: Tensor  # L, (b, rows, rows)
    left_basis: Tensor  # P − I, (b, rows, rows)
    right: Tensor  # R, (b, columns, columns)
    right_basis: Tensor  # Q − I, (b, columns, columns)
    second_moment: Tensor  # v, (b, rows, columns)


@dataclasses.dataclass(frozen=True)
class SoapMuon(MatrixRule):
    """SOAP before the polar factor, as a rule."""

    name = "soap_muon"
    inputs = ("gradient",)
    beta: float = 0.9  # decay of L, R and v

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return the state tensors of `SoapState`, by key."""
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
        self,
        directions: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
    ) -> tuple[Sequence[Tensor], Mapping[str, Sequence[Tensor]]]:
        """Return the directions to orthogonalize and the new state.

        Batches of equal shape are concatenated, because each launch costs time on a GPU.
        """
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for number, direction in enumerate(directions):
            by_shape[direction.shape[1:]].append(number)
        divided = list(directions)
        new_state = {key: list(state[key]) for key in self.tensors()}
        for numbers in by_shape.values():
            sizes = [len(directions[i]) for i in numbers]
            direction, joined_state = self._step(
                torch.cat([directions[i] for i in numbers]),
                torch.cat([gradients[i] for i in numbers]),
                SoapState(*(torch.cat([state[key][i] for i in numbers]) for key in new_state)),
            )
            for i, part in zip(numbers, direction.split(sizes), strict=True):
                divided[i] = part
            for values, tensor in zip(new_state.values(), joined_state, strict=True):
                for i, part in zip(numbers, tensor.split(sizes), strict=True):
                    values[i] = part
        return divided, new_state

    def _step(self, u: Tensor, g: Tensor, state: SoapState) -> tuple[Tensor, SoapState]:
        """Return the direction to orthogonalize, and the new state; u and g are (b, rows, columns)."""
        p = state.left_basis
        q = state.right_basis
        rotated = _rotate(_rotate(u, p).mT, q).mT  # û
        v = state.second_moment.lerp(rotated.square(), 1.0 - self.beta)
        root = v.sqrt()
        largest = root.amax(dim=(1, 2), keepdim=True)
        scaled = rotated / (root + EPSILON * largest + torch.finfo(root.dtype).tiny)
        divided = _rotate(_rotate(scaled, p.mT).mT, q.mT).mT
        left, p = self._next_side(state.left, p, g)
        right, q = self._next_side(state.right, q, g.mT)
        return divided, SoapState(left, p, right, q, v)

    def _next_side(self, covariance: Tensor, basis: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next covariance and basis of the rows of g."""
        if not basis.numel():
            return covariance, basis
        covariance = covariance.lerp(torch.bmm(g, g.mT), 1.0 - self.beta)
        return covariance, next_basis(covariance, basis)


def next_basis(covariance: Tensor, basis: Tensor) -> Tensor:
    """Return P − I after one step towards the eigenvectors of L.

    L is symmetric and positive semidefinite. L, P − I and the result are (b, n, n).
    """
    p = basis + torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    a = torch.bmm(p.mT, torch.bmm(covariance, p))
    d = a.diagonal(dim1=1, dim2=2)
    d_rows = d.unsqueeze(2)
    d_columns = d.unsqueeze(1)
    least = FLOOR * d.amax(dim=1).view(-1, 1, 1) + torch.finfo(a.dtype).tiny
    ratio = a / (torch.maximum(d_rows, d_columns) + least)
    # S_ij is 0 for equal diagonal elements. One triangle gives both, so that S is exactly
    # antisymmetric.
    upper = (ratio * torch.sign(d_columns - d_rows)).tril(-1)
    s = upper - upper.mT
    # Two bounds of the spectral norm; the singular values of S come in pairs.
    row_sums = s.abs().sum(2).amax(1)
    frobenius = torch.linalg.vector_norm(s, dim=(1, 2)) * 0.5**0.5
    norm = torch.minimum(row_sums, frobenius).clamp_min(1.0).view(-1, 1, 1)
    y = torch.baddbmm(p, p, s / norm, beta=SHRINK, alpha=SHRINK)
    for _ in range(NEWTON_SCHULZ_STEPS):
        y = torch.baddbmm(y, y, torch.bmm(y.mT, y), beta=1.5, alpha=-0.5)
    return y - torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)


def _rotate(x: Tensor, basis: Tensor) -> Tensor:
    """Return Pᵀ x, given P − I; x if the basis is empty."""
    return torch.baddbmm(x, basis.mT, x) if basis.numel() else x


register_rule(SoapMuon())
