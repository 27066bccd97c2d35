"""Neighbour counts of several small frames at once: numpy's calls take longer than the search in one of them."""

from __future__ import annotations

import numpy as np

from deepmd_muon.data.neighbors.images import (
    cells_within,
    compared_by_vesin,
    reach_of,
    squares_over_cells,
)
from deepmd_muon.data.neighbors.lists import SAME_PLACE, NeighborStatistics, image_statistics

# Nanoseconds for a pair and for each of its images here, for an image that vesin compares, and for a frame that is
# counted alone, beside its pairs (a Xeon, numpy 2.4).
_PAIR, _IMAGE, _BY_VESIN, _ALONE = 30.0, 4.0, 10.0, 300_000.0
# Images of pairs that are compared at once, of several frames and of one: their distances stay in a processor's cache.
_AT_ONCE, _OF_ONE = 1 << 17, 1 << 19
# Limits of ordinary frames: positions and cell vectors are shorter than the first and the longest vector longer than
# the second [Å], the volume is larger than the third of its cube, and atoms are fewer cells away than the last.
_FAR, _TINY, _FLAT, _OUTSIDE = 1e4, 1e-3, 1e-3, 1e3


def count_together(
    coord: np.ndarray,
    box: np.ndarray | None,
    atype: np.ndarray,
    rcut: float,
    ntypes: int,
    shortest: float = np.inf,
) -> tuple[NeighborStatistics, np.ndarray]:
    """Count neighbours in frames with the same number of atoms.

    Parameters
    ----------
    coord, box, atype
        Positions `(nframes, natoms, 3)` and cells `(nframes, 3, 3)` [Å], and types `(nframes, natoms)`.
    rcut, ntypes
        Cut-off [Å] and number of types.
    shortest
        A distance between two atoms of other frames [Å]. Where a frame has none below it, its own is not needed.

    Returns
    -------
    tuple
        The statistics of frames that were counted here, their shortest distance left out, and which were
        `(nframes,)`. The others have to be counted alone: a mistake, the shortest distance, or rounding at the
        cut-off.
    """
    total = NeighborStatistics(np.inf, (0,) * ntypes, 0)
    counted = np.zeros(len(atype), dtype=bool)
    if not atype.size:
        return total, counted
    sound, inverse = ordinary(coord, box)
    rows = np.flatnonzero(sound & (atype >= 0).all(axis=1))
    if not len(rows):
        return total, counted
    reach, by_vesin = np.zeros(3), 0.0
    if inverse is not None:
        reach = reach_of(inverse[rows], rcut).max(axis=0)
        by_vesin = compared_by_vesin(
            1.0 / (rcut * np.linalg.norm(inverse[rows], axis=1).max(axis=0))
        )
    natoms = atype.shape[1]
    ncells, npairs = int((2.0 * reach + 1.0).prod()), natoms * (natoms + 1) // 2
    cost = npairs * (_PAIR + _IMAGE * ncells)
    if npairs * ncells > _OF_ONE or cost > _ALONE + npairs * _BY_VESIN * by_vesin:
        return total, counted
    least, errors = np.full(len(atype), np.inf), np.zeros(len(atype))
    step = max(1, _AT_ONCE // (npairs * ncells))
    for some in (rows[first : first + step] for first in range(0, len(rows), step)):
        cell = None if box is None else box[some]
        inverted = None if inverse is None else inverse[some]
        square, _, errors[some] = squares_over_cells(
            coord[some], cell, inverted, cells_within(*reach.tolist()), rcut
        )
        least[some] = square.min(axis=(1, 2))
        limit = errors[some, None, None]
        near = square < rcut**2 - limit
        # Bytes are added ten times faster than booleans, and booleans counted as fast without axes.
        images = near.view(np.uint8).sum(axis=1, dtype=np.uint8 if ncells < 256 else np.int32)
        reached = [np.count_nonzero(frame) for frame in square < rcut**2 + limit]
        certain = images.sum(axis=1) == reached
        counted[some] = certain
        if certain.any():
            total = total.merge(
                image_statistics(images[certain], atype[some[certain]], np.zeros(0), ntypes)
            )
    # Rounding may decide which of the nearest atoms are nearest, and whether they lie at the same place.
    bound = min(shortest**2, float((least + errors)[rows].min()))
    counted &= (least - errors >= bound) & (least > 4.0 * SAME_PLACE**2 + errors)
    return total, counted


def ordinary(
    coord: np.ndarray, box: np.ndarray | None, flat: float = _FLAT
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return which frames have ordinary positions and cells `(nframes,)`, and the inverse cells.

    The volume must be more than `flat` of the cube of the longest cell vector. Whatever searches in other frames has to
    name mistakes. Positions of padding are looked at, too.
    """
    sound = np.abs(coord).max(axis=(1, 2)) < _FAR
    if box is None:
        return sound, None
    longest = np.abs(box).max(axis=(1, 2))
    sound &= (longest > _TINY) & (longest < _FAR) & (np.abs(np.linalg.det(box)) > flat * longest**3)
    inverse = np.linalg.inv(np.where(sound[:, None, None], box, np.eye(3)))
    sound &= (
        np.abs(np.where(sound[:, None, None], coord, 0.0) @ inverse).max(axis=(1, 2)) < _OUTSIDE
    )
    return sound, inverse
