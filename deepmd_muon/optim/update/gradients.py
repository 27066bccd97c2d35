"""Prepare gradients: unscale, negate for `maximize`, check for NaN; and form waves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StepControl(NamedTuple):
    """Conditions of one step, the same for all parameters.

    `skip` is a float32 scalar on the device, which the host does not read: 1 keeps every parameter
    and all state unchanged. `scale` is the factor by which a gradient scaler multiplied the loss.
    """

    skip: Tensor | None = None
    scale: Tensor | None = None

    def on(self, device: torch.device) -> StepControl:
        """Return the same conditions on another device."""
        if self.skip is None and self.scale is None:
            return self
        return StepControl(_to(self.skip, device), _to(self.scale, device))


def _to(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=True)


def prepare_gradients(
    grads: Sequence[Tensor], dtype: torch.dtype, scale: Tensor | None, *, maximize: bool
) -> list[Tensor]:
    """Return the gradients in `dtype`, unscaled, and negated for `maximize`.

    The originals stay unchanged.
    """
    grads = in_dtype(grads, dtype)
    if scale is not None:
        # The scale is a power of two in practice, so its reciprocal in float64 is exact.
        grads = list(torch._foreach_mul(grads, scale.double().reciprocal().to(dtype)))
    return list(torch._foreach_neg(grads)) if maximize else grads


def in_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in a dtype; a tensor that has it is returned itself."""
    # The comparison is cheaper than `to`: a small model's step is limited by the host.
    return [x if x.dtype is dtype else x.to(dtype) for x in tensors]


def gradients_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [g for p in params if (g := p.grad) is not None]


def nonfinite_flags(grads: Sequence[Tensor]) -> Tensor:
    """Return whether each gradient has NaN or infinity: bool (n,), on the first's device."""
    flags: dict[int, Tensor] = {}
    for members in index_by_kind(grads):
        norms = torch.stack(torch._foreach_norm([grads[i] for i in members], float("inf")))
        bad = norms.isfinite().logical_not().to(grads[0].device, non_blocking=True)
        flags.update(zip(members, bad.unbind(), strict=True))
    return torch.stack([flags[i] for i in range(len(grads))])


def index_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group positions by device and dtype, as multi-tensor operations require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        kinds[x.device, x.dtype].append(i)
    return list(kinds.values())


def waves(members: Sequence[tuple[Tensor, T]], workspace: int) -> Iterator[list[tuple[Tensor, T]]]:
    """Divide parameters into waves of one device and dtype.

    A wave has at most `workspace` elements, or one parameter.
    """
    for kind in index_by_kind([p for p, _ in members]):
        wave: list[tuple[Tensor, T]] = []
        size = 0
        for i in kind:
            p, value = members[i]
            if wave and size + p.numel() > workspace:
                yield wave
                wave = []
                size = 0
            wave.append((p, value))
            size += p.numel()
        if wave:
            yield wave
