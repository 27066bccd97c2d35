"""A dense layer with its derivatives written out, and other operations with written-out transposes.

A layer is y = f(h)∘idt + copies of x with h = x·W + b (`deepmd_muon.model.nn.networks`). A bar
(`_bar`) marks derivatives of the energy, a dot (`_dot`) tangents, a hat (`_hat`) derivatives of the
loss, as in `four_passes`. `keep` holds the values that the derivatives of f need: f(h) or h, see
`Activation`.

| symbol  | argument | shape         | meaning                                                |
|---------|----------|---------------|--------------------------------------------------------|
| x, y, h |          | (rows, width) | input, output, and what f is applied to                |
| W, b    | `layer`  |               | `matrix` and `bias` of `LayerTensors`                  |
| idt     | `idt`    | (n,)          | time step; None for 1                                  |
|         | `copies` |               | copies of x that y contains side by side: 0, 1 or 2    |

Where kernels know f, the element-wise part of a function here is one launch on a GPU
(`layer_kernels`). Elsewhere it is a few of torch's operations, which define the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.networks import Copies, LayerTensors

# ----- one layer ----------------------------------------------------------------------------------


def repeat(x: Tensor, copies: Copies) -> Tensor:
    """Return 1 or 2 copies of x side by side, as a residual layer adds them."""
    return torch.cat([x, x], dim=1) if copies == 2 else x


def fold(x: Tensor, copies: Copies) -> Tensor:
    """Apply the transpose of `repeat`; with 1 copy, return x itself."""
    if copies != 2:
        return x
    half = x.shape[1] // 2
    return x[:, :half] + x[:, half:]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; a single part is not copied."""
    if len(parts) == 1:
        (rows,) = parts
        return rows
    return torch.cat(list(parts))


def _kernels(f: Activation, tensor: Tensor) -> Any:
    """Return the module of Triton kernels if they can be used, else None."""
    if f.formula is None or not tensor.numel() or not triton_support.usable(tensor.device):
        return None
    from deepmd_muon.model.nn import layer_kernels

    return layer_kernels


def forward(f: Activation, layer: LayerTensors, x: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    """Return y `(rows, n)` and `keep`."""
    kernels = _kernels(f, x)
    if kernels is not None:
        # A product without bias: cuBLAS is slower if it adds one in float64.
        z = torch.mm(x, layer.matrix)
        result: tuple[Tensor, Tensor] = kernels.forward(
            z, layer.bias, layer.idt, x, residual=copies > 0, formula=f.formula
        )
        return result
    value, keep = f(torch.addmm(layer.bias, x, layer.matrix))
    out = value if layer.idt is None else value * layer.idt
    return out + repeat(x, copies) if copies else out, keep


def forward_from_scalar(
    f: Activation, x: Tensor, w: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return f(h) `(rows, n)` and `keep` with h = x·w + start.

    x is one number for each row `(rows, 1)`, w `(n,)`, start `(rows, n)`.
    """
    kernels = _kernels(f, start)
    if kernels is not None:
        result: tuple[Tensor, Tensor] = kernels.forward_from_scalar(x, w, start, f.formula)
        return result
    return f(torch.addcmul(start, x, w))


def slope(f: Activation, keep: Tensor, idt: Tensor | None, y_bar: Tensor) -> Tensor:
    """Return h̄ = f′(h)∘idt∘ȳ `(rows, n)`."""
    kernels = _kernels(f, keep)
    if kernels is not None:
        h_bar: Tensor = kernels.slope(keep, idt, y_bar, f.formula)
        return h_bar
    return f.times_slope(keep, y_bar if idt is None else y_bar * idt)


def tangent(
    f: Activation, keep: Tensor, idt: Tensor | None, h_dot: Tensor, x_dot: Tensor, copies: Copies
) -> Tensor:
    """Return ẏ = f′(h)∘ḣ∘idt + copies of ẋ `(rows, n)`."""
    kernels = _kernels(f, keep)
    if kernels is not None:
        y_dot: Tensor = kernels.tangent(
            keep, idt, h_dot, x_dot, residual=copies > 0, formula=f.formula
        )
        return y_dot
    value_dot = f.times_slope(keep, h_dot)
    out = value_dot if idt is None else value_dot * idt
    return out + repeat(x_dot, copies) if copies else out


def cotangents(
    f: Activation, keep: Tensor, idt: Tensor | None, h_dot: Tensor, y_hat: Tensor, y_bar: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Differentiate ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩ by h, ḣ, the bias and idt.

    Returns
    -------
    tuple
        ĥ and h̄ `(2, rows, n)`, the gradient of the bias `(n,)`, and the gradient of idt `(n,)` or
        None.
    """
    kernels = _kernels(f, keep)
    if kernels is not None:
        out = kernels.cotangents(keep, idt, h_dot, y_hat=y_hat, y_bar=y_bar, formula=f.formula)
        if idt is None:
            return out, out[0].sum(0), None
        idt_hat, bias_hat = out[:2].sum(1)  # before ĥ and h̄, `out` has the terms of idt's gradient
        return out[1:], bias_hat, idt_hat
    pair = torch.stack([y_hat, y_bar])
    idt_hat = None
    if idt is not None:
        terms = torch.addcmul(f.value_of(keep) * y_hat, f.times_slope(keep, h_dot), pair[1])
        idt_hat = terms.sum(0)
        pair *= idt
    f.pull_back_(keep, h_dot, pair)  # in place: ŷ and ȳ become ĥ and h̄
    return pair, pair[0].sum(0), idt_hat


def down(
    h_bar: Tensor, layer: LayerTensors, y_bar: Tensor, copies: Copies, out: Tensor | None = None
) -> Tensor:
    """Return x̄ = h̄·Wᵀ + the transpose of the copies of ȳ, in `out` if it is given."""
    if not copies:
        return torch.mm(h_bar, layer.matrix.t(), out=out)
    if copies == 2 and out is None:
        # In place: with two copies, `fold` returns a new tensor.
        return fold(y_bar, copies).addmm_(h_bar, layer.matrix.t())
    return torch.addmm(fold(y_bar, copies), h_bar, layer.matrix.t(), out=out)


# ----- a network without a last linear layer ------------------------------------------------------


def plain_values(
    f: Activation, copies: Sequence[Copies], x: Tensor, layers: Sequence[LayerTensors]
) -> Tensor:
    """Return the result of `values`, differentiated by autograd."""
    for layer, layer_copies in zip(layers, copies, strict=True):
        value = f.value(torch.addmm(layer.bias, x, layer.matrix))
        out = value if layer.idt is None else value * layer.idt
        x = out + repeat(x, layer_copies) if layer_copies else out
    return x


class Tape(NamedTuple):
    """Tensors for the gradients of `values`: input and `keep` of each layer."""

    inputs: list[Tensor]
    keeps: list[Tensor]


def values(
    f: Activation, copies: Sequence[Copies], x: Tensor, layers: Sequence[LayerTensors]
) -> tuple[Tensor, Tape]:
    """Return the features `(rows, n)` of a network, and the tape."""
    tape = Tape([], [])
    for layer, layer_copies in zip(layers, copies, strict=True):
        out, keep = forward(f, layer, x, layer_copies)
        tape.inputs.append(x)
        tape.keeps.append(keep)
        x = out
    return x, tape


def plain_gradient(
    f: Activation, layer: LayerTensors, x: Tensor, keep: Tensor, y_hat: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return ĥ, and the gradients of idt, bias and matrix, from ŷ alone.

    They are in the reverse order of `LayerTensors`: callers go through layers from the last to the
    first, and reverse all gradients at the end.
    """
    idt_hat = None if layer.idt is None else (f.value_of(keep) * y_hat).sum(0)
    h_hat = slope(f, keep, layer.idt, y_hat)
    return h_hat, [idt_hat, h_hat.sum(0), torch.mm(x.t(), h_hat)]


def pull_values(
    f: Activation,
    copies: Sequence[Copies],
    tape: Tape,
    layers: Sequence[LayerTensors],
    y_hat: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of matrix, bias and idt of every layer from that of the features.

    Inputs of the first layer get none.
    """
    gradients: list[Tensor | None] = []
    for index in reversed(range(len(layers))):
        layer = layers[index]
        h_hat, layer_gradients = plain_gradient(
            f, layer, tape.inputs[index], tape.keeps[index], y_hat
        )
        gradients += layer_gradients
        if index:
            y_hat = down(h_hat, layer, y_hat, copies[index])
    return gradients[::-1]


# ----- linear maps --------------------------------------------------------------------------------

_Map = Callable[..., Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, apply: _Map, transpose: _Map, x: Tensor, *data: Tensor) -> Tensor:
        ctx.map = apply
        ctx.transpose = transpose
        ctx.save_for_backward(*data)
        return apply(x, *data)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        data = ctx.saved_tensors
        # The transpose is linear, too: its transpose is the map itself.
        x_bar = linear(ctx.transpose, ctx.map, cotangent, *data)
        return None, None, x_bar, *(None for _ in data)


def linear(apply: _Map, transpose: _Map, x: Tensor, *data: Tensor) -> Tensor:
    """Return ``apply(x, *data)``, differentiable any number of times.

    Parameters
    ----------
    apply, transpose
        A map that is linear in its first argument, and its transpose.
    x
        The argument that has a derivative.
    data
        Further arguments of both; they have none.
    """
    out: Tensor = _Linear.apply(apply, transpose, x, *data)
    return out
