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
    Interval,
    Layout,
    MatrixLayout,
    Runs,
    ShardPlacement,
    held_interval,
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
    """How the state of a replicated parameter is sharded: along one dimension, one part per rank.

    Attributes
    ----------
    mesh
        The ranks.
    layout
        The plan's description of the same.
    dim
        The dimension.
    start, length
        This rank's part.
    """

    mesh: DeviceMesh
    layout: Layout
    dim: int
    start: int
    length: int

    @property
    def placements(self) -> tuple[Shard, ...]:
        """The placement on each axis of the mesh."""
        return (Shard(self.dim),) * self.mesh.ndim

    def intervals(self, shape: Sequence[int]) -> list[Interval]:
        """Return the part of each rank, by ascending rank, of a parameter of this shape."""
        places = self.layout.places()
        size = shape[self.dim]
        return [held_interval(size, self.dim, self.layout, places[rank]) for rank in sorted(places)]

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, sharing memory."""
        return x.narrow(self.dim, self.start, self.length)

    def joined(self, local: Tensor, shape: torch.Size) -> Tensor:
        """Return the DTensor of all ranks' parts, from this rank's part."""
        return _joined(local, self.mesh, self.placements, shape)

    def of(self, value: Tensor) -> Tensor:
        """Convert a state tensor from any layout to this sharding.

        For a DTensor, all ranks must call this together.
        """
        if _is_placed(value, self.mesh, self.placements):
            return value
        full = full_tensor(value)
        return self.joined(self.part(full).contiguous(), full.shape)


def state_sharding(p: Tensor, replicas: Replicas, *, matrices: bool) -> StateSharding | None:
    """Return the sharding of the state of a replicated parameter; None for a scalar.

    See `state_layout`.
    """
    if p.ndim == 0:
        return None
    mesh = replicas
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.from_group(mesh, p.device.type)
    ranks = mesh.mesh.flatten().tolist()
    layout = state_layout(p.shape, ranks, tuple(mesh.mesh.shape), matrices=matrices)
    placement = layout.placements[0]
    place = mesh.get_coordinate()
    assert placement is not None
    assert place is not None
    start, length = held_interval(p.shape[placement.dim], placement.dim, layout, tuple(place))
    return StateSharding(mesh, layout, placement.dim, start=start, length=length)


@dataclasses.dataclass(frozen=True)
class ShardedParameter(StateHolder):
    """A parameter that lives on several ranks.

    It is a DTensor, or a plain tensor replicated on the ranks of the layout.

    Attributes
    ----------
    group
        Number of its parameter group.
    layout
        The layout of its elements.
    device
        The device of this rank's elements.
    sharding
        The sharding of its state, if the parameter is replicated and its state is sharded.
    """

    group: int
    layout: Layout
    device: torch.device
    sharding: StateSharding | None = None

    def gradient(self) -> Tensor | None:
        """Return the gradient of the elements that have their moments on this rank."""
        grad = self.p.grad
        if grad is None:
            return None
        return local_of(grad) if self.sharding is None else self.sharding.part(grad)

    def elements(self) -> Tensor:
        """Return the elements that have their moments on this rank, sharing memory."""
        local = local_of(self.p).detach()
        return local if self.sharding is None else self.sharding.part(local)

    def full(self, tensor: StateTensor) -> Tensor:
        """Return a new state tensor with its initial value, in the layout of this state."""
        if tensor.extent == "parameter" and self.sharding is not None:
            local = self.sharding.part(self.p)
            dtype = tensor.dtype_for(self.p.dtype)
            zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
            return self.sharding.joined(zeros, self.p.shape)
        new = super().full(tensor)
        return new if tensor.extent in ("parameter", "scalar") else self.of(new, tensor.extent)

    def of(self, value: Tensor, extent: Extent) -> Tensor:
        """Convert a state tensor from any layout to the layout of this parameter's state.

        If the value is a DTensor, all ranks must call this together. The moments of a DTensor
        parameter are returned as they are; `layout_error` checks them before the step.
        """
        is_dtensor = isinstance(self.p, DTensor)
        if extent == "parameter":
            if self.sharding is not None:
                return self.sharding.of(value)
            return value if is_dtensor else full_tensor(value)
        assert self.entry.view is not None
        layout = self.layout
        # The scores of replicated parameters are replicated, even if their moments are sharded.
        if self.sharding is not None and extent != "blocks":
            layout = self.sharding.layout
        layout = rule_layout(MatrixLayout(self.entry.shape, self.entry.view, layout), extent)
        if not is_dtensor and not any(layout.placements):
            return full_tensor(value)
        if isinstance(self.p, DTensor):
            mesh = self.p.device_mesh
        else:
            assert self.sharding is not None  # otherwise the state is replicated
            mesh = self.sharding.mesh
        placements = tuple(_to_torch(placement) for placement in layout.placements)
        if _is_placed(value, mesh, placements):
            return value
        full = full_tensor(value)
        local = _local_elements(full, layout, mesh.get_coordinate())
        return _joined(local.contiguous(), mesh, placements, full.shape)

    def cut(self, key: str, whole: Tensor, *, offloaded: bool) -> Tensor:
        """Convert a tensor that every rank has whole to the layout of this parameter's state.

        There is no communication.
        """
        like = self.full(known_tensors()[key])
        if isinstance(like, DTensor):
            return local_part(whole, like)
        return super().cut(key, whole, offloaded=offloaded)

    def __str__(self) -> str:
        return f"{self.entry.name!r} of shape {tuple(self.p.shape)} on {self.layout}"


def layout_of(p: Tensor, replicas: Replicas | None) -> Layout | None:
    """Return a parameter's layout; None for a plain tensor without `replicas`."""
    if isinstance(p, DTensor):
        return _layout_of_dtensor(p)
    if replicas is None:
        return None
    if isinstance(replicas, DeviceMesh):
        return replicated(replicas.mesh.flatten().tolist())
    return replicated(dist.get_process_group_ranks(replicas))


def _layout_of_dtensor(x: DTensor) -> Layout:
    mesh = x.device_mesh.mesh
    placements = tuple(_from_torch(placement, x.ndim) for placement in x.placements)
    return Layout(tuple(mesh.shape), tuple(mesh.flatten().tolist()), placements)


def local_runs(x: Tensor, dim: int) -> Runs:
    """Return the indices along a dimension that this rank holds of a DTensor.

    There are none on a rank outside its mesh.
    """
    assert isinstance(x, DTensor)
    place = x.device_mesh.get_coordinate()
    return () if place is None else held_runs(x.shape[dim], dim, _layout_of_dtensor(x), place)


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """Convert a tensor that every rank has whole to layout, dtype and device of a DTensor.

    There is no communication.
    """
    assert isinstance(like, DTensor)
    elements = _local_elements(whole, _layout_of_dtensor(like), like.device_mesh.get_coordinate())
    local = local_of(like)
    return with_local(like, torch.empty_like(local).copy_(elements.reshape(local.shape)))


def _local_elements(whole: Tensor, layout: Layout, place: Sequence[int] | None) -> Tensor:
    """Return the elements that the rank at coordinates `place` holds; none outside the mesh."""
    local = whole
    for dim, size in enumerate(whole.shape):
        runs = () if place is None else held_runs(size, dim, layout, place)
        if runs != ((0, size),):
            pieces = [local.narrow(dim, start, stop - start) for start, stop in runs]
            local = torch.cat([local.narrow(dim, 0, 0), *pieces], dim)
    return local


def _joined(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> Tensor:
    """Return the DTensor of all ranks' parts, which may be uneven, from this rank's part."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _is_placed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Return whether a tensor is a DTensor of this mesh with these placements."""
    if not isinstance(value, DTensor):
        return False
    return value.device_mesh == mesh and value.placements == tuple(placements)


def _from_torch(placement: Placement, ndim: int) -> ShardPlacement | None:
    """Translate one placement; Partial counts as replicated here, and `layout_error` reports it."""
    if isinstance(placement, _StridedShard):
        return ShardPlacement(placement.dim % ndim, int(placement.split_factor))
    return ShardPlacement(placement.dim % ndim) if isinstance(placement, Shard) else None


def _to_torch(placement: ShardPlacement | None) -> Placement:
    if placement is None:
        return Replicate()
    if placement.stride == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.stride)


# ----- checks ------------------------------------------------------------------------------------


def layout_error(
    state: Mapping[Tensor, Mapping[str, Any]], sharded_params: Sequence[ShardedParameter]
) -> ShardingError | None:
    """Return the error of all parameters that cannot be exchanged; None without any.

    Its class is that of the first problem: `PartialPlacementError`, `GradientPlacementError` or
    `ReshardedParameterError`.
    """
    problems = []
    for param in sharded_params:
        problem = _problem_of(param, state.get(param.p, {}))
        if problem is not None:
            problems.append(problem)
    if not problems:
        return None
    listed = "\n".join(f"  {problem}" for problem in problems)
    return type(problems[0])(f"the sharded step cannot start, nothing was changed:\n{listed}")


def _problem_of(param: ShardedParameter, state: Mapping[str, Any]) -> ShardingError | None:
    p = param.p
    if p.device != param.device:
        return ReshardedParameterError(
            f"{param}: moved from {param.device} to {p.device}; construct a new optimizer"
        )
    if not isinstance(p, DTensor):
        return _problem_of_replica(param)
    if any(isinstance(placement, Partial) for placement in p.placements):
        return PartialPlacementError(
            f"{param} is {p.placements}; redistribute it to Shard or Replicate"
        )
    problem = _problem_of_gradient(param, p)
    if problem is not None:
        return problem
    if param.layout.placements != tuple(_from_torch(x, p.ndim) for x in p.placements):
        return ReshardedParameterError(
            f"{param}: it is {p.placements} now; construct a new optimizer and load its state"
        )
    for key in ALL_MOMENTS:
        value = state.get(key)
        if value is None or _is_placed(value, p.device_mesh, p.placements):
            continue
        if not isinstance(value, DTensor):
            return ReshardedParameterError(
                f"{param}: its {key} is a plain tensor; save and load the state instead"
            )
        return ReshardedParameterError(
            f"{param}: its {key} is {value.placements} on {value.device_mesh}; to reshard, save "
            "and load the state"
        )
    return None


def _problem_of_replica(param: ShardedParameter) -> ShardingError | None:
    grad = param.p.grad
    if isinstance(grad, DTensor):
        return GradientPlacementError(
            f"{param}: its gradient is a DTensor and the parameter is not"
        )
    if grad is not None and grad.device != param.p.device:
        return GradientPlacementError(
            f"{param}: its gradient is on {grad.device}, the parameter on {param.p.device}"
        )
    return None


def _problem_of_gradient(param: ShardedParameter, p: DTensor) -> ShardingError | None:
    grad = p.grad
    if grad is None or _is_placed(grad, p.device_mesh, p.placements):
        return None
    if not isinstance(grad, DTensor):
        return GradientPlacementError(
            f"{param}: its gradient is a plain tensor of shape {tuple(grad.shape)}"
        )
    if any(isinstance(placement, Partial) for placement in grad.placements):
        return PartialPlacementError(
            f"{param}: its gradient is {grad.placements}; reduce it: "
            f"p.grad = p.grad.redistribute(placements={p.placements})"
        )
    return GradientPlacementError(
        f"{param}: its gradient is {grad.placements} on {grad.device_mesh}; redistribute it to "
        f"{p.placements}"
    )
