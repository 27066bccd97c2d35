"""Magma's alignment of a block whose momentum and gradient lie in pieces on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 5


def piece_sums(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Return what a piece contributes to its block's alignment.

    Parameters
    ----------
    momentum, gradient
        (pieces, elements), of one dtype.

    Returns
    -------
    Tensor
        float64 (pieces, 5): the scales s and t, then Σ(m/s)², Σ(m/s)(g/t) and Σ(g/t)². The scales are 1 unless the
        dtype is float64, whose squares can leave the range of float64.
    """
    m, g = momentum.double(), gradient.double()
    ones = torch.ones(len(m), 1, dtype=torch.float64, device=m.device)
    s = t = ones
    if momentum.dtype == torch.float64 and m.shape[1]:
        s, t = (torch.where(x == 0, 1.0, x) for x in (y.abs().amax(dim=1, keepdim=True) for y in (m, g)))
        m, g = m / s, g / t
    sums = [torch.linalg.vecdot(a, b, dim=1).unsqueeze(1) for a, b in ((m, m), (m, g), (g, g))]
    return torch.cat([s, t, *sums], dim=1)


def cosines(sums: Tensor) -> Tensor:
    """Return cos(m, g) of every block.

    Parameters
    ----------
    sums
        float64 (blocks, pieces, 5), what `piece_sums` gave; a piece of zeros stands for none.

    Returns
    -------
    Tensor
        float32 (blocks,); 0 where either vector is zero.
    """
    s, t = sums[..., 0], sums[..., 1]
    s, t = (x / x.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for x in (s, t))
    mm, mg, gg = ((sums[..., 2 + i] * scale).sum(dim=1) for i, scale in enumerate((s * s, s * t, t * t)))
    norms = mm.sqrt() * gg.sqrt()
    return torch.where(norms > 0, mg / norms, 0.0).clamp(-1.0, 1.0).float()
