"""The embedding net of DPA-1 with written-out derivatives (see `four_passes`).

The net maps the radial component s of an edge, and the vectors of its two types, to features G. Its
first layer is

    h = s·w + start,   start = the products with the vectors, and the bias,

so that positions enter by s alone, and parameters by w, start and the later layers. The passes:

1. `value`: values go up the layers;
2. `adjoint`: Ḡ comes down the layers to s̄;
3. `tangent`: ṡ goes up the layers to Ġ;
4. `gradient`: cotangents of each layer's output and of its tangent come down together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors
from deepmd_muon.model.nn.networks import Copies, LayerTensors


class Inputs(NamedTuple):
    """The inputs of the operation."""

    s: Tensor  # (rows, 1), data without gradient
    start: Tensor  # (rows, n)
    w: Tensor  # (n,)
    later_layers: tuple[LayerTensors, ...]


class Saved(NamedTuple):
    """What pass 1 hands over to passes 2 to 4.

    A value "for derivatives" is what the activation's derivatives need (see `Activation.__call__`).
    """

    from_scalar: Tensor  # of the first layer, for derivatives
    inputs: tuple[Tensor, ...]  # of each later layer (rows, n)
    for_derivatives: tuple[Tensor, ...]  # of each later layer (rows, n)


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: the first three for pass 3, the cotangents for pass 4."""

    w: Tensor
    later_layers: tuple[LayerTensors, ...]
    saved: Saved
    bars: tuple[Tensor, ...]  # of each layer's output


class Tangents(NamedTuple):
    """What pass 3 hands over to pass 4."""

    s: Tensor  # ṡ (rows, 1)
    pre_activations: tuple[Tensor, ...]  # ḣ of every layer
    inputs: tuple[Tensor, ...]  # tangents of each later layer's input


@dataclass(frozen=True)
class Embedding(FourPasses):
    """The operation: `Inputs` to features (rows, M). The adjoint belongs to s.

    Attributes
    ----------
    activation
        f.
    copies
        How many copies of its input each later layer adds to its output; the first layer adds none.
    """

    activation: Activation
    copies: tuple[Copies, ...]

    def value(self, i: Inputs) -> tuple[Perhaps, Nested]:
        """Pass 1, see `FourPasses`."""
        value, from_scalar = layers.forward_from_scalar(self.activation, i.s, i.w, i.start)
        features, tape = layers.values(self.activation, self.copies, value, i.later_layers)
        return (features,), Saved(from_scalar, tuple(tape.inputs), tuple(tape.keeps))

    def adjoint(self, cotangents: Any, i: Inputs, saved: Saved) -> tuple[Tensors, Nested]:
        """Pass 2: return s̄."""
        (bar,) = cotangents
        f = self.activation
        bars = [bar]
        later_layers = zip(i.later_layers, self.copies, saved.for_derivatives, strict=True)
        for layer, copies, for_derivatives in reversed(list(later_layers)):
            h_bar = layers.slope(f, for_derivatives, layer.idt, bar)
            bar = layers.down(h_bar, layer, bar, copies)
            bars.append(bar)
        s_bar = torch.mm(layers.slope(f, saved.from_scalar, None, bar), i.w.unsqueeze(1))
        return (s_bar,), AdjointSaved(i.w, i.later_layers, saved, bars=tuple(reversed(bars)))

    def tangent(self, tangents: Any, adjoint_saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return Ġ, and `Tangents`."""
        (s_dot,) = tangents
        f = self.activation
        saved = adjoint_saved.saved
        h_dot = s_dot * adjoint_saved.w
        h_dots = [h_dot]
        out_dot = layers.tangent(f, saved.from_scalar, idt=None, h_dot=h_dot, x_dot=s_dot, copies=0)
        input_dots = []
        for layer, copies, for_derivatives in zip(
            adjoint_saved.later_layers, self.copies, saved.for_derivatives, strict=True
        ):
            input_dots.append(out_dot)
            h_dot = torch.mm(out_dot, layer.matrix)
            h_dots.append(h_dot)
            out_dot = layers.tangent(
                f, for_derivatives, idt=layer.idt, h_dot=h_dot, x_dot=out_dot, copies=copies
            )
        return (out_dot,), Tangents(s_dot, tuple(h_dots), tuple(input_dots))

    def gradient(
        self,
        cotangents: Any,
        i: Inputs,
        saved: Saved,
        adjoint_saved: AdjointSaved | None,
        dots: Tangents | None,
    ) -> Nested:
        """Pass 4: return the gradients of start, w and the weights."""
        (hat,) = cotangents
        f = self.activation
        if adjoint_saved is not None:
            bars = adjoint_saved.bars
            hat = torch.zeros_like(bars[-1]) if hat is None else hat
        reversed_gradients: list[Tensor | None] = []
        for index in reversed(range(len(self.copies))):
            layer = i.later_layers[index]
            x = saved.inputs[index]
            for_derivatives = saved.for_derivatives[index]
            if dots is None:
                h_hat, gradients = layers.plain_gradient(f, layer, x, for_derivatives, hat)
                reversed_gradients += gradients
            else:
                (h_hat, h_bar), bias_hat, idt_hat = layers.cotangents(
                    f,
                    for_derivatives,
                    layer.idt,
                    h_dot=dots.pre_activations[1 + index],
                    y_hat=hat,
                    y_bar=bars[1 + index],
                )
                matrix_hat = torch.mm(x.t(), h_hat).addmm_(dots.inputs[index].t(), h_bar)
                reversed_gradients += [idt_hat, bias_hat, matrix_hat]
            hat = layers.down(h_hat, layer, hat, self.copies[index])
        if dots is None:
            start_hat = layers.slope(f, saved.from_scalar, None, hat)
            w_hat = torch.mm(i.s.t(), start_hat)
        else:
            (start_hat, h_bar), _, _ = layers.cotangents(
                f,
                saved.from_scalar,
                None,
                h_dot=dots.pre_activations[0],
                y_hat=hat,
                y_bar=bars[0],
            )
            w_hat = torch.mm(i.s.t(), start_hat).addmm_(dots.s.t(), h_bar)
        return None, start_hat, w_hat.squeeze(0), *reversed_gradients[::-1]
