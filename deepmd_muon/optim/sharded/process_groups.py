"""Process groups of a plan's domains, and the agreement of their ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepmd_muon.optim import errors
from deepmd_muon.optim.errors import PlanMismatchError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.sharded.plan import Domain, Plan

T = TypeVar("T")

# Keyed by the default group: when it is destroyed, so are all other groups.
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


def group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup | None:
    """Return the process group of these ranks, all of which must call this; None for a single rank.

    It is created once and shared. Raises UnsupportedTransportError when it has no backend for the device.
    """
    if len(ranks) == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    known = _KNOWN.setdefault(world, {})
    whole = ranks == tuple(range(dist.get_world_size()))
    if not whole and ranks not in known:
        known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    group = world if whole else known[ranks]
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedTransportError(
            f"the process group of ranks {ranks} has no backend for {device.type} tensors "
            f"({dist.get_backend(group)}); initialise it with e.g. 'cpu:gloo,cuda:nccl'"
        ) from error
    return group


def agreeing_groups(
    known: Iterable[tuple[int, ...]], device: torch.device
) -> list[tuple[tuple[int, ...], dist.ProcessGroup]]:
    """Return the sets of ranks that are not subsets of others, largest first, with their process groups.

    Sets ascend, and all ranks of a set must call this together. Sets of one rank are omitted.
    """
    largest: list[tuple[int, ...]] = []
    for ranks in sorted(dict.fromkeys(known), key=lambda ranks: (-len(ranks), ranks)):
        if not any(set(ranks) <= set(other) for other in largest):
            largest.append(ranks)
    found = [(ranks, group_of(ranks, device)) for ranks in largest]
    return [(ranks, group) for ranks, group in found if group is not None]


def check_names(
    mine: Sequence[tuple[tuple[int, ...], str]],
    ranks: tuple[int, ...],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[tuple[tuple[int, ...], str], int]:
    """Check that parameters have the same names, in the same order, on all ranks that hold them.

    `mine` has the ranks and the name of every parameter that this rank holds; `ranks` are the members of `group`, which
    all call this. Return a number for every parameter of these ranks, the same on all of them.

    Raises
    ------
    PlanMismatchError
        On every rank, naming the first difference.
    """
    everyone = statements_if_different(
        repr(list(mine)).encode(), lambda: list(mine), ranks, group, device
    )
    if everyone is None:
        return {each: number for number, each in enumerate(mine)}
    by_rank = dict(zip(ranks, everyone, strict=True))
    together = list(dict.fromkeys(each for found in everyone for each in found))
    for some in dict.fromkeys(some for some, _ in together):
        lists = [[name for where, name in by_rank[rank] if where == some] for rank in some]
        for rank, names in zip(some, lists, strict=True):
            for first, second in zip_longest(lists[0], names, fillvalue="nothing more"):
                if first != second:
                    raise PlanMismatchError(
                        f"ranks {some[0]} and {rank} do not train the same parameters; rank {some[0]}: {first}; "
                        f"rank {rank}: {second}. Give all ranks the same parameters and routes, and freeze them alike."
                    )
    return {each: number for number, each in enumerate(together)}


def statements_if_different(
    statement: bytes,
    value: Callable[[], T],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[T] | None:
    """Return every rank's value if their statements differ; None if all are equal."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(statement).digest()), dtype=torch.uint8).to(
        device
    )
    digests = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(digests[0], other) for other in digests):
        return None
    everyone: list[Any] = [None for _ in ranks]
    dist.all_gather_object(everyone, value(), group=group)
    return everyone


def check_agreement(
    plan: Plan,
    domain: Domain,
    group: dist.ProcessGroup | None,
    device: torch.device,
    error: ShardingError | None = None,
) -> None:
    """Compare the plans of all ranks of a domain, and share their errors; the caller raises `error` if all have it.

    Raises
    ------
    ShardingError
        On every rank, of the class of the first rank's error, naming that rank.
    PlanMismatchError
        On every rank, naming the first statement that differs.
    """
    if group is None:
        return
    found = (type(error).__name__, str(error)) if error is not None else None
    everyone = statements_if_different(
        plan.digest(domain) + repr(found).encode(),
        lambda: (found, plan.lines(domain)),
        domain.ranks,
        group,
        device,
    )
    if everyone is None:
        return
    if error is not None:
        raise error
    for rank, (other, _) in zip(domain.ranks, everyone, strict=True):
        if other is not None:
            kind = getattr(errors, other[0], ShardingError)
            raise kind(f"rank {rank} cannot step: {other[1]}")
    lines = [stated for _, stated in everyone]
    for rank, stated in zip(domain.ranks, lines, strict=True):
        for first, second in zip(lines[0], stated, strict=False):
            if first != second:
                raise PlanMismatchError(
                    f"ranks {domain.ranks[0]} and {rank} plan different steps; rank {domain.ranks[0]}: {first}; "
                    f"rank {rank}: {second}. Parameters, settings and meshes must be the same on all ranks."
                )
    counts = ", ".join(str(len(other)) for other in lines)
    raise PlanMismatchError(
        f"the plans of ranks {domain.ranks} differ in length: {counts} statements"
    )
