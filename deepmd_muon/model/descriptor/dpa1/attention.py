"""Attention between the neighbours of an atom, gated by the angles between them.

This is the attention of DPA-1 (arXiv:2208.08236). Layers have written-out derivatives
(`attention_passes`), except those of smooth attention, which autograd differentiates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention_passes import Attention, Inputs
from deepmd_muon.model.descriptor.dpa1.settings import AttentionSettings
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Layer, SeedPath, dtype_of, run_layer

SHIFT = 20.0  # deepmd-kit's `attnw_shift`: a neighbour at the cut-off has the score −20
NORMALIZE_EPS = 1e-12  # of torch.nn.functional.normalize
LAYER_NORM_EPS = 1e-5  # deepmd-kit's PyTorch backend uses it for `ln_eps` null


class Gates(NamedTuple):
    """The effect of masks, switches and angles on the attention weights of all pairs of neighbours.

    Attributes
    ----------
    mask
        Addend of the scores `(nreal, 1, ncolumns)`: 0, or a huge negative number in columns that no
        row attends to.
    factor
        Factor of the softmax `(nreal, ncolumns, ncolumns)`: 0 in rows of empty slots.
    switch
        In smooth attention the product of both neighbours' switches `(nreal, ncolumns, ncolumns)`,
        else None.
    unlisted
        In smooth attention, the number of empty slots without a column. Each adds exp(−20) to the
        denominator of the softmax.
    """

    mask: Tensor
    factor: Tensor
    switch: Tensor | None
    unlisted: int


class NeighborAttention(torch.nn.Module):
    """The attention layers, one after another."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        layers = [
            AttentionLayer(settings, stream.child(index)) for index in range(settings.attn_layer)
        ]
        self.attention_layers = torch.nn.ModuleList(layers)

    def forward(
        self, features: Tensor, gates: Gates, *, force: bool, recompute: bool = False
    ) -> Tensor:
        """Return new features `(nreal, ncolumns, width)`.

        See `four_passes.run` for `force` and `run_layer` for `recompute`.
        """
        for layer in self.attention_layers:
            features = run_layer(layer, features, gates, force, recompute=recompute)
        return features


class AttentionLayer(torch.nn.Module):
    """Attention, its input added, and normalisation."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        self.attention_layer = GatedAttention(settings, stream.child(0))
        eps = LAYER_NORM_EPS if settings.ln_eps is None else settings.ln_eps
        self.attn_layer_norm = LayerNorm(settings.neuron[-1], eps, dtype_of(settings.precision))

    def forward(self, features: Tensor, gates: Gates, force: bool) -> Tensor:
        """Return new features `(nreal, ncolumns, width)`; `force` as in `four_passes.run`."""
        attention = self.attention_layer
        norm = self.attn_layer_norm
        if gates.switch is not None:
            mixed = attention.smooth(
                features, gates.mask, gates.factor, gates.switch, gates.unlisted
            )
            return norm.by_autograd(features + mixed)
        passes = Attention(
            scale=attention.scale,
            shortest=NORMALIZE_EPS if attention.normalize else None,
            eps=norm.eps,
        )
        inner = attention.in_proj.tensors
        outer = attention.out_proj.tensors
        inputs = Inputs(
            x=features,
            gate=gates.factor,
            mask=gates.mask,
            matrix=inner.matrix,
            bias=inner.bias,
            outer=outer.matrix,
            outer_bias=outer.bias,
            gamma=norm.matrix,
            beta=norm.bias,
        )
        out: Tensor
        (out,) = run(passes, inputs, force=force)
        return out


class GatedAttention(torch.nn.Module):
    """The layers before and behind attention, and smooth attention between them."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        width = settings.neuron[-1]
        attn = settings.attn
        dtype = dtype_of(settings.precision)
        if settings.temperature is None:
            self.scale = (attn * settings.scaling_factor) ** -0.5
        else:
            self.scale = settings.temperature
        self.normalize = settings.normalize
        self.in_proj = Layer(width, 3 * attn, timestep=False, dtype=dtype, stream=stream.child(0))
        self.out_proj = Layer(attn, width, timestep=False, dtype=dtype, stream=stream.child(1))

    def smooth(
        self, features: Tensor, mask: Tensor, factor: Tensor, switch: Tensor, unlisted: int
    ) -> Tensor:
        """Return the attention of every neighbour to the others `(nreal, ncolumns, width)`.

        The scores are (scale·QKᵀ + 20)·switch − 20, so that a neighbour vanishes at the cut-off.
        """
        inner = self.in_proj.tensors
        outer = self.out_proj.tensors
        qkv = torch.nn.functional.linear(features, inner.matrix.t(), inner.bias)
        qkv = qkv.unflatten(-1, (3, -1))
        if self.normalize:
            qkv = _Rescaled.apply(qkv, NORMALIZE_EPS, False)[0]
        query, key, value = qkv.unbind(-2)
        query = query if self.scale == 1.0 else query * self.scale
        scores = torch.bmm(query, key.transpose(1, 2))
        scores = (scores + SHIFT) * switch + (mask - SHIFT)
        # An atom whose columns are all masked gets finite numbers, which nobody uses.
        if unlisted and scores.shape[-1]:
            soft = _Softmax.apply(scores, unlisted)
        else:
            soft = scores.softmax(-1)
        mixed = torch.bmm(soft * factor, value)
        return torch.nn.functional.linear(mixed, outer.matrix.t(), outer.bias)


class LayerNorm(torch.nn.Module):
    """Layer normalisation with deepmd-kit's names: the scale is called `matrix`."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.matrix = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(width, dtype=dtype))

    def by_autograd(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; autograd differentiates the result."""
        return torch.addcmul(self.bias, _Rescaled.apply(x, self.eps, True)[0], self.matrix)


# ----- operations with short gradients, for autograd ---------------------------------------------


class _Rescaled(torch.autograd.Function):
    """y = r·x with r = 1/|x|; or, centred, y = r·(x − mean) with r = 1/sqrt(variance + eps).

    Both results are saved, and the gradient is a short expression of them. Torch's own operations
    take three times as many passes over memory for the gradient of a force loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        """Return y like x `(…, width)`, and r `(…, 1)`."""
        if not x.numel():  # of batches of lone atoms; var_mean would warn
            r = x.new_ones(*x.shape[:-1], 1)
            y = x.clone()
        elif centred:
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            r = (variance + eps).rsqrt_()
            y = (x - mean).mul_(r)
        else:
            r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(eps).reciprocal_()
            y = x * r
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, r)
        ctx.count = x.shape[-1] if centred else 1
        ctx.centred = centred
        return y, r

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_r: Tensor | None) -> Any:
        """Return the cotangent of x, itself differentiable."""
        y, r = ctx.saved_tensors
        grad = torch.zeros_like(y) if grad is None else grad
        along = (grad * y).sum(-1, keepdim=True)
        if grad_r is not None:  # the second derivative depends on r, too
            along = along + r * grad_r
        # A factor instead of the argument `value`, whose gradient would cost two more passes.
        out = torch.addcmul(grad, y, along * (-1.0 / ctx.count))
        if ctx.centred:
            out = out - grad.mean(-1, keepdim=True)
        return out * r, None, None


class _Softmax(torch.autograd.Function):
    """Softmax over the last axis with a constant added to its denominator: w = eˢ/(Σ eˢ + n·e⁻²⁰).

    As in `_Rescaled`, the gradient is a short expression of the result.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, unlisted: int) -> Tensor:
        """Return w like `scores`; `unlisted` is n."""
        top = scores.amax(-1, keepdim=True).clamp_(min=-SHIFT)
        powers = (scores - top).exp_()
        weights = powers.div_(powers.sum(-1, keepdim=True) + unlisted * (-SHIFT - top).exp_())
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the cotangent of the scores, itself differentiable."""
        (weights,) = ctx.saved_tensors
        weighted = grad * weights
        return torch.addcmul(weighted, weights, -weighted.sum(-1, keepdim=True)), None
