"""The edges whose embedding is interpolated, as the torch definition and the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from deepmd_muon.model.descriptor.pieces import Pieces

ORDERS = 16


class Edges(NamedTuple):
    """The environment rows of a batch and how its s are cut into pieces.

    Attributes
    ----------
    rows
        R of every edge `(atoms, edges, 4)`; s is its first component.
    empty
        R of an empty slot `(atoms, 4)`.
    start
        Least s, and cells of the interval per unit of s, of each neighbour type `(types, 2)`.
    pieces
        How the intervals of all types are cut.
    widths
        Columns of each neighbour type.
    missing
        Empty slots beyond these columns, per neighbour type.
    """

    rows: torch.Tensor
    empty: torch.Tensor
    start: torch.Tensor
    pieces: Pieces
    widths: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def terms(self) -> int:
        """Polynomials over all neighbour types."""
        return len(self.widths) * len(self.pieces) * ORDERS


def first_columns(widths: Sequence[int]) -> list[int]:
    """Return the first column of each neighbour type."""
    return [0, *accumulate(widths)][:-1]
