"""Agreement of ranks on routes, settings, gradients and the values of replicas.

Before the first common step, `check_settings` and `check_replicas` compare routes, settings and
values. In every step, `GradientPresence` compares which gradients exist, and the settings of
groups; its collective also carries flags of the caller.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.errors import MissingGradientError, PlanMismatchError, ReplicaMismatchError
from deepmd_muon.optim.groups.group_settings import LISTS, OF_ALL_GROUPS
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.sharded.layout import RankSet
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.process_groups import (
    RankGroup,
    Statement,
    check_statements,
    group_of,
    largest_groups,
)
from deepmd_muon.optim.state.schema import State

# Without patterns: the routes that follow from them are compared, and patterns for parameters of
# one rank may differ.
_CONFIG_KEYS = tuple(
    field.name
    for field in dataclasses.fields(HybridMuonConfig)
    if field.name not in OF_ALL_GROUPS.union(LISTS)
)
KEYS = ("lr", "maximize", *_CONFIG_KEYS)
"""The settings of a group that must be the same on all ranks that hold its parameters."""

_NUMERIC_KEYS = {"lr", "maximize"}.union(
    field.name
    for field in dataclasses.fields(HybridMuonConfig)
    if isinstance(field.default, (int, float))
)
# If steps have no collective that can carry the settings, one step in this many has one for them.
_STEPS_PER_COMPARISON = 100
_DIGEST_BITS = 24  # whole numbers that float32 holds exactly
_CHECKSUM_BITS = 62  # so that checksums and their negatives are int64
_LISTED_NAMES = 10  # in an error
_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_settings(
    groups: Sequence[Group], params: Sequence[ShardedParameter], device: torch.device
) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them.

    Tensors of `device` are exchanged. Reading a learning rate on a GPU synchronizes with it.

    Raises
    ------
    PlanMismatchError
        On all ranks, with the first parameter or setting that differs, and its value on two ranks.
    """
    routes = [
        Statement(param.layout.sorted_ranks, f"{param} (route {param.entry.placement})")
        for param in params
    ]
    settings = []
    for entry in settings_entries(params):
        group = groups[entry.group]
        values = [float(group.values["lr"]), group.values["maximize"]]
        values += [getattr(group.settings, key) for key in _CONFIG_KEYS]
        settings += [
            Statement(entry.ranks, f"{key} of {entry.label} is {value!r}")
            for key, value in zip(KEYS, values, strict=True)
        ]
    for among in largest_groups([statement.ranks for statement in routes], device):
        members = set(among.ranks)
        for statements in (routes, settings):
            check_statements([x for x in statements if members.issuperset(x.ranks)], among)


def check_replicas(state: State, params: Sequence[ShardedParameter], device: torch.device) -> None:
    """Compare the values of plain parameters that have not been stepped yet with their replicas.

    Later, replicas may differ by rounding if ranks repeat the work on different hardware.
    Parameters with state were compared before, or their values come from a checkpoint.

    Raises
    ------
    ReplicaMismatchError
        On all ranks, with the names of all parameters that differ.
    """
    fresh = [
        p for p in params if not isinstance(p.p, DTensor) and not state.get(p.p) and p.p.numel()
    ]
    if not fresh:
        return
    ranks = fresh[0].layout.sorted_ranks  # plain tensors all live on `replicas`
    process_group = group_of(ranks, device)
    if process_group is None:
        return
    checksums = torch.stack([_checksum(param.p.detach()).to(device) for param in fresh])
    extremes = torch.stack([checksums, -checksums])  # maximum and −minimum, (2, parameters)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=process_group)
    is_same = (extremes[0] == -extremes[1]).tolist()
    names = [repr(p.entry.name) for p, same in zip(fresh, is_same, strict=True) if not same]
    if names:
        listed = ", ".join(names[:_LISTED_NAMES])
        if len(names) > _LISTED_NAMES:
            listed += ", …"
        raise ReplicaMismatchError(
            f"the values of {listed} differ between ranks {ranks}, where `replicas` declares "
            "copies; broadcast them before the first step (DistributedDataParallel does). List "
            "parameters that differ between ranks on purpose, such as experts, in local_patterns."
        )


def _checksum(x: Tensor) -> Tensor:
    """Return a non-negative int64 scalar: the bits of all elements, weighted by row."""
    # Views only: there is no copy of the tensor.
    elements = x.contiguous().view(-1).view(_SAME_SIZE_INTEGERS[x.itemsize])
    n_rows = x.shape[0] if x.ndim else 1
    row_sums = elements.view(n_rows, -1).sum(1, dtype=torch.int64)  # wraps around
    weights = 2 * torch.arange(n_rows, device=x.device) + 1
    checksum: Tensor = (row_sums * weights).sum() & (2**_CHECKSUM_BITS - 1)
    return checksum


class SettingsEntry(NamedTuple):
    """The settings of one group, on the ranks that share some of its parameters."""

    ranks: RankSet
    label: str  # with the name of the first such parameter
    group: int


def settings_entries(params: Sequence[ShardedParameter]) -> list[SettingsEntry]:
    """Return an entry for each group and each set of ranks that hold some of its parameters."""
    entries: dict[tuple[RankSet, int], SettingsEntry] = {}
    for param in params:
        ranks = param.layout.sorted_ranks
        entry = SettingsEntry(ranks, f"the group of {param.entry.name!r}", param.group)
        entries.setdefault((ranks, param.group), entry)
    return list(entries.values())


def _numbers_of(group: Group) -> list[float]:
    """Return the settings `KEYS` of a group as numbers."""
    values = [_lr_on_host(group), group.values["maximize"]]
    values += [getattr(group.settings, key) for key in _CONFIG_KEYS]
    return [_as_number(value) for value in values]


def _lr_on_host(group: Group) -> float:
    """Return the learning rate; 0 for one on a GPU, which is compared in the first step only."""
    lr = group.values["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return 0.0
    return float(lr)


def _as_number(setting: object) -> float:
    """Return a number, or a digest of another setting."""
    if isinstance(setting, (bool, int, float)):
        return float(setting)
    return float(zlib.crc32(repr(setting).encode()) % 2**_DIGEST_BITS)


class ComparedParameter(NamedTuple):
    """A parameter with replicas that would diverge if only some ranks had its gradient.

    `ranks` ascend. Names and their order must be the same on all of them.
    """

    p: Tensor
    name: str
    ranks: RankSet


class _Comparison:
    """What one group of ranks compares in a step: numbers, float32 (2, columns), reduced by MAX.

    A column has a number that must be the same on all ranks that have it: 1 for a parameter with a
    gradient and 0 without, or a setting. The second row has the negative number, so that the
    maxima over ranks give the largest and the smallest number. The constructor compares names.

    Attributes
    ----------
    process_group
        Of the ranks.
    names
        Names of the parameters of all ranks, one for each of the first columns.
    labels
        Groups of parameters of all ranks: each has `len(KEYS)` of the columns that follow.
    table
        This rank's table on the device, (2 · columns,).
    result
        The last reduced table, in host memory.
    """

    table: Tensor

    def __init__(
        self,
        among: RankGroup,
        params: Sequence[ComparedParameter],
        entries: Sequence[SettingsEntry],
    ) -> None:
        names = [Statement(param.ranks, param.name) for param in params]
        labels = [Statement(entry.ranks, entry.label) for entry in entries]
        number_of_name = check_statements(names, among)
        number_of_label = check_statements(labels, among)
        self.process_group = among.process_group
        self.names = [statement.text for statement in number_of_name]
        self.labels = [statement.text for statement in number_of_label]
        self._params = [param.p for param in params]
        self._groups = [entry.group for entry in entries]
        self._numbers: list[float] | None = None  # of this rank, in the table
        columns = [number_of_name[name] for name in names]
        for label in labels:
            start = len(self.names) + len(KEYS) * number_of_label[label]
            columns += range(start, start + len(KEYS))
        self._columns = torch.tensor(columns, dtype=torch.int64, device="cpu")  # of these numbers
        n_columns = len(self.names) + len(KEYS) * len(self.labels)
        # Pinned, so that copies from a GPU are asynchronous.
        on_gpu = among.device.type == "cuda"
        self.result = torch.zeros(2, n_columns, device="cpu", pin_memory=on_gpu)

    def update(self, groups: Sequence[Group], device: torch.device) -> None:
        """Update the table if this rank's gradients or settings have changed."""
        numbers = [float(p.grad is not None) for p in self._params]
        for group in self._groups:
            numbers += _numbers_of(groups[group])
        if numbers == self._numbers:
            return
        self._numbers = numbers
        # Below the numbers of the ranks that have a column.
        table = torch.full(self.result.shape, -torch.inf, device="cpu")
        local = torch.tensor(numbers, device="cpu")
        table[:, self._columns] = torch.stack([local, -local])
        self.table = table.view(-1).to(device)

    def differing(self) -> list[int]:
        """Return the columns that differed between ranks in the last result."""
        largest, negated = self.result.tolist()
        pairs = zip(largest, negated, strict=True)
        return [column for column, (high, low) in enumerate(pairs) if high != -low]

    def describe_setting(self, column: int) -> str:
        """Return the setting of a column, and its values."""
        group, number = divmod(column - len(self.names), len(KEYS))
        key = KEYS[number]
        difference = "not the same on all ranks"  # digests say nothing to a user
        if key in _NUMERIC_KEYS:
            high, negated_low = self.result[:, column].tolist()
            difference = f"{-negated_low:.7g} on one rank and {high:.7g} on another"
        return f"{key} of {self.labels[group]} is {difference}"


class GradientPresence:
    """Compares, by one small all-reduce, which gradients exist on the ranks of each parameter.

    On a CPU the result is read at once. On a GPU it is read when the next comparison begins, or by
    `raise_deferred`, so that the host does not wait for the device: all ranks then raise together,
    one step late.

    Parameters
    ----------
    compared
        Parameters with steps that are not exchanged: a rank without a gradient would not step them.
    ranks
        All sets of ranks that hold parameters; a subset of another set is compared as part of it.
    device
        The device of the tables that are reduced.
    late
        Whether to read results late; None: on a GPU.
    entries
        Settings of groups that the same collective carries. If there is none, every hundredth step
        has one for them.

    Raises
    ------
    PlanMismatchError
        On all ranks of a group when their parameters differ.
    """

    def __init__(
        self,
        compared: Sequence[ComparedParameter],
        ranks: Sequence[RankSet],
        device: torch.device,
        *,
        late: bool | None = None,
        entries: Sequence[SettingsEntry] = (),
    ) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._late = on_gpu if late is None else late
        self._copied = torch.cuda.Event() if on_gpu else None
        self._n_steps = 0
        rank_groups = largest_groups(ranks, device)
        # Replicas on one rank cannot differ.
        compared = [param for param in compared if len(param.ranks) > 1]
        self._comparisons = [
            _Comparison(
                among,
                [x for x in compared if _first_with(rank_groups, x.ranks) is among],
                [x for x in entries if _first_with(rank_groups, x.ranks) is among],
            )
            for among in rank_groups
        ]
        self._pending = False  # whether a result has not been read yet

    def compare(
        self,
        flags: Tensor | None = None,
        groups: Sequence[Group] = (),
        *,
        only_flags: bool = False,
    ) -> Tensor | None:
        """Raise the error of the previous comparison, and start a comparison of the gradients.

        `flags`, float32 (n,) on all ranks, are reduced in the same collective; the result is their
        maximum over ranks. `groups` are the present groups. With `only_flags`, and during the
        capture of a CUDA graph, only flags are reduced: replays use the same gradients.

        Raises
        ------
        MissingGradientError
            On all ranks of the group, including those that do not hold the parameter.
        """
        capturing = is_capturing()
        with_tables = not (only_flags or capturing)
        if not capturing:
            self.raise_deferred()
        if with_tables:
            for comparison in self._comparisons:
                comparison.update(groups, self._device)
        compare_settings = flags is not None or self._n_steps % _STEPS_PER_COMPARISON == 0
        self._n_steps += 1
        for comparison in self._comparisons:
            table = None
            has_entries = comparison.names or (compare_settings and comparison.labels)
            if has_entries and with_tables:
                table = comparison.table
            operands = [x for x in (table, flags) if x is not None]
            if not operands:
                continue
            reduced = torch.cat(operands)
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=comparison.process_group)
            if table is not None:
                comparison.result.copy_(reduced[: len(table)].view(2, -1), non_blocking=True)
                self._pending = True
            if flags is not None:
                # The next group reduces them further: its ranks may be in several groups.
                flags = reduced[len(reduced) - len(flags) :]
        if self._pending and not capturing:
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device))
            if not self._late:
                self.raise_deferred()
        return flags

    def raise_deferred(self) -> None:
        """Raise the error of the last comparison, once.

        It is identical on all ranks, and there is no communication.
        """
        if not self._pending:
            return
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()  # recorded in the last step
        prefix = "the last step differed between ranks; " if self._late else ""
        names = []
        settings = []
        for comparison in self._comparisons:
            for column in comparison.differing():
                if column < len(comparison.names):
                    names.append(comparison.names[column])
                else:
                    settings.append(comparison.describe_setting(column))
            comparison.result.zero_()  # so that an error is raised once
        if names:
            raise MissingGradientError(
                f"{prefix}some ranks have a gradient of {', '.join(names)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        if settings:
            raise PlanMismatchError(f"{prefix}{settings[0]}; give all ranks the same settings")


def _first_with(rank_groups: Sequence[RankGroup], ranks: RankSet) -> RankGroup | None:
    """Return the first group that has all of these ranks."""
    for among in rank_groups:
        if set(ranks) <= set(among.ranks):
            return among
    return None
