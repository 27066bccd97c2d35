"""The embedding net of DPA-1 with derivatives that are written out.

The net maps an edge's s, and the vectors of its two types, to features. Its first layer is

    h = s·w + start,   start = the products with the vectors, and the bias,

so that positions enter by s alone, and parameters by w, start and the layers behind. See `four_passes`: values go up
the layers, adjoints come down, tangents of s go up, and one more way down gives the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors
from deepmd_muon.model.nn.networks import Copies, LayerTensors, unflatten


@dataclass(frozen=True)
class Embedding(FourPasses):
    """Features of edges.

    Inputs: s `(rows, 1)`, start `(rows, n)`, w `(n,)`, then matrix, bias, idt of every layer behind. Output: features
    `(rows, M)`. The adjoint belongs to s, which is data: it has no gradient.

    Attributes
    ----------
    activation, copies
        Of the network; the copies are those of the layers behind the first, which has none.
    """

    activation: Activation
    copies: tuple[Copies, ...]

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`; keeps values of the first activation, then inputs and values of the layers behind."""
        s, start, w, *flat = given
        value, first = layers.forward_from_scalar(self.activation, s, w, start)
        features, tape = layers.values(self.activation, self.copies, value, _behind(flat))
        return (features,), (first, *tape.inputs, *tape.keeps)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoint of s; and w, the layers, `kept`, and the adjoint of every layer's output."""
        (above,), (_, _, w, *flat), f = cotangents, given, self.activation
        first, keeps, adjoints = kept[0], kept[1 + len(self.copies) :], [above]
        for layer, kind, keep in reversed(
            list(zip(_behind(flat), self.copies, keeps, strict=True))
        ):
            above = layers.down(layers.slope(f, keep, layer.idt, above), layer, above, kind)
            adjoints.append(above)
        of_s = torch.mm(layers.slope(f, first, None, above), w.unsqueeze(1))
        return (of_s,), (w, *flat, *kept, *adjoints)

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of the features; and tangents of the arguments of f, and of all layers' inputs."""
        (along,), (w, *others), f, depth = tangents, left, self.activation, len(self.copies)
        first, keeps = others[3 * depth], others[4 * depth + 1 : 5 * depth + 1]
        before = [along * w]
        moved = [layers.tangent(f, first, None, before[0], along, 0)]
        for layer, kind, keep in zip(_behind(others[: 3 * depth]), self.copies, keeps, strict=True):
            before.append(torch.mm(moved[-1], layer.matrix))
            moved.append(layers.tangent(f, keep, layer.idt, before[-1], moved[-1], kind))
        return (moved.pop(),), (along, *before, *moved)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (down,), (s, _, _, *flat), f, depth = cotangents, given, self.activation, len(self.copies)
        first, inputs, keeps = kept[0], kept[1 : 1 + depth], kept[1 + depth :]
        forces = None
        if left is not None:
            forces = _Forces(moved[0], moved[1 : 2 + depth], moved[2 + depth :], left[-1 - depth :])
            down = torch.zeros_like(forces.adjoints[0]) if down is None else down
        gradients: list[Tensor | None] = []
        for index in reversed(range(depth)):
            layer, keep = _behind(flat)[index], keeps[index]
            if forces is None:
                of_h, found = layers.plain_gradient(f, layer, inputs[index], keep, down)
                gradients += found
            else:
                before, above = forces.before[1 + index], forces.adjoints[depth - 1 - index]
                (of_h, of_moved), of_bias, of_idt = layers.cotangents(
                    f, keep, layer.idt, before, down, above
                )
                of_matrix = torch.mm(inputs[index].t(), of_h).addmm_(
                    forces.tangents[index].t(), of_moved
                )
                gradients += [of_idt, of_bias, of_matrix]
            down = layers.down(of_h, layer, down, self.copies[index])
        if forces is None:
            of_start = layers.slope(f, first, None, down)
            of_w = torch.mm(s.t(), of_start)
        else:
            before, above = forces.before[0], forces.adjoints[depth]
            (of_start, of_moved), _, _ = layers.cotangents(f, first, None, before, down, above)
            of_w = torch.mm(s.t(), of_start).addmm_(forces.along.t(), of_moved)
        return None, of_start, of_w.squeeze(0), *gradients[::-1]


class _Forces(NamedTuple):
    """Tensors of passes 2 and 3: the tangent of s, those of arguments of f and of inputs of the layers behind.

    `adjoints` are those of every layer's output, the last first.
    """

    along: Tensor
    before: Tensors
    tangents: Tensors
    adjoints: Tensors


def _behind(flat: Any) -> list[LayerTensors]:
    """Return the layers behind the first."""
    return unflatten(flat)[0] if len(flat) else []
