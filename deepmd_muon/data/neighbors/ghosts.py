"""A frame as MD programs hold it: local atoms, the periodic images that they see, and one list of neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepmd_muon.data.neighbors.lists import find_pairs

# Atoms that see each other over more cells are moved into their cell.
_NEAR = 100


@dataclass(frozen=True)
class GhostedFrame:
    """The real atoms of a frame, followed by their images within reach of another atom."""

    coord: np.ndarray  # float64 (nall, 3): positions [Å]
    owner: np.ndarray  # int64 (nall,): the frame's atom that each is, or is an image of
    # int64 (nloc, n): all atoms within the cut-off of each real atom, −1 in empty slots, in no order.
    neighbor: np.ndarray


def with_ghosts(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float
) -> GhostedFrame:
    """Find the images and neighbours of one frame within `rcut` [Å].

    Positions may lie outside the cell, whose rows are its vectors; None without periodicity. Atoms of type −1 are
    padding and left out.

    Raises
    ------
    NeighborError
        As `build_neighbors`.
    """
    pairs = find_pairs(coord, box, atype, rcut)
    if box is not None and np.abs(pairs.shift).max(initial=0) > _NEAR:
        # The table below holds all translations between the smallest and the largest.
        coord = coord - np.floor(coord @ np.linalg.inv(box)) @ box
        pairs = find_pairs(coord, box, atype, rcut)
    nloc = len(pairs.real)
    positions = np.asarray(coord, dtype=np.float64)[pairs.real]
    owner, neighbor = pairs.real, pairs.j
    if box is not None and len(pairs.shift):
        low = pairs.shift.min(axis=0)  # not above 0: with S, −S is in a full list
        span = pairs.shift.max(axis=0) - low + 1
        cell = np.ravel_multi_index(tuple((pairs.shift - low).T), tuple(span))
        key = cell * nloc + pairs.j
        home = int(np.ravel_multi_index(tuple(-low), tuple(span))) * nloc
        seen = np.zeros(int(span.prod()) * nloc, dtype=bool)
        seen[key] = True
        seen[home : home + nloc] = False
        images = np.flatnonzero(seen)
        number = np.empty(len(seen), dtype=np.int64)
        number[images] = np.arange(nloc, nloc + len(images))
        number[home : home + nloc] = np.arange(nloc)
        neighbor = number[key]
        cells = np.stack(np.unravel_index(images // nloc, tuple(span)), axis=1) + low
        positions = np.concatenate(
            [positions, positions[images % nloc] + cells @ np.asarray(box, dtype=np.float64)]
        )
        owner = np.concatenate([owner, owner[images % nloc]])
    counts = np.bincount(pairs.i, minlength=nloc)
    order = np.argsort(pairs.i, kind="stable")
    i = pairs.i[order]
    rows = np.full((nloc, int(counts.max(initial=0))), -1, dtype=np.int64)
    rows[i, np.arange(len(i)) - (np.cumsum(counts) - counts)[i]] = neighbor[order]
    return GhostedFrame(positions, owner, rows)
