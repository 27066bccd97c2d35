"""The parts of an attention layer's passes that work row by row, with torch's operations.

`attention_passes` has the symbols. These functions define the results of `attention_kernels`, which
has the same functions for a GPU. Q, K and V are one tensor `(3, nreal, ncolumns, attn)`, and so are
their derivatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Values(NamedTuple):
    """The tensors of pass 1 that other passes read."""

    qkv: Tensor  # Q, K, V (3, nreal, ncolumns, attn)
    inverse_length: Tensor | None  # by which their rows were multiplied (3, nreal, ncolumns, 1)
    soft: Tensor  # P (nreal, ncolumns, ncolumns)
    gated: Tensor  # A (nreal, ncolumns, ncolumns)
    mixed: Tensor  # O (nreal, ncolumns, attn)
    normed: Tensor  # N (nreal, ncolumns, width)
    inverse_deviation: Tensor  # (nreal, ncolumns, 1)


class Adjoints(NamedTuple):
    """The cotangents of pass 2."""

    z: Tensor
    summed: Tensor  # of S
    norm_along: Tensor  # mean of N·N̄ (nreal, ncolumns, 1)
    mixed: Tensor
    gated: Tensor
    scores: Tensor  # of QKᵀ
    soft_along: Tensor  # Σ P·P̄ (nreal, ncolumns, 1)
    projected: Tensor  # of X·W + b, the parts of Q, K and V as in `Values.qkv`
    length_along: Tensor | None  # Σ y·ȳ for the rows y of Q, K, V; None if not rescaled


class Tangents(NamedTuple):
    """The tangents of pass 3."""

    x: Tensor
    qkv: Tensor
    length_along: Tensor | None  # Σ y·ẋ for a row y = x/|x| of Q, K, V; None if not rescaled
    soft: Tensor
    gated: Tensor
    mixed: Tensor
    normed: Tensor
    norm_along: Tensor  # mean of N·Ṡ


# ----- Q, K, V = rescale(X·W + b) ----------------------------------------------------------------


def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return X·W, plus b if there is one, with the parts of Q, K and V one after another."""
    rows = x.flatten(0, 1)
    matrices = matrix.chunk(3, dim=1)
    out = x.new_empty(3, len(rows), matrices[0].shape[1])
    for number, part_matrix in enumerate(matrices):
        if bias is None:
            torch.mm(rows, part_matrix, out=out[number])
        else:
            torch.addmm(bias.chunk(3)[number], rows, part_matrix, out=out[number])
    return out.view(3, *x.shape[:2], out.shape[2])


def project_and_rescale(
    x: Tensor, matrix: Tensor, bias: Tensor, shortest: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return Q, K and V, and the inverse lengths.

    The rows are divided by their length, at least `shortest`. With None they stay as they are.
    """
    qkv = project(x, matrix, bias)
    if shortest is None:
        return qkv, None
    length = torch.linalg.vector_norm(qkv, dim=-1, keepdim=True)
    inverse_length: Tensor = length.clamp_min_(shortest).reciprocal_()
    qkv *= inverse_length
    return qkv, inverse_length


def project_adjoint(projected_bar: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """Return the cotangent of X through X·W, plus `start`."""
    out = start.clone()
    for part_bar, part_matrix in zip(
        projected_bar.flatten(1, 2), matrix.chunk(3, dim=1), strict=True
    ):
        out.flatten(0, 1).addmm_(part_bar, part_matrix.mT)
    return out


def project_gradient(x: Tensor, projected_bar: Tensor) -> Tensor:
    """Return the gradient of W from X and the cotangent of X·W."""
    rows = x.flatten(0, 1).mT
    return torch.cat([torch.mm(rows, part_bar) for part_bar in projected_bar.flatten(1, 2)], dim=1)


def rescale_derivative_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace x by (x − y·along)·r with along = Σ x·y, and return both.

    This is the derivative of y = r·x with r = 1/|x|. It is symmetric, so that tangents and
    cotangents take the same map.
    """
    if v.inverse_length is None:
        return x, None
    along = (v.qkv * x).sum(-1, keepdim=True)
    return x.addcmul_(v.qkv, along, value=-1.0).mul_(v.inverse_length), along


def rescale_gradient_(v: Values, a: Adjoints, t: Tangents, qkv_hat: Tensor) -> Tensor:
    """Replace the cotangents of Q, K, V by those of X·W + b, including derivatives of adjoints.

    For a row y = r·x they are (ŷ − y·Σŷ·y)·r − y·Σẏ·x̄ − ẏ·r·along(ȳ) − x̄·r·along(ẋ).
    """
    rescale_derivative_(v, qkv_hat)
    if v.inverse_length is None or a.length_along is None or t.length_along is None:
        return qkv_hat
    qkv_hat.addcmul_(v.qkv, (t.qkv * a.projected).sum(-1, keepdim=True), value=-1.0)
    qkv_hat.addcmul_(t.qkv, a.length_along * v.inverse_length, value=-1.0)
    return qkv_hat.addcmul_(a.projected, t.length_along * v.inverse_length, value=-1.0)


# ----- P = softmax(scale·QKᵀ + mask), A = P∘E ----------------------------------------------------


def attend(
    query: Tensor, key: Tensor, mask: Tensor, gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return P and A."""
    soft = torch.baddbmm(mask, query, key.mT, alpha=scale).softmax(-1)
    return soft, soft * gate


def attend_adjoint(v: Values, gated_bar: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangent of QKᵀ, `soft_along`, and the cotangent P∘Ā of E.

    With P∘P̄ = A∘Ā, the cotangent of QKᵀ is scale·(A∘Ā − P·Σ A∘Ā).
    """
    scores_bar = v.gated * gated_bar
    along = scores_bar.sum(-1, keepdim=True)
    _scale_(scores_bar.addcmul_(v.soft, along, value=-1.0), scale)
    return scores_bar, along, v.soft * gated_bar


def attend_tangent(
    v: Values, scores_dot: Tensor, gate: Tensor, gate_dot: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return Ṗ = P∘(σ − Σ P∘σ) with σ = scale·(QKᵀ)˙, and Ȧ = Ṗ∘E + P∘Ė.

    `scores_dot`, the tangent of QKᵀ, is overwritten.
    """
    scores_dot = _scale_(scores_dot, scale)
    soft_dot = scores_dot.sub_((v.soft * scores_dot).sum(-1, keepdim=True)).mul_(v.soft)
    return soft_dot, (soft_dot * gate).addcmul_(v.soft, gate_dot)


def attend_gradient(
    v: Values, a: Adjoints, t: Tangents, gated_hat: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the cotangents of QKᵀ and of E, with the derivatives of their adjoints.

    With B = Ȧ∘Ā + A∘Â they are scale·(B − Ṗ·along(P̄) − P·Σ B) and Ṗ∘Ā + P∘Â.
    `gated_hat` may be overwritten.
    """
    scores_hat = (t.gated * a.gated).addcmul_(v.gated, gated_hat)
    along = scores_hat.sum(-1, keepdim=True)
    scores_hat.addcmul_(t.soft, a.soft_along, value=-1.0)
    scores_hat.addcmul_(v.soft, along, value=-1.0)
    return _scale_(scores_hat, scale), (t.soft * a.gated).addcmul_(v.soft, gated_hat)


def _scale_(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x.mul_(scale)


# ----- Z = γ∘N + β, N = (S − mean)/deviation -----------------------------------------------------


def normalise(
    mixed: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Z, N and 1/deviation of S = X + O·Wₒ + bₒ."""
    summed = torch.addmm(outer_bias, mixed.flatten(0, 1), outer).view_as(x).add_(x)
    normed, _, inverse_deviation = torch.native_layer_norm(
        summed, [x.shape[-1]], weight=None, bias=None, eps=eps
    )
    return torch.addcmul(beta, normed, gamma), normed, inverse_deviation


def normalise_derivative(
    v: Values, x: Tensor, gamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x − mean(x) − N·along)/deviation and along = mean(x·N); x is times γ first.

    This is the derivative of N. It is symmetric, as in `rescale_derivative_`.
    """
    x = x if gamma is None else x * gamma
    along = (v.normed * x).mean(-1, keepdim=True)
    out = torch.addcmul(x, v.normed, along, value=-1.0)
    return out.sub_(x.mean(-1, keepdim=True)).mul_(v.inverse_deviation), along


def normalise_gradient(
    v: Values, a: Adjoints, t: Tangents, z_hat: Tensor | None, gamma: Tensor, eps: float
) -> Tensor:
    """Return the cotangent of S, with the derivative of its adjoint.

    It is, with r = 1/deviation, `normalise_derivative` of γ∘Ẑ less

        N·(mean(Ṅ·S̄) + eps·r⁴·along(N̄)·along(Ṡ)) + Ṅ·r·along(N̄) + S̄·r·along(Ṡ).

    The term with eps is new to `rescale_gradient_`: the mean of N² is 1 − eps·r².
    """
    mean = (t.normed * a.summed).mean(-1, keepdim=True)
    mean.addcmul_(a.norm_along * t.norm_along, v.inverse_deviation.pow(4), value=eps)
    out = v.normed * mean.neg_()
    out.addcmul_(t.normed, a.norm_along * v.inverse_deviation, value=-1.0)
    out.addcmul_(a.summed, t.norm_along * v.inverse_deviation, value=-1.0)
    return out if z_hat is None else out.add_(normalise_derivative(v, z_hat, gamma)[0])
