"""Attention between the neighbours of an atom, gated by the angles between them (DPA-1, arXiv:2208.08236)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepmd_muon.model.descriptor.dpa1.attention_passes import Attention
from deepmd_muon.model.descriptor.dpa1.settings import AttentionSettings
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Layer, SeedPath, dtype_of, run_layer

SHIFT = 20.0  # deepmd-kit's `attnw_shift`: a neighbour at the cut-off has the score −20
NORMALIZE_EPS = 1e-12  # of torch.nn.functional.normalize
LAYER_NORM_EPS = 1e-5  # deepmd-kit's PyTorch backend uses it for `ln_eps` null


class _Rescaled(torch.autograd.Function):
    """y = r·x with r = 1/|x|; or, centred, y = r·(x − mean) with r = 1/sqrt(variance + eps), as layers are normalised.

    Both results are saved, and the gradient is a short expression of them. Torch's own operations take three times as
    many passes over memory for the gradient of a force loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, eps: float, centred: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y like x `(…, width)`, and r `(…, 1)`."""
        if centred:
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
    def backward(ctx: Any, grad: torch.Tensor | None, grad_r: torch.Tensor | None) -> Any:
        """Return the cotangent of x, itself differentiable."""
        y, r = ctx.saved_tensors
        grad = torch.zeros_like(y) if grad is None else grad
        along = (grad * y).sum(-1, keepdim=True)
        if grad_r is not None:
            along = along + r * grad_r
        found = torch.addcmul(
            grad, y, along * (-1.0 / ctx.count)
        )  # no `value`: its gradient would cost two more passes
        if ctx.centred:
            found = found - grad.mean(-1, keepdim=True)
        return found * r, None, None


class Gates(NamedTuple):
    """The effect of masks, switches and angles on the attention weights of every pair of neighbours.

    Attributes
    ----------
    mask
        Addend of the scores: 0, or a huge negative number in columns that no row attends to
        `(nreal, 1, ncolumns)`.
    after
        Factor of the softmax `(nreal, ncolumns, ncolumns)`: 0 in rows of empty slots.
    switch
        Product of both neighbours' switches `(nreal, ncolumns, ncolumns)` in smooth attention, else None.
    beyond
        Empty slots that stand in no column, in smooth attention: each adds exp(−20) to the softmax's denominator.
    """

    mask: torch.Tensor
    after: torch.Tensor
    switch: torch.Tensor | None
    beyond: int


class GatedAttention(torch.nn.Module):
    """Queries, keys and values of all neighbours from one layer, and the layer behind them."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        width, attn, dtype = settings.neuron[-1], settings.attn, dtype_of(settings.precision)
        usual = (attn * settings.scaling_factor) ** -0.5
        self.scale = usual if settings.temperature is None else settings.temperature
        self.normalize = settings.normalize
        self.in_proj = Layer(width, 3 * attn, timestep=False, dtype=dtype, stream=stream.child(0))
        self.out_proj = Layer(attn, width, timestep=False, dtype=dtype, stream=stream.child(1))

    def forward(self, features: torch.Tensor, gates: Gates) -> torch.Tensor:
        """Return the attention of every neighbour to the others `(nreal, ncolumns, width)`."""
        inner, outer = self.in_proj.tensors, self.out_proj.tensors
        parts = torch.nn.functional.linear(features, inner.matrix.t(), inner.bias).unflatten(
            -1, (3, -1)
        )
        if self.normalize:
            parts = _Rescaled.apply(parts, NORMALIZE_EPS, False)[0]
        query, key, value = parts.unbind(-2)
        if gates.switch is None:
            scores = torch.baddbmm(gates.mask, query, key.transpose(1, 2), alpha=self.scale)
        else:
            query = query if self.scale == 1.0 else query * self.scale
            scores = torch.bmm(query, key.transpose(1, 2))
            scores = (scores + SHIFT) * gates.switch + (gates.mask - SHIFT)
        # An atom without any column that is not masked gets finite, unused numbers.
        plain = not gates.beyond or not scores.shape[-1]
        weights = (
            scores.softmax(-1) if plain else _Softmax.apply(scores, gates.beyond)
        ) * gates.after
        return torch.nn.functional.linear(torch.bmm(weights, value), outer.matrix.t(), outer.bias)


class _Softmax(torch.autograd.Function):
    """Softmax over the last axis with a constant added to its denominator: w = eˢ/(Σ eˢ + n·e⁻²⁰).

    As in `_Rescaled`, the gradient is a short expression of the result: torch's operations take more than twice as many
    passes over memory for a force loss.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, beyond: int) -> torch.Tensor:
        """Return w like `scores`; `beyond` is n."""
        top = scores.amax(-1, keepdim=True).clamp_(min=-SHIFT)
        powers = (scores - top).exp_()
        weights = powers.div_(powers.sum(-1, keepdim=True) + beyond * (-SHIFT - top).exp_())
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the cotangent of the scores, itself differentiable."""
        (weights,) = ctx.saved_tensors
        weighted = grad * weights
        return torch.addcmul(weighted, weights, -weighted.sum(-1, keepdim=True)), None


class LayerNorm(torch.nn.Module):
    """Layer normalisation under deepmd-kit's names: the scale is called `matrix`."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.matrix = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return torch.addcmul(self.bias, _Rescaled.apply(x, self.eps, True)[0], self.matrix)


class AttentionLayer(torch.nn.Module):
    """Attention, its input added, and normalisation."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        self.attention_layer = GatedAttention(settings, stream.child(0))
        eps = LAYER_NORM_EPS if settings.ln_eps is None else settings.ln_eps
        self.attn_layer_norm = LayerNorm(settings.neuron[-1], eps, dtype_of(settings.precision))

    def forward(self, features: torch.Tensor, gates: Gates, force: bool) -> torch.Tensor:
        """Return features of the same shape `(nreal, ncolumns, width)`; `force` as in `four_passes.run`."""
        if gates.switch is not None:  # the written passes know no smooth attention
            return self.by_autograd(features, gates)
        attention = self.attention_layer
        norm = self.attn_layer_norm
        passes = Attention(
            attention.scale, NORMALIZE_EPS if attention.normalize else None, norm.eps
        )
        weights = (
            *attention.in_proj.tensors[:2],
            *attention.out_proj.tensors[:2],
            norm.matrix,
            norm.bias,
        )
        out: torch.Tensor
        (out,) = run(passes, features, gates.after, gates.mask, *weights, force=force)
        return out

    def by_autograd(self, features: torch.Tensor, gates: Gates) -> torch.Tensor:
        """Return what `forward` returns, differentiated by autograd."""
        normed: torch.Tensor = self.attn_layer_norm(
            features + self.attention_layer(features, gates)
        )
        return normed


class NeighborAttention(torch.nn.Module):
    """The attention layers, one after another."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        layers = [
            AttentionLayer(settings, stream.child(index)) for index in range(settings.attn_layer)
        ]
        self.attention_layers = torch.nn.ModuleList(layers)

    def forward(
        self, features: torch.Tensor, gates: Gates, *, force: bool, recompute: bool = False
    ) -> torch.Tensor:
        """Return features like those given `(nreal, ncolumns, width)`.

        See `four_passes.run` for `force` and `run_layer` for `recompute`.
        """
        for layer in self.attention_layers:
            features = run_layer(layer, features, gates, force, recompute=recompute)
        return features
