"""Conversions between a DTensor and this process's local elements."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def local_of(x: Tensor) -> Tensor:
    """Return this process's elements; those of a DTensor without creating a view."""
    # DTensor.to_local() moves nothing either, but creates an autograd node or, for a parameter, a
    # view at each call.
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def with_local(x: Tensor, local: Tensor) -> Tensor:
    """Return `local` as a DTensor with the layout of `x` if `x` is one.

    `local` may be in host memory.
    """
    if not hasattr(x, "device_mesh"):
        return local
    sharded: Any = x
    # DTensor.from_local() would move it to the mesh's device. A wrapper around a view into a larger
    # storage cannot be deep-copied (the view's offset is applied twice), so it is created around
    # another tensor first.
    wrapped: Any = type(sharded)(torch.empty_like(local), sharded._spec, requires_grad=False)
    wrapped._local_tensor = local
    return cast("Tensor", wrapped)


def full_tensor(x: Tensor) -> Tensor:
    """Return all elements of a tensor.

    For a DTensor, in host memory or not, all ranks must call it together.
    """
    if not hasattr(x, "device_mesh"):
        return x
    sharded: Any = x
    device = sharded.device_mesh.device_type  # of its process groups
    if sharded.device.type != device:
        sharded = sharded.to(device)
    return cast("Tensor", sharded.full_tensor())


def spec_of(x: Tensor) -> Any:
    """Return a DTensor's mesh, placements and shape as one object; None for a plain tensor."""
    return getattr(x, "_spec", None)
