"""A dense layer, and the element-wise parts of its tangents and cotangents.

A layer is y = f(h)·idt + copies of x with h = x·matrix + bias (`deepmd_muon.model.nn.networks`). Where kernels know f,
the element-wise part of a function here is one launch on a GPU. Elsewhere it is a few of torch's operations, which
define the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.networks import Copies, LayerTensors


def repeat(x: Tensor, copies: Copies) -> Tensor:
    """Return copies of x side by side, as a residual layer adds them."""
    return torch.cat([x, x], dim=1) if copies == 2 else x


def fold(x: Tensor, copies: Copies) -> Tensor:
    """Apply the transpose of `repeat`."""
    if copies != 2:
        return x
    half = x.shape[1] // 2
    return x[:, :half] + x[:, half:]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; the only part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _fused(f: Activation, tensor: Tensor) -> Any:
    """Return the module of Triton kernels where they can be used."""
    if f.formula is None or not tensor.numel() or not triton_support.usable(tensor.device):
        return None
    from deepmd_muon.model.nn import layer_kernels

    return layer_kernels


def forward(f: Activation, layer: LayerTensors, x: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    """Return y `(rows, n)` and the values of f(h) that the derivatives need."""
    fused = _fused(f, x)
    if fused is not None:
        # A product of its own: cuBLAS is slower where it adds a bias in float64.
        z = torch.mm(x, layer.matrix)
        both: tuple[Tensor, Tensor] = fused.forward(
            z, layer.bias, layer.idt, x, residual=copies > 0, formula=f.formula
        )
        return both
    value, keep = f(torch.addmm(layer.bias, x, layer.matrix))
    out = value if layer.idt is None else value * layer.idt
    return out + repeat(x, copies) if copies else out, keep


def forward_from_scalar(
    f: Activation, x: Tensor, w: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return f(h) `(rows, n)` with h = x·w + start, and the values that the derivatives need.

    x is one number for each row `(rows, 1)`, w `(n,)`, start `(rows, n)`.
    """
    fused = _fused(f, start)
    if fused is not None:
        both: tuple[Tensor, Tensor] = fused.forward_from_scalar(x, w, start, f.formula)
        return both
    return f(torch.addcmul(start, x, w))


def slope(f: Activation, keep: Tensor, idt: Tensor | None, above: Tensor) -> Tensor:
    """Return the cotangent of h `(rows, n)` from that of y."""
    fused = _fused(f, keep)
    if fused is not None:
        out: Tensor = fused.slope(keep, idt, above, f.formula)
        return out
    return f.times_slope(keep, above if idt is None else above * idt)


def tangent(
    f: Activation, keep: Tensor, idt: Tensor | None, before: Tensor, below: Tensor, copies: Copies
) -> Tensor:
    """Return the tangent of y from those of h (`before`) and x (`below`)."""
    fused = _fused(f, keep)
    if fused is not None:
        result: Tensor = fused.tangent(
            keep, idt, before, below, residual=copies > 0, formula=f.formula
        )
        return result
    moved = f.times_slope(keep, before)
    out = moved if idt is None else moved * idt
    return out + repeat(below, copies) if copies else out


def cotangents(
    f: Activation, keep: Tensor, idt: Tensor | None, before: Tensor, down: Tensor, adjoint: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pull cotangents of (y, its tangent), `down` and `adjoint`, back to (h, its tangent).

    Returns
    -------
    tuple
        Both cotangents `(2, rows, n)`, the gradient of the bias `(n,)` and that of idt.
    """
    fused = _fused(f, keep)
    if fused is not None:
        found = fused.cotangents(keep, idt, before, down, adjoint, f.formula)
        if idt is None:
            return found, found[0].sum(0), None
        of_idt, of_bias = found[:2].sum(1)
        return found[1:], of_bias, of_idt
    pair = torch.stack([down, adjoint])
    of_idt = None
    if idt is not None:
        of_idt = torch.addcmul(f.value_of(keep) * down, f.times_slope(keep, before), pair[1]).sum(0)
        pair *= idt
    f.pull_back_(keep, before, pair)
    return pair, pair[0].sum(0), of_idt


def down(
    of_h: Tensor, layer: LayerTensors, above: Tensor, copies: Copies, out: Tensor | None = None
) -> Tensor:
    """Return the cotangent of a layer's input from those of h and of its output."""
    if not copies:
        return torch.mm(of_h, layer.matrix.t(), out=out)
    if copies == 2 and out is None:
        return fold(above, copies).addmm_(of_h, layer.matrix.t())
    return torch.addmm(fold(above, copies), of_h, layer.matrix.t(), out=out)


def plain_values(
    f: Activation, copies: Sequence[Copies], x: Tensor, layers: Sequence[LayerTensors]
) -> Tensor:
    """Return the result of `values`, differentiated by autograd."""
    for layer, kind in zip(layers, copies, strict=True):
        value = f.value(torch.addmm(layer.bias, x, layer.matrix))
        out = value if layer.idt is None else value * layer.idt
        x = out + repeat(x, kind) if kind else out
    return x


class Tape(NamedTuple):
    """Tensors for the backward pass of `values`: each layer's input, and the saved values of its activation."""

    inputs: list[Tensor]
    keeps: list[Tensor]


def values(
    f: Activation, copies: Sequence[Copies], x: Tensor, layers: Sequence[LayerTensors]
) -> tuple[Tensor, Tape]:
    """Return the features `(rows, n)` of a network without a last linear layer."""
    tape = Tape([], [])
    for layer, kind in zip(layers, copies, strict=True):
        out, keep = forward(f, layer, x, kind)
        tape.inputs.append(x)
        tape.keeps.append(keep)
        x = out
    return x, tape


def plain_gradient(
    f: Activation, layer: LayerTensors, x: Tensor, keep: Tensor, cotangent: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the cotangent of h, and the gradients of idt, bias and matrix, from the cotangent of y alone."""
    of_idt = None if layer.idt is None else (f.value_of(keep) * cotangent).sum(0)
    of_h = slope(f, keep, layer.idt, cotangent)
    return of_h, [of_idt, of_h.sum(0), torch.mm(x.t(), of_h)]


def pull_values(
    f: Activation,
    copies: Sequence[Copies],
    tape: Tape,
    layers: Sequence[LayerTensors],
    cotangent: Tensor,
) -> list[Tensor | None]:
    """Return the gradient of every layer's matrix, bias and idt from that of the features."""
    gradients: list[Tensor | None] = []
    for index in reversed(range(len(layers))):
        layer, kind, x, keep = layers[index], copies[index], tape.inputs[index], tape.keeps[index]
        of_h, found = plain_gradient(f, layer, x, keep, cotangent)
        gradients += found
        if index:
            cotangent = down(of_h, layer, cotangent, kind)
    return gradients[::-1]
