"""Triton kernels of an attention layer's passes, for the parts that work row by row.

`attention_rows` documents the same functions and defines their results;
`test_attention_kernels` compares them. `attention_passes` has the symbols of attention, and
`four_passes` the bars (pass 2), dots (pass 3) and hats (pass 4).

A kernel takes a tensor as n_rows rows of `width` numbers, contiguous unless it comes with strides.
A program takes `block_rows` whole rows, padded to `block_width` columns, and moves each number of
these rows once. Q, K and V of a neighbour are side by side in memory, (nreal, ncolumns, 3, attn),
so that one matrix product computes all three, and one takes their cotangents. Kernels assume this
order (`_as_stored`) of every tensor in the shape of Q, K and V, and of the numbers per row of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention_rows import Adjoints, Tangents, Values

TILE = 512  # elements that a program takes, but at least a row


class Tile(NamedTuple):
    """The rows of a program."""

    row: Any  # (block_rows,), int64
    row_exists: Any  # (block_rows,): row < n_rows
    column: Any  # (block_width,)
    column_exists: Any  # (block_width,): column < width
    offset: Any  # (block_rows, block_width): of the elements in memory
    mask: Any  # (block_rows, block_width)


@triton.jit
def _tile(n_rows, width, block_rows: tl.constexpr, block_width: tl.constexpr):
    """Return the `Tile` of a program."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    row_exists = row < n_rows
    column_exists = column < width
    return Tile(
        row=row,
        row_exists=row_exists,
        column=column,
        column_exists=column_exists,
        offset=row[:, None] * width + column[None, :],
        mask=row_exists[:, None] & column_exists[None, :],
    )


@triton.jit
def _load(tensor, tile):
    """Load whole rows (block_rows, block_width)."""
    return tl.load(tensor + tile.offset, tile.mask, 0.0)


@triton.jit
def _load_per_row(tensor, tile):
    """Load one number for each row (block_rows, 1)."""
    return tl.load(tensor + tile.row, tile.row_exists, 0.0)[:, None]


@triton.jit
def _load_per_column(tensor, tile):
    """Load one number for each column (1, block_width)."""
    return tl.load(tensor + tile.column, tile.column_exists, 0.0)[None, :]


class Gate(NamedTuple):
    """A gate, broadcast to (nreal, ncolumns, ncolumns) by strides of 0."""

    tensor: Any
    atom_stride: Any
    row_stride: Any
    column_stride: Any

    @classmethod
    def of(cls, gate: Tensor, like: Tensor) -> Gate:
        """Return a gate in the shape of `like`."""
        return cls(gate, *gate.expand_as(like).stride())


@triton.jit
def _load_gate(gate, tile, width):
    """Load the rows of a gate; `width` is ncolumns, so that row = atom·width + query."""
    atom = tile.row // width
    start = atom * gate.atom_stride + tile.row % width * gate.row_stride
    at = gate.tensor + start[:, None] + (tile.column * gate.column_stride)[None, :]
    return tl.load(at, tile.mask, 0.0)


def _launch(kernel: triton.JITFunction, like: Tensor, **arguments: Any) -> None:
    """Launch a kernel on the rows of `like`, a tensor in the shape of those it reads and writes."""
    width = like.shape[-1]
    n_rows = like.numel() // width
    block_width = max(16, int(triton.next_power_of_2(width)))
    block_rows = max(1, TILE // block_width)
    kernel[(triton.cdiv(n_rows, block_rows),)](
        n_rows=n_rows, width=width, block_rows=block_rows, block_width=block_width, **arguments
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
        _as_stored(qkv).add_(bias.view(3, -1))
        return qkv, None
    inverse_length = _new_per_row(qkv)
    _launch(
        _rescale_kernel, qkv, x=qkv, inverse_length=inverse_length, bias=bias, shortest=shortest
    )
    return qkv, inverse_length


@triton.jit(do_not_specialize=["n_rows"])
def _rescale_kernel(
    x,  # (n_rows, width), in place: X·W, then Q, K, V; of each neighbour the rows of Q, K and V
    inverse_length,  # (n_rows,), written
    bias,  # (3, width)
    n_rows,
    width,
    shortest: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write y = r·(x + b) with r = 1/max(|x + b|, shortest)."""
    tile = _tile(n_rows, width, block_rows, block_width)
    bias_offset = (tile.row % 3)[:, None] * width + tile.column[None, :]
    biased = _load(x, tile) + tl.load(bias + bias_offset, tile.mask, 0.0)
    r = 1.0 / tl.maximum(tl.sqrt(tl.sum(biased * biased, 1)), shortest)
    tl.store(inverse_length + tile.row, r, tile.row_exists)
    tl.store(x + tile.offset, biased * r[:, None], tile.mask)


def project_adjoint(projected_bar: Tensor, matrix: Tensor, start: Tensor) -> Tensor:
    """See `attention_rows`."""
    rows = _side_by_side(projected_bar)
    return torch.addmm(start.flatten(0, 1), rows, matrix.mT).view_as(start)


def project_gradient(x: Tensor, projected_bar: Tensor) -> Tensor:
    """See `attention_rows`."""
    return torch.mm(x.flatten(0, 1).mT, _side_by_side(projected_bar))


def rescale_derivative_(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `attention_rows`."""
    if v.inverse_length is None:
        return x, None
    along = _new_per_row(x)
    _multiply_by_jacobian(x, out=x, along=along, y=v.qkv, inverse=v.inverse_length, centred=False)
    return x, along


def rescale_gradient_(v: Values, a: Adjoints, t: Tangents, qkv_hat: Tensor) -> Tensor:
    """See `attention_rows`."""
    if v.inverse_length is not None:
        _multiply_by_jacobian(
            qkv_hat,
            out=qkv_hat,
            y=v.qkv,
            inverse=v.inverse_length,
            second_order=RowSecondOrder(
                x_bar=a.projected,
                bar_along=a.length_along,
                y_dot=t.qkv,
                dot_along=t.length_along,
            ),
            centred=False,
        )
    return qkv_hat


def _as_stored(qkv: Tensor) -> Tensor:
    """Return Q, K and V in memory order (nreal, ncolumns, 3, attn)."""
    return qkv.permute(1, 2, 0, 3)


def _side_by_side(qkv: Tensor) -> Tensor:
    """Return a row with Q, K and V for each neighbour (nreal·ncolumns, 3·attn)."""
    return _as_stored(qkv).flatten(2).flatten(0, 1)


def _new_per_row(qkv: Tensor) -> Tensor:
    """Allocate one number per row of Q, K and V (3, nreal, ncolumns, 1), stored as they are."""
    return qkv.new_empty(*_as_stored(qkv).shape[:3], 1).permute(2, 0, 1, 3)


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


@triton.jit(do_not_specialize=["n_rows"])
def _attend_kernel(
    gated,  # (n_rows, width), written: A; n_rows = nreal·ncolumns, width = ncolumns
    soft,  # (n_rows, width), in place: QKᵀ, then P
    mask,  # (nreal, width)
    gate,  # Gate: E
    n_rows,
    width,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write P = softmax(scale·QKᵀ + mask) and A = P∘E."""
    tile = _tile(n_rows, width, block_rows, block_width)
    atom = tile.row // width
    addend = tl.load(mask + atom[:, None] * width + tile.column[None, :], tile.mask, 0.0)
    score = _load(soft, tile) * scale + addend
    score = tl.where(tile.column_exists[None, :], score, float("-inf"))
    power = tl.exp(score - tl.max(score, 1)[:, None])
    p = power / tl.sum(power, 1)[:, None]
    e = _load_gate(gate, tile, width)
    tl.store(soft + tile.offset, p, tile.mask)
    tl.store(gated + tile.offset, p * e, tile.mask)


def attend_adjoint(v: Values, gated_bar: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `attention_rows`."""
    scores_bar = torch.empty_like(gated_bar)
    gate_bar = torch.empty_like(gated_bar)
    along = gated_bar.new_empty(*gated_bar.shape[:2], 1)
    _launch(
        _softmax_gradient_kernel,
        gated_bar,
        scores_hat=scores_bar,  # the kernel's hats are bars in pass 2
        along=along,
        gate_hat=gate_bar,
        gated_hat=gated_bar,
        gated=v.gated,
        soft=v.soft,
        second_order=None,
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


@triton.jit(do_not_specialize=["n_rows"])
def _attend_tangent_kernel(
    gated_dot,  # (n_rows, width), written: Ȧ
    scores_dot,  # (n_rows, width), in place: the tangent of QKᵀ, then Ṗ
    soft,  # (n_rows, width): P
    gate,  # Gate: E
    gate_dot,  # Gate: Ė
    n_rows,
    width,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write Ṗ = P∘(σ − Σ P∘σ) with σ = scale·(QKᵀ)˙, and Ȧ = Ṗ∘E + P∘Ė."""
    tile = _tile(n_rows, width, block_rows, block_width)
    sigma = _load(scores_dot, tile) * scale
    p = _load(soft, tile)
    p_dot = (sigma - tl.sum(p * sigma, 1)[:, None]) * p
    e = _load_gate(gate, tile, width)
    e_dot = _load_gate(gate_dot, tile, width)
    tl.store(scores_dot + tile.offset, p_dot, tile.mask)
    tl.store(gated_dot + tile.offset, p_dot * e + p * e_dot, tile.mask)


def attend_gradient(
    v: Values, a: Adjoints, t: Tangents, gated_hat: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`; `gated_hat` becomes the first result."""
    gate_hat = torch.empty_like(gated_hat)
    _launch(
        _softmax_gradient_kernel,
        gated_hat,
        scores_hat=gated_hat,
        along=None,
        gate_hat=gate_hat,
        gated_hat=gated_hat,
        gated=v.gated,
        soft=v.soft,
        second_order=SoftmaxSecondOrder(
            gated_bar=a.gated, soft_along=a.soft_along, gated_dot=t.gated, soft_dot=t.soft
        ),
        scale=scale,
    )
    return gated_hat, gate_hat


class SoftmaxSecondOrder(NamedTuple):
    """What passes 2 and 3 add to the gradient: the loss depends on Ā, too."""

    gated_bar: Any  # (n_rows, width): Ā
    soft_along: Any  # (n_rows,): Σ P∘P̄
    gated_dot: Any  # (n_rows, width): Ȧ
    soft_dot: Any  # (n_rows, width): Ṗ


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_gradient_kernel(
    scores_hat,  # (n_rows, width), written: the cotangent of QKᵀ; may be the memory of Â
    along,  # (n_rows,), written unless None: Σ B
    gate_hat,  # (n_rows, width), written: Ê
    gated_hat,  # (n_rows, width): Â
    gated,  # (n_rows, width): A
    soft,  # (n_rows, width): P
    second_order,  # SoftmaxSecondOrder in pass 4; None in pass 2, which reads Ā for Â
    n_rows,
    width,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write scale·(B − P·Σ B) with B = A∘Â, and Ê = P∘Â.

    In pass 4, B = A∘Â + Ȧ∘Ā; scale·(B − P·Σ B − Ṗ·soft_along), and Ê = P∘Â + Ṗ∘Ā.
    """
    tile = _tile(n_rows, width, block_rows, block_width)
    a_hat = _load(gated_hat, tile)
    p = _load(soft, tile)
    b = _load(gated, tile) * a_hat
    e_hat = p * a_hat
    if second_order is not None:
        a_bar = _load(second_order.gated_bar, tile)
        p_dot = _load(second_order.soft_dot, tile)
        b += _load(second_order.gated_dot, tile) * a_bar
        e_hat += p_dot * a_bar
    total = tl.sum(b, 1)
    score_hat = b - p * total[:, None]
    if second_order is not None:
        score_hat -= p_dot * _load_per_row(second_order.soft_along, tile)
    if along is not None:
        tl.store(along + tile.row, total, tile.row_exists)
    tl.store(scores_hat + tile.offset, score_hat * scale, tile.mask)
    tl.store(gate_hat + tile.offset, e_hat, tile.mask)


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


@triton.jit(do_not_specialize=["n_rows"])
def _normalise_kernel(
    z,  # (n_rows, width), written: Z; n_rows = nreal·ncolumns
    normed,  # (n_rows, width), in place: O·Wₒ, then N
    inverse_deviation,  # (n_rows,), written
    x,  # (n_rows, width)
    bias,  # (width,): bₒ
    gamma,  # (width,)
    beta,  # (width,)
    n_rows,
    width,
    eps: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write N = (S − mean)/deviation of S = O·Wₒ + X + bₒ, and Z = γ∘N + β."""
    tile = _tile(n_rows, width, block_rows, block_width)
    summed = _load(normed, tile) + _load(x, tile) + _load_per_column(bias, tile)
    centred = summed - (tl.sum(summed, 1) / width)[:, None]
    centred = tl.where(tile.column_exists[None, :], centred, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    n = centred * r[:, None]
    tl.store(inverse_deviation + tile.row, r, tile.row_exists)
    tl.store(normed + tile.offset, n, tile.mask)
    n_gamma = n * _load_per_column(gamma, tile)
    tl.store(z + tile.offset, n_gamma + _load_per_column(beta, tile), tile.mask)


def normalise_derivative(
    v: Values, x: Tensor, gamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `attention_rows`."""
    out = torch.empty_like(v.normed)
    along = torch.empty_like(v.inverse_deviation)
    _multiply_by_jacobian(
        x.contiguous(),
        out=out,
        along=along,
        gamma=gamma,
        y=v.normed,
        inverse=v.inverse_deviation,
        centred=True,
    )
    return out, along


def normalise_gradient(
    v: Values, a: Adjoints, t: Tangents, z_hat: Tensor | None, gamma: Tensor, eps: float
) -> Tensor:
    """See `attention_rows`."""
    out = torch.empty_like(v.normed)
    _multiply_by_jacobian(
        z_hat,
        out=out,
        gamma=gamma,
        y=v.normed,
        inverse=v.inverse_deviation,
        second_order=RowSecondOrder(
            x_bar=a.summed, bar_along=a.norm_along, y_dot=t.normed, dot_along=t.norm_along
        ),
        eps=eps,
        centred=True,
    )
    return out


# ----- derivatives of rescaled and of normalised rows --------------------------------------------
# Rescaled rows are y = r·x with r = 1/|x|; centred rows y = r·(x − mean) with r = 1/deviation. The
# Jacobian J = dy/dx is symmetric: the same product J·u takes cotangents of y to those of x, and
# tangents of x to those of y.


class RowSecondOrder(NamedTuple):
    """What passes 2 and 3 add to the gradient: the loss depends on x̄ = J·ȳ, too."""

    x_bar: Any  # (n_rows, width)
    bar_along: Any  # (n_rows,): `along` of u = ȳ
    y_dot: Any  # (n_rows, width)
    dot_along: Any  # (n_rows,): `along` of u = ẋ


def _multiply_by_jacobian(
    u: Tensor | None,
    *,
    out: Tensor,
    along: Tensor | None = None,
    gamma: Tensor | None = None,
    y: Tensor,
    inverse: Tensor,
    second_order: RowSecondOrder | None = None,
    eps: float = 0.0,
    centred: bool,
) -> None:
    """Launch `_row_jacobian_kernel`."""
    _launch(
        _row_jacobian_kernel,
        out,
        out=out,
        along=along,
        u=u,
        gamma=gamma,
        y=y,
        inverse=inverse,
        second_order=second_order,
        eps=eps,
        centred=centred,
    )


@triton.jit(do_not_specialize=["n_rows"])
def _row_jacobian_kernel(
    out,  # (n_rows, width), written; may be the memory of u, which is read before
    along,  # (n_rows,), written unless None
    u,  # (n_rows, width); None for 0
    gamma,  # (width,): factor of u; None for 1
    y,  # (n_rows, width)
    inverse,  # (n_rows,): r
    second_order,  # RowSecondOrder; None without
    n_rows,
    width,
    eps: tl.constexpr,  # of the deviation; read if centred
    centred: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Write J·(γ∘u) = r·(γ∘u − y·along) with along = Σ γ∘u∘y; Σ is the sum over a row.

    For centred rows Σ is the mean, and the mean of γ∘u is subtracted, too. With second order, also
    subtract y·Σ ẏ∘x̄ + r·(ẏ·bar_along + x̄·dot_along), and y·eps·r⁴·bar_along·dot_along if centred.
    """
    tile = _tile(n_rows, width, block_rows, block_width)
    y_tile = _load(y, tile)
    result = tl.zeros_like(y_tile)
    if second_order is not None:
        y_dot = _load(second_order.y_dot, tile)
        x_bar = _load(second_order.x_bar, tile)
        r = tl.load(inverse + tile.row, tile.row_exists, 0.0)
        bar_along = tl.load(second_order.bar_along + tile.row, tile.row_exists, 0.0)
        dot_along = tl.load(second_order.dot_along + tile.row, tile.row_exists, 0.0)
        y_factor = _sum_of_row(y_dot * x_bar, width, centred)
        if centred:
            y_factor += bar_along * dot_along * (r * r * r * r) * eps
        result -= y_tile * y_factor[:, None] + y_dot * (bar_along * r)[:, None]
        result -= x_bar * (dot_along * r)[:, None]
    if u is not None:
        gamma_u = _load(u, tile)
        if gamma is not None:
            gamma_u *= _load_per_column(gamma, tile)
        if centred:
            mean = tl.sum(gamma_u, 1) / width
        u_along = _sum_of_row(gamma_u * y_tile, width, centred)
        if along is not None:
            tl.store(along + tile.row, u_along, tile.row_exists)
        remainder = gamma_u - y_tile * u_along[:, None]
        if centred:
            remainder -= mean[:, None]
        result += remainder * _load_per_row(inverse, tile)
    tl.store(out + tile.offset, result, tile.mask)


@triton.jit
def _sum_of_row(values, width, centred: tl.constexpr):
    """Return Σ (block_rows,): the mean of each row if centred, else its sum."""
    total = tl.sum(values, 1)
    return total / width if centred else total
