"""The slow step that defines the fast one: every rank gathers every parameter and takes the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from deepmd_muon.optim.dtensors import local_of, whole
from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.schema import State, complete_state
from deepmd_muon.optim.update.gradients import StepControl, waves
from deepmd_muon.optim.update.muon import muon_


def step_everywhere(
    plan: Plan,
    members: Sequence[ShardedParameter],
    process_groups: Sequence[dist.ProcessGroup | None],
    groups: Sequence[Group],
    state: State,
    memory: HostMemory | None,
    workspace: int,
    control: StepControl,
) -> None:
    """Take the Muon step of these parameters on full tensors, and keep of the results what this rank holds.

    A gradient that is missing here and is there on another rank counts as zeros.

    Parameters
    ----------
    plan, members, process_groups
        The parameters, their plan in the same order, and the process groups of the plan's domains.
    groups, state, memory
        Of the optimizer.
    workspace
        Bound on the elements that are worked on together.
    control
        Scale of the gradients, and whether the step is skipped.
    """
    if memory is not None:
        memory.wait()
    there = _somewhere(plan, members, process_groups)
    for number, group in enumerate(groups):
        damped = group.settings.magma_muon
        mine = [member for member, found in zip(members, there, strict=True) if member.group == number and found]
        for wave in waves([(member.p, member) for member in mine], workspace):
            chosen = [member for _, member in wave]
            states = [complete_state(state[member.p], member, damped=damped) for member in chosen]
            if memory is not None:
                memory.offload(state, [(member.p, "momentum_buffer") for member in chosen])
            params = [_full(member.p.detach()) for member in chosen]
            for p, member in zip(params, chosen, strict=True):
                p.grad = _full(torch.zeros_like(member.p.detach()) if member.p.grad is None else member.p.grad)
            momenta = [_full(own["momentum_buffer"]).to(p.device) for own, p in zip(states, params, strict=True)]
            scores = [_full(own["magma_score"]) for own in states] if damped else []
            muon_(
                params,
                momenta,
                scores,
                [member.entry.view for member in chosen if member.entry.view is not None],
                lr=group.lr,
                settings=group.settings,
                control=control.on(params[0].device),
                maximize=group.values["maximize"],
            )
            for member, own, p, m in zip(chosen, states, params, momenta, strict=True):
                _keep(member.p.detach(), p)
                _keep(own["momentum_buffer"], m)
            for own, score in zip(states, scores, strict=False):
                _keep(own["magma_score"], score)


def _somewhere(
    plan: Plan, members: Sequence[ShardedParameter], groups: Sequence[dist.ProcessGroup | None]
) -> list[bool]:
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
