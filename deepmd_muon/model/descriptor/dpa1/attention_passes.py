"""A layer of attention with derivatives that are written out.

`AttentionLayer` defines the result by torch's operations, whose second gradient takes several times as many passes over
memory. For features X and gates E,

    Q, K, V = X·W + b, rows divided by their length;   P = softmax(scale·QKᵀ + mask);   A = P·E (by elements);
    S = X + A·V·Wₒ + bₒ;   N = (S − mean)/deviation;   Z = N·γ + β.

Products are here, what lies between them in `attention_rows` and, on a GPU, one launch each in `attention_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1 import attention_rows
from deepmd_muon.model.descriptor.dpa1.attention_rows import Adjoints, Tangents, Values
from deepmd_muon.model.nn import triton_support
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


def _by_rows(x: Tensor) -> Any:
    """Return the module of the functions between products: Triton kernels where they can be used on features x."""
    if not x.numel() or not triton_support.usable(x.device):
        return attention_rows
    from deepmd_muon.model.descriptor.dpa1 import attention_kernels

    return attention_kernels


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
        rows = _by_rows(i.x)
        parts, inverse = rows.project_and_rescale(i.x, i.matrix, i.bias, self.shortest)
        query, key, value = parts
        soft, gated = rows.attend(query, key, i.mask, i.gate, self.scale)
        mixed = torch.bmm(gated, value)
        z, normed, spread = rows.normalise(
            mixed, i.outer, i.outer_bias, i.x, i.factor, i.shift, self.eps
        )
        return (z,), Values(parts, inverse, soft, gated, mixed, normed, spread)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of X and E."""
        (above,), i, v = cotangents, Inputs(*given), Values(*kept)
        of_x, of_gate, adjoints = self._pull(above, i, v)
        return (of_x, of_gate), (i.gate, i.matrix, i.outer, i.factor, *v, *adjoints)

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of Z; and `Tangents`."""
        (x, of_gate), (gate, matrix, outer, factor), v = tangents, left[:4], Values(*left[4:11])
        rows, (query, key, value) = _by_rows(x), v.parts
        parts, part_turn = rows.unscale_(v, rows.project(x, matrix))
        scores = torch.bmm(parts[0], key.mT).baddbmm_(query, parts[1].mT)
        soft, gated = rows.push_attention(v, scores, gate, of_gate, self.scale)
        mixed = torch.bmm(gated, value).baddbmm_(v.gated, parts[2])
        summed = torch.addmm(x.flatten(0, 1), mixed.flatten(0, 1), outer).view_as(x)
        normed, norm_turn = rows.unnormalise(v, summed)
        return (normed * factor,), Tangents(
            x, parts, part_turn, soft, gated, mixed, normed, norm_turn
        )

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (above,), i, v = cotangents, Inputs(*given), Values(*kept)
        rows = _by_rows(i.x)
        if left is None:
            of_x, of_gate, down = self._pull(above, i, v)
        else:
            a, t = Adjoints(*left[11:]), Tangents(*moved)
            of_x, of_gate, down = self._pull_along(above, i, v, a, t)
        summed = down.summed.flatten(0, 1)
        of_matrix = rows.products(i.x, down.raw)
        of_bias = down.raw.sum((1, 2)).flatten()
        of_outer = torch.mm(v.mixed.flatten(0, 1).mT, summed)
        of_factor = torch.zeros_like(i.factor) if above is None else (above * v.normed).sum((0, 1))
        of_shift = torch.zeros_like(i.shift) if above is None else above.sum((0, 1))
        if left is not None:
            of_matrix += rows.products(t.x, a.raw)
            of_outer.addmm_(t.mixed.flatten(0, 1).mT, a.summed.flatten(0, 1))
            of_factor += (a.above * t.normed).sum((0, 1))
        return of_x, of_gate, None, of_matrix, of_bias, of_outer, summed.sum(0), of_factor, of_shift

    def _pull(self, above: Tensor, i: Inputs, v: Values) -> tuple[Tensor, Tensor, Adjoints]:
        """Return the cotangents of X and E from that of Z, and those on the way."""
        rows, (query, key, value) = _by_rows(i.x), v.parts
        summed, norm_turn = rows.unnormalise(v, above, i.factor)
        mixed = torch.matmul(summed, i.outer.mT)
        gated = torch.bmm(mixed, value.mT)
        scores, soft_turn, of_gate = rows.pull_attention(v, gated, self.scale)
        parts = torch.empty_like(v.parts)
        torch.bmm(scores, key, out=parts[0])
        torch.bmm(scores.mT, query, out=parts[1])
        torch.bmm(v.gated.mT, mixed, out=parts[2])
        raw, part_turn = rows.unscale_(v, parts)
        adjoints = Adjoints(
            above, summed, norm_turn, mixed, gated, scores, soft_turn, raw, part_turn
        )
        return rows.unproject(raw, i.matrix, summed), of_gate.sum_to_size(i.gate.shape), adjoints

    def _pull_along(
        self, above: Tensor | None, i: Inputs, v: Values, a: Adjoints, t: Tangents
    ) -> tuple[Tensor, Tensor, Adjoints]:
        """Return the result of `_pull`, and add to each cotangent the derivative of its adjoint along the tangents."""
        rows, (query, key, value) = _by_rows(i.x), v.parts
        summed = rows.bend_normalisation(self.eps, v, a, t, above, i.factor)
        mixed = torch.matmul(summed, i.outer.mT)
        gated = torch.bmm(mixed, value.mT).baddbmm_(a.mixed, t.parts[2].mT)
        scores, of_gate = rows.bend_attention(v, a, t, gated, self.scale)
        parts = torch.empty_like(v.parts)
        torch.bmm(scores, key, out=parts[0]).baddbmm_(a.scores, t.parts[1])
        torch.bmm(scores.mT, query, out=parts[1]).baddbmm_(a.scores.mT, t.parts[0])
        torch.bmm(t.gated.mT, a.mixed, out=parts[2]).baddbmm_(v.gated.mT, mixed)
        raw = rows.bend_scaling_(v, a, t, parts)
        down = a._replace(summed=summed, mixed=mixed, gated=gated, scores=scores, raw=raw)
        return rows.unproject(raw, i.matrix, summed), of_gate.sum_to_size(i.gate.shape), down
