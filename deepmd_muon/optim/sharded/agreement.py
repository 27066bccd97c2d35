"""Agreement of ranks on routes, settings, gradients and the values of replicas.

Before the first common step, `check_settings` and `check_replicas` compare routes, settings and
values. In every step, `GradientPresence` compares which gradients exist, and the settings of
groups; its collective also carries flags of the caller.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    RankGroup,
    SharedName,
    check_names,
    gather_if_different,
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


class _ParameterSettings(NamedTuple):
    """A parameter, and the number and settings of its group."""

    shared_name: SharedName
    group: int
    settings: dict[str, Any]


def check_settings(
    groups: Sequence[Group], params: Sequence[ShardedParameter], device: torch.device
) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them.

    Tensors of `device` are exchanged. Reading a learning rate on a GPU synchronizes with it.

    Raises
    ------
    PlanMismatchError
        On all ranks, with the first parameter that differs, or with group, key and both values of
        the first setting.
    """
    settings = {number: _settings_of(groups[number]) for number in {p.group for p in params}}
    routes = []
    statements = []
    for param in params:
        ranks = param.layout.sorted_ranks
        routes.append(SharedName(ranks, f"{param} (route {param.entry.placement})"))
        shared_name = SharedName(ranks, param.entry.name)
        statements.append(_ParameterSettings(shared_name, param.group, settings[param.group]))
    for among in largest_groups([shared_name.ranks for shared_name in routes], device):
        members = set(among.ranks)
        check_names(
            [shared_name for shared_name in routes if members.issuperset(shared_name.ranks)], among
        )
        local = [
            statement for statement in statements if members.issuperset(statement.shared_name.ranks)
        ]
        statements_of_ranks = gather_if_different(local, among)
        if statements_of_ranks is not None:
            _require_same_settings(statements_of_ranks, among.ranks)


def _settings_of(group: Group) -> dict[str, Any]:
    """Return the values of `KEYS`."""
    return {
        "lr": float(group.values["lr"]),
        "maximize": group.values["maximize"],
        **{key: getattr(group.settings, key) for key in _CONFIG_KEYS},
    }


def _require_same_settings(
    statements_of_ranks: Sequence[Sequence[_ParameterSettings]], ranks: Sequence[int]
) -> None:
    """Raise PlanMismatchError for the first setting that differs between two ranks."""
    first_seen: dict[SharedName, tuple[int, dict[str, Any]]] = {}  # its rank and settings
    for rank, statements in zip(ranks, statements_of_ranks, strict=True):
        for shared_name, group, settings in statements:
            first_rank, expected = first_seen.setdefault(shared_name, (rank, settings))
            for key in KEYS:
                if settings[key] != expected[key]:
                    raise PlanMismatchError(
                        f"{key} of param_groups[{group}], to which {shared_name.name!r} belongs, "
                        f"is {expected[key]!r} on rank {first_rank} and {settings[key]!r} on rank "
                        f"{rank}; give all ranks the same settings"
                    )


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


class _SettingsEntry(NamedTuple):
    """The settings of one group, on the ranks that share some of its parameters."""

    ranks: tuple[int, ...]
    label: str  # with the name of the first such parameter
    group: int


class GroupColumns:
    """Settings of groups, as columns of the small all-reduce that a step needs anyway.

    Attributes
    ----------
    entries
        One for each group and each set of ranks that hold some of its parameters.
    values
        By group, the numbers of `KEYS` that `changed` has read last.
    """

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        entries: dict[tuple[tuple[int, ...], int], _SettingsEntry] = {}
        for param in params:
            ranks = param.layout.sorted_ranks
            entry = _SettingsEntry(ranks, f"the group of {param.entry.name!r}", param.group)
            entries.setdefault((ranks, param.group), entry)
        self.entries = list(entries.values())
        self.values: dict[int, list[float]] = {}
        self._groups: Sequence[Group] = ()
        self._rates: list[tuple[float, bool]] | None = None

    def watch(self, groups: Sequence[Group]) -> None:
        """Compare the settings of these groups; the next call of `changed` reads all of them."""
        self._groups = groups
        self._rates = None

    def changed(self) -> bool:
        """Read the groups; return whether a setting has changed since the last call."""
        # In most steps only these two can have changed: new settings come with a call of `watch`.
        rates = [(_lr_on_host(group), group.values["maximize"]) for group in self._groups]
        if rates == self._rates:
            return False
        self._rates = rates
        values_before = self.values
        self.values = {}
        for number in {entry.group for entry in self.entries}:
            settings = self._groups[number].settings
            lr, maximize = rates[number]
            numbers = [_as_number(getattr(settings, key)) for key in _CONFIG_KEYS]
            self.values[number] = [lr, float(maximize), *numbers]
        return self.values != values_before


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
    ranks: tuple[int, ...]


class _LocalParameter(NamedTuple):
    p: Tensor
    column: int


class _LocalSettings(NamedTuple):
    group: int
    first_column: int  # of `len(KEYS)`


@dataclasses.dataclass
class _Comparison:
    """What one group of ranks compares in a step: tables, float32 (2, columns), reduced by MAX.

    In the column of a parameter, the first row is 1 on a rank with its gradient, the second row is
    1 on a rank without. In the column of a setting, the rows are its value and the negative value:
    the maximum over ranks gives the largest and the smallest value.

    Attributes
    ----------
    process_group
        Of the ranks.
    names
        Names of the parameters of all ranks, one for each of the first columns.
    labels
        Groups of parameters of all ranks: each has `len(KEYS)` of the columns that follow.
    params, settings
        The columns that this rank fills.
    result
        The last reduced table, in host memory.
    table
        This rank's table on the device, (2 · columns,).
    """

    process_group: dist.ProcessGroup
    names: list[str]
    labels: list[str]
    params: list[_LocalParameter]
    settings: list[_LocalSettings]
    result: Tensor
    table: Tensor | None = None

    def fill(self, columns: GroupColumns, device: torch.device) -> None:
        """Write this rank's gradients and settings to its table."""
        table = torch.zeros(self.result.shape, device="cpu")
        for param in self.params:
            row = 0 if param.p.grad is not None else 1
            table[row, param.column] = 1.0
        # Below the values of the ranks that have the group.
        table[:, len(self.names) :] = -torch.inf
        for group, start in self.settings:
            values = torch.tensor(columns.values[group], device="cpu")
            table[:, start : start + len(KEYS)] = torch.stack([values, -values])
        self.table = table.view(-1).to(device)


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
    columns
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
        ranks: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        late: bool | None = None,
        columns: GroupColumns | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._late = on_gpu if late is None else late
        self._copied = torch.cuda.Event() if on_gpu else None
        self._columns = columns or GroupColumns([])
        self._n_steps = 0
        rank_groups = largest_groups(ranks, device)
        # Replicas on one rank cannot differ.
        compared = [param for param in compared if len(param.ranks) > 1]
        self._comparisons = []
        for among in rank_groups:
            group_params = [
                param for param in compared if _first_with(rank_groups, param.ranks) is among
            ]
            group_entries = [
                entry
                for entry in self._columns.entries
                if _first_with(rank_groups, entry.ranks) is among
            ]
            self._comparisons.append(_comparison(among, group_params, group_entries))
        self._presence: list[list[bool]] | None = None  # gradients in the present tables
        self._pending = False  # whether a result has not been read yet

    def compare(self, flags: Tensor | None = None, *, only_flags: bool = False) -> Tensor | None:
        """Raise the error of the previous comparison, and start a comparison of the gradients.

        `flags`, float32 (n,) on all ranks, are reduced in the same collective; the result is their
        maximum over ranks. With `only_flags`, and during the capture of a CUDA graph, only they are
        reduced: replays use the same gradients.

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
            self._fill_tables()
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

    def _fill_tables(self) -> None:
        """Update the tables on the device if local gradients or settings have changed."""
        presence = [
            [param.p.grad is not None for param in comparison.params]
            for comparison in self._comparisons
        ]
        settings_changed = self._columns.changed()
        if presence == self._presence and not settings_changed:
            return
        self._presence = presence
        for comparison in self._comparisons:
            comparison.fill(self._columns, self._device)

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
        results = [comparison.result.tolist() for comparison in self._comparisons]
        for comparison in self._comparisons:
            comparison.result.zero_()  # so that an error is raised once
        names = []
        for comparison, (present, missing) in zip(self._comparisons, results, strict=True):
            for column, name in enumerate(comparison.names):
                if present[column] and missing[column]:
                    names.append(name)
        if names:
            raise MissingGradientError(
                f"{prefix}some ranks have a gradient of {', '.join(names)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        for comparison, (largest, negated) in zip(self._comparisons, results, strict=True):
            settings = itertools.product(comparison.labels, KEYS)
            columns = slice(len(comparison.names), None)  # those before are of parameters
            for (label, key), high, negated_low in zip(
                settings, largest[columns], negated[columns], strict=True
            ):
                low = -negated_low
                if high == low:
                    continue
                difference = "not the same on all ranks"  # digests say nothing to a user
                if key in _NUMERIC_KEYS:
                    difference = f"{low:.7g} on one rank and {high:.7g} on another"
                raise PlanMismatchError(
                    f"{prefix}{key} of {label} is {difference}; give all ranks the same settings"
                )


def _first_with(rank_groups: Sequence[RankGroup], ranks: tuple[int, ...]) -> RankGroup | None:
    """Return the first group that has all of these ranks."""
    for among in rank_groups:
        if set(ranks) <= set(among.ranks):
            return among
    return None


def _comparison(
    among: RankGroup, params: Sequence[ComparedParameter], entries: Sequence[_SettingsEntry]
) -> _Comparison:
    """Return what one group of ranks compares, after a comparison of names."""
    param_names = [SharedName(param.ranks, param.name) for param in params]
    entry_labels = [SharedName(entry.ranks, entry.label) for entry in entries]
    param_columns = check_names(param_names, among)
    entry_numbers = check_names(entry_labels, among)
    n_params = len(param_columns)
    n_columns = n_params + len(KEYS) * len(entry_numbers)
    return _Comparison(
        process_group=among.process_group,
        names=[shared_name.name for shared_name in param_columns],
        labels=[shared_name.name for shared_name in entry_numbers],
        params=[
            _LocalParameter(param.p, param_columns[shared_name])
            for param, shared_name in zip(params, param_names, strict=True)
        ],
        settings=[
            _LocalSettings(entry.group, n_params + len(KEYS) * entry_numbers[shared_name])
            for entry, shared_name in zip(entries, entry_labels, strict=True)
        ],
        # Pinned, so that copies from a GPU are asynchronous.
        result=torch.zeros(2, n_columns, device="cpu", pin_memory=among.device.type == "cuda"),
    )
