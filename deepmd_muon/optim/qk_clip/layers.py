"""Attention layers declared to QK-clip, with the rows of weights that make the queries and keys of each head."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from deepmd_muon.optim.errors import QKClipError
from deepmd_muon.optim.routing.routes import RouteEntry, canonical_name

# The factor of some rows: γ^α, γ^(1−α) or γ.
Factor = Literal["query", "key", "rotary"]
Axis = Literal["rows", "columns"]

_WEIGHT = re.compile(r"(weight|matrix|kernel)$")
# A layer of this name between projection and logits, e.g. q_norm, k_layernorm, norm_q, qk_norm.
_NORM = re.compile(
    r"(?:^|[._])(?:(?:q|k|qk|query|key)_?(?:layer|rms)?_?norm|(?:layer|rms)?_?norm_(?:q|k|qk|query|key))\b"
)


class HeadRows(NamedTuple):
    """Rows of one weight that belong to `heads` heads.

    The i-th of these heads, number ``first + i · step`` of its layer, has `size` rows from ``start
    + i · stride`` on.
    """

    parameter: str
    factor: Factor
    heads: int
    size: int
    start: int
    stride: int
    first: int = 0
    step: int = 1


@dataclasses.dataclass(frozen=True)
class SeparateQK:
    """Queries and keys made by two weights: multi-head attention, or grouped-query with fewer `key_heads`.

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

    def rows(
        self, shapes: Mapping[str, tuple[int, ...]], routes: Mapping[str, RouteEntry]
    ) -> list[HeadRows]:
        """Return the rows of both weights."""
        count = self.key_heads or self.heads
        size = _per_head(self, self.query, _length(self, self.query, shapes), self.heads)
        if _length(self, self.key, shapes) != count * size:
            found = _length(self, self.key, shapes)
            raise QKClipError(
                [f"{self.name}: {self.key!r} has {found} {self.axis}, not {count} x {size}"]
            )
        return [
            HeadRows(self.query, "query", self.heads, size, 0, size),
            HeadRows(self.key, "key", count, size, 0, size),
        ]


@dataclasses.dataclass(frozen=True)
class FusedQKV:
    """Queries, keys and values made by one weight, e.g. ``in_proj_weight`` of torch.nn.MultiheadAttention.

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

    def rows(
        self, shapes: Mapping[str, tuple[int, ...]], routes: Mapping[str, RouteEntry]
    ) -> list[HeadRows]:
        """Return the rows of queries and keys."""
        count = self.key_heads or self.heads
        group = self.heads // count
        length = _length(self, self.weight, shapes)
        view = routes[self.weight].view
        parts = view.sizes if view is not None and view.axis == self.axis else ()
        if not self.interleaved:
            query, key = self._head_sizes(length, parts, self.heads, count)
            return [
                HeadRows(self.weight, "query", self.heads, query, 0, query),
                HeadRows(self.weight, "key", count, key, self.heads * query, key),
            ]
        each = parts[: len(parts) // count]
        if each * count != parts:
            sizes = "+".join(map(str, parts))
            raise QKClipError(
                [
                    f"{self.name}: {self.weight!r} is split into {sizes}, which does not repeat "
                    f"for {count} key heads"
                ]
            )
        stride = _per_head(self, self.weight, length, count)
        query, key = self._head_sizes(stride, each, group, 1)
        queries = [
            HeadRows(self.weight, "query", count, query, i * query, stride, i, group)
            for i in range(group)
        ]
        return [*queries, HeadRows(self.weight, "key", count, key, group * query, stride)]

    def _head_sizes(
        self, length: int, parts: tuple[int, ...], heads: int, key_heads: int
    ) -> tuple[int, int]:
        """Return the numbers of rows of a query head and of a key head in q | k | v of this length and these parts.

        Parts may be q, k and v, or heads, or divide equal heads further.
        """
        if len(parts) <= 1:
            query = key = _per_head(self, self.weight, length, heads + 2 * key_heads)
        elif len(parts) == 3:
            query, key = (
                _per_head(self, self.weight, parts[0], heads),
                _per_head(self, self.weight, parts[1], key_heads),
            )
        else:
            size, left = divmod(length, heads + 2 * key_heads)
            ends = {0, *itertools.accumulate(parts)}
            if not left and ends >= {*range(0, (heads + key_heads + 1) * size, size)}:
                return size, size  # parts of heads, such as those with and without position
            query, key, value = parts[0], parts[min(heads, len(parts) - 1)], parts[-1]
            if parts != (query,) * heads + (key,) * key_heads + (value,) * key_heads:
                raise QKClipError(
                    [
                        f"{self.name}: {self.weight!r} is split into {'+'.join(map(str, parts))}; "
                        "parts must be q, k "
                        f"and v, or those of {heads} query, {key_heads} key and {key_heads} value "
                        "heads in this order"
                    ]
                )
        if query != key:
            raise QKClipError(
                [
                    f"{self.name}: {self.weight!r} has {query} {self.axis} a query head and {key} "
                    "a key head"
                ]
            )
        return query, key


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

    def rows(
        self, shapes: Mapping[str, tuple[int, ...]], routes: Mapping[str, RouteEntry]
    ) -> list[HeadRows]:
        """Return the rows of the queries' two parts, and of the keys without position."""
        query, key = self.nope_dim + self.rope_dim, self.nope_dim + self.value_dim
        problems = [
            f"{self.name}: {parameter!r} has {_length(self, parameter, shapes)} {self.axis}, not "
            f"{self.heads} x {size}"
            for parameter, size in ((self.query, query), (self.key_value, key))
            if _length(self, parameter, shapes) != self.heads * size
        ]
        if problems:
            raise QKClipError(problems)
        return [
            HeadRows(self.query, "query", self.heads, self.nope_dim, 0, query),
            HeadRows(self.query, "rotary", self.heads, self.rope_dim, self.nope_dim, query),
            HeadRows(self.key_value, "key", self.heads, self.nope_dim, 0, key),
        ]


Layer = SeparateQK | FusedQKV | LatentQK


@dataclasses.dataclass(frozen=True)
class QKClip:
    r"""Keep attention logits below a threshold: MuonClip's QK-clip.

    After an update, with S_h the largest logit that head h has seen and γ_h = min(1, τ / S_h)::

        multi-head      W_q^h ← γ_h^α W_q^h            W_k^h ← γ_h^(1−α) W_k^h
        grouped-query   W_q^h ← γ_h^α W_q^h            W_k^g ← min over the heads h of group g of γ_h^(1−α) · W_k^g
        latent          W_qc^h ← γ_h^α W_qc^h          W_kc^h ← γ_h^(1−α) W_kc^h      W_qr^h ← γ_h W_qr^h

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
    Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, Algorithm 1 (τ = 100, α = 1/2).
    """

    layers: tuple[Layer, ...]
    threshold: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        layers = []
        for layer in self.layers:  # with names as in the routing
            given = {field.name for field in dataclasses.fields(layer)} & {
                "name",
                "query",
                "key",
                "weight",
                "key_value",
            }
            named: dict[str, Any] = {
                field: canonical_name(getattr(layer, field)) for field in given
            }
            layers.append(dataclasses.replace(layer, **named))
        object.__setattr__(self, "layers", tuple(layers))
        problems = [] if self.layers else ["layers: at least one layer is needed"]
        if not self.threshold > 0.0:
            problems.append(f"threshold: must be > 0; found {self.threshold!r}")
        if not 0.0 <= self.alpha <= 1.0:
            problems.append(f"alpha: must be in [0, 1]; found {self.alpha!r}")
        names = [layer.name for layer in self.layers]
        problems += [
            f"layers: two are called {name!r}"
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
        for layer in self.layers:
            heads, keys = layer.heads, layer.key_heads or layer.heads
            if heads < 1 or keys < 1 or heads % keys:
                problems.append(
                    f"{layer.name}: key_heads must divide heads; found {layer.key_heads} and "
                    f"{heads}"
                )
        if problems:
            raise QKClipError(problems)


def rows_by_parameter(
    clip: QKClip, routes: Mapping[str, RouteEntry]
) -> dict[str, list[tuple[Layer, HeadRows]]]:
    """Return the rows that QK-clip scales by parameter, including those of biases.

    Raises QKClipError when a weight is missing or does not fit its layer, or a layer normalises
    queries or keys.
    """
    shapes = {name: entry.shape for name, entry in routes.items()}
    found: dict[str, list[tuple[Layer, HeadRows]]] = {}
    problems: list[str] = []
    for layer in clip.layers:
        problems += normalizations(layer.name, routes)
        try:
            rows = layer.rows(shapes, routes)
        except QKClipError as error:
            problems += error.problems
            continue
        for each in rows:
            found.setdefault(each.parameter, []).append((layer, each))
            bias = _WEIGHT.sub("bias", each.parameter)
            if bias != each.parameter and bias in routes:
                found.setdefault(bias, []).append((layer, each))
    if problems:
        raise QKClipError(problems)
    return found


def normalizations(layer: str, names: Iterable[str]) -> list[str]:
    """Return a problem for the first name below a layer that looks like a normalization of queries or keys."""
    below = (
        name
        for name in names
        if name.startswith(f"{layer}.") and _NORM.search(name[len(layer) + 1 :])
    )
    return [
        f"{layer}: {name!r} normalizes queries or keys, so that the scale of their weights does "
        "not reach the logits; "
        "leave this layer out"
        for name in itertools.islice(below, 1)
    ]


def _length(layer: Layer, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of rows (or columns) of a weight."""
    if parameter not in shapes:
        raise QKClipError([f"{layer.name}: the optimizer has no parameter {parameter!r}"])
    shape = shapes[parameter]
    if len(shape) != 2:
        raise QKClipError([f"{layer.name}: {parameter!r} of shape {shape} is not a matrix"])
    return shape[0 if layer.axis == "rows" else 1]


def _per_head(layer: Layer, parameter: str, length: int, heads: int) -> int:
    """Return how many rows each head has."""
    if length % heads:
        raise QKClipError(
            [
                f"{layer.name}: {length} {layer.axis} of {parameter!r} do not divide among {heads} "
                "heads"
            ]
        )
    return length // heads
