"""Agreement of ranks on routes, settings, gradients and the values of replicas.

Before the first common step, `check_routes_and_settings` and `check_replicas` compare routes,
settings and values. In steps, `StepComparison` compares which gradients exist, and the settings of
parameter groups; its collective also carries flags of the caller.
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
from deepmd_muon.optim.errors import (
    MissingGradientError,
    PlanMismatchError,
    ReplicaMismatchError,
    ShardingError,
)
from deepmd_muon.optim.groups.group_settings import LISTS, OF_ALL_GROUPS
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.sharded.layout import RankSet
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.process_groups import (
    RankGroup,
    Statement,
    check_statements,
    group_of,
    largest_group,
)
from deepmd_muon.optim.state.schema import State

# Without `OF_ALL_GROUPS`, which are settings of the optimizer, and without `LISTS`. Routes are
# compared instead of patterns, which may differ for parameters of one rank. The plan states the
# rules of each matrix.
_CONFIG_KEYS = tuple(
    field.name
    for field in dataclasses.fields(HybridMuonConfig)
    if field.name not in OF_ALL_GROUPS.union(LISTS)
)
# The settings of a group that must be the same on all ranks that hold its parameters.
_KEYS = ("lr", "maximize", *_CONFIG_KEYS)

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
# By bytes of an element.
_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_routes_and_settings(
    state: State,
    groups: Sequence[Group],
    params: Sequence[ShardedParameter],
    device: torch.device,
    error: ShardingError | None,
) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them.

    Replicas must all have state of a plain parameter or none, as `check_replicas` assumes. Tensors
    of `device` are exchanged. Reading a learning rate on a GPU synchronizes with it.

    Raises
    ------
    ShardingError
        On all ranks, when a rank has an `error`. The caller raises one that all ranks have.
    PlanMismatchError
        On all ranks, with the first parameter or setting that differs, and its value on two ranks.
    """
    rank_group = largest_group([param.layout.sorted_ranks for param in params], device)
    if rank_group is None:
        return
    routes = []
    for param in params:
        text = f"{param} (route {param.entry.placement})"
        if not isinstance(param.p, DTensor) and state.get(param.p):
            text += ", with state"
        routes.append(Statement(param.layout.sorted_ranks, text))
    settings = []
    for shared in shared_groups(params):
        group = groups[shared.group]
        values = _settings_of(group, lr=float(group.values["lr"]))
        settings += [
            Statement(shared.ranks, f"{key} of {shared.label} is {value!r}")
            for key, value in zip(_KEYS, values, strict=True)
        ]
    check_statements(routes, rank_group, error)
    check_statements(settings, rank_group)


def check_replicas(state: State, params: Sequence[ShardedParameter], device: torch.device) -> None:
    """Compare the values of plain parameters that have not been stepped yet with their replicas.

    Later, replicas may differ by rounding if ranks repeat the work on different hardware.
    Parameters with state were compared before, or their values come from a checkpoint;
    `check_routes_and_settings` has checked that they are the same on all replicas.

    Raises
    ------
    ReplicaMismatchError
        On all ranks, with the names of the first parameters that differ (`_LISTED_NAMES`).
    """
    fresh = [
        param
        for param in params
        if not isinstance(param.p, DTensor) and not state.get(param.p) and param.p.numel()
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
    names = [repr(param.entry.name) for param, same in zip(fresh, is_same, strict=True) if not same]
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
    # Without a copy of a contiguous tensor.
    elements = x.contiguous().view(-1).view(_SAME_SIZE_INTEGERS[x.itemsize])
    n_rows = x.shape[0] if x.ndim else 1
    row_sums = elements.view(n_rows, -1).sum(1, dtype=torch.int64)  # wraps around
    # Odd, so that a change of a row sum never vanishes modulo a power of two.
    weights = 2 * torch.arange(n_rows, device=x.device) + 1
    checksum: Tensor = (row_sums * weights).sum() & (2**_CHECKSUM_BITS - 1)
    return checksum


class SharedGroup(NamedTuple):
    """A parameter group, on the ranks that share some of its parameters."""

    ranks: RankSet
    label: str  # with the name of the first such parameter
    group: int  # its number on this rank


def shared_groups(params: Sequence[ShardedParameter]) -> list[SharedGroup]:
    """Return each group once for each set of ranks that hold some of its parameters."""
    shared: dict[tuple[RankSet, int], SharedGroup] = {}
    for param in params:
        ranks = param.layout.sorted_ranks
        label = f"the group of {param.entry.name!r}"
        shared.setdefault((ranks, param.group), SharedGroup(ranks, label, param.group))
    return list(shared.values())


def _settings_of(group: Group, lr: float) -> list[object]:
    """Return the values of `_KEYS`."""
    return [lr, group.values["maximize"], *(getattr(group.settings, key) for key in _CONFIG_KEYS)]


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


class _ComparisonTable:
    """The values that one group of ranks compares in a step, float32 (2, columns), reduced by MAX.

    A column has a value that must be the same on all ranks that have it: 1 for a parameter with a
    gradient and 0 without, or a setting as a number. The second row has the negative values, so the
    maxima over ranks give the largest and the smallest value. The constructor compares names.

    Attributes
    ----------
    process_group
        Of the ranks.
    names
        Names of the parameters of all ranks, one for each of the first columns.
    labels
        Labels of the groups of all ranks; each has `len(_KEYS)` of the columns that follow.
    reduced
        The last reduced table, in host memory.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        params: Sequence[ComparedParameter],
        groups: Sequence[SharedGroup],
    ) -> None:
        names = [Statement(param.ranks, param.name) for param in params]
        labels = [Statement(shared.ranks, shared.label) for shared in groups]
        place_of_name = check_statements(names, rank_group)
        place_of_label = check_statements(labels, rank_group)
        self.process_group = rank_group.process_group
        self.names = [statement.text for statement in place_of_name]
        self.labels = [statement.text for statement in place_of_label]
        self._params = [param.p for param in params]
        self._group_numbers = [shared.group for shared in groups]
        self._device = rank_group.device
        columns = [place_of_name[name] for name in names]
        for label in labels:
            start = len(self.names) + len(_KEYS) * place_of_label[label]
            columns += range(start, start + len(_KEYS))
        # This rank's values (n,), their columns (n,), and its flat table on the device,
        # (2 · columns,).
        self._values: list[float] | None = None
        self._columns = torch.tensor(columns, dtype=torch.int64, device="cpu")
        self._local = torch.empty(0, device="cpu")
        n_columns = len(self.names) + len(_KEYS) * len(self.labels)
        # Pinned, so that copies from a GPU are asynchronous.
        on_gpu = rank_group.device.type == "cuda"
        self.reduced = torch.zeros(2, n_columns, device="cpu", pin_memory=on_gpu)

    def local(self, groups: Sequence[Group]) -> Tensor:
        """Return this rank's table; it is made again if gradients or settings have changed."""
        values = [float(p.grad is not None) for p in self._params]
        for number in self._group_numbers:
            settings = _settings_of(groups[number], lr=_lr_on_host(groups[number]))
            values += map(_as_number, settings)
        if values != self._values:
            self._values = values
            # A column that this rank does not have must not change the maximum.
            table = torch.full(self.reduced.shape, -torch.inf, device="cpu")
            row = torch.tensor(values, device="cpu")
            table[:, self._columns] = torch.stack([row, -row])
            self._local = table.view(-1).to(self._device)
        return self._local

    def differing(self) -> list[int]:
        """Return the columns that differed between ranks in the last comparison."""
        largest, negated_smallest = self.reduced.tolist()
        pairs = zip(largest, negated_smallest, strict=True)
        return [column for column, (high, negated_low) in enumerate(pairs) if high != -negated_low]

    def describe_setting(self, column: int) -> str:
        """Return the setting of a column, and its values."""
        label_number, key_number = divmod(column - len(self.names), len(_KEYS))
        key = _KEYS[key_number]
        difference = "not the same on all ranks"  # digests say nothing to a user
        if key in _NUMERIC_KEYS:
            high, negated_low = self.reduced[:, column].tolist()
            difference = f"{-negated_low:.7g} on one rank and {high:.7g} on another"
        return f"{key} of {self.labels[label_number]} is {difference}"


class StepComparison:
    """Compares gradients and settings in steps, by one small all-reduce of the largest group.

        step                                               compared
        with `only_flags`, or in a capture                 nothing
        without flags, and without parameters to compare   settings, in 1 step of 100
        any other                                          gradients and settings

    A learning rate on a GPU is compared by `check_routes_and_settings` only.

    A parameter must have a gradient on all of its ranks or on none. On a CPU the result is read at
    once. On a GPU it is read when the next comparison begins, or by `raise_deferred`, so that the
    host does not wait for the device: all ranks then raise together, one step late.

    Parameters
    ----------
    compared
        Parameters with replicas that would diverge if only some ranks had the gradient.
    sets_of_ranks
        All sets of ranks that hold parameters of this rank; the largest contains the others.
    device
        The device of the tables that are reduced.
    late
        Whether to read results late; None: on a GPU.
    groups
        The parameter groups that have their settings compared.

    Raises
    ------
    PlanMismatchError
        On all ranks of the group when their parameters differ.
    """

    def __init__(
        self,
        compared: Sequence[ComparedParameter],
        sets_of_ranks: Sequence[RankSet],
        device: torch.device,
        *,
        late: bool | None = None,
        groups: Sequence[SharedGroup] = (),
    ) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._late = on_gpu if late is None else late
        # On a GPU: recorded when the copy of the reduced table to the host has been enqueued.
        self._copy_done = torch.cuda.Event() if on_gpu else None
        self._n_steps = 0
        rank_group = largest_group(sets_of_ranks, device)
        self._table: _ComparisonTable | None = None
        if rank_group is not None:
            # Replicas on one rank cannot differ.
            compared = [param for param in compared if len(param.ranks) > 1]
            groups = [shared for shared in groups if len(shared.ranks) > 1]
            self._table = _ComparisonTable(rank_group, compared, groups)
        self._pending = False  # whether a result has not been read yet

    def compare(
        self,
        flags: Tensor | None = None,
        groups: Sequence[Group] = (),
        *,
        only_flags: bool = False,
    ) -> Tensor | None:
        """Raise the error of the previous comparison, and start the one of this step.

        If results are not read late, the error of this step is raised, too.

        `flags`, float32 (n,), are reduced in the same collective; the result is their maximum over
        the largest group. `groups` are the present parameter groups. With `only_flags`, and during
        the capture of a CUDA graph, only flags are reduced: replays use the same gradients.

        Raises
        ------
        MissingGradientError
            On all ranks of the group, including those that do not hold the parameter.
        PlanMismatchError
            On all ranks of the group, when settings differ.
        """
        table = self._table
        if table is None:
            return flags
        capturing = is_capturing()
        if not capturing:
            self.raise_deferred()
        # Settings travel with gradients and with flags. In steps without either, one step in
        # `_STEPS_PER_COMPARISON` has a collective for them. With names `settings_due` is not used:
        # the table always has both.
        settings_due = flags is not None or self._n_steps % _STEPS_PER_COMPARISON == 0
        self._n_steps += 1
        local = None
        has_columns = table.names or (settings_due and table.labels)
        if has_columns and not (only_flags or capturing):
            local = table.local(groups)
        operands = [x for x in (local, flags) if x is not None]
        if not operands:
            return None
        reduced = torch.cat(operands)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=table.process_group)
        if local is not None:
            table.reduced.copy_(reduced[: len(local)].view(2, -1), non_blocking=True)
            self._pending = True
        if self._pending and not capturing:
            if self._copy_done is not None:
                self._copy_done.record(torch.cuda.current_stream(self._device))
            if not self._late:
                self.raise_deferred()
        return None if flags is None else reduced[len(reduced) - len(flags) :]

    def raise_deferred(self) -> None:
        """Raise the error of the last comparison, once.

        It is identical on all ranks of the group, and there is no communication.
        """
        table = self._table
        if table is None or not self._pending:
            return
        self._pending = False  # so that an error is raised once
        if self._copy_done is not None:
            self._copy_done.synchronize()  # recorded in the last step; in this one if not late
        prefix = "the last step differed between ranks; " if self._late else ""
        names = []
        settings = []
        for column in table.differing():
            if column < len(table.names):
                names.append(table.names[column])
            else:
                settings.append(table.describe_setting(column))
        if names:
            raise MissingGradientError(
                f"{prefix}some ranks have a gradient of {', '.join(names)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        if settings:
            raise PlanMismatchError(f"{prefix}{settings[0]}; give all ranks the same settings")
