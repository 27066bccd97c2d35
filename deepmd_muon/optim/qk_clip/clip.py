"""QK-clip on the parameters of an optimizer: the factors from the logits, and the rows that they scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, spec_of
from deepmd_muon.optim.errors import QKClipError
from deepmd_muon.optim.qk_clip.layers import HeadRows, Layer, QKClip, rows_by_parameter
from deepmd_muon.optim.routing.routes import RouteEntry, canonical_name, is_local

if TYPE_CHECKING:
    from deepmd_muon.optim.groups.param_groups import Group
    from deepmd_muon.optim.sharded.params import Replicas


# The largest logit of each head, (heads,) by layer name: plain tensors, or DTensors in any layout
# except Partial sums.
Logits = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class _Target:
    """One parameter, the dimension that is scaled, and the place in the table of each local index along it."""

    p: Tensor
    dim: int
    places: Tensor


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
        by_name = {entry.name: (p, entry) for group in groups for p, entry in group.routed}
        local = {
            e.name for group in groups for _, e in group.routed if is_local(e.name, group.settings)
        }
        scaled = rows_by_parameter(clip, {name: entry for name, (_, entry) in by_name.items()})
        self._first: dict[str, int] = {}  # the number of a layer's first head
        self._groups: list[list[int]] = []  # heads that share a key
        keys: dict[str, int] = {}
        heads = 0
        for layer in clip.layers:
            self._first[layer.name], keys[layer.name] = heads, len(self._groups)
            count = layer.key_heads or layer.heads
            each = layer.heads // count
            self._groups += [
                list(range(heads + g * each, heads + (g + 1) * each)) for g in range(count)
            ]
            heads += layer.heads
        # The table of factors: γ^α of all heads, γ^(1−α) of all keys, γ of all heads, and 1.
        self._starts = {"query": 0, "key": heads, "rotary": heads + len(self._groups)}
        self._heads, self._one = heads, 2 * heads + len(self._groups)
        self._keys = keys
        self._targets = [
            self._target(*by_name[name], rows)
            for name, rows in sorted(scaled.items())
            if by_name[name][0].numel()
        ]
        self._reductions = _reductions(clip, scaled, by_name, self._first, replicas, local)
        self._reduced: dict[torch.device, list[Tensor]] = {}
        widest = max(map(len, self._groups))
        # Smaller groups repeat their first head.
        self._members = torch.tensor(
            [g + g[:1] * (widest - len(g)) for g in self._groups], device="cpu"
        )

    def _target(
        self, p: Tensor, entry: RouteEntry, rows: Sequence[tuple[Layer, HeadRows]]
    ) -> _Target:
        """Return a parameter with the place of each row's factor in the table."""
        dim = 0 if len(entry.shape) == 1 or rows[0][0].axis == "rows" else 1
        places = torch.full((entry.shape[dim],), self._one, device="cpu")
        for layer, each in rows:
            first = self._starts[each.factor]
            first += self._keys[layer.name] if each.factor == "key" else self._first[layer.name]
            for i in range(each.heads):
                start = each.start + i * each.stride
                places[start : start + each.size] = first + each.first + i * each.step
        if hasattr(p, "device_mesh"):
            from deepmd_muon.optim.sharded.params import local_runs  # needs torch.distributed

            places = torch.cat(
                [places[:0], *(places[start:stop] for start, stop in local_runs(p, dim))]
            )
        return _Target(p, dim, places.to(local_of(p).device))

    def checked(self, logits: Logits) -> dict[str, Tensor]:
        """Return logits by the routing's names.

        Raise unless they are (heads,) tensors of known layers.
        """
        heads = {layer.name: layer.heads for layer in self._clip.layers}
        found: dict[str, Tensor] = {}
        problems = []
        for key, value in logits.items():
            name = canonical_name(key) if isinstance(key, str) else key
            if name not in heads:
                # Indices are refused: they could count the model's layers, or the declared ones.
                problems.append(
                    f"qk_logits: unknown layer {key!r}; known are {', '.join(map(repr, heads))}"
                )
            elif name in found:
                problems.append(f"qk_logits: two entries are layer {name!r}")
            elif problem := self._problem(name, value, heads[name]):
                problems.append(f"qk_logits[{key!r}]: {problem}")
            found[name] = value
        if problems:
            raise QKClipError(sorted(problems))
        return found

    def _problem(self, name: str, value: object, heads: int) -> str | None:
        """Return what is wrong with the logits of a layer; None if nothing is."""
        if not isinstance(value, Tensor):
            return f"must be a tensor of shape ({heads},), one a head; found {type(value).__name__}"
        if tuple(value.shape) != (heads,) or not value.is_floating_point():
            found = f"{value.dtype} of shape {tuple(value.shape)}"
            return (
                f"must be real of shape ({heads},), one a head; found {found}. If ranks have "
                "different heads, "
                "pass a DTensor, or -inf for heads of other ranks"
            )
        spec = spec_of(value)
        if spec is None:
            return None
        if any(
            placement.is_partial() and placement.reduce_op != "max" for placement in spec.placements
        ):
            return f"is {spec.placements}; reduce it first, or pass its full_tensor()"
        held = sum(stop - start for start, stop in _held_heads(value))
        if held != len(local_of(value)):
            return (
                f"this rank holds {len(local_of(value))} logits, but its layout assigns it {held}"
            )
        ranks = set(spec.mesh.mesh.flatten().tolist())
        first = self._first[name]
        reduced = {
            rank
            for group, members in self._reductions
            if first in members.tolist()
            for rank in group
        }
        if (
            len(ranks) > 1
            and not ranks <= reduced
            and not all(p.is_replicate() for p in spec.placements)
        ):
            return (
                f"is {spec.placements} on ranks {sorted(ranks)}, which do not share the layer's "
                "weights, so that each "
                "would scale its own heads only; pass its full_tensor()"
            )
        return None

    def __call__(self, logits: Logits, skip: Tensor | None = None) -> None:
        """Scale the rows of heads whose logits exceed the threshold, unless `skip` is 1 on the device.

        `logits` is the result of `checked`: the largest logit of each head, −inf for heads that
        this rank does not compute; or a DTensor, from which each rank reads its own heads. Layers
        may be missing, but all ranks must give the same layers: the maximum over the ranks counts.
        """
        device = local_of(self._targets[0].p).device
        largest = torch.full((self._heads,), -math.inf, dtype=torch.float64, device=device)
        for name, value in logits.items():
            local = local_of(value).detach().to(device, torch.float64, non_blocking=True)
            for start, stop in _held_heads(value):
                first = self._first[name] + start
                largest[first : first + stop - start], local = (
                    local[: stop - start],
                    local[stop - start :],
                )
        if device not in self._reduced:  # a captured step cannot copy from the host
            self._reduced[device] = [heads.to(device) for _, heads in self._reductions]
        if self._reductions:
            import torch.distributed as dist

            from deepmd_muon.optim.sharded.process_groups import group_of
        for (ranks, _), heads in zip(self._reductions, self._reduced[device], strict=True):
            mine = largest[heads]
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=group_of(ranks, device))
            largest[heads] = mine
        table = self._table(largest, skip)
        tables = {device: table}
        for target in self._targets:
            local = local_of(target.p).detach()
            if local.device not in tables:
                tables[local.device] = table.to(local.device, non_blocking=True)
            wide = torch.promote_types(local.dtype, torch.float32)
            scale = tables[local.device].to(wide)[target.places.to(local.device)]
            local.mul_(scale.view(-1, *[1] * (local.ndim - 1 - target.dim)))

    def _table(self, largest: Tensor, skip: Tensor | None) -> Tensor:
        """Return all factors, float64; see `QKClip`."""
        over = (largest > self._clip.threshold) & largest.isfinite()
        if skip is not None:
            over &= skip.to(over.device) <= 0
        factor = torch.where(over, self._clip.threshold / largest, 1.0)
        self._members = self._members.to(factor.device)
        keys = factor[self._members].amin(1)
        alpha = self._clip.alpha
        return torch.cat([factor**alpha, keys ** (1.0 - alpha), factor, factor.new_ones(1)])


def _held_heads(value: Tensor) -> Sequence[tuple[int, int]]:
    """Return the heads whose logits this rank holds, as intervals."""
    if spec_of(value) is None:
        return ((0, len(value)),)
    from deepmd_muon.optim.sharded.params import local_runs  # needs torch.distributed

    return local_runs(value, 0)


def _reductions(
    clip: QKClip,
    scaled: Mapping[str, Sequence[tuple[Layer, HeadRows]]],
    by_name: Mapping[str, tuple[Tensor, RouteEntry]],
    first: Mapping[str, int],
    replicas: Replicas | None,
    local: Container[str],
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return pairs of ranks and of the heads whose logits these ranks reduce, in the same order on all ranks."""
    params = {layer.name: by_name[name] for name, rows in scaled.items() for layer, _ in rows}
    if replicas is None and not any(hasattr(p, "device_mesh") for p, _ in params.values()):
        return []
    from deepmd_muon.optim.sharded.params import layout_of  # needs torch.distributed

    heads: dict[tuple[int, ...], list[int]] = {}
    for layer in clip.layers:
        p, entry = params[layer.name]
        layout = layout_of(p, None if entry.name in local else replicas)
        if layout is not None and len(layout.ranks) > 1:
            heads.setdefault(tuple(sorted(layout.ranks)), []).extend(
                range(first[layer.name], first[layer.name] + layer.heads)
            )
    return [(ranks, torch.tensor(found, device="cpu")) for ranks, found in heads.items()]
