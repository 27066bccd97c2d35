"""A layer of attention on a CPU with derivatives that are written out.

`AttentionLayer` defines the result by torch's operations, whose second gradient takes several times as many passes over
memory. For features X and gates E,

    Q, K, V = X·W + b, rows divided by their length;   P = softmax(scale·QKᵀ + mask);   A = P·E (by elements);
    S = X + A·V·Wₒ + bₒ;   N = (S − mean)/deviation;   Z = N·γ + β.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors


class Inputs(NamedTuple):
    """X `(nreal, ncolumns, width)`, E, which broadcasts to `(nreal, ncolumns, ncolumns)`, mask, W, b, Wₒ, bₒ, γ, β.

    The mask `(nreal, 1, ncolumns)` has no gradient. W is `(width, 3·attn)`, Wₒ `(attn, width)`.
    """

    x: Tensor
    gate: Tensor
    mask: Tensor
    matrix: Tensor
    bias: Tensor
    outer: Tensor
    outer_bias: Tensor
    factor: Tensor
    shift: Tensor


class Values(NamedTuple):
    """The tensors of pass 1 that the others read.

    Attributes
    ----------
    parts, inverse
        Q, K and V `(3, nreal, ncolumns, attn)`, and the inverse lengths that rescaled them, or None.
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

    `norm_turn`, `soft_turn` and `part_turn` are the sums that normalisation, softmax and rescaling subtract
    `(…, ncolumns, 1)`.
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


@dataclass(frozen=True)
class Attention(FourPasses):
    """The operation of one layer: `Inputs` to Z. Adjoints belong to X and E.

    Attributes
    ----------
    scale
        Factor of the scores.
    shortest
        Rows of Q, K and V are divided by their length, at least this; None leaves them as they are.
    eps
        Addend of the variance.
    """

    scale: float
    shortest: float | None
    eps: float

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        i = Inputs(*given)
        parts = _project(i.x, i.matrix, i.bias)
        inverse = None
        if self.shortest is not None:
            inverse = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).clamp_min_(self.shortest).reciprocal_()
            parts *= inverse
        query, key, value = parts
        soft = torch.baddbmm(i.mask, query, key.mT, alpha=self.scale).softmax(-1)
        gated = soft * i.gate
        mixed = torch.bmm(gated, value)
        summed = torch.addmm(i.outer_bias, mixed.flatten(0, 1), i.outer).view_as(i.x).add_(i.x)
        normed, _, spread = torch.native_layer_norm(summed, [i.x.shape[-1]], None, None, self.eps)
        z = torch.addcmul(i.shift, normed, i.factor)
        return (z,), Values(parts, inverse, soft, gated, mixed, normed, spread)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of X and E."""
        (above,), i, v = cotangents, Inputs(*given), Values(*kept)
        of_x, of_gate, adjoints = self._pull(above, i, v)
        return (of_x, of_gate), (i.gate, i.matrix, i.outer, i.factor, *v, *adjoints)

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of Z; and `Tangents`."""
        (x, of_gate), (gate, matrix, outer, factor), v = tangents, left[:4], Values(*left[4:11])
        query, key, value = v.parts
        parts, part_turn = _unscale_(v, _project(x, matrix, None))
        scores = torch.bmm(parts[0], key.mT).baddbmm_(query, parts[1].mT).mul_(self.scale)
        soft = scores.sub_((v.soft * scores).sum(-1, keepdim=True)).mul_(v.soft)
        gated = (soft * gate).addcmul_(v.soft, of_gate)
        mixed = torch.bmm(gated, value).baddbmm_(v.gated, parts[2])
        normed, norm_turn = _unnormalise(v, torch.addmm(x.flatten(0, 1), mixed.flatten(0, 1), outer).view_as(x))
        return (normed * factor,), Tangents(x, parts, part_turn, soft, gated, mixed, normed, norm_turn)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (above,), i, v = cotangents, Inputs(*given), Values(*kept)
        if left is None:
            of_x, of_gate, down = self._pull(above, i, v)
        else:
            a, t = Adjoints(*left[11:]), Tangents(*moved)
            of_x, of_gate, down = self._pull_along(above, i, v, a, t)
        raw, rows, summed = down.raw.flatten(1, 2), i.x.flatten(0, 1).mT, down.summed.flatten(0, 1)
        of_matrix = torch.cat([torch.mm(rows, part) for part in raw], dim=1)
        of_outer = torch.mm(v.mixed.flatten(0, 1).mT, summed)
        of_factor = torch.zeros_like(i.factor) if above is None else (above * v.normed).sum((0, 1))
        of_shift = torch.zeros_like(i.shift) if above is None else above.sum((0, 1))
        if left is not None:
            rows = t.x.flatten(0, 1).mT
            for part, bar in zip(of_matrix.chunk(3, dim=1), a.raw.flatten(1, 2), strict=True):
                part.addmm_(rows, bar)
            of_outer.addmm_(t.mixed.flatten(0, 1).mT, a.summed.flatten(0, 1))
            of_factor += (a.above * t.normed).sum((0, 1))
        return of_x, of_gate, None, of_matrix, raw.sum(1).flatten(), of_outer, summed.sum(0), of_factor, of_shift

    def _pull(self, above: Tensor, i: Inputs, v: Values) -> tuple[Tensor, Tensor, Adjoints]:
        """Return the cotangents of X and E from that of Z, and those on the way."""
        query, key, value = v.parts
        summed, norm_turn = _unnormalise(v, above * i.factor)
        mixed = torch.matmul(summed, i.outer.mT)
        gated = torch.bmm(mixed, value.mT)
        scores = v.gated * gated
        soft_turn = scores.sum(-1, keepdim=True)
        scores.addcmul_(v.soft, soft_turn, value=-1.0)
        parts = torch.empty_like(v.parts)
        torch.bmm(scores, key, out=parts[0])
        torch.bmm(scores.mT, query, out=parts[1])
        parts[:2] *= self.scale
        torch.bmm(v.gated.mT, mixed, out=parts[2])
        raw, part_turn = _unscale_(v, parts)
        of_gate = (v.soft * gated).sum_to_size(i.gate.shape)
        adjoints = Adjoints(above, summed, norm_turn, mixed, gated, scores, soft_turn, raw, part_turn)
        return _unproject(raw, i.matrix, summed), of_gate, adjoints

    def _pull_along(
        self, above: Tensor | None, i: Inputs, v: Values, a: Adjoints, t: Tangents
    ) -> tuple[Tensor, Tensor, Adjoints]:
        """Return the result of `_pull`, and add to each cotangent the derivative of its adjoint along the tangents."""
        query, key, value = v.parts
        summed = _bend_normalisation(self.eps, v, a, t)
        if above is not None:
            summed += _unnormalise(v, above * i.factor)[0]
        mixed = torch.matmul(summed, i.outer.mT)
        gated = torch.bmm(mixed, value.mT).baddbmm_(a.mixed, t.parts[2].mT)
        scores = (t.gated * a.gated).addcmul_(v.gated, gated)
        turn = scores.sum(-1, keepdim=True)
        scores.addcmul_(t.soft, a.soft_turn, value=-1.0).addcmul_(v.soft, turn, value=-1.0)
        parts = torch.empty_like(v.parts)
        torch.bmm(scores, key, out=parts[0]).baddbmm_(a.scores, t.parts[1])
        torch.bmm(scores.mT, query, out=parts[1]).baddbmm_(a.scores.mT, t.parts[0])
        parts[:2] *= self.scale
        torch.bmm(t.gated.mT, a.mixed, out=parts[2]).baddbmm_(v.gated.mT, mixed)
        raw, _ = _unscale_(v, parts)
        _bend_scaling_(raw, v, a, t)
        of_gate = (t.soft * a.gated).addcmul_(v.soft, gated).sum_to_size(i.gate.shape)
        down = a._replace(summed=summed, mixed=mixed, gated=gated, scores=scores, raw=raw)
        return _unproject(raw, i.matrix, summed), of_gate, down


def _project(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return x times the three parts of the matrix, plus those of the bias `(3, nreal, ncolumns, attn)`."""
    rows, matrices = x.flatten(0, 1), matrix.chunk(3, dim=1)
    out = x.new_empty(3, len(rows), matrices[0].shape[1])
    for number, part in enumerate(matrices):
        if bias is None:
            torch.mm(rows, part, out=out[number])
        else:
            torch.addmm(bias.chunk(3)[number], rows, part, out=out[number])
    return out.view(3, *x.shape[:2], out.shape[2])


def _unproject(raw: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """Return `start` plus the three parts times their transposed matrices."""
    out = start.clone()
    for part, of_part in zip(raw.flatten(1, 2), matrix.chunk(3, dim=1), strict=True):
        out.flatten(0, 1).addmm_(part, of_part.mT)
    return out


def _unscale_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the derivative of the rescaling, a symmetric map, to x, which is overwritten; also return x·parts."""
    if v.inverse is None:
        return x, None
    turn = (v.parts * x).sum(-1, keepdim=True)
    return x.addcmul_(v.parts, turn, value=-1.0).mul_(v.inverse), turn


def _bend_scaling_(raw: Tensor, v: Values, a: Adjoints, t: Tangents) -> None:
    """Add the derivative of `_unscale_` along the tangents, applied to the adjoints.

    With y the rescaled row, r its factor, ẏ its tangent, h̄ the cotangent of the raw row and both sums that `_unscale_`
    found, it is −(ẏ·h̄)·y − r·turn(a)·ẏ − r·turn(t)·h̄.
    """
    if v.inverse is None or a.part_turn is None or t.part_turn is None:
        return
    raw.addcmul_(v.parts, (t.parts * a.raw).sum(-1, keepdim=True), value=-1.0)
    raw.addcmul_(t.parts, a.part_turn * v.inverse, value=-1.0)
    raw.addcmul_(a.raw, t.part_turn * v.inverse, value=-1.0)


def _unnormalise(v: Values, x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the derivative of the normalisation, a symmetric map, to x; also return the mean of x·normed."""
    turn = (v.normed * x).mean(-1, keepdim=True)
    out = torch.addcmul(x, v.normed, turn, value=-1.0)
    return out.sub_(x.mean(-1, keepdim=True)).mul_(v.spread), turn


def _bend_normalisation(eps: float, v: Values, a: Adjoints, t: Tangents) -> Tensor:
    """Return the derivative of `_unnormalise` along the tangents, applied to the adjoints.

    Like `_bend_scaling_` with means, and eps·r⁴·turn(a)·turn(t) more in the first factor: the mean of y² is
    1 − eps·r².
    """
    first = (t.normed * a.summed).mean(-1, keepdim=True)
    first.addcmul_(a.norm_turn * t.norm_turn, v.spread.pow(4), value=eps)
    out = (v.normed * first.neg_()).addcmul_(t.normed, a.norm_turn * v.spread, value=-1.0)
    return out.addcmul_(a.summed, t.norm_turn * v.spread, value=-1.0)
