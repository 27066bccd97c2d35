"""Magma's alignment of a block whose momentum and gradient lie in pieces on several ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# Elements of a tensor below which launches cost more than the copies that joining it with others takes.
_SMALL = 2**16


class Pair(NamedTuple):
    """Momentum and gradient of some pieces, of any shape; `shape` is (pieces, elements)."""

    momentum: Tensor
    gradient: Tensor
    shape: tuple[int, int]


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


def piece_sums_of_many(pairs: Sequence[Pair], *, joined: bool | None = None) -> list[Tensor]:
    """Return `piece_sums` of several pairs, in one tensor or several, below each other.

    With `joined` small float32 ones are summed together, in a few launches; by default on a GPU, where launches cost
    more than copies.
    """
    found: list[Tensor | None] = [None] * len(pairs)
    joined = bool(pairs) and pairs[0].momentum.is_cuda if joined is None else joined
    small = [i for i, x in enumerate(pairs) if x.momentum.numel() <= _SMALL and x.momentum.dtype != torch.float64]
    if joined and len(small) > 1:
        flat = [_flatten_dense_tensors([pairs[i][k] for i in small]) for k in (0, 1)]
        m, g = (x.double() for x in flat)
        shapes = tuple(pairs[i].shape for i in small)
        lengths = _lengths(shapes, m.device)
        # unsafe: the lengths are right by construction, and checking them would wait for the device.
        sums = torch.segment_reduce(
            torch.stack((m * m, m * g, g * g), dim=1), "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0
        )
        sums = torch.cat([torch.ones_like(sums[:, :2]), sums], dim=1)
        if len(small) == len(pairs):
            return [sums]
        for i, part in zip(small, sums.split([pieces for pieces, _ in shapes]), strict=True):
            found[i] = part
    return [
        piece_sums(m.reshape(shape), g.reshape(shape)) if part is None else part
        for (m, g, shape), part in zip(pairs, found, strict=True)
    ]


def table(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Return `piece_sums` of several pairs below each other, float64 (pieces of all, 5)."""
    found = piece_sums_of_many(pairs)
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else torch.zeros(0, 5, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=256)
def _lengths(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor([n for pieces, n in shapes for _ in range(pieces)], dtype=torch.int64, device=device)


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
