"""What ranks compare before they step together, and in every step.

    when          function                       compares                       error
    first step    `check_routes_and_settings`    names, routes and settings     PlanMismatchError
    first step    `check_replicas`               values of plain parameters     ReplicaMismatchError
    every step    `StepComparison.compare`       which gradients exist          MissingGradientError
                                                 settings of parameter groups   PlanMismatchError

`ShardedStep` calls them in this order, on all ranks. Before the first one it compares the plans
(`Plan.statements`). `shard_state` uses `StepComparison` alone. *Plain* parameters are no DTensors:
each of their ranks has a complete copy.

Parameters may live on different sets of ranks, and a set compares only what concerns all of it. An
error is raised on all ranks of this rank's largest set, which contains its other sets. So no rank
waits for one that has given up.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
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

# ----- the first step ----------------------------------------------------------------------------

_LISTED_NAMES = 10  # in an error
_CHECKSUM_BITS = 62  # so that checksums and their negatives are int64
# By bytes of an element. One of 8 bytes counts as two integers: its sign would be above the bits of
# a checksum.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def check_routes_and_settings(
    state: State,
    groups: Sequence[Group],
    params: Sequence[ShardedParameter],
    device: torch.device,
    error: ShardingError | None,
) -> None:
    """Compare names, routes and settings of all parameters among the ranks that hold them.

    Whether a plain parameter has state is compared, too: `check_replicas` relies on it. Tensors of
    `device` are exchanged. Reading a learning rate on a GPU synchronizes with it.

    Raises
    ------
    ShardingError
        On all ranks, when some have an `error`; on a single rank the caller raises it.
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
        for key, value in _settings_of(group, lr=float(group.values["lr"])).items():
            settings.append(Statement(shared.ranks, f"{key} of {shared.label} is {value!r}"))
    check_statements(routes, rank_group, error)
    if error is not None:  # the same on all ranks
        raise error
    check_statements(settings, rank_group)


def check_replicas(state: State, params: Sequence[ShardedParameter], device: torch.device) -> None:
    """Compare the values of plain parameters that have not been stepped yet with their replicas.

    Later, replicas may differ by rounding if ranks repeat the work on different hardware.
    Parameters with state were compared before, or their values come from a checkpoint.
    `check_routes_and_settings` has checked that the same parameters have state on all replicas.

    Raises
    ------
    ReplicaMismatchError
        On all ranks, with the names of at most `_LISTED_NAMES` parameters that differ.
    """
    rank_group = largest_group([param.layout.sorted_ranks for param in params], device)
    if rank_group is None:
        return
    fresh = [
        param
        for param in params
        if not isinstance(param.p, DTensor) and not state.get(param.p) and param.p.numel()
    ]
    error = _replica_error(fresh, device) if fresh else None
    # `replicas` may be some of the ranks of `rank_group`; the others raise the error here.
    check_statements([], rank_group, error)
    if error is not None:
        raise error


def _replica_error(
    params: Sequence[ShardedParameter], device: torch.device
) -> ReplicaMismatchError | None:
    """Compare plain parameters with their replicas; return the error, None if they agree."""
    ranks = params[0].layout.sorted_ranks  # plain tensors all live on `replicas`
    process_group = group_of(ranks, device)
    if process_group is None:  # a single rank
        return None
    checksums = torch.stack([_checksum(param.p.detach()).to(device) for param in params])
    extremes = torch.stack([checksums, -checksums])  # maximum and −minimum, (2, parameters)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=process_group)
    is_same = (extremes[0] == -extremes[1]).tolist()
    names = [
        repr(param.entry.name) for param, same in zip(params, is_same, strict=True) if not same
    ]
    if not names:
        return None
    listed = ", ".join(names[:_LISTED_NAMES])
    if len(names) > _LISTED_NAMES:
        listed += ", …"
    return ReplicaMismatchError(
        f"the values of {listed} differ between ranks {ranks}, where `replicas` declares "
        "copies; broadcast them before the first step (DistributedDataParallel does). List "
        "parameters that differ between ranks on purpose, such as experts, in local_patterns."
    )


def _checksum(x: Tensor) -> Tensor:
    """Return a non-negative int64 scalar: the sum of the bits of all elements, weighted by row.

    It does not depend on the order of elements in a row.
    """
    # The bits as integers, without a copy of a contiguous tensor.
    elements = x.contiguous().view(-1).view(_INTEGERS[x.itemsize])
    n_rows = x.shape[0] if x.ndim else 1
    row_sums = elements.view(n_rows, -1).sum(1, dtype=torch.int64)  # wraps around
    # Odd: a change of a row sum vanishes in the checksum only if 2**_CHECKSUM_BITS divides it.
    weights = 2 * torch.arange(n_rows, device=x.device) + 1
    checksum: Tensor = (row_sums * weights).sum() & (2**_CHECKSUM_BITS - 1)
    return checksum


# ----- parameter groups and their settings -------------------------------------------------------

# Not `OF_ALL_GROUPS`: these are settings of the optimizer. Not `LISTS`: patterns may differ for
# parameters of one rank, so their results, the routes, are compared; the plan states the rules.
_CONFIG_FIELDS = [
    field
    for field in dataclasses.fields(HybridMuonConfig)
    if field.name not in OF_ALL_GROUPS and field.name not in LISTS
]
# The settings of a group that must be the same on all ranks that share parameters of it.
_KEYS = ("lr", "maximize", *(field.name for field in _CONFIG_FIELDS))
_NUMERIC_KEYS = {
    "lr",
    "maximize",
    *(field.name for field in _CONFIG_FIELDS if isinstance(field.default, (int, float))),
}


class SharedGroup(NamedTuple):
    """A parameter group, on the ranks that share some of its parameters.

    Each of these ranks may have another number for it, so the first parameter that they share
    names it.
    """

    ranks: RankSet
    label: str  # with the name of that parameter
    group: int  # number of the group on this rank


def shared_groups(params: Sequence[ShardedParameter]) -> list[SharedGroup]:
    """Return each group once for each set of ranks that hold some of its parameters."""
    shared: dict[tuple[RankSet, int], SharedGroup] = {}
    for param in params:
        ranks = param.layout.sorted_ranks
        label = f"the group of {param.entry.name!r}"
        shared.setdefault((ranks, param.group), SharedGroup(ranks, label, param.group))
    return list(shared.values())


def _settings_of(group: Group, lr: float) -> dict[str, object]:
    """Return the settings of a group in the order of `_KEYS`.

    The callers read the learning rate `lr` in different ways, see `_lr_on_host`.
    """
    settings: dict[str, object] = {"lr": lr, "maximize": group.values["maximize"]}
    for field in _CONFIG_FIELDS:
        settings[field.name] = getattr(group.settings, field.name)
    return settings


# ----- every step --------------------------------------------------------------------------------

# If steps have no collective that can carry the settings, one step in this many has one for them.
_STEPS_PER_COMPARISON = 100
_DIGEST_BITS = 24  # whole numbers that float32 holds exactly


class ComparedParameter(NamedTuple):
    """A parameter with replicas that would diverge if only some ranks had its gradient.

    `name` is its name in errors, which may include shape and route. `ranks` ascend. Names and their
    order must be the same on all of them.
    """

    p: Tensor
    name: str
    ranks: RankSet


class StepComparison:
    """Compares gradients and settings in every step, by one small all-reduce.

    A parameter must have a gradient on all of its ranks or on none. The all-reduce also carries
    flags of the caller, such as whether a gradient of this rank is not finite.

        step                                               compared
        with `only_flags`, or in a capture                 nothing
        without flags, and without parameters to compare   settings, in 1 step of 100
        any other                                          gradients and settings

    A learning rate on a GPU is compared by `check_routes_and_settings` only.

    On a CPU the result is read at once. On a GPU it is read when the next comparison begins, or by
    `raise_deferred`, so that the host does not wait for the device: all ranks then raise together,
    one step late.

    The constructor is a collective of the largest set of ranks.

    Parameters
    ----------
    compared
        Parameters with replicas that would diverge if only some ranks had the gradient.
    sets_of_ranks
        All sets of ranks that hold parameters of this rank; the largest contains the others.
    device
        The device of the tables that are reduced.
    late
        Whether to read results late. None: late on a GPU, at once on a CPU.
    groups
        The parameter groups that have their settings compared.

    Raises
    ------
    PlanMismatchError
        On all ranks of the largest set, when the names of their parameters or groups differ.
    ShardingError
        When no set of ranks contains all others.
    UnsupportedTransportError
        When the process group has no backend for the device.
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
        self._n_steps = 0
        self._table: _ComparisonTable | None = None  # None on a single rank
        rank_group = largest_group(sets_of_ranks, device)
        if rank_group is not None:
            # Replicas on one rank cannot differ.
            compared = [param for param in compared if len(param.ranks) > 1]
            groups = [shared for shared in groups if len(shared.ranks) > 1]
            self._table = _ComparisonTable(rank_group, compared, groups)
        self._pending = False  # whether the table has a result that has not been read yet
        # On a GPU: recorded when the copy of the result to the host has been enqueued.
        self._copy_done = torch.cuda.Event() if on_gpu else None

    def compare(
        self,
        flags: Tensor | None = None,
        groups: Sequence[Group] = (),
        *,
        only_flags: bool = False,
    ) -> Tensor | None:
        """Raise the error of the previous comparison, and start the one of this step.

        If results are not read late, the error of this step is raised, too.

        Parameters
        ----------
        flags
            Numbers to reduce in the same collective, float32 (n,).
        groups
            The present parameter groups of this rank.
        only_flags
            Reduce the flags and compare nothing. The capture of a CUDA graph compares nothing
            either: replays use the same gradients.

        Returns
        -------
        Tensor or None
            The maximum of the flags over the largest set of ranks, (n,); None without flags.

        Raises
        ------
        MissingGradientError
            On all ranks of the largest set, including those that do not hold the parameter, when
            only some ranks have its gradient.
        PlanMismatchError
            On all ranks of the largest set, when settings differ.
        """
        table = self._table
        if table is None:
            return flags
        capturing = is_capturing()
        if not capturing:
            self.raise_deferred()
        # Gradients are compared in every step, and settings travel with them or with flags. A
        # collective for the settings alone runs in one of `_STEPS_PER_COMPARISON` steps.
        is_due = (
            table.has_gradients or flags is not None or self._n_steps % _STEPS_PER_COMPARISON == 0
        )
        self._n_steps += 1
        local = None
        if is_due and table.n_columns and not (only_flags or capturing):
            local = table.local(groups)
        operands = [x for x in (local, flags) if x is not None]
        if not operands:
            return None
        reduced = torch.cat(operands)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=table.process_group)
        if local is not None:
            table.store(reduced[: len(local)])
            self._pending = True
            if self._copy_done is not None:
                self._copy_done.record(torch.cuda.current_stream(self._device))
            if not self._late:
                self.raise_deferred()
        return None if flags is None else reduced[len(reduced) - len(flags) :]

    def raise_deferred(self) -> None:
        """Raise the error of the last comparison, once.

        It is identical on all ranks of the largest set, and there is no communication.
        """
        if self._table is None or not self._pending:
            return
        self._pending = False
        if self._copy_done is not None:
            self._copy_done.synchronize()  # recorded in the last step; in this one if not late
        prefix = "the last step differed between ranks; " if self._late else ""
        missing, settings = self._table.differences()
        if missing:
            raise MissingGradientError(
                f"{prefix}some ranks have a gradient of {', '.join(missing)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        if settings:
            raise PlanMismatchError(f"{prefix}{settings[0]}; give all ranks the same settings")


class _Column(NamedTuple):
    """One value that must be the same on some ranks.

    Attributes
    ----------
    subject
        The name of a parameter, or the label of a parameter group, and the ranks that share it.
    key
        The setting of the group. None for a parameter: its value is 1 if it has a gradient, and 0
        otherwise.
    """

    subject: Statement
    key: str | None


def _columns_of(names: Iterable[Statement], labels: Iterable[Statement]) -> list[_Column]:
    """Return a column for each parameter, and then one for each setting of each group."""
    gradients = [_Column(name, None) for name in names]
    settings = [_Column(label, key) for label in labels for key in _KEYS]
    return gradients + settings


class _ComparisonTable:
    """The values that some ranks compare in a step, float32 (2, columns), reduced by MAX.

    The first row has values, the second their negatives, so the maxima over ranks give the largest
    and the smallest value of each column. Where a rank does not have a column, its table has −∞.
    For example, rank 0 has no gradient of 'b', and rank 1 has another learning rate:

        column                'a'          'b'          lr of the group of 'a'    maximize …
        rank 0                 1, −1        0,  0       0.1, −0.1                 0, 0
        rank 1                 1, −1        1, −1       0.2, −0.2                 0, 0
        maximum                1, −1        1,  0       0.2, −0.1                 0, 0
        largest, smallest      1,  1        1,  0       0.2,  0.1                 0, 0
                              the same     differs      differs                   the same

    The constructor compares the columns of all ranks, which is a collective.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        params: Sequence[ComparedParameter],
        groups: Sequence[SharedGroup],
    ) -> None:
        names = [Statement(param.ranks, param.name) for param in params]
        labels = [Statement(shared.ranks, shared.label) for shared in groups]
        # Of all ranks, in one order.
        all_names = check_statements(names, rank_group)
        all_labels = check_statements(labels, rank_group)
        self._columns = _columns_of(all_names, all_labels)
        self.n_columns = len(self._columns)
        self.has_gradients = bool(all_names)
        self.process_group = rank_group.process_group
        self._device = rank_group.device
        self._params = [param.p for param in params]
        self._group_numbers = [shared.group for shared in groups]

        # Of this rank: values (n,), the number of the column of each (n,), and the table that
        # `local` returns.
        self._values: list[float] | None = None
        position = {column: number for number, column in enumerate(self._columns)}
        local_columns = [position[column] for column in _columns_of(names, labels)]
        self._local_columns = torch.tensor(local_columns, dtype=torch.int64, device="cpu")
        self._local = torch.empty(0, device="cpu")
        # The last result. Pinned, so that copies from a GPU are asynchronous.
        on_gpu = rank_group.device.type == "cuda"
        self._reduced = torch.zeros(2, self.n_columns, device="cpu", pin_memory=on_gpu)

    def local(self, groups: Sequence[Group]) -> Tensor:
        """Return this rank's table on the device, (2 · columns,).

        It is made again only if gradients or settings have changed.
        """
        values = [float(p.grad is not None) for p in self._params]
        for number in self._group_numbers:
            settings = _settings_of(groups[number], lr=_lr_on_host(groups[number]))
            values += map(_as_number, settings.values())
        if values != self._values:
            self._values = values
            table = torch.full(self._reduced.shape, -torch.inf, device="cpu")
            row = torch.tensor(values, device="cpu")
            table[:, self._local_columns] = torch.stack([row, -row])
            self._local = table.view(-1).to(self._device)
        return self._local

    def store(self, reduced: Tensor) -> None:
        """Copy a reduced table to the host, (2 · columns,); on a GPU asynchronously."""
        self._reduced.copy_(reduced.view(2, -1), non_blocking=True)

    def differences(self) -> tuple[list[str], list[str]]:
        """Return what differs in the stored table.

        These are the names of parameters without a gradient on some ranks, and descriptions of
        settings.
        """
        missing = []
        settings = []
        rows = self._reduced.tolist()
        for column, high, negated_low in zip(self._columns, *rows, strict=True):
            low = -negated_low
            if high == low:
                continue
            if column.key is None:
                missing.append(column.subject.text)
                continue
            difference = "not the same on all ranks"  # digests say nothing to a user
            if column.key in _NUMERIC_KEYS:
                difference = f"{low:.7g} on one rank and {high:.7g} on another"
            settings.append(f"{column.key} of {column.subject.text} is {difference}")
        return missing, settings


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
