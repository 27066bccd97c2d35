"""A layer of attention with written-out derivatives (see `four_passes`).

For features X and gates E of every atom, with ∘ the product by elements,

    Q, K, V = X·W + b, rows divided by their length;   P = softmax(scale·QKᵀ + mask);   A = P∘E;
    O = A·V;   S = X + O·Wₒ + bₒ;   N = (S − mean)/deviation;   Z = γ∘N + β.

| symbol | name               | shape                        |
|--------|--------------------|------------------------------|
| X, Z   | `x`, `z`           | (nreal, ncolumns, width)     |
| E      | `gate`             | (nreal, ncolumns, ncolumns)  |
| W, b   | `matrix`, `bias`   | (width, 3·attn), (3·attn,)   |
| QKᵀ    | `scores`           | (nreal, ncolumns, ncolumns)  |
| P, A   | `soft`, `gated`    | (nreal, ncolumns, ncolumns)  |
| O      | `mixed`            | (nreal, ncolumns, attn)      |
| Wₒ, bₒ | `outer`, `outer_bias` | (attn, width), (width,)   |
| S, N   | `summed`, `normed` | (nreal, ncolumns, width)     |
| γ, β   | `gamma`, `beta`    | (width,)                     |

Matrix products between tensors of all atoms are written here. What works row by row is in
`attention_rows`, and on a GPU in `attention_kernels`, with one launch for each function.

Autograd's second derivative of the same operations takes several times as many passes over memory;
the tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1 import attention_rows
from deepmd_muon.model.descriptor.dpa1.attention_rows import Adjoints, Tangents, Values
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors


class Inputs(NamedTuple):
    """The inputs of the operation."""

    x: Tensor
    gate: Tensor  # broadcasts to (nreal, ncolumns, ncolumns)
    mask: Tensor  # (nreal, 1, ncolumns), without gradient
    matrix: Tensor
    bias: Tensor
    outer: Tensor
    outer_bias: Tensor
    gamma: Tensor
    beta: Tensor


class AdjointSaved(NamedTuple):
    """What pass 2 hands over to pass 3 (all) and pass 4 (the adjoints)."""

    gate: Tensor
    matrix: Tensor
    outer: Tensor
    gamma: Tensor
    values: Values
    adjoints: Adjoints


@dataclass(frozen=True)
class Attention(FourPasses):
    """The operation of one layer: `Inputs` to Z. Adjoints belong to X and E.

    Attributes
    ----------
    scale
        Factor of the scores.
    shortest
        Rows of Q, K and V are divided by their length, at least this; None leaves them as they are.
    eps
        Addend of the variance.
    """

    scale: float
    shortest: float | None
    eps: float

    def value(self, i: Inputs) -> tuple[Perhaps, Nested]:
        """Pass 1, see `FourPasses`."""
        ops = _row_operations(i.x)
        qkv, inverse_length = ops.project_and_rescale(i.x, i.matrix, i.bias, self.shortest)
        query, key, value = qkv
        soft, gated = ops.attend(query, key, mask=i.mask, gate=i.gate, scale=self.scale)
        mixed = torch.bmm(gated, value)
        z, normed, inverse_deviation = ops.normalise(
            mixed, i.outer, i.outer_bias, x=i.x, gamma=i.gamma, beta=i.beta, eps=self.eps
        )
        saved = Values(
            qkv=qkv,
            inverse_length=inverse_length,
            soft=soft,
            gated=gated,
            mixed=mixed,
            normed=normed,
            inverse_deviation=inverse_deviation,
        )
        return (z,), saved

    def adjoint(self, cotangents: Any, i: Inputs, v: Values) -> tuple[Tensors, Nested]:
        """Pass 2: return the adjoints of X and E."""
        (z_bar,) = cotangents
        x_bar, gate_bar, adjoints = self._pull(z_bar, i, v)
        saved = AdjointSaved(
            gate=i.gate, matrix=i.matrix, outer=i.outer, gamma=i.gamma, values=v, adjoints=adjoints
        )
        return (x_bar, gate_bar), saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return the derivative of Z, and `Tangents`."""
        x_dot, gate_dot = tangents
        v = saved.values
        query, key, value = v.qkv
        ops = _row_operations(x_dot)
        qkv_dot, length_along = ops.rescale_derivative_(v, ops.project(x_dot, saved.matrix))
        query_dot, key_dot, value_dot = qkv_dot
        scores_dot = torch.bmm(query_dot, key.mT).baddbmm_(query, key_dot.mT)
        soft_dot, gated_dot = ops.attend_tangent(
            v, scores_dot, gate=saved.gate, gate_dot=gate_dot, scale=self.scale
        )
        mixed_dot = torch.bmm(gated_dot, value).baddbmm_(v.gated, value_dot)
        summed_dot = torch.addmm(x_dot.flatten(0, 1), mixed_dot.flatten(0, 1), saved.outer)
        normed_dot, norm_along = ops.normalise_derivative(v, summed_dot.view_as(x_dot))
        tangent_saved = Tangents(
            x=x_dot,
            qkv=qkv_dot,
            length_along=length_along,
            soft=soft_dot,
            gated=gated_dot,
            mixed=mixed_dot,
            normed=normed_dot,
            norm_along=norm_along,
        )
        return (normed_dot * saved.gamma,), tangent_saved

    def gradient(
        self,
        cotangents: Any,
        i: Inputs,
        v: Values,
        adjoint_saved: AdjointSaved | None,
        t: Tangents | None,
    ) -> Nested:
        """Pass 4: return the gradients of `Inputs`; the mask has none."""
        (z_hat,) = cotangents
        ops = _row_operations(i.x)
        a = None if adjoint_saved is None else adjoint_saved.adjoints
        if a is not None and t is not None:
            x_hat, gate_hat, summed_hat, projected_hat = self._pull_with_forces(z_hat, i, v, a, t)
        else:
            x_hat, gate_hat, adjoints = self._pull(z_hat, i, v)
            summed_hat = adjoints.summed
            projected_hat = adjoints.projected
        matrix_hat = ops.project_gradient(i.x, projected_hat)
        bias_hat = projected_hat.sum((1, 2)).flatten()
        outer_hat = torch.mm(v.mixed.flatten(0, 1).mT, summed_hat.flatten(0, 1))
        outer_bias_hat = summed_hat.flatten(0, 1).sum(0)
        if z_hat is None:
            gamma_hat = torch.zeros_like(i.gamma)
            beta_hat = torch.zeros_like(i.beta)
        else:
            gamma_hat = (z_hat * v.normed).sum((0, 1))
            beta_hat = z_hat.sum((0, 1))
        if a is not None and t is not None:
            # The adjoints depend on these three as well: x̄·ẋ has the terms Ẋ·W̄, Ȯ·S̄ and Z̄∘Ṅ.
            matrix_hat += ops.project_gradient(t.x, a.projected)
            outer_hat.addmm_(t.mixed.flatten(0, 1).mT, a.summed.flatten(0, 1))
            gamma_hat += (a.z * t.normed).sum((0, 1))
        of_weights = (matrix_hat, bias_hat, outer_hat, outer_bias_hat, gamma_hat, beta_hat)
        return x_hat, gate_hat, None, *of_weights

    def _pull(self, z_bar: Tensor, i: Inputs, v: Values) -> tuple[Tensor, Tensor, Adjoints]:
        """Return the cotangents of X and E from that of Z, and those on the way."""
        ops = _row_operations(i.x)
        query, key, value = v.qkv
        summed_bar, norm_along = ops.normalise_derivative(v, z_bar, i.gamma)
        mixed_bar = torch.matmul(summed_bar, i.outer.mT)
        gated_bar = torch.bmm(mixed_bar, value.mT)
        scores_bar, soft_along, gate_bar = ops.attend_adjoint(v, gated_bar, self.scale)
        qkv_bar = torch.empty_like(v.qkv)
        torch.bmm(scores_bar, key, out=qkv_bar[0])
        torch.bmm(scores_bar.mT, query, out=qkv_bar[1])
        torch.bmm(v.gated.mT, mixed_bar, out=qkv_bar[2])
        projected_bar, length_along = ops.rescale_derivative_(v, qkv_bar)
        adjoints = Adjoints(
            z=z_bar,
            summed=summed_bar,
            norm_along=norm_along,
            mixed=mixed_bar,
            gated=gated_bar,
            scores=scores_bar,
            soft_along=soft_along,
            projected=projected_bar,
            length_along=length_along,
        )
        x_bar = ops.project_adjoint(projected_bar, i.matrix, start=summed_bar)
        return x_bar, gate_bar.sum_to_size(i.gate.shape), adjoints

    def _pull_with_forces(
        self, z_hat: Tensor | None, i: Inputs, v: Values, a: Adjoints, t: Tangents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the cotangents of X, E, S and X·W + b, with the derivatives of their adjoints."""
        ops = _row_operations(i.x)
        query, key, value = v.qkv
        query_dot, key_dot, value_dot = t.qkv
        summed_hat = ops.normalise_gradient(v, a, t, z_hat=z_hat, gamma=i.gamma, eps=self.eps)
        mixed_hat = torch.matmul(summed_hat, i.outer.mT)
        gated_hat = torch.bmm(mixed_hat, value.mT).baddbmm_(a.mixed, value_dot.mT)
        scores_hat, gate_hat = ops.attend_gradient(v, a, t, gated_hat, scale=self.scale)
        qkv_hat = torch.empty_like(v.qkv)
        torch.bmm(scores_hat, key, out=qkv_hat[0]).baddbmm_(a.scores, key_dot)
        torch.bmm(scores_hat.mT, query, out=qkv_hat[1]).baddbmm_(a.scores.mT, query_dot)
        torch.bmm(t.gated.mT, a.mixed, out=qkv_hat[2]).baddbmm_(v.gated.mT, mixed_hat)
        projected_hat = ops.rescale_gradient_(v, a, t, qkv_hat)
        x_hat = ops.project_adjoint(projected_hat, i.matrix, start=summed_hat)
        return x_hat, gate_hat.sum_to_size(i.gate.shape), summed_hat, projected_hat


def _row_operations(x: Tensor) -> Any:
    """Return the module with the functions that work row by row for features x."""
    if not x.numel() or not triton_support.usable(x.device):
        return attention_rows
    from deepmd_muon.model.descriptor.dpa1 import attention_kernels

    return attention_kernels
