"""The reference step, which defines the fast one: every rank gathers every parameter and takes the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from deepmd_muon.optim.dtensors import full_tensor, local_of
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.rules.registry import matrix_rules, tensors_of
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.state.host_memory import HostMemory, moments_of
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl, waves
from deepmd_muon.optim.update.muon import muon_


def reference_step(
    plan: Plan,
    sharded_params: Sequence[ShardedParameter],
    process_groups: Sequence[dist.ProcessGroup | None],
    groups: Sequence[Group],
    state: State,
    memory: HostMemory | None,
    workspace: int,
    control: StepControl,
) -> None:
    """Take the Muon step of these parameters on full tensors, and store this rank's part of the results.

    `sharded_params` are in the plan's order. A gradient that is missing on this rank, but not on all ranks, counts as
    zeros.
    """
    if memory is not None:
        memory.wait()
    there = _has_gradient_on_any_rank(plan, sharded_params, process_groups)
    for number, group in enumerate(groups):
        rules = matrix_rules(group.settings)
        mine = [
            param
            for param, found in zip(sharded_params, there, strict=True)
            if param.group == number and found
        ]
        for wave in waves([(param.p, param) for param in mine], workspace):
            chosen = [param for _, param in wave]
            states = [param.complete(state[param.p], rules) for param in chosen]
            if memory is not None:
                memory.offload(state, moments_of(state, [param.p for param in chosen]))
            params = [full_tensor(param.p.detach()).clone() for param in chosen]
            for p, param in zip(params, chosen, strict=True):
                grad = torch.zeros_like(param.p.detach()) if param.p.grad is None else param.p.grad
                p.grad = full_tensor(grad).clone()
            # All ranks must gather in the same order.
            keys = ["momentum_buffer", *(key for key in tensors_of(rules) if key in states[0])]
            of_rules = {
                key: [
                    full_tensor(own[key]).clone().to(p.device)
                    for own, p in zip(states, params, strict=True)
                ]
                for key in keys
            }
            momenta = of_rules.pop("momentum_buffer")
            muon_(
                params,
                momenta,
                of_rules,
                [param.entry.view for param in chosen if param.entry.view is not None],
                lr=group.lr,
                settings=group.settings,
                control=control.on(params[0].device),
                maximize=group.values["maximize"],
            )
            for param, own, p, m in zip(chosen, states, params, momenta, strict=True):
                _write_local_part(param.p.detach(), p)
                _write_local_part(own["momentum_buffer"], m)
            for key, values in of_rules.items():
                for own, value in zip(states, values, strict=True):
                    _write_local_part(own[key], value)


def _has_gradient_on_any_rank(
    plan: Plan,
    sharded_params: Sequence[ShardedParameter],
    groups: Sequence[dist.ProcessGroup | None],
) -> list[bool]:
    """Return for each parameter whether any rank has its gradient; one small all-reduce per domain."""
    found = [param.p.grad is not None for param in sharded_params]
    for domain, group in zip(plan.domains, groups, strict=True):
        if group is None:
            continue
        flags = torch.tensor(
            [float(found[i]) for i in domain.parameters], device=sharded_params[0].device
        )
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for i, flag in zip(domain.parameters, flags.tolist(), strict=True):
            found[i] = flag > 0.0
    return found


def _write_local_part(mine: Tensor, full: Tensor) -> None:
    """Write this rank's part of a full tensor."""
    if isinstance(mine, DTensor):
        everywhere = DTensor.from_local(
            full, mine.device_mesh, [Replicate()] * mine.device_mesh.ndim, run_check=False
        )
        full = everywhere.redistribute(placements=mine.placements).to_local()
    with torch.no_grad():
        local_of(mine).copy_(full)  # `mine` may be in host memory
