"""Linear maps whose derivative is a transpose that is written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Map = Callable[..., Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, apply: _Map, transpose: _Map, x: Tensor, *data: Tensor) -> Tensor:
        ctx.maps = apply, transpose
        ctx.save_for_backward(*data)
        return apply(x, *data)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        apply, transpose = ctx.maps
        data = ctx.saved_tensors
        return None, None, linear(transpose, apply, cotangent, *data), *(None for _ in data)


def linear(apply: _Map, transpose: _Map, x: Tensor, *data: Tensor) -> Tensor:
    """Return ``apply(x, *data)``, differentiable any number of times.

    Parameters
    ----------
    apply, transpose
        A map that is linear in its first argument, and its transpose.
    x
        The argument that has a derivative.
    data
        Further arguments of both; they have none.
    """
    found: Tensor = _Linear.apply(apply, transpose, x, *data)
    return found
