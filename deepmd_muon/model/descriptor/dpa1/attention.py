"""Attention between the neighbours of an atom, gated by the angles between them (DPA-1, arXiv:2208.08236)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepmd_muon.model.descriptor.dpa1.settings import AttentionSettings
from deepmd_muon.model.networks import Layer, SeedPath, dtype_of

SHIFT = 20.0  # deepmd-kit's `attnw_shift`: a neighbour at the cut-off has the score −20
LAYER_NORM_EPS = 1e-5  # what deepmd-kit's PyTorch backend takes for `ln_eps` null


class Gates(NamedTuple):
    """What masks, switches and angles do to the attention weights of every pair of neighbours.

    Attributes
    ----------
    hidden
        True for columns that no row attends to `(nreal, 1, ncolumns)`.
    after
        Factor of the softmax `(nreal, ncolumns, ncolumns)`: 0 in rows of empty slots.
    switch
        Product of both neighbours' switches `(nreal, ncolumns, ncolumns)` in smooth attention, else None.
    beyond
        Empty slots that stand in no column, in smooth attention: each adds exp(−20) to the softmax's denominator.
    """

    hidden: torch.Tensor
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
        """Return what every neighbour takes from the others `(nreal, ncolumns, width)`."""
        inner, outer = self.in_proj.tensors, self.out_proj.tensors
        parts = torch.nn.functional.linear(features, inner.matrix.t(), inner.bias).chunk(3, dim=-1)
        if self.normalize:
            parts = tuple(torch.nn.functional.normalize(part, dim=-1) for part in parts)
        query, key, value = parts
        scores = torch.bmm(query * self.scale, key.transpose(1, 2))
        if gates.switch is not None:
            scores = (scores + SHIFT) * gates.switch - SHIFT
        weights = _softmax(scores, gates) * gates.after
        return torch.nn.functional.linear(torch.bmm(weights, value), outer.matrix.t(), outer.bias)


def _softmax(scores: torch.Tensor, gates: Gates) -> torch.Tensor:
    """Return the softmax over the columns that are not hidden; an atom without any gets finite, unused numbers."""
    scores = scores.masked_fill(gates.hidden, torch.finfo(scores.dtype).min)
    if not gates.beyond or not scores.shape[-1]:
        return scores.softmax(-1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-SHIFT)
    powers = (scores - top).exp()
    return powers / (powers.sum(-1, keepdim=True) + gates.beyond * (-SHIFT - top).exp())


class LayerNorm(torch.nn.Module):
    """Layer normalisation under deepmd-kit's names: the scale is called `matrix`."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.matrix = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.matrix, self.bias, self.eps)


class AttentionLayer(torch.nn.Module):
    """Attention, its input added, and normalisation."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        self.attention_layer = GatedAttention(settings, stream.child(0))
        eps = LAYER_NORM_EPS if settings.ln_eps is None else settings.ln_eps
        self.attn_layer_norm = LayerNorm(settings.neuron[-1], eps, dtype_of(settings.precision))

    def forward(self, features: torch.Tensor, gates: Gates) -> torch.Tensor:
        """Return features like those given `(nreal, ncolumns, width)`."""
        normed: torch.Tensor = self.attn_layer_norm(features + self.attention_layer(features, gates))
        return normed


class NeighborAttention(torch.nn.Module):
    """The attention layers, one after another."""

    def __init__(self, settings: AttentionSettings, stream: SeedPath) -> None:
        super().__init__()
        layers = [AttentionLayer(settings, stream.child(index)) for index in range(settings.attn_layer)]
        self.attention_layers = torch.nn.ModuleList(layers)

    def forward(self, features: torch.Tensor, gates: Gates) -> torch.Tensor:
        """Return features like those given `(nreal, ncolumns, width)`."""
        for layer in self.attention_layers:
            features = layer(features, gates)
        return features
