"""Where torch's tensors meet the plan: layouts of DTensors and replicated tensors, local parts, state, and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from deepmd_muon.optim import magma
from deepmd_muon.optim.routing import RouteEntry
from deepmd_muon.optim.sharded.errors import (
    GradientPlacementError,
    PartialPlacementError,
    ReshardedParameterError,
    ShardingError,
)
from deepmd_muon.optim.sharded.layout import Layout, Split, replicated, score_layout, scores_of_rank, total

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Replicas = DeviceMesh | dist.ProcessGroup


@dataclasses.dataclass(frozen=True)
class Member:
    """A parameter that lives on several ranks.

    Attributes
    ----------
    p
        The parameter, a DTensor or a tensor that every rank of the layout holds in full.
    entry
        Its route.
    group
        Number of its parameter group.
    layout
        Where its elements live.
    device
        Where this rank's are.
    """

    p: Tensor
    entry: RouteEntry
    group: int
    layout: Layout
    device: torch.device

    def __str__(self) -> str:
        return f"{self.entry.name!r} of shape {tuple(self.p.shape)} on {self.layout}"


def layout_of(p: Tensor, replicas: Replicas | None) -> Layout | None:
    """Return where a parameter lives; None for a plain tensor of which nothing is said."""
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        placements = tuple(_split(placement, p.ndim) for placement in p.placements)
        return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), placements)
    if replicas is None:
        return None
    if isinstance(replicas, DeviceMesh):
        return replicated(replicas.mesh.flatten().tolist())
    return replicated(dist.get_process_group_ranks(replicas))


def _split(placement: Placement, ndim: int) -> Split | None:
    """Translate one placement; sums that are not reduced yet count as replicated here and are refused later."""
    if isinstance(placement, _StridedShard):
        return Split(placement.dim % ndim, int(placement.split_factor))
    return Split(placement.dim % ndim) if isinstance(placement, Shard) else None


def local_part(x: Tensor) -> Tensor:
    """Return the elements that this rank holds, sharing memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_twin(p: Tensor, *, missing_as_zero: bool = False) -> Tensor:
    """Return this rank's elements of a parameter as a leaf that shares its memory and carries its gradient's."""
    twin = local_part(p).detach()
    if p.grad is not None:
        twin.grad = local_part(p.grad)
    elif missing_as_zero:
        twin.grad = torch.zeros_like(twin)
    return twin


def muon_state(optimizer: HybridMuon, member: Member, *, damped: bool) -> dict[str, Tensor]:
    """Return a parameter's state, made on first use: the momentum laid out as it, scores as its blocks."""
    state: dict[str, Tensor] = optimizer.state[member.p]
    p, entry = member.p, member.entry
    assert entry.view is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    if damped and "magma_score" not in state:
        if isinstance(p, DTensor):
            kept = scores_of_rank(entry.shape, entry.view, member.layout)[dist.get_rank()]
            local = magma.initial_scores(total(kept), p.to_local().device)
            axes = score_layout(entry.shape, entry.view, member.layout).placements
            state["magma_score"] = DTensor.from_local(
                local,
                p.device_mesh,
                [_placement(axis) for axis in axes],
                run_check=False,
                shape=torch.Size((entry.view.blocks,)),
                stride=(1,),
            )
        else:
            state["magma_score"] = magma.initial_scores(entry.view.blocks, p.device)
    return state


def _placement(axis: Split | None) -> Placement:
    if axis is None:
        return Replicate()
    return Shard(axis.dim) if axis.stride == 1 else _StridedShard(axis.dim, split_factor=axis.stride)


def check_members(optimizer: HybridMuon, members: Sequence[Member]) -> None:
    """Refuse what could not be exchanged, naming every such parameter.

    Raises
    ------
    PartialPlacementError, GradientPlacementError, ReshardedParameterError
        All are `ShardingError`; of several problems the first decides the class and all are listed.
    """
    problems = [found for member in members if (found := _problem(optimizer, member))]
    if problems:
        listed = "\n".join(f"  {message}" for _, message in problems)
        raise problems[0][0](f"the sharded step cannot start, nothing was changed:\n{listed}")


def _problem(optimizer: HybridMuon, member: Member) -> tuple[type[ShardingError], str] | None:
    p, grad = member.p, member.p.grad
    if p.device != member.device:
        return ReshardedParameterError, f"{member}: moved from {member.device} to {p.device}; make the optimizer anew"
    if not isinstance(p, DTensor):
        if isinstance(grad, DTensor):
            return GradientPlacementError, f"{member}: its gradient is a DTensor and the parameter is not"
        return None
    if any(isinstance(placement, Partial) for placement in p.placements):
        return PartialPlacementError, f"{member} is {p.placements}; redistribute it to Shard or Replicate"
    if grad is not None:
        if not isinstance(grad, DTensor):
            return GradientPlacementError, f"{member}: its gradient is a plain tensor of shape {tuple(grad.shape)}"
        if any(isinstance(placement, Partial) for placement in grad.placements):
            return PartialPlacementError, (
                f"{member}: its gradient is {grad.placements}; reduce it: "
                f"p.grad = p.grad.redistribute(placements={p.placements})"
            )
        if grad.placements != p.placements or grad.device_mesh != p.device_mesh:
            return GradientPlacementError, (
                f"{member}: its gradient is {grad.placements} on {grad.device_mesh}; redistribute it to {p.placements}"
            )
    if member.layout.placements != tuple(_split(placement, p.ndim) for placement in p.placements):
        return (
            ReshardedParameterError,
            f"{member}: it is {p.placements} now; make the optimizer anew and load its state",
        )
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        value = optimizer.state.get(p, {}).get(key)
        if value is None:
            continue
        if not isinstance(value, DTensor):
            return ReshardedParameterError, f"{member}: its {key} is a plain tensor; save and load the state instead"
        if value.placements != p.placements or value.device_mesh != p.device_mesh:
            return ReshardedParameterError, (
                f"{member}: its {key} is {value.placements} on {value.device_mesh}; to reshard, save and load the state"
            )
    return None
