"""Process groups of sets of ranks, and the comparison of names and plans among their ranks.

Each comparison costs one small all-gather of digests. Only if these differ, the ranks exchange the
values themselves. So all ranks raise the same error, and it names what differs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepmd_muon.optim import errors
from deepmd_muon.optim.errors import PlanMismatchError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.sharded.plan import Domain, Plan

T = TypeVar("T")

# By default group: when it is destroyed, so are all other groups.
_PROCESS_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


class RankGroup(NamedTuple):
    """Several ranks, ascending, that compare something; all of them call the comparison."""

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup
    device: torch.device  # of the tensors that they exchange


class SharedName(NamedTuple):
    """A name, and the ranks, ascending, that hold the parameter."""

    ranks: tuple[int, ...]
    name: str


def group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup | None:
    """Return the process group of these ranks, all of which must call this; None for a single rank.

    It is created once and shared. Raises UnsupportedTransportError when it has no backend for the
    device.
    """
    if len(ranks) == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if ranks == tuple(range(dist.get_world_size())):
        group = world
    else:
        groups = _PROCESS_GROUPS.setdefault(world, {})
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        group = groups[ranks]
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedTransportError(
            f"the process group of ranks {ranks} has no backend for {device.type} tensors "
            f"({dist.get_backend(group)}); initialise it with e.g. 'cpu:gloo,cuda:nccl'"
        ) from error
    return group


def largest_groups(
    sets_of_ranks: Iterable[tuple[int, ...]], device: torch.device
) -> list[RankGroup]:
    """Return the sets of ranks that are not subsets of others, largest first.

    Sets ascend, and all ranks of a set must call this together. Sets of one rank are omitted.
    """
    largest: list[tuple[int, ...]] = []
    for ranks in sorted(set(sets_of_ranks), key=lambda ranks: (-len(ranks), ranks)):
        if not any(set(ranks) <= set(larger) for larger in largest):
            largest.append(ranks)
    rank_groups = []
    for ranks in largest:
        process_group = group_of(ranks, device)
        if process_group is not None:
            rank_groups.append(RankGroup(ranks, process_group, device))
    return rank_groups


def gather_if_different(value: T, among: RankGroup) -> list[T] | None:
    """Return every rank's value, in the order of ranks; None if all have the same `repr`."""
    local_digest = hashlib.sha256(repr(value).encode()).digest()
    local = torch.frombuffer(bytearray(local_digest), dtype=torch.uint8).to(among.device)
    digests = [torch.empty_like(local) for _ in among.ranks]
    dist.all_gather(digests, local, group=among.process_group)
    if all(torch.equal(digests[0], digest) for digest in digests):
        return None
    values: list[Any] = [None for _ in among.ranks]
    dist.all_gather_object(values, value, group=among.process_group)
    return values


def check_names(local_names: Sequence[SharedName], among: RankGroup) -> dict[SharedName, int]:
    """Check that parameters have the same names, in the same order, on all ranks that hold them.

    Parameters
    ----------
    local_names
        All parameters that this rank holds and some ranks of `among` share.
    among
        The ranks that compare them.

    Returns
    -------
    dict
        A number for each parameter that a rank of `among` holds, the same on all of them.

    Raises
    ------
    PlanMismatchError
        On every rank, naming the first difference.
    """
    names_of_ranks = gather_if_different(list(local_names), among)
    if names_of_ranks is None:
        return {shared_name: number for number, shared_name in enumerate(local_names)}
    by_rank = dict(zip(among.ranks, names_of_ranks, strict=True))
    all_names = list(dict.fromkeys(itertools.chain(*names_of_ranks)))
    for ranks in dict.fromkeys(shared_name.ranks for shared_name in all_names):
        first_rank = ranks[0]
        expected = _names_on(by_rank[first_rank], ranks)
        for rank in ranks:
            names = _names_on(by_rank[rank], ranks)
            for expected_name, name in itertools.zip_longest(
                expected, names, fillvalue="nothing more"
            ):
                if expected_name != name:
                    raise PlanMismatchError(
                        f"ranks {first_rank} and {rank} do not train the same parameters; "
                        f"rank {first_rank}: {expected_name}; rank {rank}: {name}. Give all ranks "
                        "the same parameters and routes, and freeze them alike."
                    )
    return {shared_name: number for number, shared_name in enumerate(all_names)}


def _names_on(shared_names: Sequence[SharedName], ranks: tuple[int, ...]) -> list[str]:
    """Return the names of the parameters that exactly these ranks share."""
    return [shared_name.name for shared_name in shared_names if shared_name.ranks == ranks]


class _Report(NamedTuple):
    """One rank's error, as class name and message, and the statements of its plan."""

    error: tuple[str, str] | None
    statements: list[str]


def check_plans(plan: Plan, domain: Domain, among: RankGroup, error: ShardingError | None) -> None:
    """Compare the plans of all ranks of a domain, and share their errors.

    Parameters
    ----------
    plan, domain
        This rank's plan, and one of its domains.
    among
        The ranks of the domain.
    error
        This rank's error, which the caller raises if all ranks have the same one.

    Raises
    ------
    ShardingError
        On every rank: its own error, or one of the class of the first rank's error, which it names.
    PlanMismatchError
        On every rank, naming the first statement that differs.
    """
    error_text = None if error is None else (type(error).__name__, str(error))
    reports = gather_if_different(_Report(error_text, plan.statements(domain)), among)
    if reports is None:
        return
    if error is not None:
        raise error
    for rank, report in zip(among.ranks, reports, strict=True):
        if report.error is not None:
            class_name, message = report.error
            error_class = getattr(errors, class_name, ShardingError)
            raise error_class(f"rank {rank} cannot step: {message}")
    first_rank = among.ranks[0]
    for rank, report in zip(among.ranks, reports, strict=True):
        # The lengths may differ; that is reported below.
        for expected, statement in zip(reports[0].statements, report.statements, strict=False):
            if expected != statement:
                raise PlanMismatchError(
                    f"ranks {first_rank} and {rank} plan different steps; rank {first_rank}: "
                    f"{expected}; rank {rank}: {statement}. Parameters, settings and meshes must "
                    "be the same on all ranks."
                )
    counts = ", ".join(str(len(report.statements)) for report in reports)
    raise PlanMismatchError(
        f"the plans of ranks {among.ranks} differ in length: {counts} statements"
    )
