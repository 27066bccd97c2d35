"""Agreement of ranks: before the first common step, they compare routes, settings and the values of replicas.

In every step they compare which gradients exist and the settings of groups, and agree whether to skip the step.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.errors import MissingGradientError, PlanMismatchError, ReplicaMismatchError
from deepmd_muon.optim.groups.group_settings import LISTS, OF_ALL_GROUPS
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.process_groups import (
    agreeing_groups,
    check_names,
    group_of,
    statements_if_different,
)
from deepmd_muon.optim.state.schema import State

# Without patterns: the routes that follow from them are compared, and patterns for parameters of one rank may differ.
_KEYS = tuple(
    field.name
    for field in dataclasses.fields(HybridMuonConfig)
    if field.name not in OF_ALL_GROUPS.union(LISTS)
)
KEYS = ("lr", "maximize", *_KEYS)
"""The settings of a group that must be the same on all ranks that hold its parameters."""

_NUMERIC = {"lr", "maximize"}.union(
    field.name
    for field in dataclasses.fields(HybridMuonConfig)
    if isinstance(field.default, (int, float))
)
# The ranks and name of a parameter, and the number and settings of its group.
_Statement = tuple[tuple[int, ...], str, int, dict[str, Any]]
# If steps have no collective that can carry the settings, they are compared once in this many steps.
_RARELY = 100
_DIGEST_BITS = 24  # whole numbers that float32 holds exactly


def check_settings(
    groups: Sequence[Group], params: Sequence[ShardedParameter], device: torch.device
) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them, on tensors of `device`.

    Reading a learning rate on a GPU synchronizes with it. Raises PlanMismatchError on all ranks, with the first
    parameter that differs, or with group, key and both values of the first setting.
    """
    members = [
        (tuple(sorted(p.layout.ranks)), f"{p} (route {p.entry.placement})", p) for p in params
    ]
    settings = {}
    for number in dict.fromkeys(p.group for p in params):
        group = groups[number]
        own = {key: getattr(group.settings, key) for key in _KEYS}
        settings[number] = {
            "lr": float(group.values["lr"]),
            "maximize": group.values["maximize"],
            **own,
        }
    for among, process_group in agreeing_groups([ranks for ranks, _, _ in members], device):
        here = [member for member in members if set(member[0]) <= set(among)]
        check_names([(ranks, name) for ranks, name, _ in here], among, process_group, device)
        mine: list[_Statement] = [
            (ranks, p.entry.name, p.group, settings[p.group]) for ranks, _, p in here
        ]
        everyone: list[list[_Statement]] | None
        statement = repr(mine).encode()
        everyone = statements_if_different(
            statement, functools.partial(list, mine), among, process_group, device
        )
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

    Later, replicas may differ by rounding if ranks repeat the work on different hardware. Parameters with state were
    compared before, or their values come from a checkpoint. Raises ReplicaMismatchError on all ranks, with all
    names.
    """
    fresh = [
        p for p in params if not isinstance(p.p, DTensor) and not state.get(p.p) and p.p.numel()
    ]
    if not fresh:
        return
    ranks = tuple(sorted(fresh[0].layout.ranks))  # those of `replicas`
    group = group_of(ranks, device)
    if group is None:
        return
    digests = []  # 62-bit checksums of each tensor's bits, weighted by row; without a copy of the tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for param in fresh:
        x = param.p.detach()
        bits = x.contiguous().view(-1).view(kinds[x.itemsize]).view(x.shape[0] if x.ndim else 1, -1)
        rows = bits.sum(1, dtype=torch.int64)  # wraps around
        weights = 2 * torch.arange(len(rows), device=x.device) + 1
        digests.append(((rows * weights).sum() & (2**62 - 1)).to(device))
    mine = torch.stack(digests)
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    different = [
        p
        for p, equal in zip(fresh, (extremes[0] == -extremes[1]).tolist(), strict=True)
        if not equal
    ]
    if different:
        names = ", ".join(map(repr, (p.entry.name for p in different[:10]))) + ", …" * (
            len(different) > 10
        )
        raise ReplicaMismatchError(
            f"the values of {names} differ between ranks {ranks}, where `replicas` declares copies; broadcast them "
            "before the first step (DistributedDataParallel does). List parameters that differ between ranks on "
            "purpose, such as experts, in local_patterns."
        )


class GroupColumns:
    """Settings of groups, as columns of the small all-reduce that a step needs anyway.

    `entries` has, for each group and each set of ranks that hold some of its parameters, these ranks and the name of
    the first such parameter; `numbers` has the number of the group. `values` has the settings of each group, in the
    order of `KEYS`, as last `read` from `groups`.
    """

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        first: dict[tuple[tuple[int, ...], int], str] = {}
        for p in params:
            first.setdefault((tuple(sorted(p.layout.ranks)), p.group), p.entry.name)
        self.entries = [(ranks, f"the group of {name!r}") for (ranks, _), name in first.items()]
        self.numbers = [number for _, number in first]
        self.groups: Sequence[Group] = ()
        self.read: list[Any] = []
        self.values: dict[int, list[float]] = {}

    def changed(self) -> bool:
        """Read the groups; return whether a setting has changed since the last call."""
        lrs = [group.values["lr"] for group in self.groups]
        # Learning rates on a GPU are compared in the first step only.
        on_host = [
            float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else 0.0
            for lr in lrs
        ]
        read = [
            (lr, group.values["maximize"]) for lr, group in zip(on_host, self.groups, strict=True)
        ]
        if read == self.read:
            return False
        self.read = read
        before, self.values = self.values, {}
        for number in set(self.numbers):
            group, (lr, maximize) = self.groups[number], read[number]
            own = [getattr(group.settings, key) for key in _KEYS]
            # Settings that are not numbers are compared by digests.
            numbers = [
                float(
                    x
                    if isinstance(x, (bool, int, float))
                    else zlib.crc32(repr(x).encode()) % 2**_DIGEST_BITS
                )
                for x in own
            ]
            self.values[number] = [lr, float(maximize), *numbers]
        return self.values != before


class ComparedParameter(NamedTuple):
    """A parameter whose replicas would diverge if only some ranks had its gradient.

    `ranks` ascend. Names and their order must be the same on all of them.
    """

    p: Tensor
    name: str
    ranks: tuple[int, ...]


class GradientPresence:
    """Compares, by one small all-reduce, which parameters have gradients on the ranks that hold them.

    On a CPU the result is read at once. On a GPU, or with `late`, it is read when the next comparison begins, or by
    `raise_deferred`, so that the host does not wait for the device: all ranks then raise together, one step late.

    The steps of the parameters `compared` are not exchanged: a rank without a gradient would not step them. `ranks` are
    all sets of ranks that hold parameters; a subset of another set is compared as part of that set. The same collective
    carries the settings of groups, `columns`; without one, every hundredth step has a collective for them.

    Raises PlanMismatchError on all ranks of a group when their parameters differ.
    """

    def __init__(
        self,
        compared: Sequence[ComparedParameter],
        ranks: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        late: bool | None = None,
        columns: GroupColumns | None = None,
    ) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._late = on_gpu if late is None else late
        self._copied = torch.cuda.Event() if on_gpu else None
        self._groups: list[dist.ProcessGroup] = []
        self._members: list[list[Tensor]] = []  # for each group: this rank's parameters,
        self._places: list[list[int]] = []  # the positions of their flags,
        self._names: list[list[str]] = []  # and the names of all ranks' parameters, one per flag
        self._columns, self._steps = columns, 0
        self._entries: list[
            list[tuple[int, int]]
        ] = []  # this rank's groups of parameters: number, first column
        self._labels: list[list[str]] = []  # and all ranks'
        rest = [each for each in compared if len(each.ranks) > 1]
        groups = [] if columns is None else list(enumerate(columns.entries))
        for among, group in agreeing_groups(ranks, device):
            mine = [each for each in rest if set(each.ranks) <= set(among)]
            rest = [each for each in rest if not set(each.ranks) <= set(among)]
            known = check_names([(each.ranks, each.name) for each in mine], among, group, device)
            self._groups.append(group)
            self._members.append([each.p for each in mine])
            self._places.append([known[each.ranks, each.name] for each in mine])
            self._names.append([name for _, name in known])
            held = [(number, entry) for number, entry in groups if set(entry[0]) <= set(among)]
            groups = [each for each in groups if each not in held]
            found = check_names([entry for _, entry in held], among, group, device)
            self._entries.append(
                [(number, len(known) + len(KEYS) * found[entry]) for number, entry in held]
            )
            self._labels.append([name for _, name in found])
        # Host memory for the results; pinned, so that copies from a GPU are asynchronous.
        self._widths = [
            len(a) + len(KEYS) * len(b) for a, b in zip(self._names, self._labels, strict=True)
        ]
        self._arrived = [
            torch.zeros(2, width, device="cpu", pin_memory=on_gpu) for width in self._widths
        ]
        self._found: list[list[bool]] | None = None
        self._here: list[Tensor] = []
        self._pending = False

    def compare(self, flags: Tensor | None = None) -> Tensor | None:
        """Raise the error of the previous comparison, and start a comparison of the present gradients.

        `flags`, float32 (n,) on all ranks, are reduced in the same collective; the result is their maximum over ranks.
        During the capture of a CUDA graph only they are reduced: replays use the same gradients.

        Raises
        ------
        MissingGradientError
            On all ranks of the group, including those that do not hold the parameter.
        """
        capturing = is_capturing()
        if not capturing:
            self.raise_deferred()
            self._look()
        rarely = self._steps % _RARELY == 0
        self._steps += 1
        for k, group in enumerate(self._groups):
            wanted = self._names[k] or (self._labels[k] and (rarely or flags is not None))
            here = self._here[k] if wanted and not capturing else None
            sent = [x for x in (here, flags) if x is not None]
            if not sent:
                continue
            together = torch.cat(sent)
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            if here is not None:
                self._arrived[k].copy_(together[: len(here)].view(2, -1), non_blocking=True)
                self._pending = True
            if flags is not None:
                flags = together[len(together) - len(flags) :]
        if self._pending and not capturing:
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device))
            if not self._late:
                self.raise_deferred()
        return flags

    def raise_deferred(self) -> None:
        """Raise the error of the last comparison, once; identical on all ranks, without communication."""
        if not self._pending:
            return
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()  # recorded in the last step
        late = "the last step differed between ranks; " if self._late else ""
        read = [arrived.tolist() for arrived in self._arrived]
        for arrived in self._arrived:
            arrived.zero_()  # reported once
        names = [
            name
            for known, arrived in zip(self._names, read, strict=True)
            for name, here, missing in zip(known, *arrived, strict=False)
            if here and missing
        ]
        if names:
            raise MissingGradientError(
                f"{late}some ranks have a gradient of {', '.join(names)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        for known, labels, (largest, negated) in zip(self._names, self._labels, read, strict=True):
            for i, label in enumerate(labels):
                here = slice(len(known) + i * len(KEYS), len(known) + (i + 1) * len(KEYS))
                for key, high, low in zip(
                    KEYS, largest[here], [-x for x in negated[here]], strict=True
                ):
                    if high != low:
                        values = f"{low:.7g} on one rank and {high:.7g} on another"
                        values = values if key in _NUMERIC else "not the same on all ranks"
                        raise PlanMismatchError(
                            f"{late}{key} of {label} is {values}; give all ranks the same settings"
                        )

    def _look(self) -> None:
        """Update the flags on the device if local gradients or settings have changed.

        Float32 (2, n): for parameters, 1 where the gradient is present, and where it is missing; for settings, value
        and negative, so that the maximum over ranks gives their largest and smallest.
        """
        found = [[p.grad is not None for p in members] for members in self._members]
        changed = self._columns is not None and self._columns.changed()
        if found == self._found and not changed:
            return
        self._found = found
        self._here = []
        for k, (places, there) in enumerate(zip(self._places, found, strict=True)):
            flags = torch.zeros(2, self._widths[k], device="cpu")
            for place, is_there in zip(places, there, strict=True):
                flags[0 if is_there else 1, place] = 1.0
            flags[:, len(self._names[k]) :] = -torch.inf  # of groups on other ranks
            for number, start in self._entries[k]:
                assert self._columns is not None
                values = torch.tensor(
                    self._columns.values[self._columns.numbers[number]], device="cpu"
                )
                flags[:, start : start + len(KEYS)] = torch.stack([values, -values])
            self._here.append(flags.view(-1).to(self._device))
