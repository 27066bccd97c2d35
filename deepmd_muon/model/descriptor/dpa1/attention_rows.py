"""The parts of an attention layer's passes that work row by row, by torch; they define the results of the kernels.

Symbols and passes are those of `attention_passes`. All of Q, K, V and their derivatives are tensors
`(3, nreal, ncolumns, attn)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Values(NamedTuple):
    """The tensors of pass 1 that the others read.

    Attributes
    ----------
    parts, inverse
        Q, K and V, and the inverse lengths that rescaled them `(3, nreal, ncolumns, 1)`, or None.
    soft, gated
        P and A `(nreal, ncolumns, ncolumns)`.
    mixed
        A·V `(nreal, ncolumns, attn)`.
    normed, spread
        N `(nreal, ncolumns, width)` and 1/deviation `(nreal, ncolumns, 1)`.
    """

    parts: Tensor
    inverse: Tensor | None
    soft: Tensor
    gated: Tensor
    mixed: Tensor
    normed: Tensor
    spread: Tensor


class Adjoints(NamedTuple):
    """Cotangents of Z, S, A·V, A, the scores, and of Q, K, V before they were rescaled.

    The cotangent of the scores includes the factor `scale`. `norm_turn`, `soft_turn` and `part_turn` are the sums that
    normalisation, softmax and rescaling subtract `(…, ncolumns, 1)`.
    """

    above: Tensor
    summed: Tensor
    norm_turn: Tensor
    mixed: Tensor
    gated: Tensor
    scores: Tensor
    soft_turn: Tensor
    raw: Tensor
    part_turn: Tensor | None


class Tangents(NamedTuple):
    """Derivatives of X, Q, K and V, P, A, A·V and N along the tangents; `_turn` as in `Adjoints`."""

    x: Tensor
    parts: Tensor
    part_turn: Tensor | None
    soft: Tensor
    gated: Tensor
    mixed: Tensor
    normed: Tensor
    norm_turn: Tensor


def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x times the three parts of the matrix, plus those of the bias."""
    rows, matrices = x.flatten(0, 1), matrix.chunk(3, dim=1)
    out = x.new_empty(3, len(rows), matrices[0].shape[1])
    for number, part in enumerate(matrices):
        if bias is None:
            torch.mm(rows, part, out=out[number])
        else:
            torch.addmm(bias.chunk(3)[number], rows, part, out=out[number])
    return out.view(3, *x.shape[:2], out.shape[2])


def project_and_rescale(
    x: Tensor, matrix: Tensor, bias: Tensor, shortest: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return Q, K and V, their rows divided by their length, at least `shortest`; and the factors.

    With `shortest` None the rows stay as they are, and there are no factors.
    """
    parts = project(x, matrix, bias)
    if shortest is None:
        return parts, None
    inverse: Tensor = (
        torch.linalg.vector_norm(parts, dim=-1, keepdim=True).clamp_min_(shortest).reciprocal_()
    )
    parts *= inverse
    return parts, inverse


def unproject(raw: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """Return `start` plus the three parts times their transposed matrices."""
    out = start.clone()
    for part, of_part in zip(raw.flatten(1, 2), matrix.chunk(3, dim=1), strict=True):
        out.flatten(0, 1).addmm_(part, of_part.mT)
    return out


def products(x: Tensor, raw: Tensor) -> Tensor:
    """Return the gradient of W from X, or its tangent, and the cotangents of Q, K and V before they were rescaled."""
    rows = x.flatten(0, 1).mT
    return torch.cat([torch.mm(rows, part) for part in raw.flatten(1, 2)], dim=1)


def unscale_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the derivative of the rescaling, a symmetric map, to x, which is overwritten; also return x·parts."""
    if v.inverse is None:
        return x, None
    turn = (v.parts * x).sum(-1, keepdim=True)
    return x.addcmul_(v.parts, turn, value=-1.0).mul_(v.inverse), turn


def bend_scaling_(v: Values, a: Adjoints, t: Tangents, raw: Tensor) -> Tensor:
    """Apply `unscale_` to `raw`, and add the derivative of `unscale_` along the tangents, applied to the adjoints.

    With y the rescaled row, r its factor, ẏ its tangent, h̄ the cotangent of the raw row and both sums that `unscale_`
    found, the addend is −(ẏ·h̄)·y − r·turn(a)·ẏ − r·turn(t)·h̄.
    """
    unscale_(v, raw)
    if v.inverse is None or a.part_turn is None or t.part_turn is None:
        return raw
    raw.addcmul_(v.parts, (t.parts * a.raw).sum(-1, keepdim=True), value=-1.0)
    raw.addcmul_(t.parts, a.part_turn * v.inverse, value=-1.0)
    return raw.addcmul_(a.raw, t.part_turn * v.inverse, value=-1.0)


def attend(
    query: Tensor, key: Tensor, mask: Tensor, gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return P and A."""
    soft = torch.baddbmm(mask, query, key.mT, alpha=scale).softmax(-1)
    return soft, soft * gate


def pull_attention(v: Values, gated: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of the scores, `soft_turn` and the cotangent of E from that of A."""
    scores = v.gated * gated
    turn = scores.sum(-1, keepdim=True)
    return _scaled_(scores.addcmul_(v.soft, turn, value=-1.0), scale), turn, v.soft * gated


def push_attention(
    v: Values, scores: Tensor, gate: Tensor, of_gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the tangents of P and A from those of the scores, without `scale`, and of E; `scores` is overwritten."""
    scores = _scaled_(scores, scale)
    soft = scores.sub_((v.soft * scores).sum(-1, keepdim=True)).mul_(v.soft)
    return soft, (soft * gate).addcmul_(v.soft, of_gate)


def bend_attention(
    v: Values, a: Adjoints, t: Tangents, gated: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the cotangents of the scores and of E from that of A, with the derivatives of their adjoints."""
    scores = (t.gated * a.gated).addcmul_(v.gated, gated)
    turn = scores.sum(-1, keepdim=True)
    scores.addcmul_(t.soft, a.soft_turn, value=-1.0).addcmul_(v.soft, turn, value=-1.0)
    return _scaled_(scores, scale), (t.soft * a.gated).addcmul_(v.soft, gated)


def normalise(
    mixed: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Z, N and 1/deviation from A·V."""
    summed = torch.addmm(outer_bias, mixed.flatten(0, 1), outer).view_as(x).add_(x)
    normed, _, spread = torch.native_layer_norm(summed, [x.shape[-1]], None, None, eps)
    return torch.addcmul(shift, normed, factor), normed, spread


def unnormalise(v: Values, x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the derivative of the normalisation, a symmetric map, to x times `factor`; also return the mean of x·N."""
    x = x if factor is None else x * factor
    turn = (v.normed * x).mean(-1, keepdim=True)
    out = torch.addcmul(x, v.normed, turn, value=-1.0)
    return out.sub_(x.mean(-1, keepdim=True)).mul_(v.spread), turn


def bend_normalisation(
    eps: float, v: Values, a: Adjoints, t: Tangents, above: Tensor | None, factor: Tensor
) -> Tensor:
    """Return `unnormalise` of `above`, and the derivative of `unnormalise` along the tangents, applied to the adjoints.

    Like `bend_scaling_` with means, and eps·r⁴·turn(a)·turn(t) more in the first factor: the mean of y² is
    1 − eps·r².
    """
    first = (t.normed * a.summed).mean(-1, keepdim=True)
    first.addcmul_(a.norm_turn * t.norm_turn, v.spread.pow(4), value=eps)
    out = (v.normed * first.neg_()).addcmul_(t.normed, a.norm_turn * v.spread, value=-1.0)
    out.addcmul_(a.summed, t.norm_turn * v.spread, value=-1.0)
    return out if above is None else out.add_(unnormalise(v, above, factor)[0])


def _scaled_(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x.mul_(scale)
