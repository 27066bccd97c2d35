"""All pairs of the atoms of a small cell and their images, compared at once by products of matrices.

Where the cut-off exceeds half the height of a cell, vesin compares them, too, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from deepmd_muon.data.neighbors.far_atoms import heights

# With fewer atoms, numpy's calls take longer than the search; the distances of more do not stay in a processor's cache.
_FEWEST, _MOST = 40, 180
# Nanoseconds for a pair and for each of its images here, and for an image that vesin compares (a Xeon, numpy 2.4).
_PAIR, _IMAGE, _BY_VESIN = 30.0, 4.0, 10.0
# Multiplications up to which OpenBLAS takes one thread. Threads that search beside each other would wait for more.
_PRODUCT = 1 << 18
#: Squared distances that differ by less [Å²] may be sorted either way where keys hold more than the distance.
TIE = 1e-8
# Bound on the error of a squared distance over the square of the largest length: a few thousand roundings.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Images:
    """Squared distances of all pairs of atoms of a frame over all cells that may bring them near.

    Attributes
    ----------
    first, second
        Atoms of each pair `(npairs,)`, first ≤ second.
    moved
        Translation of the second atom that brings it nearest along each cell vector `(3, npairs)`.
    cells
        Further translations `(ncells, 3)`, each with its opposite; zero is in the middle.
    square
        Squared distances `(ncells, npairs)` [Å²]; infinite from an atom to itself.
    error
        Bound on the difference between a squared distance and that of vesin, which adds in another order [Å²].
    """

    first: np.ndarray
    second: np.ndarray
    moved: np.ndarray
    cells: np.ndarray
    square: np.ndarray
    error: float

    def within(self, rcut: float) -> np.ndarray | None:
        """Return which are nearer than `rcut` [Å], bool `(ncells, npairs)`; None where rounding decides about one."""
        near: np.ndarray = self.square < rcut**2 - self.error
        doubtful = np.count_nonzero(self.square < rcut**2 + self.error) > np.count_nonzero(near)
        return None if doubtful else near

    def nearest(self) -> tuple[float, np.ndarray]:
        """Return the least squared distance [Å²], and the atoms of the pairs that may have it."""
        least = float(self.square.min())
        _, pair = places_of(self.square <= least + self.error)
        return least, np.unique([self.first[pair], self.second[pair]])


def compare_images(
    points: np.ndarray, box: np.ndarray | None, inverse: np.ndarray | None, rcut: float
) -> Images | None:
    """Compare all pairs of atoms `(natoms, 3)` within `rcut` [Å]; `inverse` is that of the cell.

    None where a search by cells is faster: for few or many atoms, in large cells, and without a cell. And in perfect
    crystals: rounding decides about the order of their neighbours and about shells at the cut-off.
    """
    natoms = len(points)
    if box is None or inverse is None or not _FEWEST <= natoms <= _MOST:
        return None
    reach = reach_of(inverse, rcut)
    if not _pays(reach, heights(inverse) / rcut) or _has_shells(points, box, inverse):
        return None
    cells = cells_within(*reach.tolist())
    square, moved, error = squares_over_cells(points, box, inverse, cells, rcut)
    return Images(*pairs_of(natoms), moved, cells, square, float(error))


def squares_over_cells(
    points: np.ndarray,
    box: np.ndarray | None,
    inverse: np.ndarray | None,
    cells: np.ndarray,
    rcut: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the squared distances of all pairs of atoms over all cells, the translations, and a bound on the errors.

    `(…, ncells, npairs)` [Å²], `(…, 3, npairs)` and `(…,)` [Å²] for positions `(…, natoms, 3)` and cells `(…, 3, 3)`
    [Å]; see `Images`.
    """
    first, second = pairs_of(points.shape[-2])
    apart, moved = nearest_images(points, box, inverse)
    shifts = np.zeros((*points.shape[:-2], 1, 3)) if box is None else cells @ box
    square = squares(with_squares(apart), shifts)
    square[..., shifts.shape[-2] // 2, first == second] = np.inf
    axes = (-2, -1)
    longest = np.abs(points).max(axis=axes) + np.abs(shifts).max(axis=axes) + rcut
    skewed = (
        1.0
        if box is None or inverse is None
        else np.abs(box).max(axis=axes) * np.abs(inverse).max(axis=axes)
    )
    return square, moved, _ROUNDING * longest**2 * np.maximum(1.0, skewed)


def _pays(reach: np.ndarray, height: np.ndarray) -> bool:
    """Return whether a pair takes less time than with vesin; `height` counts cut-offs."""
    return bool(_PAIR + _IMAGE * (2.0 * reach + 1.0).prod() < _BY_VESIN * compared_by_vesin(height))


def compared_by_vesin(height: np.ndarray) -> float:
    """Return how many images of a pair vesin compares; `height` counts cut-offs `(3,)`.

    vesin divides the cell into as many as fit, at least as high as the cut-off, and looks at those within it.
    """
    divided = np.maximum(np.floor(height), 1.0)
    return float(((2.0 * np.ceil(divided / height) + 1.0) / divided).prod())


def _has_shells(points: np.ndarray, box: np.ndarray, inverse: np.ndarray) -> bool:
    """Return whether two atoms are as far from the last one, as in a perfect crystal."""
    apart = (points - points[-1]) @ inverse
    apart -= np.round(apart)
    apart = apart @ box
    return bool(np.diff(np.sort(np.einsum("pc,pc->p", apart, apart))).min() < TIE)


def reach_of(inverse: np.ndarray, rcut: float) -> np.ndarray:
    """Return the cells beyond the nearest image that may bring an atom within `rcut` [Å], along each axis `(…, 3)`.

    Columns of `inverse` are 1 / height of the cell.
    """
    reach: np.ndarray = np.floor(rcut * np.linalg.norm(inverse, axis=-2) + (0.5 + 1e-9))
    return reach


@lru_cache(maxsize=64)
def cells_within(*reach: float) -> np.ndarray:
    """Return the numbers of all cells at most so far along each axis, (ncells, 3)."""
    return np.stack(
        np.meshgrid(*(np.arange(-n, n + 1) for n in reach), indexing="ij"), axis=-1
    ).reshape(-1, 3)


def pairs_of(natoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Return i ≤ j of all pairs of so many atoms, an atom with itself included."""
    number = natoms * (natoms + 1) // 2
    few = natoms <= _FEW
    first, second = (
        _pairs_up_to_few(1 << max(0, natoms - 1).bit_length()) if few else _pairs_up_to_many(natoms)
    )
    return first[:number], second[:number]


def _pairs_up_to(natoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs, sorted by the second atom: those of fewer atoms come first."""
    counts = np.arange(1, natoms + 1)
    second = np.repeat(counts - 1, counts)
    return np.arange(len(second)) - np.repeat(np.cumsum(counts) - counts, counts), second


# Those of small frames take 11 MB together.
_FEW = 1024
_pairs_up_to_few = lru_cache(maxsize=11)(_pairs_up_to)
_pairs_up_to_many = lru_cache(maxsize=4)(
    _pairs_up_to
)  # the frames of a system have the same number of atoms


def nearest_images(
    points: np.ndarray, box: np.ndarray | None, inverse: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of the pairs of `pairs_of`, nearest along each cell vector [Å], and the translations.

    Both are `(…, 3, npairs)` for positions `(…, natoms, 3)`: numpy gathers and rounds columns four times faster than
    short rows.
    """
    first, second = pairs_of(points.shape[-2])
    apart = np.empty((*points.shape[:-2], 3, len(first)))
    fractions = points if inverse is None else points @ inverse
    for axis in range(3):
        column = fractions[..., axis]
        np.subtract(
            column.take(second, axis=-1), column.take(first, axis=-1), out=apart[..., axis, :]
        )
    if box is None or inverse is None:
        return apart, np.zeros_like(apart)
    moved = -np.round(apart)
    apart += moved
    return box.swapaxes(-1, -2) @ apart, moved


def with_squares(apart: np.ndarray) -> np.ndarray:
    """Return vectors a `(…, 3, npairs)` [Å] as columns (a, 1, |a|²) for `squares`, (…, 5, npairs)."""
    columns = np.ones((*apart.shape[:-2], 5, apart.shape[-1]))
    columns[..., :3, :], columns[..., 4, :] = apart, np.einsum("...cp,...cp->...p", apart, apart)
    return columns


def squares(right: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return |a + s|² of the vectors of `with_squares` and translations s `(…, ncells, 3)`, (…, ncells, npairs) [Å²].

    The rows (2 s, |s|², 1) times the columns.
    """
    left = np.ones((*shifts.shape[:-1], 5))
    left[..., :3], left[..., 3] = 2.0 * shifts, (shifts * shifts).sum(axis=-1)
    square = np.empty((*left.shape[:-1], right.shape[-1]))
    columns = max(1, _PRODUCT // (5 * left.shape[-2]))
    for begin in range(0, right.shape[-1], columns):
        some = slice(begin, begin + columns)
        np.matmul(left, right[..., some], out=square[..., some])
    return square


def places_of(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the places that are true; `np.nonzero` takes ten times as long for two axes."""
    place = np.flatnonzero(wanted)
    row = place // wanted.shape[1]  # `np.divmod` takes longer than this and the next line
    return row, place - row * wanted.shape[1]
