"""QK-clip on the parameters of an optimizer: factors from logits, and the rows that they scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, spec_of
from deepmd_muon.optim.errors import QKClipError
from deepmd_muon.optim.qk_clip.layers import LayerRows, QKClip, rows_by_parameter
from deepmd_muon.optim.routing.routes import RouteEntry, canonical_name, is_local

if TYPE_CHECKING:
    from deepmd_muon.optim.groups.param_groups import Group
    from deepmd_muon.optim.sharded.params import Replicas


# The largest logit of each head, (heads,) by layer name: plain tensors, or DTensors in any layout
# except Partial sums.
Logits = Mapping[str, Tensor]


class _Weight(NamedTuple):
    """A parameter, its route, and the ranks with copies of it; None for a DTensor or a local one."""

    p: Tensor
    entry: RouteEntry
    replicas: Replicas | None


class _Target(NamedTuple):
    """One parameter, the dimension that is scaled, and the factor of each index along it."""

    p: Tensor
    dim: int
    places: Tensor  # (local indices,), in the table of factors


class _Reduction(NamedTuple):
    """Ranks that take the maximum of the logits of some heads."""

    ranks: tuple[int, ...]
    heads: Tensor  # numbers of heads, on the CPU


def checked_logits(clipper: Clipper | None, logits: Logits | None) -> dict[str, Tensor]:
    """Return the logits given to a step, by the routing's names.

    Raises QKClipError, naming the entries that are not (heads,) tensors of declared layers; nothing
    is changed.
    """
    if logits is None:
        return {}
    if not isinstance(logits, Mapping):
        raise QKClipError(
            [f"qk_logits: must be a dict of tensors by layer name; found {type(logits).__name__}"]
        )
    if clipper is None and logits:
        raise QKClipError(["qk_logits: the optimizer was made without qk_clip=QKClip(...)"])
    return {} if clipper is None else clipper.checked(logits)


class Clipper:
    """A `QKClip` bound to parameters, plain or DTensors, with their routes.

    Plain parameters are copies on `replicas`, except those of `local_patterns`, which belong to
    this rank alone.

    Raises
    ------
    QKClipError
        Naming every mismatch between layers and parameters.
    """

    def __init__(self, clip: QKClip, groups: Sequence[Group], replicas: Replicas | None) -> None:
        self._clip = clip
        by_name: dict[str, _Weight] = {}
        for group in groups:
            for p, entry in group.routed:
                local = is_local(entry.name, group.settings)
                by_name[entry.name] = _Weight(p, entry, None if local else replicas)
        scaled = rows_by_parameter(clip, {name: weight.entry for name, weight in by_name.items()})
        self._first_head: dict[str, int] = {}  # by layer
        self._first_key: dict[str, int] = {}  # by layer
        key_of_head: list[int] = []
        n_keys = 0
        for layer in clip.layers:
            self._first_head[layer.name] = len(key_of_head)
            self._first_key[layer.name] = n_keys
            key_heads = layer.key_heads or layer.heads
            heads_per_key = layer.heads // key_heads
            key_of_head += [n_keys + head // heads_per_key for head in range(layer.heads)]
            n_keys += key_heads
        n_heads = len(key_of_head)
        # The table of factors: γ^α of all heads, γ^(1−α) of all keys, γ of all heads, and 1.
        self._starts = {"query": 0, "key": n_heads, "rotary": n_heads + n_keys}
        self._n_heads = n_heads
        self._n_keys = n_keys
        self._place_of_one = 2 * n_heads + n_keys
        self._key_of_head = torch.tensor(key_of_head, device="cpu")
        self._targets = [
            self._target(by_name[name], rows)
            for name, rows in sorted(scaled.items())
            if by_name[name].p.numel()
        ]
        self._reductions = self._find_reductions(
            {x.layer.name: by_name[name] for name, rows in scaled.items() for x in rows}
        )
        self._reduced_heads: dict[torch.device, list[Tensor]] = {}

    def _target(self, weight: _Weight, scaled: Sequence[LayerRows]) -> _Target:
        """Return a parameter with the place of each row's factor in the table."""
        p, entry, _ = weight
        is_bias = len(entry.shape) == 1
        dim = 0 if is_bias or scaled[0].layer.axis == "rows" else 1
        places = torch.full((entry.shape[dim],), self._place_of_one, device="cpu")
        for layer, rows in scaled:
            firsts = self._first_key if rows.factor == "key" else self._first_head
            in_table = self._starts[rows.factor] + firsts[layer.name] + rows.heads
            places = torch.where(rows.heads >= 0, in_table, places)
        if spec_of(p) is not None:
            from deepmd_muon.optim.sharded.params import local_runs  # needs torch.distributed

            runs = [places[start:stop] for start, stop in local_runs(p, dim)]
            places = torch.cat([places[:0], *runs])
        return _Target(p, dim, places.to(local_of(p).device))

    def _find_reductions(self, weights: Mapping[str, _Weight]) -> list[_Reduction]:
        """Return the ranks that reduce the logits of heads, in the same order on all ranks.

        `weights` has one weight of each layer.
        """
        if all(x.replicas is None and spec_of(x.p) is None for x in weights.values()):
            return []
        from deepmd_muon.optim.sharded.params import layout_of  # needs torch.distributed

        heads: dict[tuple[int, ...], list[int]] = {}
        for layer in self._clip.layers:
            weight = weights[layer.name]
            layout = layout_of(weight.p, weight.replicas)
            if layout is not None and len(layout.ranks) > 1:
                start = self._first_head[layer.name]
                heads.setdefault(layout.sorted_ranks, []).extend(range(start, start + layer.heads))
        return [
            _Reduction(ranks, torch.tensor(numbers, device="cpu"))
            for ranks, numbers in heads.items()
        ]

    def checked(self, logits: Logits) -> dict[str, Tensor]:
        """Return logits by the routing's names.

        Raise QKClipError unless they are (heads,) tensors of known layers.
        """
        heads = {layer.name: layer.heads for layer in self._clip.layers}
        by_name: dict[str, Tensor] = {}
        problems = []
        for key, value in logits.items():
            name = canonical_name(key) if isinstance(key, str) else key
            if name not in heads:
                # Indices are refused: they could count the model's layers, or the declared ones.
                problems.append(
                    f"qk_logits: unknown layer {key!r}; known are {', '.join(map(repr, heads))}"
                )
            elif name in by_name:
                problems.append(f"qk_logits: two entries are layer {name!r}")
            elif problem := self._problem(name, value, heads[name]):
                problems.append(f"qk_logits[{key!r}]: {problem}")
            by_name[name] = value
        if problems:
            raise QKClipError(sorted(problems))
        return by_name

    def _problem(self, name: str, value: object, heads: int) -> str | None:
        """Return what is wrong with the logits of a layer; None if nothing is."""
        if not isinstance(value, Tensor):
            return f"must be a tensor of shape ({heads},), one a head; found {type(value).__name__}"
        if tuple(value.shape) != (heads,) or not value.is_floating_point():
            return (
                f"must be real of shape ({heads},), one a head; found {value.dtype} of shape "
                f"{tuple(value.shape)}. If ranks have different heads, pass a DTensor, or -inf for "
                "heads of other ranks"
            )
        spec = spec_of(value)
        if spec is None:
            return None
        placements = spec.placements
        if any(place.is_partial() and place.reduce_op != "max" for place in placements):
            return f"is {placements}; reduce it first, or pass its full_tensor()"
        assigned = sum(stop - start for start, stop in _held_heads(value))
        if assigned != len(local_of(value)):
            return (
                f"this rank holds {len(local_of(value))} logits, but its layout assigns it "
                f"{assigned}"
            )
        ranks = set(spec.mesh.mesh.flatten().tolist())
        first_head = self._first_head[name]
        reducing_ranks = {
            rank
            for reduction in self._reductions
            if first_head in reduction.heads.tolist()
            for rank in reduction.ranks
        }
        is_whole = all(place.is_replicate() for place in placements)
        if len(ranks) > 1 and not ranks <= reducing_ranks and not is_whole:
            return (
                f"is {placements} on ranks {sorted(ranks)}, which do not share the layer's "
                "weights, so that each would scale its own heads only; pass its full_tensor()"
            )
        return None

    def __call__(self, logits: Logits, skip: Tensor | None = None) -> None:
        """Scale the rows of heads with logits above the threshold, unless `skip` is 1.

        `skip` is read on the device. `logits` is the result of `checked`: the largest logit of each
        head, −inf for heads that this rank does not compute; or a DTensor, from which each rank
        reads its own heads. Layers may be missing, but all ranks must give the same layers: the
        maximum over the ranks counts.
        """
        device = local_of(self._targets[0].p).device
        largest = self._largest(logits, device)
        if device not in self._reduced_heads:  # a captured step cannot copy from the host
            self._reduced_heads[device] = [
                reduction.heads.to(device) for reduction in self._reductions
            ]
        if self._reductions:
            import torch.distributed as dist

            from deepmd_muon.optim.sharded.process_groups import group_of
        # In the same order on all ranks.
        for reduction, heads in zip(self._reductions, self._reduced_heads[device], strict=True):
            maxima = largest[heads]
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group_of(reduction.ranks, device))
            largest[heads] = maxima
        tables = {device: self._table(largest, skip)}
        for target in self._targets:
            local = local_of(target.p).detach()
            if local.device not in tables:
                tables[local.device] = tables[device].to(local.device, non_blocking=True)
            wide = torch.promote_types(local.dtype, torch.float32)
            scale = tables[local.device].to(wide)[target.places.to(local.device)]
            # Broadcast along the dimensions after `dim`.
            local.mul_(scale.view(-1, *[1] * (local.ndim - 1 - target.dim)))

    def _largest(self, logits: Logits, device: torch.device) -> Tensor:
        """Return the largest logits that this rank has, float64 (heads of all layers,)."""
        largest = torch.full((self._n_heads,), -math.inf, dtype=torch.float64, device=device)
        for name, value in logits.items():
            local = local_of(value).detach().to(device, torch.float64, non_blocking=True)
            copied = 0
            for start, stop in _held_heads(value):
                count = stop - start
                head = self._first_head[name] + start
                largest[head : head + count] = local[copied : copied + count]
                copied += count
        return largest

    def _table(self, largest: Tensor, skip: Tensor | None) -> Tensor:
        """Return all factors, float64; see `QKClip`."""
        is_over = (largest > self._clip.threshold) & largest.isfinite()
        if skip is not None:
            is_over &= skip.to(is_over.device) <= 0
        gamma = torch.where(is_over, self._clip.threshold / largest, 1.0)
        self._key_of_head = self._key_of_head.to(gamma.device)
        ones = gamma.new_ones(self._n_keys)
        gamma_of_keys = ones.scatter_reduce(0, self._key_of_head, gamma, "amin")
        alpha = self._clip.alpha
        return torch.cat([gamma**alpha, gamma_of_keys ** (1.0 - alpha), gamma, gamma.new_ones(1)])


def _held_heads(value: Tensor) -> Sequence[tuple[int, int]]:
    """Return the intervals of heads of which this rank holds the logits."""
    if spec_of(value) is None:
        return ((0, len(value)),)
    from deepmd_muon.optim.sharded.params import local_runs  # needs torch.distributed

    return local_runs(value, 0)
