"""Triton kernels of an attention layer's passes, for the parts that work row by row.

`attention_rows` has the same functions with their formulas, and defines the results;
`attention_passes` has the symbols. `test_attention_kernels` compares the results.

A program takes whole rows and moves each number once. Q, K and V of a neighbour are side by side in
memory, (nreal, ncolumns, 3, attn), so that one product makes all three, and one product takes their
cotangents. Tensors are contiguous unless they come with strides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention_rows import Adjoints, Tangents, Values

TILE = 512  # elements of a program, at least a row


class Tile(NamedTuple):
    """The rows of a program. `block` is a power of two that holds `width` columns."""

    row: Any  # (rows,), int64
    exists: Any  # (rows,): row < count
    column: Any  # (block,)
    inside: Any  # (block,): column < width
    at: Any  # (rows, block): where the elements are
    mask: Any  # (rows, block)


@triton.jit
def _tile(count, width, rows: tl.constexpr, block: tl.constexpr):
    """Return the `Tile` of a program."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    exists = row < count
    inside = column < width
    return Tile(
        row=row,
        exists=exists,
        column=column,
        inside=inside,
        at=row[:, None] * width + column[None, :],
        mask=exists[:, None] & inside[None, :],
    )


@triton.jit
def _load(tensor, tile):
    """Load a tensor's rows (rows, block)."""
    return tl.load(tensor + tile.at, tile.mask, 0.0)


@triton.jit
def _load_by_row(tensor, tile):
    """Load one number for each row (rows, 1)."""
    return tl.load(tensor + tile.row, tile.exists, 0.0)[:, None]


@triton.jit
def _load_by_column(tensor, tile):
    """Load one number for each column (1, block)."""
    return tl.load(tensor + tile.column, tile.inside, 0.0)[None, :]


class Gate(NamedTuple):
    """A gate (nreal, ncolumns, ncolumns) with its strides, which may be 0."""

    tensor: Any
    atom_stride: Any
    row_stride: Any
    column_stride: Any

    @classmethod
    def of(cls, gate: Tensor, like: Tensor) -> Gate:
        """Return a gate that broadcasts to the shape of `like`."""
        return cls(gate, *gate.expand_as(like).stride())


@triton.jit
def _load_gate(gate, tile, width):
    """Load the rows of a gate."""
    atom = tile.row // width
    start = atom * gate.atom_stride + tile.row % width * gate.row_stride
    at = gate.tensor + start[:, None] + (tile.column * gate.column_stride)[None, :]
    return tl.load(at, tile.mask, 0.0)


def _launch(kernel: triton.JITFunction, like: Tensor, **arguments: Any) -> None:
    """Launch a kernel on the rows of all tensors, which have the shape of `like`."""
    width = like.shape[-1]
    count = like.numel() // width
    block = max(16, int(triton.next_power_of_2(width)))
    rows = max(1, TILE // block)
    kernel[(triton.cdiv(count, rows),)](
        count=count, width=width, rows=rows, block=block, **arguments
    )


# ----- Q, K, V = rescale(X·W + b) ----------------------------------------------------------------


def project(x: Tensor, matrix: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.mm(x.flatten(0, 1), matrix).view(*x.shape[:2], 3, -1).permute(2, 0, 1, 3)


def project_and_rescale(
    x: Tensor, matrix: Tensor, bias: Tensor, shortest: float | None
) -> tuple[Tensor, Tensor | None]:
    """See `attention_rows`; cuBLAS takes twice as long for a product with a bias in float64."""
    qkv = project(x, matrix)
    if shortest is None:
        _in_memory(qkv).add_(bias.view(3, -1))
        return qkv, None
    inverse_length = _number_by_row(qkv)
    _launch(
        _rescale_kernel, qkv, x=qkv, inverse_length=inverse_length, bias=bias, shortest=shortest
    )
    return qkv, inverse_length


@triton.jit(do_not_specialize=["count"])
def _rescale_kernel(
    x,  # (count, width), in place: X·W, then Q, K and V; a row for each of them in turn
    inverse_length,  # (count,), written
    bias,  # (3, width)
    count,
    width,
    shortest: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write y = (x + b)·r with r = 1/max(|x + b|, shortest)."""
    tile = _tile(count, width, rows, block)
    at_bias = (tile.row % 3)[:, None] * width + tile.column[None, :]
    value = _load(x, tile) + tl.load(bias + at_bias, tile.mask, 0.0)
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(value * value, 1)), shortest)
    tl.store(inverse_length + tile.row, factor, tile.exists)
    tl.store(x + tile.at, value * factor[:, None], tile.mask)


def project_adjoint(projected_bar: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """See `attention_rows`."""
    rows = _neighbor_rows(projected_bar)
    return torch.addmm(start.flatten(0, 1), rows, matrix.mT).view_as(start)


def project_gradient(x: Tensor, projected_bar: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.mm(x.flatten(0, 1).mT, _neighbor_rows(projected_bar))


def rescale_derivative_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `attention_rows`."""
    if v.inverse_length is None:
        return x, None
    along = _number_by_row(x)
    _launch(
        _pull_rows_kernel,
        x,
        out=x,
        along=along,
        y_hat=x,
        gamma=None,
        y=v.qkv,
        inverse=v.inverse_length,
        adjoints=None,
        eps=0.0,
        centred=False,
    )
    return x, along


def rescale_gradient_(v: Values, a: Adjoints, t: Tangents, qkv_hat: Tensor) -> Tensor:
    """See `attention_rows`."""
    if v.inverse_length is not None:
        _launch(
            _pull_rows_kernel,
            qkv_hat,
            out=qkv_hat,
            along=None,
            y_hat=qkv_hat,
            gamma=None,
            y=v.qkv,
            inverse=v.inverse_length,
            adjoints=RowAdjoints(
                x_bar=a.projected,
                bar_along=a.length_along,
                y_dot=t.qkv,
                dot_along=t.length_along,
            ),
            eps=0.0,
            centred=False,
        )
    return qkv_hat


def _in_memory(qkv: Tensor) -> Tensor:
    """Return Q, K and V in the order of memory (nreal, ncolumns, 3, attn)."""
    return qkv.permute(1, 2, 0, 3)


def _neighbor_rows(qkv: Tensor) -> Tensor:
    """Return Q, K and V of a neighbour in one row (nreal·ncolumns, 3·attn)."""
    return _in_memory(qkv).flatten(2).flatten(0, 1)


def _number_by_row(qkv: Tensor) -> Tensor:
    """Allocate a number for each row of Q, K and V (3, nreal, ncolumns, 1), in memory order."""
    return qkv.new_empty(*_in_memory(qkv).shape[:3], 1).permute(2, 0, 1, 3)


# ----- P = softmax(scale·QKᵀ + mask), A = P∘E ----------------------------------------------------


def attend(
    query: Tensor, key: Tensor, mask: Tensor, gate: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    soft = torch.bmm(query, key.mT)  # the kernel replaces QKᵀ by P
    gated = torch.empty_like(soft)
    _launch(
        _attend_kernel,
        soft,
        gated=gated,
        soft=soft,
        mask=mask.contiguous(),
        gate=Gate.of(gate, soft),
        scale=scale,
    )
    return soft, gated


@triton.jit(do_not_specialize=["count"])
def _attend_kernel(
    gated,  # (count, width), written: A; count = nreal·ncolumns, width = ncolumns
    soft,  # (count, width), in place: QKᵀ, then P
    mask,  # (nreal, width)
    gate,  # Gate: E
    count,
    width,
    scale: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write P = softmax(scale·QKᵀ + mask) and A = P∘E."""
    tile = _tile(count, width, rows, block)
    atom = tile.row // width
    addend = tl.load(mask + atom[:, None] * width + tile.column[None, :], tile.mask, 0.0)
    score = _load(soft, tile) * scale + addend
    score = tl.where(tile.inside[None, :], score, float("-inf"))
    power = tl.exp(score - tl.max(score, 1)[:, None])
    weight = power / tl.sum(power, 1)[:, None]
    e = _load_gate(gate, tile, width)
    tl.store(soft + tile.at, weight, tile.mask)
    tl.store(gated + tile.at, weight * e, tile.mask)


def attend_adjoint(v: Values, gated_bar: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_rows`."""
    scores_bar = torch.empty_like(gated_bar)
    gate_bar = torch.empty_like(gated_bar)
    along = gated_bar.new_empty(*gated_bar.shape[:2], 1)
    _launch(
        _pull_softmax_kernel,
        gated_bar,
        scores_hat=scores_bar,
        along=along,
        gate_hat=gate_bar,
        gated_hat=gated_bar,
        gated=v.gated,
        soft=v.soft,
        adjoints=None,
        scale=scale,
    )
    return scores_bar, along, gate_bar


def attend_tangent(
    v: Values, scores_dot: Tensor, gate: Tensor, gate_dot: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    gated_dot = torch.empty_like(scores_dot)
    _launch(
        _attend_tangent_kernel,
        scores_dot,
        gated_dot=gated_dot,
        scores_dot=scores_dot,
        soft=v.soft,
        gate=Gate.of(gate, scores_dot),
        gate_dot=Gate.of(gate_dot, scores_dot),
        scale=scale,
    )
    return scores_dot, gated_dot


@triton.jit(do_not_specialize=["count"])
def _attend_tangent_kernel(
    gated_dot,  # (count, width), written: Ȧ
    scores_dot,  # (count, width), in place: the tangent of QKᵀ, then Ṗ
    soft,  # (count, width): P
    gate,  # Gate: E
    gate_dot,  # Gate: Ė
    count,
    width,
    scale: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write Ṗ = P∘(σ − Σ P∘σ) with σ = scale·(QKᵀ)˙, and Ȧ = Ṗ∘E + P∘Ė."""
    tile = _tile(count, width, rows, block)
    score_dot = _load(scores_dot, tile) * scale
    weight = _load(soft, tile)
    weight_dot = (score_dot - tl.sum(weight * score_dot, 1)[:, None]) * weight
    e = _load_gate(gate, tile, width)
    e_dot = _load_gate(gate_dot, tile, width)
    tl.store(scores_dot + tile.at, weight_dot, tile.mask)
    tl.store(gated_dot + tile.at, weight_dot * e + weight * e_dot, tile.mask)


def attend_gradient(
    v: Values, a: Adjoints, t: Tangents, gated_hat: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`; `gated_hat` becomes the first result."""
    gate_hat = torch.empty_like(gated_hat)
    _launch(
        _pull_softmax_kernel,
        gated_hat,
        scores_hat=gated_hat,
        along=None,
        gate_hat=gate_hat,
        gated_hat=gated_hat,
        gated=v.gated,
        soft=v.soft,
        adjoints=SoftmaxAdjoints(
            gated_bar=a.gated, soft_along=a.soft_along, gated_dot=t.gated, soft_dot=t.soft
        ),
        scale=scale,
    )
    return gated_hat, gate_hat


class SoftmaxAdjoints(NamedTuple):
    """The adjoints of the softmax, on which a loss on forces depends, and their tangents."""

    gated_bar: Any  # (count, width): Ā
    soft_along: Any  # (count,)
    gated_dot: Any  # (count, width): Ȧ
    soft_dot: Any  # (count, width): Ṗ


@triton.jit(do_not_specialize=["count"])
def _pull_softmax_kernel(
    scores_hat,  # (count, width), written: the cotangent of QKᵀ; may be Â
    along,  # (count,), written unless None
    gate_hat,  # (count, width), written
    gated_hat,  # (count, width): Â; in pass 2 Ā, and all hats are bars
    gated,  # (count, width): A
    soft,  # (count, width): P
    adjoints,  # SoftmaxAdjoints; None without
    count,
    width,
    scale: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write scale·(B − P·along) with B = A∘Â and along = Σ B, and P∘Â.

    With adjoints B = Ȧ∘Ā + A∘Â, scale·(B − Ṗ·soft_along − P·along), and Ṗ∘Ā + P∘Â.
    """
    tile = _tile(count, width, rows, block)
    hat = _load(gated_hat, tile)
    weight = _load(soft, tile)
    b = _load(gated, tile) * hat
    gate = weight * hat
    if adjoints is not None:
        bar = _load(adjoints.gated_bar, tile)
        weight_dot = _load(adjoints.soft_dot, tile)
        b += _load(adjoints.gated_dot, tile) * bar
        gate += weight_dot * bar
    total = tl.sum(b, 1)
    score = b - weight * total[:, None]
    if adjoints is not None:
        score -= weight_dot * _load_by_row(adjoints.soft_along, tile)
    if along is not None:
        tl.store(along + tile.row, total, tile.exists)
    tl.store(scores_hat + tile.at, score * scale, tile.mask)
    tl.store(gate_hat + tile.at, gate, tile.mask)


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
    """See `attention_rows`."""
    normed = torch.mm(mixed.flatten(0, 1), outer).view_as(x)  # the kernel replaces O·Wₒ by N
    z = torch.empty_like(normed)
    inverse_deviation = normed.new_empty(*x.shape[:2], 1)
    _launch(
        _normalise_kernel,
        normed,
        z=z,
        normed=normed,
        inverse_deviation=inverse_deviation,
        x=x.contiguous(),
        bias=outer_bias,
        gamma=gamma,
        beta=beta,
        eps=eps,
    )
    return z, normed, inverse_deviation


@triton.jit(do_not_specialize=["count"])
def _normalise_kernel(
    z,  # (count, width), written; count = nreal·ncolumns
    normed,  # (count, width), in place: O·Wₒ, then N
    inverse_deviation,  # (count,), written
    x,  # (count, width)
    bias,  # (width,): bₒ
    gamma,  # (width,)
    beta,  # (width,)
    count,
    width,
    eps: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write N = (S − mean)/deviation of S = O·Wₒ + X + bₒ, and Z = γ∘N + β."""
    tile = _tile(count, width, rows, block)
    summed = _load(normed, tile) + _load(x, tile) + _load_by_column(bias, tile)
    centred = summed - (tl.sum(summed, 1) / width)[:, None]
    centred = tl.where(tile.inside[None, :], centred, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    n = centred * r[:, None]
    tl.store(inverse_deviation + tile.row, r, tile.exists)
    tl.store(normed + tile.at, n, tile.mask)
    scaled = n * _load_by_column(gamma, tile)
    tl.store(z + tile.at, scaled + _load_by_column(beta, tile), tile.mask)


def normalise_derivative(
    v: Values, x: Tensor, gamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    out = torch.empty_like(v.normed)
    along = torch.empty_like(v.inverse_deviation)
    _launch(
        _pull_rows_kernel,
        out,
        out=out,
        along=along,
        y_hat=x.contiguous(),
        gamma=gamma,
        y=v.normed,
        inverse=v.inverse_deviation,
        adjoints=None,
        eps=0.0,
        centred=True,
    )
    return out, along


def normalise_gradient(
    v: Values, a: Adjoints, t: Tangents, z_hat: Tensor | None, gamma: Tensor, eps: float
) -> Tensor:
    """See `attention_rows`."""
    out = torch.empty_like(v.normed)
    _launch(
        _pull_rows_kernel,
        out,
        out=out,
        along=None,
        y_hat=z_hat,
        gamma=gamma,
        y=v.normed,
        inverse=v.inverse_deviation,
        adjoints=RowAdjoints(
            x_bar=a.summed, bar_along=a.norm_along, y_dot=t.normed, dot_along=t.norm_along
        ),
        eps=eps,
        centred=True,
    )
    return out


# ----- derivatives of rescaled and of normalised rows --------------------------------------------
# Rescaled, y = r·x with r = 1/|x|; centred, y = r·(x − mean) with r = 1/deviation, and sums over a
# row become means.


class RowAdjoints(NamedTuple):
    """The adjoints of rows, on which a loss on forces depends, and their tangents."""

    x_bar: Any  # (count, width)
    bar_along: Any  # (count,)
    y_dot: Any  # (count, width)
    dot_along: Any  # (count,)


@triton.jit
def _sum_of_row(values, width, centred: tl.constexpr):
    """Return the sum (rows,) of each row, or the mean."""
    total = tl.sum(values, 1)
    return total / width if centred else total


@triton.jit(do_not_specialize=["count"])
def _pull_rows_kernel(
    out,  # (count, width), written; may be ŷ
    along,  # (count,), written unless None
    y_hat,  # (count, width): the cotangent of y, or the tangent of x; None for 0
    gamma,  # (width,): factor of ŷ; None for 1
    y,  # (count, width)
    inverse,  # (count,): r
    adjoints,  # RowAdjoints; None without
    count,
    width,
    eps: tl.constexpr,
    centred: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Write (γ∘ŷ − y·along)·r, centred less the mean of γ∘ŷ, with along = Σ γ∘ŷ∘y.

    With adjoints, subtract y·(Σ ẏ·x̄ + eps·r⁴·bar_along·dot_along) + ẏ·r·bar_along + x̄·r·dot_along.
    """
    tile = _tile(count, width, rows, block)
    unit = _load(y, tile)
    result = tl.zeros_like(unit)
    if adjoints is not None:
        unit_dot = _load(adjoints.y_dot, tile)
        bar = _load(adjoints.x_bar, tile)
        r = tl.load(inverse + tile.row, tile.exists, 0.0)
        by_bar = tl.load(adjoints.bar_along + tile.row, tile.exists, 0.0)
        by_dot = tl.load(adjoints.dot_along + tile.row, tile.exists, 0.0)
        by_unit = _sum_of_row(unit_dot * bar, width, centred)
        if centred:
            by_unit += by_bar * by_dot * (r * r * r * r) * eps
        result -= unit * by_unit[:, None] + unit_dot * (by_bar * r)[:, None]
        result -= bar * (by_dot * r)[:, None]
    if y_hat is not None:
        value = _load(y_hat, tile)
        if gamma is not None:
            value *= _load_by_column(gamma, tile)
        if centred:
            mean = tl.sum(value, 1) / width
        product = _sum_of_row(value * unit, width, centred)
        if along is not None:
            tl.store(along + tile.row, product, tile.exists)
        value -= unit * product[:, None]
        if centred:
            value -= mean[:, None]
        result += value * _load_by_row(inverse, tile)
    tl.store(out + tile.at, result, tile.mask)
