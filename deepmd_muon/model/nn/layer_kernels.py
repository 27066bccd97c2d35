"""Triton kernels of the element-wise part of a layer; `layers` defines their results.

For tanh they keep its values, for other functions their arguments, as `activation` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.nn.activation import Formula
from deepmd_muon.model.nn.activation_kernels import curve, tanh

BLOCK = 512


@triton.jit
def _derivatives(kept, kind: tl.constexpr, curve_of: tl.constexpr):
    """Return f, f′ and f″ from what was kept."""
    if kind == "tanh":
        slope = 1.0 - kept * kept
        return kept, slope, -2.0 * kept * slope
    return curve(kept, kind, curve_of)


@triton.jit
def _forward_kernel(
    out, keep, bias, idt, x, count, width, n_in,
    curve_of: tl.constexpr, kind: tl.constexpr, scaled: tl.constexpr, residual: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store out = f(h)·idt + copies of x, with h = `keep` + bias; then keep f(h) for tanh, h for other functions."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    row, column = at // width, at % width
    value = tl.load(keep + at, real, 0.0) + tl.load(bias + column, real, 0.0)
    if kind == "tanh":
        value = tanh(value)
    tl.store(keep + at, value, real)
    if kind != "tanh":
        value = curve(value, kind, curve_of)[0]
    if scaled:
        value *= tl.load(idt + column, real, 0.0)
    if residual:
        value += tl.load(x + row * n_in + column % n_in, real, 0.0)
    tl.store(out + at, value, real)


@triton.jit
def _scalar_kernel(
    out,
    keep,
    x,
    w,
    start,
    count,
    width,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """Store out = f(h) with h = x·w + start; then keep h, except for tanh."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    row, column = at // width, at % width
    h = tl.load(start + at, real, 0.0) + tl.load(x + row, real, 0.0) * tl.load(
        w + column, real, 0.0
    )
    if kind == "tanh":
        tl.store(out + at, tanh(h), real)
    else:
        tl.store(keep + at, h, real)
        tl.store(out + at, curve(h, kind, curve_of)[0], real)


@triton.jit
def _slope_kernel(
    out, keep, idt, above, count, width, stride,
    curve_of: tl.constexpr, kind: tl.constexpr, scaled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store out = f′·idt·above; `stride` 0 reads one row of `above` for all."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    row, column = at // width, at % width
    slope = _derivatives(tl.load(keep + at, real, 0.0), kind, curve_of)[1]
    moved = tl.load(above + row * stride + column, real, 0.0)
    if scaled:
        moved *= tl.load(idt + column, real, 0.0)
    tl.store(out + at, slope * moved, real)


@triton.jit
def _tangent_kernel(
    out, keep, idt, before, tangent, count, width, n_in,
    curve_of: tl.constexpr, kind: tl.constexpr, scaled: tl.constexpr, residual: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store out = f′·before·idt + copies of the tangent below."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    row, column = at // width, at % width
    slope = _derivatives(tl.load(keep + at, real, 0.0), kind, curve_of)[1]
    result = slope * tl.load(before + at, real, 0.0)
    if scaled:
        result *= tl.load(idt + column, real, 0.0)
    if residual:
        result += tl.load(tangent + row * n_in + column % n_in, real, 0.0)
    tl.store(out + at, result, real)


@triton.jit
def _cotangent_kernel(
    out, keep, idt, before, down, adjoint, count, width, stride,
    curve_of: tl.constexpr, kind: tl.constexpr, scaled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """If `scaled`, the cotangent of idt per row; then those of h and of its tangent: `out` (2 or 3, rows, width)."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    row, column = at // width, at % width
    value, slope, bend = _derivatives(tl.load(keep + at, real, 0.0), kind, curve_of)
    tangent = tl.load(before + at, real, 0.0)
    up, along = tl.load(down + at, real, 0.0), tl.load(adjoint + row * stride + column, real, 0.0)
    if scaled:
        tl.store(out + at, value * up + slope * tangent * along, real)
        out += count
        scale = tl.load(idt + column, real, 0.0)
        up *= scale
        along *= scale
    tl.store(out + at, slope * up + bend * tangent * along, real)
    tl.store(out + count + at, slope * along, real)


def _form(formula: Formula) -> dict[str, Any]:
    return {**formula.constants, "block": BLOCK}


def _grid(keep: Tensor) -> tuple[int]:
    return (triton.cdiv(keep.numel(), BLOCK),)


def forward(
    z: Tensor, bias: Tensor, idt: Tensor | None, x: Tensor, *, residual: bool, formula: Formula
) -> tuple[Tensor, Tensor]:
    """Return the results of `layers.forward` from z = x·matrix, which is overwritten."""
    out = torch.empty_like(z)
    scaled = idt is not None
    sizes = z.numel(), z.shape[1], x.shape[1]
    _forward_kernel[_grid(z)](
        out,
        z,
        bias,
        idt if scaled else z,
        x,
        *sizes,
        scaled=scaled,
        residual=residual,
        **_form(formula),
    )
    return out, z


def forward_from_scalar(
    x: Tensor, w: Tensor, start: Tensor, formula: Formula
) -> tuple[Tensor, Tensor]:
    """See `layers.forward_from_scalar`."""
    out = torch.empty(start.shape, dtype=start.dtype, device=start.device)
    keep = out if formula.kind == "tanh" else torch.empty_like(out)
    tensors = x.contiguous(), w.contiguous(), start.contiguous()
    _scalar_kernel[_grid(out)](out, keep, *tensors, out.numel(), out.shape[1], **_form(formula))
    return out, keep


def _row_stride(above: Tensor) -> tuple[Tensor, int]:
    """Return a tensor whose rows are dense, and the distance between rows, 0 where all are one."""
    if above.stride(1) != 1 or above.stride(0) not in (0, above.shape[1]):
        above = above.contiguous()
    return above, above.stride(0)


def slope(keep: Tensor, idt: Tensor | None, above: Tensor, formula: Formula) -> Tensor:
    """See `layers.slope`."""
    out = torch.empty_like(keep)
    scaled = idt is not None
    above, stride = _row_stride(above)
    sizes = keep.numel(), keep.shape[1], stride
    _slope_kernel[_grid(keep)](
        out, keep, idt if scaled else keep, above, *sizes, scaled=scaled, **_form(formula)
    )
    return out


def tangent(
    keep: Tensor,
    idt: Tensor | None,
    before: Tensor,
    below: Tensor,
    *,
    residual: bool,
    formula: Formula,
) -> Tensor:
    """See `layers.tangent`."""
    out = torch.empty_like(keep)
    scaled = idt is not None
    sizes = keep.numel(), keep.shape[1], below.shape[1]
    below = below.contiguous()
    _tangent_kernel[_grid(keep)](
        out,
        keep,
        idt if scaled else keep,
        before,
        below,
        *sizes,
        scaled=scaled,
        residual=residual,
        **_form(formula),
    )
    return out


def cotangents(
    keep: Tensor,
    idt: Tensor | None,
    before: Tensor,
    down: Tensor,
    adjoint: Tensor,
    formula: Formula,
) -> Tensor:
    """See `layers.cotangents`."""
    scaled = idt is not None
    out = keep.new_empty(2 + scaled, *keep.shape)
    adjoint, stride = _row_stride(adjoint)
    sizes = keep.numel(), keep.shape[1], stride
    down = down.contiguous()
    _cotangent_kernel[_grid(keep)](
        out,
        keep,
        idt if scaled else keep,
        before,
        down,
        adjoint,
        *sizes,
        scaled=scaled,
        **_form(formula),
    )
    return out
