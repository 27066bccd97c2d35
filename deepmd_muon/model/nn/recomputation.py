"""Layers whose intermediate tensors are computed again in the backward passes instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def run_layer(layer: Callable[..., T], *arguments: Any, recompute: bool) -> T:
    """Return ``layer(*arguments)``; with `recompute`, its forward pass keeps the arguments alone.

    The layer draws no random numbers. It is called again in every backward pass that needs its tensors: once for
    forces, once for the gradient of the loss. The pass that gives forces still keeps some tensors for the gradient of a
    loss on forces. Without gradients it is called once.
    """
    if not recompute or not torch.is_grad_enabled():
        return layer(*arguments)
    from torch.utils.checkpoint import (
        checkpoint,
    )  # its first call imports torch's compiler, which takes seconds

    found: T = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
    return found
