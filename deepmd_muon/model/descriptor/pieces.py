"""How the interval of an interpolated network's argument is cut, and its edges.

The interval has `GRID` cells. A piece is a run of 2ᵏ cells that begins at a multiple of 2ᵏ, as if
the interval had been halved again and again. Therefore any two ways of cutting have a common
refinement. A way of cutting is the tuple of the first cells of its pieces; it is empty if the
network is not interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Pieces = tuple[int, ...]

GRID = 1024
"""Cells of an interval."""

FEWEST = 16
"""Least number of pieces; all numbers are multiples of it."""

MOST = 128
"""Largest number of pieces."""

ORDERS = 16
"""Chebyshev polynomials on each piece."""


def uniform(count: int) -> Pieces:
    """Return `count` pieces of equal length; none for 0."""
    return tuple(range(0, GRID, GRID // count)) if count else ()


def lengths(pieces: Pieces) -> list[int]:
    """Return the length of every piece [cells]."""
    ends = (*pieces[1:], GRID)
    return [end - start for start, end in zip(pieces, ends, strict=True)]


def finest(candidates: Iterable[Pieces]) -> Pieces:
    """Return the common refinement of all ways of cutting.

    It is empty if one of them is, or if the refinement has too many pieces.
    """
    distinct = set(candidates)
    if not distinct or not all(distinct):
        return ()
    if len(distinct) == 1:
        return distinct.pop()
    return padded(sorted(set().union(*distinct)))


def padded(starts: Sequence[int]) -> Pieces:
    """Halve the longest pieces until their number is a multiple of `FEWEST`.

    The result is empty if they are too many.
    """
    pieces = tuple(starts)
    while len(pieces) % FEWEST:
        sizes = lengths(pieces)
        pieces = halved(pieces, [sizes.index(max(sizes))])
    return pieces if len(pieces) <= MOST else ()


def halved(pieces: Pieces, numbers: Iterable[int]) -> Pieces:
    """Return the pieces with those of some numbers cut in two."""
    sizes = lengths(pieces)
    middles = [pieces[i] + sizes[i] // 2 for i in numbers]
    return tuple(sorted((*pieces, *middles)))


def refined(errors_of: Callable[[Pieces], Tensor], tolerance: float) -> Pieces:
    """Return pieces with errors within a tolerance, long where the error is small.

    `errors_of` returns the error of every piece. The result is empty if too many pieces would be
    needed.
    """
    pieces = uniform(FEWEST // 2)
    while pieces:
        # Negated, so that an error of NaN is too large.
        too_large = torch.nonzero(~(errors_of(pieces) <= tolerance)).flatten().tolist()
        if not too_large:
            return padded(pieces)
        sizes = lengths(pieces)
        if len(pieces) + len(too_large) > MOST or any(sizes[i] == 1 for i in too_large):
            return ()
        pieces = halved(pieces, too_large)
    return pieces


@cache  # captured graphs read these tables
def places(pieces: Pieces, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each cell's piece `(GRID,)`, and first cell and 1/length of a piece `(pieces, 2)`."""
    sizes = torch.tensor(lengths(pieces), device="cpu")
    numbers = torch.arange(len(pieces), dtype=torch.int32, device="cpu")
    first_cells = torch.tensor(pieces, device="cpu").double()
    spans = torch.stack([first_cells, 1.0 / sizes.double()], dim=1)
    return numbers.repeat_interleave(sizes).to(device), spans.to(device, dtype)


class Edges(NamedTuple):
    """The environment rows of a batch, and how the intervals of s are cut.

    Attributes
    ----------
    rows
        R of every edge `(atoms, edges, 4)`; s is its first component.
    empty
        R of an empty slot `(atoms, 4)`.
    intervals
        Least s, and cells of the interval per unit of s, of each neighbour type `(types, 2)`.
    pieces
        How the intervals of all types are cut.
    widths
        Columns of each neighbour type.
    missing
        Empty slots beyond these columns, per neighbour type.
    """

    rows: Tensor
    empty: Tensor
    intervals: Tensor
    pieces: Pieces
    widths: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def terms(self) -> int:
        """Polynomials over all neighbour types."""
        return len(self.widths) * len(self.pieces) * ORDERS


def first_columns(widths: Sequence[int]) -> list[int]:
    """Return the first column of each neighbour type."""
    return list(accumulate(widths, initial=0))[:-1]
