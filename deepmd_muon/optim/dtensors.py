"""The elements that a process holds of a DTensor, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_of(x: Tensor) -> Tensor:
    """Return the elements that this process holds; those of a DTensor without a view made anew."""
    # DTensor.to_local() would move nothing either, but makes an autograd node or, of a parameter, a view each time.
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def with_local(x: Tensor, local: Tensor) -> Tensor:
    """Return `local`, as a DTensor laid out like `x` where that is one; `local` may be in host memory."""
    if not hasattr(x, "device_mesh"):
        return local
    sharded: Any = x
    # DTensor.from_local() would move it to the mesh's device. A wrapper made around a view into a larger memory cannot
    # be deep-copied (it takes the view's offset for its own address), so that it is made around another tensor first.
    wrapped: Any = type(sharded)(torch.empty_like(local), sharded._spec, requires_grad=False)
    wrapped._local_tensor = local
    found: Tensor = wrapped
    return found


def full_tensor(x: Tensor) -> Tensor:
    """Return all elements of a tensor; of a DTensor, in host memory or not, all ranks must ask for them."""
    if not hasattr(x, "device_mesh"):
        return x
    sharded: Any = x
    device = sharded.device_mesh.device_type  # that its process groups serve
    gathered: Tensor = (sharded if sharded.device.type == device else sharded.to(device)).full_tensor()
    return gathered


def spec_of(x: Tensor) -> Any:
    """Return a DTensor's mesh, placements and shape as one object; None for a plain tensor."""
    return getattr(x, "_spec", None)
