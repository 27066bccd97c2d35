"""Process groups of a plan's domains, and the agreement of their ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepmd_muon.optim.sharded.errors import PlanMismatchError, UnsupportedTransportError
from deepmd_muon.optim.sharded.plan import Domain, Plan


def group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup | None:
    """Return a process group of these ranks, which all of them must ask for; None for a single rank.

    Raises
    ------
    UnsupportedTransportError
        When it has no backend for the device.
    """
    if len(ranks) == 1:
        return None
    world = tuple(range(dist.get_world_size()))
    group = dist.group.WORLD if ranks == world else dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedTransportError(
            f"the process group of ranks {ranks} has no backend for {device.type} tensors "
            f"({dist.get_backend(group)}); initialise it with e.g. 'cpu:gloo,cuda:nccl'"
        ) from error
    return group


def check_agreement(plan: Plan, domain: Domain, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the plans of all ranks of a domain.

    Raises
    ------
    PlanMismatchError
        On every rank, naming the first statement that differs.
    """
    if group is None:
        return
    mine = torch.frombuffer(bytearray(plan.digest(domain)), dtype=torch.uint8).to(device)
    digests = [torch.empty_like(mine) for _ in domain.ranks]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(digests[0], other) for other in digests):
        return
    lines: list[list[str]] = [[] for _ in domain.ranks]
    dist.all_gather_object(lines, plan.lines(domain), group=group)
    for rank, other in zip(domain.ranks, lines, strict=True):
        for first, second in zip(lines[0], other, strict=False):
            if first != second:
                raise PlanMismatchError(
                    f"ranks {domain.ranks[0]} and {rank} plan different steps; rank {domain.ranks[0]}: {first}; "
                    f"rank {rank}: {second}. Parameters, settings and meshes must be the same on all ranks."
                )
    counts = ", ".join(str(len(other)) for other in lines)
    raise PlanMismatchError(f"the plans of ranks {domain.ranks} differ in length: {counts} statements")
