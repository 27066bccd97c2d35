"""Magma damping: blocks whose momentum no longer points along the gradient take smaller steps.

For each block (one matrix of a parameter's view) with momentum m and gradient g::

    c = cos(m, g)
    r = (sigmoid(c/2) − sigmoid(−1/2)) / (sigmoid(1/2) − sigmoid(−1/2))        in [0, 1]
    s ← 0.9 s + 0.1 r                                                         starts at 0.5
    update ← (0.1 + 0.9 s) · update

This is the form that deepmd-kit calls Magma-lite: masked momentum alignment without the random masks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

TEMPERATURE = 2.0
SCORE_DECAY = 0.9
SCORE_START = 0.5
MIN_SCALE = 0.1

_LOWEST = 1.0 / (1.0 + math.exp(1.0 / TEMPERATURE))
_HIGHEST = 1.0 / (1.0 + math.exp(-1.0 / TEMPERATURE))


def initial_scores(blocks: int, device: torch.device) -> Tensor:
    """Return the scores of a parameter that has not been stepped: float32 (blocks,)."""
    return torch.full((blocks,), SCORE_START, dtype=torch.float32, device=device)


def alignments(momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return `alignment` of several pairs (blocks, elements) of one dtype; equal lengths share their operations."""
    alike: dict[int, list[int]] = defaultdict(list)
    for i, m in enumerate(momenta):
        alike[m.shape[1]].append(i)
    found = list(momenta)
    for length, members in alike.items():
        blocks = [momenta[i].shape[0] for i in members]
        joined = momenta[0].new_empty(2, sum(blocks), length, dtype=torch.float64)
        for place, several in zip(joined, (momenta, gradients), strict=True):
            torch.cat([several[i] for i in members], out=place)
        if momenta[0].dtype == torch.float64:  # the squares of others stay in range
            largest = joined.abs().amax(dim=2, keepdim=True)
            joined.div_(largest.masked_fill_(largest == 0, 1.0))
        for i, cosine in zip(members, _cosines(*joined).split(blocks), strict=True):
            found[i] = cosine
    return found


def alignment(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Return cos(m, g) per block in float32.

    Parameters
    ----------
    momentum, gradient
        (blocks, elements). Sums run in float64 and float64 blocks are scaled first, so that neither size nor scale
        of a block matters.

    Returns
    -------
    Tensor
        (blocks,); 0 where either vector is zero.
    """
    return alignments([momentum], [gradient])[0]


def _cosines(m: Tensor, g: Tensor) -> Tensor:
    """Return cos(m, g) of float64 (blocks, elements); `m` is used up, to save the memory of the products."""
    norms = torch.linalg.vector_norm(m, dim=1) * torch.linalg.vector_norm(g, dim=1)
    dot = m.mul_(g).sum(dim=1)
    return torch.where(norms > 0, dot / norms, 0.0).clamp(-1.0, 1.0).float()


def update_scores(scores: Sequence[Tensor], cosines: Sequence[Tensor], skip: Tensor | None = None) -> list[Tensor]:
    """Advance the scores in place and return each block's damping factor.

    Parameters
    ----------
    scores
        float32 tensors (blocks,), the state; changed in place.
    cosines
        Alignments of the same shapes.
    skip
        Device predicate; where it is positive the scores stay.

    Returns
    -------
    list of Tensor
        Factors in [0.1, 1], shapes as the scores.
    """
    raw = list(torch._foreach_div(list(cosines), TEMPERATURE))
    torch._foreach_sigmoid_(raw)
    torch._foreach_sub_(raw, _LOWEST)
    torch._foreach_div_(raw, _HIGHEST - _LOWEST)
    if skip is not None:
        raw = [torch.where(skip > 0, score, new) for score, new in zip(scores, raw, strict=True)]
    torch._foreach_lerp_(list(scores), raw, 1.0 - SCORE_DECAY)
    factors = torch._foreach_mul(list(scores), 1.0 - MIN_SCALE)
    torch._foreach_add_(factors, MIN_SCALE)
    return list(factors)
