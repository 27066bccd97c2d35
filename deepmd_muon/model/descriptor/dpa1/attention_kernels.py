"""Triton kernels of an attention layer's passes, for the parts that work row by row; `attention_rows` defines them.

Each program takes whole rows, and moves each number once. Q, K and V of an edge lie side by side in memory, so that one
product makes them, and one takes all their cotangents.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention_rows import Adjoints, Tangents, Values

TILE = 512  # elements of a program, at least a row


@triton.jit
def _places(count, width, rows: tl.constexpr, block: tl.constexpr):
    """Return the rows of a program, their columns, the places of their elements, and which of these exist."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    return (
        row,
        column,
        row[:, None] * width + column[None, :],
        (row < count)[:, None] & (column < width)[None, :],
    )


@triton.jit
def _rescale_kernel(
    x, inverse, bias, count, width, shortest: tl.constexpr, rows: tl.constexpr, block: tl.constexpr
):
    """Add the bias to rows, of which Q, K and V take turns, divide them by their length, and write the factors."""
    row, column, at, real = _places(count, width, rows, block)
    value = tl.load(x + at, real, 0.0) + tl.load(
        bias + (row % 3)[:, None] * width + column[None, :], real, 0.0
    )
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(value * value, 1)), shortest)
    tl.store(inverse + row, factor, row < count)
    tl.store(x + at, value * factor[:, None], real)


@triton.jit
def _unscale_kernel(x, turn, y, inverse, count, width, rows: tl.constexpr, block: tl.constexpr):
    """Replace x by (x − y·turn)·inverse with turn = x·y."""
    row, _, at, real = _places(count, width, rows, block)
    value, unit = tl.load(x + at, real, 0.0), tl.load(y + at, real, 0.0)
    along = tl.sum(value * unit, 1)
    tl.store(turn + row, along, row < count)
    tl.store(
        x + at,
        (value - unit * along[:, None]) * tl.load(inverse + row, row < count, 0.0)[:, None],
        real,
    )


@triton.jit
def _bend_scaling_kernel(
    x,
    y,
    inverse,
    y_dot,
    x_bar,
    bar_turn,
    dot_turn,
    count,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Unscale x, and add the derivative of that along `y_dot`, applied to `x_bar`."""
    row, _, at, real = _places(count, width, rows, block)
    value, unit = tl.load(x + at, real, 0.0), tl.load(y + at, real, 0.0)
    moved, bar = tl.load(y_dot + at, real, 0.0), tl.load(x_bar + at, real, 0.0)
    factor = tl.load(inverse + row, row < count, 0.0)
    of_unit = tl.sum(value * unit, 1) * factor + tl.sum(moved * bar, 1)
    of_moved = tl.load(bar_turn + row, row < count, 0.0) * factor
    of_bar = tl.load(dot_turn + row, row < count, 0.0) * factor
    result = (
        value * factor[:, None]
        - unit * of_unit[:, None]
        - moved * of_moved[:, None]
        - bar * of_bar[:, None]
    )
    tl.store(x + at, result, real)


@triton.jit
def _attend_kernel(
    gated, soft, mask, gate, of_atom, of_row, of_column, count, width,
    scale: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace products QKᵀ in `soft` by P, and write A; the last three of the first line are strides of the gate."""
    row, column, at, real = _places(count, width, rows, block)
    atom = row // width
    hidden = tl.load(mask + atom[:, None] * width + column[None, :], real, 0.0)
    score = tl.where(
        (column < width)[None, :], tl.load(soft + at, real, 0.0) * scale + hidden, float("-inf")
    )
    power = tl.exp(score - tl.max(score, 1)[:, None])
    weight = power / tl.sum(power, 1)[:, None]
    here = gate + (atom * of_atom + row % width * of_row)[:, None] + (column * of_column)[None, :]
    tl.store(soft + at, weight, real)
    tl.store(gated + at, weight * tl.load(here, real, 0.0), real)


@triton.jit
def _pull_attention_kernel(
    scores,
    turn,
    of_gate,
    bar,
    gated,
    soft,
    count,
    width,
    scale: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write the cotangents of scores and gate from that of A, `bar`."""
    row, _, at, real = _places(count, width, rows, block)
    above, weight = tl.load(bar + at, real, 0.0), tl.load(soft + at, real, 0.0)
    score = tl.load(gated + at, real, 0.0) * above
    along = tl.sum(score, 1)
    tl.store(turn + row, along, row < count)
    tl.store(scores + at, (score - weight * along[:, None]) * scale, real)
    tl.store(of_gate + at, weight * above, real)


@triton.jit
def _push_attention_kernel(
    gated, scores, soft, gate, of_atom, of_row, of_column, dot, dot_atom, dot_row, dot_column, count, width,
    scale: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace tangents of the scores by those of P, and write those of A; `dot` is the tangent of the gate."""
    row, column, at, real = _places(count, width, rows, block)
    atom, inner = row // width, row % width
    score, weight = tl.load(scores + at, real, 0.0) * scale, tl.load(soft + at, real, 0.0)
    moved = (score - tl.sum(weight * score, 1)[:, None]) * weight
    here = gate + (atom * of_atom + inner * of_row)[:, None] + (column * of_column)[None, :]
    along = dot + (atom * dot_atom + inner * dot_row)[:, None] + (column * dot_column)[None, :]
    tl.store(scores + at, moved, real)
    tl.store(
        gated + at, moved * tl.load(here, real, 0.0) + weight * tl.load(along, real, 0.0), real
    )


@triton.jit
def _bend_attention_kernel(
    of_gate, scores, gated, soft, gated_bar, soft_turn, gated_dot, soft_dot, count, width,
    scale: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace the cotangents of A in `scores` by those of the scores, and write those of the gate."""
    row, _, at, real = _places(count, width, rows, block)
    above, weight = tl.load(scores + at, real, 0.0), tl.load(soft + at, real, 0.0)
    bar, moved = tl.load(gated_bar + at, real, 0.0), tl.load(soft_dot + at, real, 0.0)
    score = tl.load(gated_dot + at, real, 0.0) * bar + tl.load(gated + at, real, 0.0) * above
    along = tl.sum(score, 1)[:, None]
    before = tl.load(soft_turn + row, row < count, 0.0)[:, None]
    tl.store(scores + at, (score - moved * before - weight * along) * scale, real)
    tl.store(of_gate + at, moved * bar + weight * above, real)


@triton.jit
def _normalise_kernel(
    z, normed, spread, x, bias, factor, shift, count, width,
    eps: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace products in `normed` by N, and write 1/deviation and Z."""
    row, column, at, real = _places(count, width, rows, block)
    inside = column < width
    summed = (
        tl.load(normed + at, real, 0.0)
        + tl.load(x + at, real, 0.0)
        + tl.load(bias + column, inside, 0.0)[None, :]
    )
    centred = tl.where(inside[None, :], summed - (tl.sum(summed, 1) / width)[:, None], 0.0)
    factors = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    result = centred * factors[:, None]
    tl.store(spread + row, factors, row < count)
    tl.store(normed + at, result, real)
    scaled = result * tl.load(factor + column, inside, 0.0)[None, :]
    tl.store(z + at, scaled + tl.load(shift + column, inside, 0.0)[None, :], real)


@triton.jit
def _unnormalise_kernel(
    out,
    turn,
    x,
    factor,
    normed,
    spread,
    count,
    width,
    scaled: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write the derivative of the normalisation applied to x, times the factor if `scaled`."""
    row, column, at, real = _places(count, width, rows, block)
    value, unit = tl.load(x + at, real, 0.0), tl.load(normed + at, real, 0.0)
    if scaled:
        value *= tl.load(factor + column, column < width, 0.0)[None, :]
    along, mean = tl.sum(value * unit, 1) / width, tl.sum(value, 1) / width
    tl.store(turn + row, along, row < count)
    result = value - unit * along[:, None] - mean[:, None]
    tl.store(out + at, result * tl.load(spread + row, row < count, 0.0)[:, None], real)


@triton.jit
def _bend_normalisation_kernel(
    out, normed, spread, bar, bar_turn, dot, dot_turn, above, factor, count, width,
    eps: tl.constexpr, attached: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the derivative of `_unnormalise_kernel` along `dot`, applied to `bar`; with `attached` add its result."""
    row, column, at, real = _places(count, width, rows, block)
    exists = row < count
    unit, moved, below = (
        tl.load(normed + at, real, 0.0),
        tl.load(dot + at, real, 0.0),
        tl.load(bar + at, real, 0.0),
    )
    r = tl.load(spread + row, exists, 0.0)
    turns = tl.load(bar_turn + row, exists, 0.0), tl.load(dot_turn + row, exists, 0.0)
    first = tl.sum(moved * below, 1) / width + turns[0] * turns[1] * (r * r * r * r) * eps
    result = (
        -unit * first[:, None] - moved * (turns[0] * r)[:, None] - below * (turns[1] * r)[:, None]
    )
    if attached:
        value = (
            tl.load(above + at, real, 0.0) * tl.load(factor + column, column < width, 0.0)[None, :]
        )
        along, mean = tl.sum(value * unit, 1) / width, tl.sum(value, 1) / width
        result += (value - unit * along[:, None] - mean[:, None]) * r[:, None]
    tl.store(out + at, result, real)


def _form(x: Tensor) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """Return the grid for the rows of x, their number and width, and the tile."""
    width = x.shape[-1]
    count, block = x.numel() // width, max(16, int(triton.next_power_of_2(width)))
    rows = max(1, TILE // block)
    return (triton.cdiv(count, rows),), (count, width), {"rows": rows, "block": block}


def _beside(parts: Tensor) -> Tensor:
    """Return Q, K and V as they lie in memory `(nreal, ncolumns, 3, attn)`."""
    return parts.permute(1, 2, 0, 3)


def _rows_of(parts: Tensor) -> Tensor:
    """Return Q, K and V of an edge in one row `(nreal·ncolumns, 3·attn)`."""
    return _beside(parts).flatten(2).flatten(0, 1)


def _per_part(parts: Tensor) -> Tensor:
    """Return a tensor for a number of each row of Q, K and V `(3, nreal, ncolumns, 1)`, side by side as they are."""
    return parts.new_empty(*_beside(parts).shape[:3], 1).permute(2, 0, 1, 3)


def project(x: Tensor, matrix: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.mm(x.flatten(0, 1), matrix).view(*x.shape[:2], 3, -1).permute(2, 0, 1, 3)


def project_and_rescale(
    x: Tensor, matrix: Tensor, bias: Tensor, shortest: float | None
) -> tuple[Tensor, Tensor | None]:
    """See `attention_rows`; cuBLAS takes twice as long for a product to which it adds a bias in float64."""
    parts = project(x, matrix)
    if shortest is None:
        _beside(parts).add_(bias.view(3, -1))
        return parts, None
    inverse = _per_part(parts)
    grid, sizes, form = _form(parts)
    _rescale_kernel[grid](parts, inverse, bias, *sizes, shortest=shortest, **form)
    return parts, inverse


def unproject(raw: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.addmm(start.flatten(0, 1), _rows_of(raw), matrix.mT).view_as(start)


def products(x: Tensor, raw: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.mm(x.flatten(0, 1).mT, _rows_of(raw))


def unscale_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `attention_rows`."""
    if v.inverse is None:
        return x, None
    turn = _per_part(x)
    grid, sizes, form = _form(x)
    _unscale_kernel[grid](x, turn, v.parts, v.inverse, *sizes, **form)
    return x, turn


def bend_scaling_(v: Values, a: Adjoints, t: Tangents, raw: Tensor) -> Tensor:
    """See `attention_rows`."""
    if v.inverse is not None:
        grid, sizes, form = _form(raw)
        _bend_scaling_kernel[grid](
            raw, v.parts, v.inverse, t.parts, a.raw, a.part_turn, t.part_turn, *sizes, **form
        )
    return raw


def attend(
    query: Tensor, key: Tensor, mask: Tensor, gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    soft = torch.bmm(query, key.mT)
    gated = torch.empty_like(soft)
    grid, sizes, form = _form(soft)
    _attend_kernel[grid](
        gated,
        soft,
        mask.contiguous(),
        gate,
        *gate.expand_as(soft).stride(),
        *sizes,
        scale=scale,
        **form,
    )
    return soft, gated


def pull_attention(v: Values, gated: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_rows`."""
    scores, of_gate = torch.empty_like(gated), torch.empty_like(gated)
    turn = gated.new_empty(*gated.shape[:2], 1)
    grid, sizes, form = _form(gated)
    _pull_attention_kernel[grid](
        scores, turn, of_gate, gated, v.gated, v.soft, *sizes, scale=scale, **form
    )
    return scores, turn, of_gate


def push_attention(
    v: Values, scores: Tensor, gate: Tensor, of_gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    gated = torch.empty_like(scores)
    grid, sizes, form = _form(scores)
    strides = gate.expand_as(scores).stride(), of_gate.expand_as(scores).stride()
    _push_attention_kernel[grid](
        gated, scores, v.soft, gate, *strides[0], of_gate, *strides[1], *sizes, scale=scale, **form
    )
    return scores, gated


def bend_attention(
    v: Values, a: Adjoints, t: Tangents, gated: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`; `gated` is overwritten."""
    of_gate = torch.empty_like(gated)
    grid, sizes, form = _form(gated)
    _bend_attention_kernel[grid](
        of_gate,
        gated,
        v.gated,
        v.soft,
        a.gated,
        a.soft_turn,
        t.gated,
        t.soft,
        *sizes,
        scale=scale,
        **form,
    )
    return gated, of_gate


def normalise(
    mixed: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    x: Tensor,
    factor: Tensor,
    shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_rows`."""
    normed = torch.mm(mixed.flatten(0, 1), outer).view_as(x)
    z, spread = torch.empty_like(normed), normed.new_empty(*x.shape[:2], 1)
    grid, sizes, form = _form(normed)
    _normalise_kernel[grid](
        z, normed, spread, x.contiguous(), outer_bias, factor, shift, *sizes, eps=eps, **form
    )
    return z, normed, spread


def unnormalise(v: Values, x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    out, turn = torch.empty_like(v.normed), torch.empty_like(v.spread)
    grid, sizes, form = _form(out)
    scaled = factor is not None
    _unnormalise_kernel[grid](
        out,
        turn,
        x.contiguous(),
        factor if scaled else x,
        v.normed,
        v.spread,
        *sizes,
        scaled=scaled,
        **form,
    )
    return out, turn


def bend_normalisation(
    eps: float, v: Values, a: Adjoints, t: Tangents, above: Tensor | None, factor: Tensor
) -> Tensor:
    """See `attention_rows`."""
    out = torch.empty_like(v.normed)
    grid, sizes, form = _form(out)
    _bend_normalisation_kernel[grid](
        out, v.normed, v.spread, a.summed, a.norm_turn, t.normed, t.norm_turn, out if above is None else above, factor,
        *sizes, eps=eps, attached=above is not None, **form,
    )  # fmt: skip
    return out
