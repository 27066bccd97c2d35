"""The pieces into which the interval of an interpolated network's argument is cut.

The interval has `GRID` cells. A piece is a run of 2ᵏ of them that begins at a multiple of 2ᵏ, as if the interval had
been halved again and again, so that any two ways of cutting have a common refinement. A way of cutting is the tuple of
the first cells of its pieces, empty where the network is not interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

Pieces = tuple[int, ...]

GRID = 1024
"""Cells of an interval."""

FEWEST, MOST = 16, 128
"""Numbers of pieces, which are multiples of the least."""


def uniform(count: int) -> Pieces:
    """Return so many pieces of equal length, none for 0."""
    return tuple(range(0, GRID, GRID // count)) if count else ()


def lengths(pieces: Pieces) -> list[int]:
    """Return the length of every piece [cells]."""
    return [end - start for start, end in zip(pieces, (*pieces[1:], GRID), strict=True)]


def finest(several: Iterable[Pieces]) -> Pieces:
    """Return pieces that lie within those of all ways of cutting; none if one has none, or if they are too many."""
    several = set(several)
    if not several or not all(several):
        return ()
    if len(several) == 1:
        return several.pop()
    return padded(sorted(set().union(*several)))


def padded(starts: Sequence[int]) -> Pieces:
    """Halve the longest pieces until their number is one of those allowed; none if they are too many."""
    pieces = tuple(starts)
    while len(pieces) % FEWEST:
        sizes = lengths(pieces)
        pieces = halved(pieces, [sizes.index(max(sizes))])
    return pieces if len(pieces) <= MOST else ()


def halved(pieces: Pieces, chosen: Iterable[int]) -> Pieces:
    """Return the pieces with some of them, by number, cut in two."""
    sizes = lengths(pieces)
    return tuple(sorted((*pieces, *(pieces[i] + sizes[i] // 2 for i in chosen))))


def refined(errors_of: Callable[[Pieces], Tensor], tolerance: float) -> Pieces:
    """Return pieces whose errors are all within a tolerance, long where the error is small.

    `errors_of` returns the error of every piece. The result is empty where too many pieces would be needed.
    """
    pieces = uniform(FEWEST // 2)
    while pieces:
        bad = torch.nonzero(~(errors_of(pieces) <= tolerance)).flatten().tolist()
        if not bad:
            return padded(pieces)
        sizes = lengths(pieces)
        possible = len(pieces) + len(bad) <= MOST and all(sizes[i] > 1 for i in bad)
        pieces = halved(pieces, bad) if possible else ()
    return pieces


@cache  # captured graphs read these tables
def places(pieces: Pieces, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each cell's piece, int32 `(GRID,)`, and each piece's first cell and inverse length `(pieces, 2)`."""
    size = torch.tensor(lengths(pieces), device="cpu")
    cells = torch.arange(len(pieces), dtype=torch.int32, device="cpu").repeat_interleave(size)
    spans = torch.stack([torch.tensor(pieces, device="cpu").double(), 1.0 / size.double()], dim=1)
    return cells.to(device), spans.to(device, dtype)
