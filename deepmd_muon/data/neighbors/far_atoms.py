"""Frames that the neighbour library cannot take: atoms far apart, and geometries that are mistakes.

vesin 0.6 sorts atoms into at most 1e5 cells. In wide, flat or long frames it rounds the number of cells along an axis
to zero and divides by it, which ends the process (SIGFPE). `far_pairs` keeps a list of the occupied cells only.
"""

from __future__ import annotations

import itertools

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.frames import MAX_LENGTH

# vesin's limit of cells, from which on it makes them larger than the cut-off.
_VESIN_CELLS = 1e5
# Most visits of cells by vesin, 5 ns each, in frames of fewer atoms than cells.
_MOST_VISITS = 2e7
# Most images of an atom within the cut-off, and most pairs of a frame of uniform density: 48 bytes each.
_MOST_IMAGES, _MOST_PAIRS = 1e6, 1e9
# Atoms further from their cell [cell lengths] than translations of 32 bits can say.
_MOST_CELLS = float(1 << 30)


def check_geometry(
    points: np.ndarray, box: np.ndarray | None, rcut: float, names: np.ndarray
) -> np.ndarray | None:
    """Refuse positions `(natoms, 3)` and cells for which neighbours within `rcut` [Å] cannot be found.

    `names` are the numbers of the atoms in messages. Return the inverse of the cell; None without one.

    Raises
    ------
    NeighborError
        Names the atom, if it is one.
    """
    # One number of all atoms decides: most frames are sound. A comparison with NaN is false.
    if not np.abs(points).max(initial=0.0) <= MAX_LENGTH:
        _refuse(~np.isfinite(points).all(axis=1), points, names, "is not finite")
        _refuse(
            np.abs(points).max(axis=1) > MAX_LENGTH, points, names, f"is beyond {MAX_LENGTH:g} Å"
        )
    if box is None:
        return None
    longest = float(np.abs(box).max())
    if not longest <= MAX_LENGTH:
        raise NeighborError(
            f"the cell {box.tolist()} is not finite or longer than {MAX_LENGTH:g} Å; check the units"
        )
    volume = abs(float(np.linalg.det(box)))
    if not volume > 1e-12 * longest**3:
        raise NeighborError(
            f"the cell {box.tolist()} has volume {volume:.3g} Å³; a system without a cell needs a file nopbc"
        )
    inverse = np.linalg.inv(box)
    height = heights(inverse)
    reach = 2.0 * rcut / height
    if (
        np.maximum(reach, 1.0).prod() > _MOST_IMAGES
        or len(points) ** 2 * reach.prod() > _MOST_PAIRS
    ):
        raise NeighborError(
            f"the cell {box.tolist()} is {height.min():.3g} Å high, so that its {len(points)} atoms have "
            f"millions of images within {rcut:g} Å; box and coord must be in Å"
        )
    outside = np.abs(points @ inverse)
    if outside.max(initial=0.0) > _MOST_CELLS:
        _refuse(
            (outside > _MOST_CELLS).any(axis=1),
            points,
            names,
            "is more than 1e9 cell lengths away from the cell",
        )
    return np.asarray(inverse)


def _refuse(wrong: np.ndarray, points: np.ndarray, names: np.ndarray, problem: str) -> None:
    if wrong.any():
        first = int(wrong.argmax())
        raise NeighborError(
            f"the position of atom {names[first]} {problem}: {points[first].tolist()}; check the units"
        )


def heights(inverse: np.ndarray) -> np.ndarray:
    """Return the distances between opposite faces of a cell, (3,) [Å], from its inverse."""
    return np.asarray(1.0 / np.linalg.norm(inverse, axis=0))


def is_sparse(points: np.ndarray, inverse: np.ndarray | None, rcut: float) -> bool:
    """Return whether vesin would divide by zero, or go through a hundred million cells for few atoms.

    `inverse` is that of the cell; None without one.
    """
    if not len(points):
        return False
    lengths = np.ptp(points, axis=0) if inverse is None else heights(inverse)
    cells = np.maximum(lengths // rcut, 1.0)
    # Every cell looks at its neighbours, empty or not, and at more images of them where the period is short.
    count = float(cells.prod())
    neighbors = 27.0 if inverse is None else float((2.0 * np.ceil(rcut / lengths) + 1.0).prod())
    if len(points) < count and min(count, _VESIN_CELLS) * neighbors > _MOST_VISITS:
        return True
    if count < 0.9 * _VESIN_CELLS:
        return False
    # Its formula, with a margin for the box that it puts around atoms without a cell.
    first, second = cells[0] / cells[1], cells[1] / cells[2]
    last = np.cbrt(_VESIN_CELLS / (first * second**2))
    return bool(min(last, last * second, last * second * first) < 3.0)


def far_pairs(points: np.ndarray, box: np.ndarray | None, rcut: float) -> tuple[np.ndarray, ...]:
    """Find all pairs of a frame within the cut-off [Å], each both ways.

    Return i and j (npairs,) int64, shift (npairs, 3) int32, and distance (npairs,) [Å], sorted by i.
    """
    everywhere, owner, shift = _with_images(points, box, rcut)
    key, strides = _cell_keys(everywhere, rcut)
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    found = []
    for offset in itertools.product((-1, 0, 1), repeat=3):
        wanted = key[: len(points)] + int(np.dot(offset, strides))
        first, last = (
            np.searchsorted(ordered, wanted, "left"),
            np.searchsorted(ordered, wanted, "right"),
        )
        counts = last - first
        i = np.repeat(np.arange(len(points)), counts)
        within = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)
        j = order[np.repeat(first, counts) + within]
        distance = np.linalg.norm(everywhere[j] - everywhere[i], axis=1)
        near = (distance < rcut) & (i != j)
        found.append((i[near], j[near], distance[near]))
    i, j, distance = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((j, i))
    i, j = i[order], j[order]
    return i, owner[j], shift[j] - shift[i], distance[order]


def _with_images(
    points: np.ndarray, box: np.ndarray | None, rcut: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return atoms, moved into the cell, and then their images near it: positions, owners, translations."""
    owner = np.arange(len(points))
    shift = np.zeros((len(points), 3), dtype=np.int32)
    if box is None:
        return points, owner, shift
    inverse = np.linalg.inv(box)
    fraction = points @ inverse
    home = -np.floor(fraction)
    fraction += home
    shift = home.astype(np.int32)
    points = points + home @ box
    reach = rcut / heights(inverse)
    positions, owners, shifts = [points], [owner], [shift]
    # Axis by axis: an image of an image is one, too.
    for axis in range(3):
        most = int(np.ceil(reach[axis]))
        base = [np.concatenate(parts) for parts in (positions, owners, shifts)]
        place = (base[0] @ inverse)[:, axis]
        for step in (*range(-most, 0), *range(1, most + 1)):
            near = (place + step > -reach[axis]) & (place + step < 1.0 + reach[axis])
            positions.append(base[0][near] + step * box[axis])
            owners.append(base[1][near])
            moved = base[2][near].copy()
            moved[:, axis] += step
            shifts.append(moved)
    return np.concatenate(positions), np.concatenate(owners), np.concatenate(shifts)


def _cell_keys(points: np.ndarray, rcut: float) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return numbers of cells as wide as the cut-off, and the steps between neighbours along the axes.

    Empty stretches of an axis shrink to one cell, so that numbers stay small at any distance.
    """
    cells = np.empty(points.shape, dtype=np.int64)
    for axis in range(3):
        used, place = np.unique(np.floor(points[:, axis] / rcut), return_inverse=True)
        cells[:, axis] = np.cumsum(np.minimum(np.diff(used, prepend=used[:1] - 1), 2))[place]
    width = cells.max(axis=0) + 2
    strides = (int(width[1] * width[2]), int(width[2]), 1)
    return cells @ np.array(strides), strides
