"""The slow step that defines the fast one: every rank gathers every parameter and takes the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from deepmd_muon.optim.dtensors import local_of, whole
from deepmd_muon.optim.routing.param_groups import group_settings, rate_of
from deepmd_muon.optim.sharded.params import Member, muon_state
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.update.gradients import StepControl, waves
from deepmd_muon.optim.update.muon import muon_

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon


def step_everywhere(
    optimizer: HybridMuon,
    plan: Plan,
    members: Sequence[Member],
    groups: Sequence[dist.ProcessGroup | None],
    control: StepControl,
) -> None:
    """Take the Muon step of these parameters on full tensors, and keep of the results what this rank holds.

    A gradient that is missing here and is there on another rank counts as zeros.

    Parameters
    ----------
    optimizer
        Whose groups and state are used.
    plan
        Of the members, in this order.
    members
        The parameters.
    groups
        Process groups of the plan's domains.
    control
        Scale of the gradients, and whether the step is left out.
    """
    if optimizer._offload is not None:
        optimizer._offload.wait()
    there = _somewhere(plan, members, groups)
    for number, group in enumerate(optimizer.param_groups):
        settings = group_settings(group)
        mine = [member for member, found in zip(members, there, strict=True) if member.group == number and found]
        for wave in waves([(member.p, member) for member in mine], optimizer.workspace):
            chosen = [member for _, member in wave]
            states = [muon_state(optimizer, member, damped=settings.magma_muon) for member in chosen]
            if optimizer._offload is not None:
                optimizer._offload.house(optimizer.state, [(member.p, "momentum_buffer") for member in chosen])
            params = [_full(member.p.detach()) for member in chosen]
            for p, member in zip(params, chosen, strict=True):
                p.grad = _full(torch.zeros_like(member.p.detach()) if member.p.grad is None else member.p.grad)
            momenta = [_full(s["momentum_buffer"]).to(p.device) for s, p in zip(states, params, strict=True)]
            scores = [_full(state["magma_score"]) for state in states] if settings.magma_muon else []
            muon_(
                params,
                momenta,
                scores,
                [member.entry.view for member in chosen if member.entry.view is not None],
                lr=rate_of(group),
                settings=settings,
                control=control.on(params[0].device),
                maximize=group["maximize"],
            )
            for member, state, p, m in zip(chosen, states, params, momenta, strict=True):
                _keep(member.p.detach(), p)
                _keep(state["momentum_buffer"], m)
            for state, score in zip(states, scores, strict=False):
                _keep(state["magma_score"], score)


def _somewhere(plan: Plan, members: Sequence[Member], groups: Sequence[dist.ProcessGroup | None]) -> list[bool]:
    """Return of each member whether any rank has its gradient; one small all-reduce a domain."""
    found = [member.p.grad is not None for member in members]
    for domain, group in zip(plan.domains, groups, strict=True):
        if group is None:
            continue
        flags = torch.tensor([float(found[i]) for i in domain.parameters], device=members[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for i, flag in zip(domain.parameters, flags.tolist(), strict=True):
            found[i] = flag > 0.0
    return found


def _full(x: Tensor) -> Tensor:
    """Gather a tensor, as a copy."""
    return whole(x).clone()


def _keep(mine: Tensor, full: Tensor) -> None:
    """Write this rank's share of a full tensor."""
    if isinstance(mine, DTensor):
        everywhere = DTensor.from_local(full, mine.device_mesh, [Replicate()] * mine.device_mesh.ndim, run_check=False)
        full = everywhere.redistribute(placements=mine.placements).to_local()
    with torch.no_grad():
        local_of(mine).copy_(full)  # which may be in host memory
