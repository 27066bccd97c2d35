"""Agreement of ranks before they share steps: routes, settings of parameter groups, and the values of replicas."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.errors import PlanMismatchError, ReplicaMismatchError
from deepmd_muon.optim.routing.group_settings import LISTS, OF_ALL_GROUPS
from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.process_groups import agreeing_groups, check_names, group_of, statements_if_different
from deepmd_muon.optim.state.schema import State

# Patterns matter by the routes they give, which are compared; those for parameters of one rank may differ.
_KEYS = tuple(
    field.name for field in dataclasses.fields(HybridMuonConfig) if field.name not in OF_ALL_GROUPS.union(LISTS)
)
KEYS = ("lr", "maximize", *_KEYS)
"""The settings of a group that must be the same on all ranks that hold its parameters."""

_NUMERIC = {"lr", "maximize", "adam_lr_ratio"}.union(
    field.name for field in dataclasses.fields(HybridMuonConfig) if isinstance(field.default, (int, float))
)
# The ranks and name of a parameter, and the number and settings of its group.
_Statement = tuple[tuple[int, ...], str, int, dict[str, Any]]
_DIGEST_BITS = 24  # whole numbers that float32 holds exactly


def check_settings(groups: Sequence[Group], params: Sequence[ShardedParameter], device: torch.device) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them, on tensors of `device`.

    A learning rate on a GPU is read, which waits for it.

    Raises
    ------
    PlanMismatchError
        On all ranks: with the first parameter, or with group, key and both values of the first setting that differs.
    """
    members = [(tuple(sorted(p.layout.ranks)), f"{p} (route {p.entry.placement})", p) for p in params]
    settings = {}
    for number in dict.fromkeys(p.group for p in params):
        group = groups[number]
        own = {key: getattr(group.settings, key) for key in _KEYS}
        settings[number] = {"lr": float(group.values["lr"]), "maximize": group.values["maximize"], **own}
    for among, process_group in agreeing_groups([ranks for ranks, _, _ in members], device):
        here = [member for member in members if set(member[0]) <= set(among)]
        check_names([(ranks, name) for ranks, name, _ in here], among, process_group, device)
        mine: list[_Statement] = [(ranks, p.entry.name, p.group, settings[p.group]) for ranks, _, p in here]
        everyone: list[list[_Statement]] | None
        statement = repr(mine).encode()
        everyone = statements_if_different(statement, functools.partial(list, mine), among, process_group, device)
        known: dict[Any, tuple[int, dict[str, Any]]] = {}
        for rank, theirs in zip(among, everyone or (), strict=everyone is not None):
            for ranks, name, number, values in theirs:
                first, expected = known.setdefault((ranks, name), (rank, values))
                differing = next((key for key in KEYS if values[key] != expected[key]), None)
                if differing is not None:
                    raise PlanMismatchError(
                        f"{differing} of param_groups[{number}], to which {name!r} belongs, is {expected[differing]!r} "
                        f"on rank {first} and {values[differing]!r} on rank {rank}; give all ranks the same settings"
                    )


def check_replicas(state: State, params: Sequence[ShardedParameter], device: torch.device) -> None:
    """Compare the values of plain parameters that have not been stepped yet with those of their replicas.

    Later, replicas may differ by rounding where ranks repeat the work on unlike hardware.

    Parameters with state have been compared before, or their values come from a checkpoint.

    Raises
    ------
    ReplicaMismatchError
        On all ranks, naming the parameters.
    """
    fresh = [p for p in params if not isinstance(p.p, DTensor) and not state.get(p.p) and p.p.numel()]
    if not fresh:
        return
    ranks = tuple(sorted(fresh[0].layout.ranks))  # those of `replicas`
    group = group_of(ranks, device)
    if group is None:
        return
    mine = torch.stack([_digest(p.p.detach()).to(device) for p in fresh])
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    different = [p for p, equal in zip(fresh, (extremes[0] == -extremes[1]).tolist(), strict=True) if not equal]
    if different:
        names = ", ".join(map(repr, (p.entry.name for p in different[:10]))) + ", …" * (len(different) > 10)
        raise ReplicaMismatchError(
            f"the values of {names} differ between ranks {ranks}, where `replicas` declares copies; broadcast them "
            "before the first step (DistributedDataParallel does). Name parameters that each rank has for itself, such "
            "as its experts, in local_patterns."
        )


def _digest(x: Tensor) -> Tensor:
    """Return a number of at most 62 bits from the bits of a tensor and their rows, without a copy of the tensor."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.contiguous().view(-1).view(kinds[x.itemsize]).view(x.shape[0] if x.ndim else 1, -1)
    rows = bits.sum(1, dtype=torch.int64)  # wraps around
    weights = 2 * torch.arange(len(rows), device=x.device) + 1
    return (rows * weights).sum() & (2**62 - 1)


class GroupColumns:
    """Settings of groups as columns of the small all-reduce that a step has anyway.

    Attributes
    ----------
    entries
        The ranks of each group's parameters, with the name of the first of them; one or more for each group.
    """

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        first: dict[tuple[tuple[int, ...], int], str] = {}
        for p in params:
            first.setdefault((tuple(sorted(p.layout.ranks)), p.group), p.entry.name)
        self.entries = [(ranks, f"the group of {name!r}") for (ranks, _), name in first.items()]
        self._numbers = [number for _, number in first]
        self._groups: Sequence[Group] = ()
        self._read: list[Any] = []
        self._values: dict[int, list[float]] = {}

    def bind(self, groups: Sequence[Group]) -> None:
        """Take the groups whose settings the next comparisons read."""
        self._groups, self._read = groups, []

    def changed(self) -> bool:
        """Read the groups; return whether a setting has changed since the last call."""
        lrs = [group.values["lr"] for group in self._groups]
        # The first step alone compares learning rates on a GPU.
        on_host = [float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else 0.0 for lr in lrs]
        read = [(lr, group.values["maximize"]) for lr, group in zip(on_host, self._groups, strict=True)]
        if read == self._read:
            return False
        self._read = read
        before, self._values = self._values, {}
        for number in set(self._numbers):
            group, (lr, maximize) = self._groups[number], read[number]
            own = [getattr(group.settings, key) for key in _KEYS]
            # Settings that are no numbers are compared by digests.
            numbers = [
                float(x if isinstance(x, (bool, int, float)) else zlib.crc32(repr(x).encode()) % 2**_DIGEST_BITS)
                for x in own
            ]
            self._values[number] = [lr, float(maximize), *numbers]
        return self._values != before

    def values(self, entry: int) -> list[float]:
        """Return the settings of the group of an entry, in the order of `KEYS`."""
        return self._values[self._numbers[entry]]


def difference(entry: str, largest: Sequence[float], smallest: Sequence[float]) -> str | None:
    """Return the first setting of a group that differs between ranks, with both values; None without any."""
    for key, high, low in zip(KEYS, largest, smallest, strict=True):
        if high != low:
            numeric = key in _NUMERIC
            values = f"{low:.7g} on one rank and {high:.7g} on another" if numeric else "not the same on all ranks"
            return f"{key} of {entry} is {values}"
    return None
