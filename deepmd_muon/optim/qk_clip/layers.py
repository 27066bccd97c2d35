"""Attention layers declared to QK-clip, and the rows of weights that make queries and keys."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.errors import QKClipError
from deepmd_muon.optim.routing.routes import RouteEntry, canonical_name

# The factor of some rows: γ^α, γ^(1−α) or γ.
Factor = Literal["query", "key", "rotary"]
Axis = Literal["rows", "columns"]

_WEIGHT = re.compile(r"(weight|matrix|kernel)$")
# A layer of this name between projection and logits, e.g. q_norm, k_layernorm, norm_q, qk_norm.
_NORM = re.compile(
    r"(?:^|[._])"
    r"(?:(?:q|k|qk|query|key)_?(?:layer|rms)?_?norm|(?:layer|rms)?_?norm_(?:q|k|qk|query|key))\b"
)


class HeadRows(NamedTuple):
    """Rows of one weight, or columns, that one factor of their head scales.

    `heads` has the head of each row, or the key head, int64 (rows,); −1 for other rows.
    """

    parameter: str
    factor: Factor
    heads: Tensor


@dataclasses.dataclass(frozen=True)
class SeparateQK:
    """Queries and keys made by two weights.

    This is multi-head attention, or grouped-query attention with fewer `key_heads`.

    Attributes
    ----------
    name
        Name of the layer; with `LogitRecorder`, that of the module.
    query, key
        Full names of the weights, (heads · head_dim, in). A bias is found by its name: ``weight``,
        ``matrix`` or ``kernel`` at the end replaced by ``bias``.
    heads
        Number of query heads.
    key_heads
        Number of key heads, a divisor of `heads`; None means `heads`. Key head g serves the query
        heads g · heads/key_heads and following.
    axis
        'columns' for weights stored as (in, heads · head_dim).
    """

    name: str
    query: str
    key: str
    heads: int
    key_heads: int | None = None
    axis: Axis = "rows"

    def rows(self, routes: Mapping[str, RouteEntry]) -> list[HeadRows]:
        """Return the rows of both weights."""
        key_heads = self.key_heads or self.heads
        query_length = _length(self, self.query, routes)
        key_length = _length(self, self.key, routes)
        size = _per_head(self, self.query, query_length, self.heads)
        if key_length != key_heads * size:
            problem = f"{self.key!r} has {key_length} {self.axis}, not {key_heads} x {size}"
            raise QKClipError([f"{self.name}: {problem}"])
        return [
            HeadRows(self.query, "query", _numbers(self.heads, size)),
            HeadRows(self.key, "key", _numbers(key_heads, size)),
        ]


@dataclasses.dataclass(frozen=True)
class FusedQKV:
    """Queries, keys and values made by one weight, as in torch.nn.MultiheadAttention.

    Attributes
    ----------
    name, heads, key_heads, axis
        As in `SeparateQK`.
    weight
        Full name of the weight. If the optimizer's setting `splits` divides it, the parts must be
        q, k and v; or the single heads of these in this order; or parts of equally large heads.
        Without parts, all heads are equally large.
    interleaved
        Rows are ordered by key head, and within one as queries | key | value (GPT-NeoX, Megatron).
        Parts, if any, must then be whole key heads; or q, k and v of each; or single heads, or
        parts of equally large heads, in this order.
    """

    name: str
    weight: str
    heads: int
    key_heads: int | None = None
    interleaved: bool = False
    axis: Axis = "rows"

    def rows(self, routes: Mapping[str, RouteEntry]) -> list[HeadRows]:
        """Return the rows of queries and keys."""
        key_heads = self.key_heads or self.heads
        length = _length(self, self.weight, routes)
        view = routes[self.weight].view
        sizes = view.storage_sizes if view is not None and view.axis == self.axis else ()
        # Queries | keys | values, for all key heads or for each in turn.
        n_blocks = key_heads if self.interleaved else 1
        parts = sizes[: len(sizes) // n_blocks]
        if parts * n_blocks != sizes:
            raise self._error_of_parts(sizes, f"which does not repeat for {key_heads} key heads")
        stride = _per_head(self, self.weight, length, n_blocks)
        size = self._head_size(stride, parts, self.heads // n_blocks, key_heads // n_blocks)
        n_queries = size * self.heads // n_blocks
        n_keys = size * key_heads // n_blocks
        queries = _none_of(n_blocks, stride)
        queries[:, :n_queries] = _numbers(self.heads, size).view(n_blocks, n_queries)
        keys = _none_of(n_blocks, stride)
        keys[:, n_queries : n_queries + n_keys] = _numbers(key_heads, size).view(n_blocks, n_keys)
        return [
            HeadRows(self.weight, "query", queries.flatten()),
            HeadRows(self.weight, "key", keys.flatten()),
        ]

    def _head_size(
        self, length: int, part_sizes: tuple[int, ...], heads: int, key_heads: int
    ) -> int:
        """Return the number of rows of a head in q | k | v of this length and these parts.

        Parts may be q, k and v, or heads, or divide equal heads further.
        """
        if len(part_sizes) <= 1:
            return _per_head(self, self.weight, length, heads + 2 * key_heads)
        if len(part_sizes) == 3:
            query_size = _per_head(self, self.weight, part_sizes[0], heads)
            key_size = _per_head(self, self.weight, part_sizes[1], key_heads)
        else:
            size, remainder = divmod(length, heads + 2 * key_heads)
            ends_of_parts = {0, *itertools.accumulate(part_sizes)}
            ends_of_heads = range(0, (heads + key_heads + 1) * size, size) if size else ()
            if not remainder and ends_of_parts >= {*ends_of_heads}:
                return size  # parts of heads, such as those with and without position
            query_size = part_sizes[0]
            key_size = part_sizes[min(heads, len(part_sizes) - 1)]
            value_size = part_sizes[-1]
            of_heads = (query_size,) * heads
            of_heads += (key_size,) * key_heads + (value_size,) * key_heads
            if part_sizes != of_heads:
                raise self._error_of_parts(
                    part_sizes,
                    f"parts must be q, k and v, or those of {heads} query, {key_heads} key and "
                    f"{key_heads} value heads in this order",
                    separator="; ",
                )
        if query_size != key_size:
            problem = f"has {query_size} {self.axis} a query head and {key_size} a key head"
            raise QKClipError([f"{self.name}: {self.weight!r} {problem}"])
        return query_size

    def _error_of_parts(
        self, part_sizes: tuple[int, ...], reason: str, separator: str = ", "
    ) -> QKClipError:
        text = "+".join(map(str, part_sizes))
        return QKClipError(
            [f"{self.name}: {self.weight!r} is split into {text}{separator}{reason}"]
        )


@dataclasses.dataclass(frozen=True)
class LatentQK:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Queries and keys of each head have a part without position and a rotary one. The rotary key,
    which all heads share, is not scaled.

    Attributes
    ----------
    name, heads, axis
        As in `SeparateQK`.
    query
        Full name of the weight that makes, head by head, ``nope_dim`` rows without position and
        ``rope_dim`` rotary.
    key_value
        Full name of the weight that makes, head by head, ``nope_dim`` rows of the key and
        ``value_dim`` of the value.
    nope_dim, rope_dim, value_dim
        Rows per head.
    """

    name: str
    query: str
    key_value: str
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    axis: Axis = "rows"

    @property
    def key_heads(self) -> int:
        """The number of heads: each has its own key."""
        return self.heads

    def rows(self, routes: Mapping[str, RouteEntry]) -> list[HeadRows]:
        """Return the rows of the queries' two parts, and of the keys without position."""
        sizes = {
            self.query: self.nope_dim + self.rope_dim,
            self.key_value: self.nope_dim + self.value_dim,
        }
        lengths = {parameter: _length(self, parameter, routes) for parameter in sizes}
        problems = [
            f"{self.name}: {parameter!r} has {lengths[parameter]} {self.axis}, not {self.heads} x "
            f"{size}"
            for parameter, size in sizes.items()
            if lengths[parameter] != self.heads * size
        ]
        if problems:
            raise QKClipError(problems)

        def rows_of(parameter: str, factor: Factor, part: slice) -> HeadRows:
            heads = _none_of(self.heads, sizes[parameter])
            heads[:, part] = torch.arange(self.heads, device="cpu").unsqueeze(1)
            return HeadRows(parameter, factor, heads.flatten())

        return [
            rows_of(self.query, "query", slice(self.nope_dim)),
            rows_of(self.query, "rotary", slice(self.nope_dim, None)),
            rows_of(self.key_value, "key", slice(self.nope_dim)),
        ]


Layer = SeparateQK | FusedQKV | LatentQK


@dataclasses.dataclass(frozen=True)
class QKClip:
    r"""Keep attention logits below a threshold: MuonClip's QK-clip.

    After an update, with S_h the largest logit that head h has seen and γ_h = min(1, τ / S_h)::

        multi-head     W_q^h ← γ_h^α W_q^h      W_k^h ← γ_h^(1−α) W_k^h
        grouped-query  W_q^h ← γ_h^α W_q^h      W_k^g ← min γ_h^(1−α) W_k^g over heads h of group g
        latent         W_qc^h ← γ_h^α W_qc^h    W_kc^h ← γ_h^(1−α) W_kc^h    W_qr^h ← γ_h W_qr^h

    (c: without position, r: rotary; the rotary key, which all heads share, stays). Biases are
    scaled like their rows. The logits of head h are then multiplied by γ_h, or by less in a group.
    The rows of heads below the threshold stay bitwise the same. A logit that is NaN or infinite
    clips nothing.

    Attributes
    ----------
    layers
        The attention layers.
    threshold
        τ, the bound on the logits: q · k times the attention's scale.
    alpha
        Exponent α in [0, 1]: queries are scaled by γ^α, keys by γ^(1−α).

    Raises
    ------
    QKClipError
        Naming all problems.

    References
    ----------
    Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, Algorithm 1 (τ = 100,
    α = 1/2).
    """

    layers: tuple[Layer, ...]
    threshold: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        layers = tuple(_with_canonical_names(layer) for layer in self.layers)
        object.__setattr__(self, "layers", layers)
        problems = [] if layers else ["layers: at least one layer is needed"]
        if not self.threshold > 0.0:
            problems.append(f"threshold: must be > 0; found {self.threshold!r}")
        if not 0.0 <= self.alpha <= 1.0:
            problems.append(f"alpha: must be in [0, 1]; found {self.alpha!r}")
        names = [layer.name for layer in layers]
        problems += [
            f"layers: two are called {name!r}"
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
        for layer in layers:
            key_heads = layer.key_heads or layer.heads
            if layer.heads < 1 or key_heads < 1 or layer.heads % key_heads:
                problems.append(
                    f"{layer.name}: key_heads must divide heads; found {layer.key_heads} and "
                    f"{layer.heads}"
                )
        if problems:
            raise QKClipError(problems)


def _with_canonical_names(layer: Layer) -> Layer:
    """Return a layer with names as in the routing."""
    names = {
        field.name: canonical_name(getattr(layer, field.name))
        for field in dataclasses.fields(layer)
        if field.name in ("name", "query", "key", "weight", "key_value")
    }
    return dataclasses.replace(layer, **names)  # type: ignore[arg-type]  # all names are str


class LayerRows(NamedTuple):
    """Rows that QK-clip scales, with their layer."""

    layer: Layer
    rows: HeadRows


def rows_by_parameter(clip: QKClip, routes: Mapping[str, RouteEntry]) -> dict[str, list[LayerRows]]:
    """Return the rows that QK-clip scales by parameter, including those of biases.

    Raises QKClipError when a weight is missing or does not fit its layer, or a layer normalises
    queries or keys.
    """
    scaled: dict[str, list[LayerRows]] = {}
    problems: list[str] = []
    for layer in clip.layers:
        problems += normalizations(layer.name, routes)
        try:
            rows_of_layer = layer.rows(routes)
        except QKClipError as error:
            problems += error.problems
            continue
        for rows in rows_of_layer:
            bias = _WEIGHT.sub("bias", rows.parameter)
            for parameter in dict.fromkeys([rows.parameter, bias]):
                if parameter in routes:
                    scaled.setdefault(parameter, []).append(LayerRows(layer, rows))
    if problems:
        raise QKClipError(problems)
    return scaled


def normalizations(layer: str, names: Iterable[str]) -> list[str]:
    """Return a problem if a name below a layer looks like a normalization of queries or keys."""
    prefix = f"{layer}."
    for name in names:
        if name.startswith(prefix) and _NORM.search(name[len(prefix) :]):
            return [
                f"{layer}: {name!r} normalizes queries or keys, so that the scale of their weights "
                "does not reach the logits; leave this layer out"
            ]
    return []


def _length(layer: Layer, parameter: str, routes: Mapping[str, RouteEntry]) -> int:
    """Return the number of rows (or columns) of a weight."""
    if parameter not in routes:
        raise QKClipError([f"{layer.name}: the optimizer has no parameter {parameter!r}"])
    shape = routes[parameter].shape
    if len(shape) != 2:
        raise QKClipError([f"{layer.name}: {parameter!r} of shape {shape} is not a matrix"])
    return shape[0 if layer.axis == "rows" else 1]


def _per_head(layer: Layer, parameter: str, length: int, heads: int) -> int:
    """Return how many rows each head has."""
    if length % heads:
        problem = f"{length} {layer.axis} of {parameter!r} do not divide among {heads} heads"
        raise QKClipError([f"{layer.name}: {problem}"])
    return length // heads


def _numbers(heads: int, size: int) -> Tensor:
    """Return the head of each row of heads with `size` rows each."""
    return torch.arange(heads, device="cpu").repeat_interleave(size)


def _none_of(blocks: int, size: int) -> Tensor:
    """Return a table of rows, (blocks, size), that belong to no head."""
    return torch.full((blocks, size), -1, device="cpu")
