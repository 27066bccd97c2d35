"""Process groups of sets of ranks, and the comparison of statements among their ranks.

Each comparison costs one small all-gather of digests. Only if these differ, the ranks exchange the
values themselves. So all ranks raise the same error, and it names what differs.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from deepmd_muon.optim import errors
from deepmd_muon.optim.errors import PlanMismatchError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.sharded.layout import RankSet

T = TypeVar("T")

# By default group: when it is destroyed, so are all other groups.
_PROCESS_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[RankSet, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


class RankGroup(NamedTuple):
    """Several ranks, ascending, that compare something; all of them call the comparison."""

    ranks: RankSet
    process_group: dist.ProcessGroup
    device: torch.device  # of the tensors that they exchange


class Statement(NamedTuple):
    """What must be the same on some ranks, ascending, in one sentence."""

    ranks: RankSet
    text: str


class _Report(NamedTuple):
    """One rank's error, as class name and message, and its statements."""

    error: tuple[str, str] | None
    statements: list[Statement]


def group_of(ranks: RankSet, device: torch.device) -> dist.ProcessGroup | None:
    """Return the process group of these ranks, all of which must call this; None for a single rank.

    It is created once and shared. Raises UnsupportedTransportError when it has no backend for the
    device.
    """
    if len(ranks) == 1:
        return None
    release_exchanges_at_exit()
    world = dist.group.WORLD
    assert world is not None
    if ranks == tuple(range(dist.get_world_size())):
        group = world
    else:
        groups = _PROCESS_GROUPS.setdefault(world, {})
        if ranks not in groups:
            groups[ranks] = _new_group(ranks, world)
        group = groups[ranks]
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedTransportError(
            f"the process group of ranks {ranks} has no backend for {device.type} tensors "
            f"({dist.get_backend(group)}); initialise it with e.g. 'cpu:gloo,cuda:nccl'"
        ) from error
    return group


def _new_group(ranks: RankSet, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the process group of these ranks; the other ranks of `world` do not take part.

    `torch.distributed.new_group` names such a group by how many groups the calling rank is in or
    has created. Ranks that call it by different names would wait for each other for ever.
    """
    backend, store = c10d._world.pg_map[world]
    # NCCL splits a group off a world that is bound to a device, for which it needs all ranks.
    bound_device = world.bound_device_id
    world.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            group_size=len(ranks),
            group_rank=ranks.index(dist.get_rank()),
            global_ranks_in_group=list(ranks),
            backend=backend,
            store=store,
            group_name=c10d.GroupName(f"deepmd_muon {ranks}"),
            timeout=c10d._get_default_timeout(dist.Backend(backend)),
        )
    finally:
        world.bound_device_id = bound_device
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


@functools.cache
def release_exchanges_at_exit() -> None:
    """Let gloo's threads release their last exchanges before the interpreter ends.

    Its groups and threads outlive `destroy_process_group`, as caches of DTensor keep them. To free
    the tensors of an exchange a thread needs the interpreter's lock; once the interpreter ends, it
    aborts the process instead ("terminate called without an active exception").
    """
    # Sleeping releases the lock, which another thread may keep for 5 ms.
    atexit.register(time.sleep, 0.05)


def largest_set(sets_of_ranks: Sequence[RankSet]) -> RankSet:
    """Return the set that contains all others; every set contains this rank.

    Raises ShardingError if there is none: of ranks {0, 1} and {1, 2}, rank 0 would miss the flags
    of rank 2.
    """
    largest = max(sets_of_ranks, key=len)
    for ranks in sets_of_ranks:
        if not set(ranks) <= set(largest):
            raise ShardingError(
                f"parameters of this rank are on ranks {ranks} and on ranks {largest}: one of its "
                "sets of ranks must contain all others; give the parameters a mesh of all these "
                "ranks"
            )
    return largest


def largest_group(sets_of_ranks: Sequence[RankSet], device: torch.device) -> RankGroup | None:
    """Return the group of `largest_set`, all ranks of which must call this; None for one rank."""
    ranks = largest_set(sets_of_ranks)
    process_group = group_of(ranks, device)
    return None if process_group is None else RankGroup(ranks, process_group, device)


def gather_if_different(value: T, rank_group: RankGroup) -> list[T] | None:
    """Return every rank's value, in the order of ranks; None if all have the same `repr`."""
    local_digest = hashlib.sha256(repr(value).encode()).digest()
    local = torch.frombuffer(bytearray(local_digest), dtype=torch.uint8).to(rank_group.device)
    digests = [torch.empty_like(local) for _ in rank_group.ranks]
    dist.all_gather(digests, local, group=rank_group.process_group)
    if all(torch.equal(digests[0], digest) for digest in digests):
        return None
    values: list[Any] = [None for _ in rank_group.ranks]
    dist.all_gather_object(values, value, group=rank_group.process_group)
    return values


def check_statements(
    statements: Sequence[Statement], rank_group: RankGroup, error: ShardingError | None = None
) -> dict[Statement, int]:
    """Check that ranks make the same statements in the same order, and share their errors.

    Parameters
    ----------
    statements
        All statements of this rank that concern only ranks of `rank_group`.
    rank_group
        The ranks that compare them.
    error
        This rank's error, which the caller raises if all ranks have the same one.

    Returns
    -------
    dict
        A number for each statement of a rank of `rank_group`, the same on all of them.

    Raises
    ------
    ShardingError
        On every rank: its own error, or one of the class of the first rank's error, which it names.
    PlanMismatchError
        On every rank, naming the first difference.
    """
    error_text = None if error is None else (type(error).__name__, str(error))
    reports = gather_if_different(_Report(error_text, list(statements)), rank_group)
    if reports is None:
        return {statement: number for number, statement in enumerate(statements)}
    if error is not None:
        raise error
    by_rank = dict(zip(rank_group.ranks, reports, strict=True))
    for rank, report in by_rank.items():
        if report.error is not None:
            class_name, message = report.error
            error_class = getattr(errors, class_name, ShardingError)
            raise error_class(f"rank {rank} cannot step: {message}")
    all_statements = dict.fromkeys(itertools.chain(*(report.statements for report in reports)))
    for ranks in dict.fromkeys(statement.ranks for statement in all_statements):
        first_rank = ranks[0]
        expected = _texts(by_rank[first_rank], ranks)
        for rank in ranks:
            texts = _texts(by_rank[rank], ranks)
            pairs = itertools.zip_longest(expected, texts, fillvalue="nothing more")
            for first_text, text in pairs:
                if first_text != text:
                    raise PlanMismatchError(
                        f"ranks {first_rank} and {rank} do not take the same step; "
                        f"rank {first_rank}: {first_text}; rank {rank}: {text}. Give all ranks the "
                        "same parameters, routes, settings and meshes, and freeze parameters alike."
                    )
    return {statement: number for number, statement in enumerate(all_statements)}


def _texts(report: _Report, ranks: RankSet) -> list[str]:
    """Return the statements that concern exactly these ranks."""
    return [statement.text for statement in report.statements if statement.ranks == ranks]
