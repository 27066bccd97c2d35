"""What a dense layer does between its matrix products, for values, tangents and their cotangents.

A layer is y = f(h)·idt + copies of x with h = x·matrix + bias (`deepmd_muon.model.networks`). Each function here is
one launch on a GPU where f is tanh, and a few of torch's operations elsewhere, which define the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation, Tanh
from deepmd_muon.model.networks import Copies, unflatten


def repeat(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return copies of x side by side, as a residual layer adds them."""
    return torch.cat([x, x], dim=1) if copies == 2 else x


def fold(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Apply the transpose of `repeat`."""
    return x.view(x.shape[0], 2, -1).sum(1) if copies == 2 else x


def _fused(f: Activation, tensor: torch.Tensor) -> Any:
    """Return the module of Triton kernels where they can be used."""
    if not isinstance(f, Tanh) or not tensor.numel() or not kernels.usable(tensor.device):
        return None
    from deepmd_muon.model import layer_kernels

    return layer_kernels


def forward(
    f: Activation, h: torch.Tensor, idt: torch.Tensor | None, x: torch.Tensor, copies: Copies
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y `(rows, n)` and what the derivatives need of f(h); `h` may be overwritten."""
    fused = _fused(f, h)
    if fused is not None:
        both: tuple[torch.Tensor, torch.Tensor] = fused.forward(h, idt, x, residual=copies > 0)
        return both
    value, keep = f(h)
    out = value if idt is None else value * idt
    return out + repeat(x, copies) if copies else out, keep


def slope(f: Activation, keep: torch.Tensor, idt: torch.Tensor | None, above: torch.Tensor) -> torch.Tensor:
    """Return the cotangent of h `(rows, n)` from that of y."""
    fused = _fused(f, keep)
    if fused is not None:
        out: torch.Tensor = fused.slope(keep, idt, above)
        return out
    return f.times_slope(keep, above if idt is None else above * idt)


def tangent(
    f: Activation,
    keep: torch.Tensor,
    idt: torch.Tensor | None,
    before: torch.Tensor,
    below: torch.Tensor,
    copies: Copies,
) -> torch.Tensor:
    """Return the tangent of y from those of h (`before`) and x (`below`)."""
    fused = _fused(f, keep)
    if fused is not None:
        result: torch.Tensor = fused.tangent(keep, idt, before, below, residual=copies > 0)
        return result
    moved = f.times_slope(keep, before)
    out = moved if idt is None else moved * idt
    return out + repeat(below, copies) if copies else out


def cotangents(
    f: Activation,
    keep: torch.Tensor,
    idt: torch.Tensor | None,
    before: torch.Tensor,
    down: torch.Tensor,
    adjoint: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pull cotangents of (y, its tangent), `down` and `adjoint`, back to (h, its tangent).

    Returns
    -------
    tuple
        Both cotangents `(2, rows, n)`, the gradient of the bias `(n,)` and that of idt.
    """
    fused = _fused(f, keep)
    if fused is not None:
        found = fused.cotangents(keep, idt, before, down, adjoint)
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


class Values(torch.autograd.Function):
    """The features of a network without a last linear layer `(rows, n)`.

    Arguments: activation, copies of every layer, x `(rows, n_in)`, then matrix, bias, idt of every layer. x is data.
    """

    @staticmethod
    def forward(
        ctx: Any, f: Activation, copies: tuple[Copies, ...], x: torch.Tensor, *flat: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the last layer's output."""
        inputs, keeps = [x], []
        for layer, kind in zip(unflatten(flat), copies, strict=True):
            h = torch.addmm(layer.bias, inputs[-1], layer.matrix)
            out, keep = forward(f, h, layer.idt, inputs[-1], kind)
            inputs.append(out)
            keeps.append(keep)
        ctx.activation, ctx.copies = f, copies
        ctx.save_for_backward(*inputs[:-1], *keeps, *flat)
        return inputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        """Return the gradient of every layer's tensors."""
        f, depth = ctx.activation, len(ctx.copies)
        inputs, keeps = ctx.saved_tensors[:depth], ctx.saved_tensors[depth : 2 * depth]
        layers = unflatten(ctx.saved_tensors[2 * depth :])
        gradients: list[torch.Tensor | None] = []
        for index in reversed(range(depth)):
            layer, kind = layers[index], ctx.copies[index]
            of_idt = None if layer.idt is None else (f.value_of(keeps[index]) * cotangent).sum(0)
            of_h = slope(f, keeps[index], layer.idt, cotangent)
            gradients += [of_idt, of_h.sum(0), torch.mm(inputs[index].t(), of_h)]
            if index == 0:
                break
            if kind:
                cotangent = torch.addmm(fold(cotangent, kind), of_h, layer.matrix.t())
            else:
                cotangent = torch.mm(of_h, layer.matrix.t())
        return (None, None, None, *reversed(gradients))


values: Callable[..., torch.Tensor] = Values.apply  # torch leaves `apply` untyped
