"""Gradient clipping that suits Muon: by the norm of the gradients of the Adam routes alone.

The size of a Muon update does not depend on the size of its gradient. Large matrices dominate the
norm of all gradients: clipping by that norm would shorten the steps of the Adam routes whenever a
matrix has a large gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, spec_of
from deepmd_muon.optim.hybrid_muon import HybridMuon

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_adam_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Scale the gradients of the Adam routes in place to a norm of at most `max_norm`.

    Call it in place of ``torch.nn.utils.clip_grad_norm_``, after the backward pass and, with a
    gradient scaler, after ``scaler.unscale_``. It reads nothing from the device, so a captured step
    may contain it.

    Parameters
    ----------
    optimizer
        A `HybridMuon`; the gradients of its Muon route stay unchanged. With another optimizer, all
        gradients count and are scaled.
    max_norm
        Largest Euclidean norm.

    Returns
    -------
    Tensor
        The norm before scaling, a scalar; 0 without gradients. All ranks must call this together
        and get the same norm. Plain parameters of `local_patterns` do not count in it: each rank
        measures and scales its own separately.
    """
    shared: list[Tensor] = []
    local: list[Tensor] = []
    if isinstance(optimizer, HybridMuon):
        for p, entry, is_local in optimizer.routed_parameters():
            if entry.route in ("adam", "adamw") and p.grad is not None:
                (local if is_local else shared).append(p.grad)
    else:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        shared += [p.grad for p in params if p.grad is not None]
    if local:
        _scale(local, _norm(local), max_norm)
    if not shared:
        return torch.zeros(())
    norm = _norm(shared)
    _scale(shared, norm, max_norm)
    return norm


def _norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients.

    Those of DTensors count with their elements on all ranks.
    """
    by_layout: dict[Hashable, list[Tensor]] = defaultdict(list)
    for g in grads:
        spec: Any = spec_of(g)
        by_layout[None if spec is None else (spec.mesh, spec.placements)].append(g)
    norms = []
    for alike in by_layout.values():
        norm: Any = torch.nn.utils.get_total_norm(alike)
        norms.append(norm.full_tensor() if spec_of(norm) is not None else norm)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total


def _scale(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm, now `norm`, is at most `max_norm`."""
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for g in map(local_of, grads):
        by_device[g.device].append(g)
    for device, alike in by_device.items():
        torch._foreach_mul_(alike, factor.to(device, non_blocking=True))
