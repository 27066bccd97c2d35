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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors
from deepmd_muon.model.nn.networks import Copies, LayerTensors, unflatten


class Inputs(NamedTuple):
    """The inputs of the operation."""

    s: Tensor  # (rows, 1), data without gradient
    start: Tensor  # (rows, n)
    w: Tensor  # (n,)
    weights: Sequence[Tensor | None]  # matrix, bias, idt of each later layer

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Inputs:
        """Name the inputs as they come."""
        s, start, w, *weights = tensors
        return cls(s, start, w, weights)

    @property
    def layers(self) -> list[LayerTensors]:
        """The later layers."""
        return unflatten(self.weights)[0] if self.weights else []


class Saved(NamedTuple):
    """What the passes remember for `depth` later layers.

    A value "for derivatives" is what the activation's derivatives need (see `Activation.__call__`).
    """

    from_scalar: Tensor  # of the first layer, for derivatives
    inputs: Sequence[Tensor]  # of each later layer (rows, n)
    for_derivatives: Sequence[Tensor]  # of each later layer (rows, n)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], depth: int) -> Saved:
        """Name the tensors that `flat` returned."""
        return cls(tensors[0], tensors[1 : 1 + depth], tensors[1 + depth :])

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in a row, as autograd saves them."""
        return self.from_scalar, *self.inputs, *self.for_derivatives


class Tangents(NamedTuple):
    """What pass 3 hands over to pass 4."""

    s: Tensor  # ṡ (rows, 1)
    pre_activations: Sequence[Tensor]  # ḣ of every layer
    inputs: Sequence[Tensor]  # tangents of each later layer's input

    @classmethod
    def of(cls, tensors: Sequence[Tensor], depth: int) -> Tangents:
        """Name the tensors that `flat` returned."""
        return cls(tensors[0], tensors[1 : 2 + depth], tensors[2 + depth :])

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in a row, as autograd saves them."""
        return self.s, *self.pre_activations, *self.inputs


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

    def value(self, inputs: Any) -> tuple[Perhaps, Perhaps]:
        """Pass 1, see `FourPasses`."""
        i = Inputs.of(inputs)
        value, from_scalar = layers.forward_from_scalar(self.activation, i.s, i.w, i.start)
        features, tape = layers.values(self.activation, self.copies, value, i.layers)
        return (features,), Saved(from_scalar, tape.inputs, tape.keeps).flat

    def adjoint(self, cotangents: Any, inputs: Any, value_saved: Any) -> tuple[Tensors, Perhaps]:
        """Pass 2: return s̄; save what passes 3 and 4 read, in a row."""
        (bar,) = cotangents
        f = self.activation
        i = Inputs.of(inputs)
        saved = Saved.of(value_saved, len(self.copies))
        bars = [bar]
        later_layers = zip(i.layers, self.copies, saved.for_derivatives, strict=True)
        for layer, copies, for_derivatives in reversed(list(later_layers)):
            h_bar = layers.slope(f, for_derivatives, layer.idt, bar)
            bar = layers.down(h_bar, layer, bar, copies)
            bars.append(bar)
        s_bar = torch.mm(layers.slope(f, saved.from_scalar, None, bar), i.w.unsqueeze(1))
        # The cotangents of the layers' outputs come last, in the order of the layers.
        return (s_bar,), (i.w, *i.weights, *value_saved, *reversed(bars))

    def tangent(self, tangents: Any, adjoint_saved: Any) -> tuple[Perhaps, Perhaps]:
        """Pass 3: return Ġ, and `Tangents`."""
        (s_dot,) = tangents
        f = self.activation
        depth = len(self.copies)
        # In the order in which `adjoint` saves them: w, matrices, biases and idt, and `Saved`.
        w = adjoint_saved[0]
        weights = adjoint_saved[1 : 1 + 3 * depth]
        later_layers = unflatten(weights)[0] if weights else []
        saved = Saved.of(adjoint_saved[1 + 3 * depth : 2 + 5 * depth], depth)
        h_dot = s_dot * w
        h_dots = [h_dot]
        out_dot = layers.tangent(f, saved.from_scalar, idt=None, h_dot=h_dot, x_dot=s_dot, copies=0)
        input_dots = []
        for layer, copies, for_derivatives in zip(
            later_layers, self.copies, saved.for_derivatives, strict=True
        ):
            input_dots.append(out_dot)
            h_dot = torch.mm(out_dot, layer.matrix)
            h_dots.append(h_dot)
            out_dot = layers.tangent(
                f, for_derivatives, idt=layer.idt, h_dot=h_dot, x_dot=out_dot, copies=copies
            )
        return (out_dot,), Tangents(s_dot, h_dots, input_dots).flat

    def gradient(
        self, cotangents: Any, inputs: Any, value_saved: Any, adjoint_saved: Any, tangent_saved: Any
    ) -> Perhaps:
        """Pass 4: return the gradients of start, w and the weights."""
        (hat,) = cotangents
        f = self.activation
        depth = len(self.copies)
        i = Inputs.of(inputs)
        saved = Saved.of(value_saved, depth)
        later_layers = i.layers
        dots = None
        if adjoint_saved is not None:
            dots = Tangents.of(tangent_saved, depth)
            bars = adjoint_saved[-1 - depth :]  # of each layer's output
            hat = torch.zeros_like(bars[-1]) if hat is None else hat
        reversed_gradients: list[Tensor | None] = []
        for index in reversed(range(depth)):
            layer = later_layers[index]
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
