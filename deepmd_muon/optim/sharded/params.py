"""Layouts, local parts, state and checks of DTensors and replicated tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from deepmd_muon.optim.dtensors import full_tensor, local_of, with_local
from deepmd_muon.optim.errors import (
    GradientPlacementError,
    PartialPlacementError,
    ReshardedParameterError,
    ShardingError,
)
from deepmd_muon.optim.rules.interface import Extent, StateTensor
from deepmd_muon.optim.sharded.layout import (
    Layout,
    Runs,
    ShardPlacement,
    held_runs,
    replicated,
    rule_layout,
    state_layout,
)
from deepmd_muon.optim.state.schema import ALL_MOMENTS, StateHolder, known_tensors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Replicas = DeviceMesh | dist.ProcessGroup


@dataclasses.dataclass(frozen=True)
class StateSharding:
    """How the state of a replicated parameter is sharded: along one dimension, one part per rank of the mesh.

    `layout` is the plan's description of the same; this rank's part has `length` indices from `start` on.
    """

    mesh: DeviceMesh
    layout: Layout
    dim: int
    start: int
    length: int

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, sharing memory."""
        return x.narrow(self.dim, self.start, self.length)

    def joined(self, local: Tensor, shape: torch.Size) -> Tensor:
        """Return the DTensor of all ranks' parts, from this rank's part."""
        strides = torch.empty(shape, device="meta").stride()
        placements = [Shard(self.dim)] * self.mesh.ndim
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=strides
        )

    def of(self, value: Tensor) -> Tensor:
        """Convert a state tensor from any layout to this sharding; for a DTensor all ranks must call it together."""
        if isinstance(value, DTensor):
            if (
                value.device_mesh == self.mesh
                and value.placements == (Shard(self.dim),) * self.mesh.ndim
            ):
                return value
            value = full_tensor(value)
        return self.joined(self.part(value).contiguous(), value.shape)


def state_sharding(p: Tensor, replicas: Replicas, *, matrices: bool) -> StateSharding | None:
    """Return the sharding of the state of a replicated parameter, see `state_layout`; None for a scalar."""
    if p.ndim == 0:
        return None
    mesh = (
        replicas
        if isinstance(replicas, DeviceMesh)
        else DeviceMesh.from_group(replicas, p.device.type)
    )
    layout = state_layout(
        p.shape, mesh.mesh.flatten().tolist(), tuple(mesh.mesh.shape), matrices=matrices
    )
    first = layout.placements[0]
    place = mesh.get_coordinate()
    assert first is not None
    assert place is not None
    runs = held_runs(p.shape[first.dim], first.dim, layout, tuple(place))
    start, stop = runs[0] if runs else (0, 0)
    return StateSharding(mesh, layout, first.dim, start, stop - start)


@dataclasses.dataclass(frozen=True)
class ShardedParameter(StateHolder):
    """A parameter that lives on several ranks: a DTensor, or a plain tensor replicated on the ranks of the layout."""

    group: int  # number of its parameter group
    layout: Layout  # of its elements
    device: torch.device  # of this rank's elements
    sharding: StateSharding | None = (
        None  # of its state, if the parameter is replicated and its state is sharded
    )

    def gradient(self) -> Tensor | None:
        """Return the gradient of the elements whose moments are on this rank."""
        grad = self.p.grad
        if grad is None or self.sharding is None:
            return grad if grad is None else local_of(grad)
        return self.sharding.part(grad)

    def elements(self) -> Tensor:
        """Return the elements whose moments are on this rank, sharing memory."""
        local = local_of(self.p).detach()
        return local if self.sharding is None else self.sharding.part(local)

    def full(self, tensor: StateTensor) -> Tensor:
        """Return a new state tensor, filled with its initial value, in the layout of the parameter's state."""
        if tensor.extent == "parameter" and self.sharding is not None:
            part = self.sharding.part(self.p)
            zeros = torch.zeros(
                part.shape, dtype=tensor.dtype_for(self.p.dtype), device=part.device
            )
            return self.sharding.joined(zeros, self.p.shape)
        new = super().full(tensor)
        return new if tensor.extent in ("parameter", "scalar") else self.of(new, tensor.extent)

    def of(self, value: Tensor, extent: Extent) -> Tensor:
        """Convert a state tensor from any layout to the layout of this parameter's state.

        If the value is a DTensor, all ranks must call this together. The moments of a DTensor parameter are returned as
        they are; `layout_error` checks them before the step.
        """
        sharded = isinstance(self.p, DTensor)
        if extent == "parameter":
            if self.sharding is not None:
                return self.sharding.of(value)
            return value if sharded else full_tensor(value)
        assert self.entry.view is not None
        # The scores of replicated parameters are replicated, even if their moments are sharded.
        cut = (
            self.sharding.layout
            if self.sharding is not None and extent != "blocks"
            else self.layout
        )
        layout = rule_layout(self.entry.shape, self.entry.view, cut, extent)
        if not sharded and not any(layout.placements):
            return full_tensor(value)
        mesh: Any = (
            self.p.device_mesh
            if isinstance(self.p, DTensor)
            else getattr(self.sharding, "mesh", None)
        )
        placements = tuple(_placement(axis) for axis in layout.placements)
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
            mesh,
            placements,
        ):
            return value
        local = value = full_tensor(value)
        for dim, size in enumerate(value.shape):
            runs = held_runs(size, dim, layout, tuple(mesh.get_coordinate()))
            if runs != ((0, size),):
                index = [i for start, stop in runs for i in range(start, stop)]
                local = local.index_select(
                    dim, torch.tensor(index, dtype=torch.int64, device=value.device)
                )
        strides = torch.empty(value.shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(), mesh, placements, run_check=False, shape=value.shape, stride=strides
        )

    def cut(self, key: str, whole: Tensor, *, offloaded: bool) -> Tensor:
        """Convert a tensor that every rank has whole to the layout of this parameter's state; without communication."""
        like = self.full(known_tensors()[key])
        return (
            local_part(whole, like)
            if isinstance(like, DTensor)
            else super().cut(key, whole, offloaded=offloaded)
        )

    def __str__(self) -> str:
        return f"{self.entry.name!r} of shape {tuple(self.p.shape)} on {self.layout}"


def layout_of(p: Tensor, replicas: Replicas | None) -> Layout | None:
    """Return a parameter's layout; None for a plain tensor without `replicas`."""
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        placements = tuple(_split(placement, p.ndim) for placement in p.placements)
        return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), placements)
    if replicas is None:
        return None
    if isinstance(replicas, DeviceMesh):
        return replicated(replicas.mesh.flatten().tolist())
    return replicated(dist.get_process_group_ranks(replicas))


def local_runs(x: Tensor, dim: int) -> Runs:
    """Return the indices along a dimension that this rank holds of a DTensor; none on a rank outside its mesh."""
    assert isinstance(x, DTensor)
    layout, place = layout_of(x, None), x.device_mesh.get_coordinate()
    assert layout is not None
    return () if place is None else held_runs(x.shape[dim], dim, layout, tuple(place))


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Convert a tensor that every rank has whole to layout, dtype and device of a DTensor; without communication."""
    for dim in range(whole.ndim):
        kept = [whole.narrow(dim, start, stop - start) for start, stop in local_runs(like, dim)]
        whole = torch.cat([whole.narrow(dim, 0, 0), *kept], dim)
    local = local_of(like)
    return with_local(like, torch.empty_like(local).copy_(whole.reshape(local.shape)))


def _split(placement: Placement, ndim: int) -> ShardPlacement | None:
    """Translate one placement; Partial counts as replicated here, and `layout_error` reports it."""
    if isinstance(placement, _StridedShard):
        return ShardPlacement(placement.dim % ndim, int(placement.split_factor))
    return ShardPlacement(placement.dim % ndim) if isinstance(placement, Shard) else None


def _placement(axis: ShardPlacement | None) -> Placement:
    if axis is None:
        return Replicate()
    return (
        Shard(axis.dim) if axis.stride == 1 else _StridedShard(axis.dim, split_factor=axis.stride)
    )


def layout_error(
    state: Mapping[Tensor, Mapping[str, Any]], sharded_params: Sequence[ShardedParameter]
) -> ShardingError | None:
    """Return the error of parameters that cannot be exchanged, naming all of them; None without any.

    Its class is that of the first problem: `PartialPlacementError`, `GradientPlacementError` or
    `ReshardedParameterError`.
    """
    problems = [
        found
        for param in sharded_params
        if (found := _layout_error_of(state.get(param.p, {}), param))
    ]
    if not problems:
        return None
    listed = "\n".join(f"  {message}" for _, message in problems)
    return problems[0][0](f"the sharded step cannot start, nothing was changed:\n{listed}")


def _layout_error_of(
    state: Mapping[str, Any], param: ShardedParameter
) -> tuple[type[ShardingError], str] | None:
    p, grad = param.p, param.p.grad
    if p.device != param.device:
        return (
            ReshardedParameterError,
            f"{param}: moved from {param.device} to {p.device}; construct a new optimizer",
        )
    if not isinstance(p, DTensor):
        if isinstance(grad, DTensor):
            return (
                GradientPlacementError,
                f"{param}: its gradient is a DTensor and the parameter is not",
            )
        if grad is not None and grad.device != p.device:
            return (
                GradientPlacementError,
                f"{param}: its gradient is on {grad.device}, the parameter on {p.device}",
            )
        return None
    if any(isinstance(placement, Partial) for placement in p.placements):
        return (
            PartialPlacementError,
            f"{param} is {p.placements}; redistribute it to Shard or Replicate",
        )
    if grad is not None:
        if not isinstance(grad, DTensor):
            return (
                GradientPlacementError,
                f"{param}: its gradient is a plain tensor of shape {tuple(grad.shape)}",
            )
        if any(isinstance(placement, Partial) for placement in grad.placements):
            return PartialPlacementError, (
                f"{param}: its gradient is {grad.placements}; reduce it: "
                f"p.grad = p.grad.redistribute(placements={p.placements})"
            )
        if grad.placements != p.placements or grad.device_mesh != p.device_mesh:
            return GradientPlacementError, (
                f"{param}: its gradient is {grad.placements} on {grad.device_mesh}; redistribute it to {p.placements}"
            )
    if param.layout.placements != tuple(_split(placement, p.ndim) for placement in p.placements):
        return (
            ReshardedParameterError,
            f"{param}: it is {p.placements} now; construct a new optimizer and load its state",
        )
    for key in ALL_MOMENTS:
        value = state.get(key)
        if value is None:
            continue
        if not isinstance(value, DTensor):
            return (
                ReshardedParameterError,
                f"{param}: its {key} is a plain tensor; save and load the state instead",
            )
        if value.placements != p.placements or value.device_mesh != p.device_mesh:
            return ReshardedParameterError, (
                f"{param}: its {key} is {value.placements} on {value.device_mesh}; to reshard, save and load the state"
            )
    return None
