"""Process groups of a plan's domains, and the agreement of their ranks."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepmd_muon.optim.sharded import errors
from deepmd_muon.optim.sharded.errors import PlanMismatchError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.sharded.plan import Domain, Plan

# Beside the default group, with which all others are destroyed.
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup | None:
    """Return the process group of these ranks, which all of them must ask for; None for a single rank.

    It is made once, and the same one serves all that ask for it.

    Raises
    ------
    UnsupportedTransportError
        When it has no backend for the device.
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


def check_agreement(
    plan: Plan,
    domain: Domain,
    group: dist.ProcessGroup | None,
    device: torch.device,
    problem: ShardingError | None = None,
) -> None:
    """Compare the plans of all ranks of a domain, and tell all of what one of them has found wrong.

    Parameters
    ----------
    plan, domain
        To compare.
    group
        Of the domain's ranks; None for a single rank.
    device
        Of the tensors that are exchanged.
    problem
        What this rank cannot step, to be raised by the caller where all ranks have found the same.

    Raises
    ------
    ShardingError
        On every rank, of the kind of the first problem that a rank has and naming that rank.
    PlanMismatchError
        On every rank, naming the first statement that differs.
    """
    if group is None:
        return
    found = (type(problem).__name__, str(problem)) if problem is not None else None
    digest = hashlib.sha256(plan.digest(domain) + repr(found).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    digests = [torch.empty_like(mine) for _ in domain.ranks]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(digests[0], other) for other in digests):
        return
    everyone: list[Any] = [None for _ in domain.ranks]
    dist.all_gather_object(everyone, (found, plan.lines(domain)), group=group)
    if problem is not None:
        raise problem
    for rank, (other, _) in zip(domain.ranks, everyone, strict=True):
        if other is not None:
            kind = getattr(errors, other[0], ShardingError)
            raise kind(f"rank {rank} cannot step: {other[1]}")
    lines = [stated for _, stated in everyone]
    for rank, other in zip(domain.ranks, lines, strict=True):
        for first, second in zip(lines[0], other, strict=False):
            if first != second:
                raise PlanMismatchError(
                    f"ranks {domain.ranks[0]} and {rank} plan different steps; rank {domain.ranks[0]}: {first}; "
                    f"rank {rank}: {second}. Parameters, settings and meshes must be the same on all ranks."
                )
    counts = ", ".join(str(len(other)) for other in lines)
    raise PlanMismatchError(f"the plans of ranks {domain.ranks} differ in length: {counts} statements")
