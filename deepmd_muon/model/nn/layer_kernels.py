"""Triton kernels of the element-wise part of a layer, and activation functions for other kernels.

A layer is y = f(h)∘idt + copies of x with h = x·W + b. A kernel reads each element once; `layers`
has the same functions in torch's operations, which define the results (`test_layer_kernels`
compares them). `keep` holds what the derivatives need, as in `activation`: f(h) for tanh, and h for
other functions.

| symbol | name            | shape         | meaning                                       |
|--------|-----------------|---------------|-----------------------------------------------|
| y      | `y`             | (rows, width) | output                                        |
| h      | `keep`          | (rows, width) | argument of f, or f(h) for tanh               |
| b, idt | `bias`, `idt`   | (width,)      | bias, and factor of f(h)                      |
| x      | `x`             | (rows, n_in)  | input; width = copies·n_in if there are copies |
| ẋ, ḣ, ẏ | `_dot`         | like x, h, y  | tangents                                      |
| h̄, ȳ   | `_bar`          | like h, y     | derivatives of the energy                     |
| ĥ, ŷ   | `_hat`          | like h, y     | derivatives of the loss                       |
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.nn.activation import Formula

BLOCK = 512  # elements of (rows, width) that one program computes

# ----- activation functions; `activation` defines their results -----------------------------------


@triton.jit
def tanh(x):
    """As torch on CPUs computes it in this package: off by 2e-16 at most in float64."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def curve(h, kind: tl.constexpr, curve_constants: tl.constexpr):
    """Return f(h), f′(h) and f″(h).

    `kind` and `curve_constants`, which are threshold, rate and start, come from
    `activation.Formula.kernel_arguments`. The compiler drops the results that a caller does not
    use.
    """
    if kind == "tanh":
        value = tanh(h)
        slope = 1.0 - value * value
        return value, slope, -2.0 * value * slope
    # silu: f = h·σ(h), f′ = σ + h·σ(1 − σ), f″ = σ(1 − σ)·(2 + h·(1 − 2σ)).
    # silut is silu up to the threshold, then start + tanh(rate·(h − threshold)). One sigmoid serves
    # both pieces: with u = rate·(h − threshold) and σ = σ(2u), tanh u = 2σ − 1 and
    # 1 − tanh² u = 4σ(1 − σ).
    x = h
    if kind == "silut":
        # Arguments and variables would be rounded to single precision; constants are not.
        threshold: tl.constexpr = curve_constants[0]
        rate: tl.constexpr = curve_constants[1]
        start: tl.constexpr = curve_constants[2]
        past = h - threshold  # a comparison would round the constant
        x = tl.where(past >= 0.0, 2.0 * rate * past, h)
    sigmoid = tl.sigmoid(x)
    complement = 1.0 - sigmoid
    product = sigmoid * complement  # σ(1 − σ)
    turn = complement - sigmoid  # 1 − 2σ
    q = h * product
    value = h * sigmoid
    slope = sigmoid + q
    bend = 2.0 * product + q * turn
    if kind == "silut":
        value = tl.where(past >= 0.0, start - turn, value)
        slope = tl.where(past >= 0.0, 4.0 * rate * product, slope)
        bend = tl.where(past >= 0.0, 8.0 * rate * rate * product * turn, bend)
    return value, slope, bend


@triton.jit
def _derivatives(keep, kind: tl.constexpr, curve_constants: tl.constexpr):
    """Return f, f′ and f″ from an element of `keep`."""
    if kind == "tanh":
        slope = 1.0 - keep * keep
        return keep, slope, -2.0 * keep * slope
    return curve(keep, kind, curve_constants)


# ----- kernels: a program computes `block` elements of (rows, width) ------------------------------


@triton.jit
def _elements(count, width, block: tl.constexpr):
    """Return the flat indices of this program's elements, their mask, rows and columns."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return index, index < count, index // width, index % width


@triton.jit
def _push_kernel(
    y,  # (rows, width), written: y, or ẏ with ḣ
    keep,  # (rows, width): x·W, overwritten; with ḣ only read
    bias,  # (width,); None with ḣ
    idt,  # (width,); None for 1
    h_dot,  # (rows, width); None for values
    x,  # (rows, n_in): x, or ẋ with ḣ; None without copies
    n_in,
    count,  # rows·width
    width,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """Y = f(h)∘idt + copies of x with h = x·W + b, or ẏ = f′(h)∘ḣ∘idt + copies of ẋ."""
    index, mask, row, column = _elements(count, width, block)
    kept = tl.load(keep + index, mask, 0.0)
    if h_dot is None:
        value = kept + tl.load(bias + column, mask, 0.0)
        # `keep` is overwritten by h, or by tanh h, from which all derivatives of tanh follow.
        if kind == "tanh":
            value = tanh(value)
        tl.store(keep + index, value, mask)
        if kind != "tanh":
            value = curve(value, kind, curve_constants)[0]
    else:
        _, slope, _ = _derivatives(kept, kind, curve_constants)
        value = slope * tl.load(h_dot + index, mask, 0.0)
    if idt is not None:
        value *= tl.load(idt + column, mask, 0.0)
    if x is not None:
        value += tl.load(x + row * n_in + column % n_in, mask, 0.0)
    tl.store(y + index, value, mask)


@triton.jit
def _scalar_kernel(
    out,  # (rows, width), written
    keep,  # (rows, width), written except for tanh
    x,  # (rows,)
    w,  # (width,)
    start,  # (rows, width)
    count,  # rows·width
    width,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """f(h) with h = x⊗w + start."""
    index, mask, row, column = _elements(count, width, block)
    x_value = tl.load(x + row, mask, 0.0)
    h = tl.load(start + index, mask, 0.0) + x_value * tl.load(w + column, mask, 0.0)
    if kind == "tanh":
        tl.store(out + index, tanh(h), mask)
    else:
        tl.store(keep + index, h, mask)
        tl.store(out + index, curve(h, kind, curve_constants)[0], mask)


@triton.jit
def _pull_kernel(
    out,  # ([1 +] 2, rows, width), written: [terms of the gradient of idt if any,] ĥ and h̄; or ĥ
    keep,  # (rows, width)
    idt,  # (width,); None for 1
    h_dot,  # (rows, width); None without ȳ
    y_hat,  # (rows, width), or one row for all if its stride is 0: cotangent of y
    hat_stride,  # between rows of ŷ
    y_bar,  # like ŷ: cotangent of ẏ; None without
    bar_stride,  # between rows of ȳ
    count,  # rows·width
    width,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """Differentiate ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩ by h and ḣ, and row by row by idt.

    ĥ = idt∘(f′(h)∘ŷ + f″(h)∘ḣ∘ȳ), h̄ = idt∘f′(h)∘ȳ; the gradient of idt sums f(h)∘ŷ + f′(h)∘ḣ∘ȳ
    over rows. Without ȳ only ĥ = idt∘f′(h)∘ŷ.
    """
    index, mask, row, column = _elements(count, width, block)
    value, slope, bend = _derivatives(tl.load(keep + index, mask, 0.0), kind, curve_constants)
    hat = tl.load(y_hat + row * hat_stride + column, mask, 0.0)
    if y_bar is not None:
        dot = tl.load(h_dot + index, mask, 0.0)
        bar = tl.load(y_bar + row * bar_stride + column, mask, 0.0)
        if idt is not None:
            tl.store(out + index, value * hat + slope * dot * bar, mask)
            out += count  # ĥ and h̄ come behind the terms of the gradient of idt
    if idt is not None:
        scale = tl.load(idt + column, mask, 0.0)
        hat *= scale
        if y_bar is not None:
            bar *= scale
    h_hat = slope * hat
    if y_bar is not None:
        h_hat += bend * dot * bar
        tl.store(out + count + index, slope * bar, mask)
    tl.store(out + index, h_hat, mask)


# ----- launches -----------------------------------------------------------------------------------


def _grid(keep: Tensor) -> tuple[int]:
    return (triton.cdiv(keep.numel(), BLOCK),)


def _common(keep: Tensor, formula: Formula) -> dict[str, Any]:
    """Return the arguments that all kernels on matrices like `keep` share."""
    return {
        "count": keep.numel(),
        "width": keep.shape[1],
        "block": BLOCK,
        **formula.kernel_arguments,
    }


def _dense_rows(y_bar: Tensor) -> tuple[Tensor, int]:
    """Return a tensor with dense rows, and the distance between rows: 0 if all are the same row."""
    if y_bar.stride(1) != 1 or y_bar.stride(0) not in (0, y_bar.shape[1]):
        y_bar = y_bar.contiguous()
    return y_bar, y_bar.stride(0)


def forward(
    z: Tensor, bias: Tensor, idt: Tensor | None, x: Tensor, *, residual: bool, formula: Formula
) -> tuple[Tensor, Tensor]:
    """Return the results of `layers.forward` from z = x·W, which is overwritten."""
    y = torch.empty_like(z)
    _push_kernel[_grid(z)](
        y=y,
        keep=z,
        bias=bias,
        idt=idt,
        h_dot=None,
        x=x if residual else None,
        n_in=x.shape[1],
        **_common(z, formula),
    )
    return y, z


def forward_from_scalar(
    x: Tensor, w: Tensor, start: Tensor, formula: Formula
) -> tuple[Tensor, Tensor]:
    """Return the results of `layers.forward_from_scalar`."""
    out = torch.empty(start.shape, dtype=start.dtype, device=start.device)
    keep = out if formula.kind == "tanh" else torch.empty_like(out)
    _scalar_kernel[_grid(out)](
        out=out,
        keep=keep,
        x=x.contiguous(),
        w=w.contiguous(),
        start=start.contiguous(),
        **_common(out, formula),
    )
    return out, keep


def slope(keep: Tensor, idt: Tensor | None, y_bar: Tensor, formula: Formula) -> Tensor:
    """Return the result of `layers.slope`."""
    h_bar = torch.empty_like(keep)
    y_bar, stride = _dense_rows(y_bar)
    _pull_kernel[_grid(keep)](
        out=h_bar,
        keep=keep,
        idt=idt,
        h_dot=None,
        y_hat=y_bar,
        hat_stride=stride,
        y_bar=None,
        bar_stride=0,
        **_common(keep, formula),
    )
    return h_bar


def tangent(
    keep: Tensor,
    idt: Tensor | None,
    h_dot: Tensor,
    x_dot: Tensor,
    *,
    residual: bool,
    formula: Formula,
) -> Tensor:
    """Return the result of `layers.tangent`."""
    y_dot = torch.empty_like(keep)
    _push_kernel[_grid(keep)](
        y=y_dot,
        keep=keep,
        bias=None,
        idt=idt,
        h_dot=h_dot,
        x=x_dot.contiguous() if residual else None,
        n_in=x_dot.shape[1],
        **_common(keep, formula),
    )
    return y_dot


def cotangents(
    keep: Tensor,
    idt: Tensor | None,
    h_dot: Tensor,
    y_hat: Tensor,
    y_bar: Tensor,
    formula: Formula,
) -> Tensor:
    """Return ĥ and h̄ `(2, rows, width)`, and with idt before them the terms of its gradient."""
    out = keep.new_empty(2 if idt is None else 3, *keep.shape)
    y_hat, hat_stride = _dense_rows(y_hat)
    y_bar, bar_stride = _dense_rows(y_bar)
    _pull_kernel[_grid(keep)](
        out=out,
        keep=keep,
        idt=idt,
        h_dot=h_dot,
        y_hat=y_hat,
        hat_stride=hat_stride,
        y_bar=y_bar,
        bar_stride=bar_stride,
        **_common(keep, formula),
    )
    return out
