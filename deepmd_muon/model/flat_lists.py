"""Edges and angles of a batch as flat lists of fixed capacity: what dynamic selection computes on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

GROWTH = 1.25
"""Ratio of successive capacities: lists of similar lengths share one, so shapes recur from batch to batch."""


@dataclass(frozen=True)
class FlatLists:
    """Edges and angles without empty slots, padded to a capacity.

    Edges are ordered by centre and distance, angles by their first edge. Padding repeats edge 0 and angle 0 (or index
    0 of an empty list) and is False in `real_edge` and `real_angle`.

    Attributes
    ----------
    edge
        Slot of every edge, counted through the rows of `Structures.neighbor`: row · nnei + column `(nedge,)`, int64.
    centre
        Sorted atom (row) of every edge `(nedge,)`, int64.
    real_edge
        False for padding `(nedge,)`.
    first, second
        The two edges of every angle, both within the first inner cut-off, all ordered pairs with j = k included
        `(nangle,)`, int64.
    real_angle
        False for padding `(nangle,)`.
    """

    edge: torch.Tensor
    centre: torch.Tensor
    real_edge: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    real_angle: torch.Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> FlatLists:
        """Return the lists on `device`."""
        moved: dict[str, Any] = {
            field.name: getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self)
        }
        return FlatLists(**moved)


def flat_lists(counts: np.ndarray, inner: np.ndarray, nnei: int) -> FlatLists:
    """List the edges and angles of a mixed neighbour list.

    Parameters
    ----------
    counts
        Neighbours of every sorted atom `(nreal,)`; they fill the first columns of its row.
    inner
        How many of them lie within the shorter cut-off `(nreal,)`.
    nnei
        Columns of the list.
    """
    centre = np.repeat(np.arange(len(counts)), counts)
    start = np.cumsum(counts) - counts
    edge = centre * nnei + np.arange(len(centre)) - start[centre]
    pairs = inner * inner
    atom = np.repeat(np.arange(len(inner)), pairs)
    rank = np.arange(len(atom)) - (np.cumsum(pairs) - pairs)[atom]
    first = start[atom] + rank // np.maximum(inner[atom], 1)
    second = start[atom] + rank % np.maximum(inner[atom], 1)
    real_edge, real_angle = (np.arange(capacity(len(x))) < len(x) for x in (edge, first))
    padded = [_pad(x, real_edge) for x in (edge, centre)] + [_pad(x, real_angle) for x in (first, second)]
    tensors = [torch.from_numpy(x) for x in (*padded[:2], real_edge, *padded[2:], real_angle)]
    return FlatLists(*tensors)


def capacity(length: int) -> int:
    """Return the capacity of a list: the smallest power of `GROWTH`, in steps of 64, that holds it."""
    size = 64
    while size < length:
        size = -(-int(size * GROWTH) // 64) * 64
    return size


def _pad(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    padded = np.zeros(len(real), dtype=np.int64)
    padded[: len(values)] = values
    if len(values):
        padded[len(values) :] = values[0]
    return padded
