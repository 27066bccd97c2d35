"""Frames that the neighbour library cannot take: atoms far apart, and geometries that are mistakes.

vesin 0.6 sorts atoms into at most 1e5 cells. In wide, flat or long frames it rounds the number of
cells along an axis to zero and divides by it, which ends the process (SIGFPE). `far_pairs` keeps a
list of the occupied cells only.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.frames import MAX_LENGTH

# Bound on the number of vesin's cells, above which it makes them larger than the cut-off.
_VESIN_CELLS = 1e5
# Largest number of cell visits by vesin, 5 ns each, in frames with fewer atoms than cells.
_MOST_VISITS = 2e7
# Largest number of images of an atom within the cut-off.
_MOST_IMAGES = 1e6
# Largest number of pairs, 48 bytes each, that a frame of uniform density may have.
_MOST_PAIRS = 1e9
# Atoms further from their cell [cell lengths] need more than the 32 bits of a translation.
_MOST_CELLS = float(1 << 30)


class RawPairs(NamedTuple):
    """Pairs that a search found, each both ways: position[j] + shift·box is near position[i]."""

    i: np.ndarray  # (npairs,) int64
    j: np.ndarray  # (npairs,) int64
    shift: np.ndarray  # (npairs, 3) int32
    distance: np.ndarray  # (npairs,) [Å]


def check_geometry(
    points: np.ndarray, box: np.ndarray | None, rcut: float, names: np.ndarray
) -> np.ndarray | None:
    """Reject positions and cells for which neighbours within `rcut` [Å] cannot be found.

    `points` are `(natoms, 3)` [Å], `names` the numbers of the atoms in messages. Return the inverse
    of the cell; None without one.

    Raises
    ------
    NeighborError
        Names the atom, if it is one.
    """
    # One maximum decides for sound frames. The comparison with NaN is false.
    if not np.abs(points).max(initial=0.0) <= MAX_LENGTH:
        infinite = ~np.isfinite(points).all(axis=1)
        _raise_if_any(infinite, points, names, "is not finite")
        far = np.abs(points).max(axis=1) > MAX_LENGTH
        _raise_if_any(far, points, names, f"is beyond {MAX_LENGTH:g} Å")
    if box is None:
        return None

    longest = float(np.abs(box).max())
    if not longest <= MAX_LENGTH:
        raise NeighborError(
            f"the cell {box.tolist()} is not finite or longer than {MAX_LENGTH:g} Å; "
            "check the units"
        )
    volume = abs(float(np.linalg.det(box)))
    if not volume > 1e-12 * longest**3:
        raise NeighborError(
            f"the cell {box.tolist()} has volume {volume:.3g} Å³; "
            "a system without a cell needs a file nopbc"
        )

    inverse = np.linalg.inv(box)
    height = heights(inverse)
    reach = 2.0 * rcut / height
    n_images = np.maximum(reach, 1.0).prod()
    n_pairs = len(points) ** 2 * reach.prod()
    if n_images > _MOST_IMAGES or n_pairs > _MOST_PAIRS:
        raise NeighborError(
            f"the cell {box.tolist()} is {height.min():.3g} Å high, so that its {len(points)} "
            f"atoms have millions of images within {rcut:g} Å; box and coord must be in Å"
        )
    fractions = np.abs(points @ inverse)
    if fractions.max(initial=0.0) > _MOST_CELLS:
        outside = (fractions > _MOST_CELLS).any(axis=1)
        problem = "is more than 1e9 cell lengths away from the cell"
        _raise_if_any(outside, points, names, problem)
    return np.asarray(inverse)


def _raise_if_any(wrong: np.ndarray, points: np.ndarray, names: np.ndarray, problem: str) -> None:
    if wrong.any():
        atom = int(wrong.argmax())
        raise NeighborError(
            f"the position of atom {names[atom]} {problem}: {points[atom].tolist()}; "
            "check the units"
        )


def heights(inverse: np.ndarray) -> np.ndarray:
    """Return the distances between opposite faces of a cell, (3,) [Å], from its inverse."""
    return np.asarray(1.0 / np.linalg.norm(inverse, axis=0))


def is_sparse(points: np.ndarray, inverse: np.ndarray | None, rcut: float) -> bool:
    """Return whether vesin would divide by zero, or visit a hundred million cells for few atoms.

    `inverse` is the inverse of the cell; None without one.
    """
    if not len(points):
        return False
    lengths = np.ptp(points, axis=0) if inverse is None else heights(inverse)
    cells = np.maximum(lengths // rcut, 1.0)
    n_cells = float(cells.prod())
    # vesin visits the neighbours of every cell, empty or not, and more images of them where the
    # period is short.
    n_neighbors = 27.0
    if inverse is not None:
        n_neighbors = float((2.0 * np.ceil(rcut / lengths) + 1.0).prod())
    visits = min(n_cells, _VESIN_CELLS) * n_neighbors
    if len(points) < n_cells and visits > _MOST_VISITS:
        return True
    if n_cells < 0.9 * _VESIN_CELLS:
        return False
    # vesin's formula for its numbers of cells along the axes. The bound of 3 leaves a margin for
    # the box that vesin puts around atoms without a cell.
    cells_x, cells_y, cells_z = cells
    ratio_xy = cells_x / cells_y
    ratio_yz = cells_y / cells_z
    nz = np.cbrt(_VESIN_CELLS / (ratio_xy * ratio_yz**2))
    ny = nz * ratio_yz
    nx = ny * ratio_xy
    return bool(min(nx, ny, nz) < 3.0)


def far_pairs(points: np.ndarray, box: np.ndarray | None, rcut: float) -> RawPairs:
    """Find all pairs of a frame within the cut-off [Å], each both ways, sorted by i."""
    images = _with_images(points, box, rcut)
    key, strides = _cell_keys(images.points, rcut)
    by_key = np.argsort(key, kind="stable")
    sorted_key = key[by_key]

    natoms = len(points)
    i_parts = []
    j_parts = []
    distance_parts = []
    for offset in itertools.product((-1, 0, 1), repeat=3):
        # The atoms in the cell at this offset from the cell of each atom: sorted_key[begin:end].
        neighbor_key = key[:natoms] + int(np.dot(offset, strides))
        begin = np.searchsorted(sorted_key, neighbor_key, "left")
        end = np.searchsorted(sorted_key, neighbor_key, "right")
        counts = end - begin
        i = np.repeat(np.arange(natoms), counts)
        number_in_cell = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)
        j = by_key[np.repeat(begin, counts) + number_in_cell]
        distance = np.linalg.norm(images.points[j] - images.points[i], axis=1)
        near = (distance < rcut) & (i != j)
        i_parts.append(i[near])
        j_parts.append(j[near])
        distance_parts.append(distance[near])
    i = np.concatenate(i_parts)
    j = np.concatenate(j_parts)
    distance = np.concatenate(distance_parts)

    order = np.lexsort((j, i))
    i = i[order]
    j = j[order]
    return RawPairs(
        i=i,
        j=images.owner[j],
        shift=images.shift[j] - images.shift[i],
        distance=distance[order],
    )


class _Images(NamedTuple):
    """Atoms, moved into the cell, followed by their images near it."""

    points: np.ndarray  # (nimages, 3) [Å]
    owner: np.ndarray  # (nimages,): the atom of each image
    shift: np.ndarray  # (nimages, 3) int32: translation from the atom's given position


def _with_images(points: np.ndarray, box: np.ndarray | None, rcut: float) -> _Images:
    owner = np.arange(len(points))
    if box is None:
        return _Images(points, owner, np.zeros((len(points), 3), dtype=np.int32))
    inverse = np.linalg.inv(box)
    into_cell = -np.floor(points @ inverse)
    images = _Images(points + into_cell @ box, owner, into_cell.astype(np.int32))
    reach = rcut / heights(inverse)
    # Axis by axis: later axes repeat the images of earlier ones.
    for axis in range(3):
        images_along_axis = [images]
        fraction = (images.points @ inverse)[:, axis]
        furthest = int(np.ceil(reach[axis]))
        for step in (*range(-furthest, 0), *range(1, furthest + 1)):
            near = (fraction + step > -reach[axis]) & (fraction + step < 1.0 + reach[axis])
            shift = images.shift[near].copy()
            shift[:, axis] += step
            moved_points = images.points[near] + step * box[axis]
            images_along_axis.append(_Images(moved_points, images.owner[near], shift))
        images = _Images(
            *(np.concatenate(arrays) for arrays in zip(*images_along_axis, strict=True))
        )
    return images


def _cell_keys(points: np.ndarray, rcut: float) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the number of each atom's cell, and the steps from cell to cell along the axes.

    Cells are as wide as the cut-off. Empty stretches of an axis shrink to one cell, so that numbers
    stay small at any distance.
    """
    cells = np.empty(points.shape, dtype=np.int64)
    for axis in range(3):
        occupied, place = np.unique(np.floor(points[:, axis] / rcut), return_inverse=True)
        gaps = np.minimum(np.diff(occupied, prepend=occupied[:1] - 1), 2)
        cells[:, axis] = np.cumsum(gaps)[place]
    _, width_y, width_z = (cells.max(axis=0) + 2).tolist()
    strides = (width_y * width_z, width_z, 1)
    return cells @ np.array(strides), strides
