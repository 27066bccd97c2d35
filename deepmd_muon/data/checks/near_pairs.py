"""All pairs of near atoms in some frames, found by comparing all atoms and their images.

The squared distances are one product of matrices, |a + s|² = (2s, |s|², 1) · (a, 1, |a|²): a is the
vector of a pair that is nearest along each cell vector, s a further translation by cell vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from deepmd_muon.data.frames import Frames

#: Cut-off [Å]. Cells of liquids have more than twice this, which spares their images.
RCUT = 4.5
#: Pairs of atoms times images times frames that one system may cost.
MOST_PAIRS = 3_000_000
# Pairs that are compared at once: few enough for the caches, enough to make Python's share small.
_AT_ONCE = 30_000
# Multiplications up to which OpenBLAS takes one thread. Threads that check systems side by side
# would wait for more.
_ONE_THREAD = 1 << 18


@dataclass(frozen=True)
class NearPairs:
    """Pairs of atoms of some frames within `RCUT`, each once, images included."""

    frame: np.ndarray  # (npairs,)
    i: np.ndarray  # (npairs,)
    j: np.ndarray  # (npairs,)
    vector: np.ndarray  # (npairs, 3) [Å], from i to j
    distance: np.ndarray  # (npairs,) [Å]

    @classmethod
    def of(cls, frames: Frames) -> NearPairs:
        """Find the pairs; cells have a volume, and the caller has checked `pairs_to_try`."""
        inverse = None if frames.box is None else np.linalg.inv(frames.box)
        pairs_of_frames = []
        for k in range(frames.nframes):
            real = np.flatnonzero(frames.atype[k] >= 0)
            i, j, vector = _pairs_of_frame(
                points=frames.coord[k][real],
                box=None if frames.box is None else frames.box[k],
                inverse=None if inverse is None else inverse[k],
            )
            pairs_of_frames.append((real.take(i), real.take(j), vector))
        i, j, vector = (np.concatenate(arrays) for arrays in zip(*pairs_of_frames, strict=True))
        npairs = [len(i_of_frame) for i_of_frame, _, _ in pairs_of_frames]
        frame = np.repeat(np.arange(frames.nframes), npairs)
        return cls(frame, i, j, vector, np.sqrt((vector**2).sum(axis=1)))


def pairs_to_try(natoms: int, box: np.ndarray | None) -> float:
    """Return how many pairs of atoms and images `NearPairs` compares in a frame, at most."""
    if box is None:
        return float(natoms**2)
    images = (2.0 * _reach(np.linalg.inv(box)) + 1.0).prod(axis=-1).max()
    return float(natoms**2 * images)


def _reach(inverse: np.ndarray) -> np.ndarray:
    """Return how many cells beyond the nearest image may bring an atom within `RCUT` `(…, 3)`.

    The columns of `inverse` have the length 1 / height of the cell.
    """
    return np.asarray(np.floor(RCUT * np.linalg.norm(inverse, axis=-2) + (0.5 + 1e-9)))


def _pairs_of_frame(
    points: np.ndarray, box: np.ndarray | None, inverse: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return i, j and vectors [Å] of the near pairs of atoms `(natoms, 3)`."""
    i, j = _atom_pairs(len(points))
    nearest = _nearest_vectors(points, box, inverse)
    translations = np.zeros((1, 3))
    if box is not None and inverse is not None:
        translations = _cells_within(*_reach(inverse).tolist()) @ box
    # The right factor of the product: columns (a, 1, |a|²).
    columns = np.ones((5, len(i)))
    columns[:3] = nearest
    columns[4] = np.einsum("cp,cp->p", nearest, nearest)

    with_itself = np.flatnonzero(i == j)
    middle = len(translations) // 2
    i_parts = []
    j_parts = []
    vector_parts = []
    step = max(1, _AT_ONCE // max(1, len(i)))
    for begin in range(0, len(translations), step):
        chunk = translations[begin : begin + step]
        squared = _squared_lengths(columns, chunk)
        # An atom meets its images at opposite translations s and −s: it takes one of each two. The
        # translation in the middle, 0, leads to itself.
        squared[: max(0, middle + 1 - begin), with_itself] = np.inf
        # `np.nonzero` takes ten times as long for two axes, and `np.divmod` longer than two
        # operations.
        place = np.flatnonzero(squared < RCUT**2)
        cell = place // len(i)
        pair = place - cell * len(i)
        i_parts.append(i.take(pair))
        j_parts.append(j.take(pair))
        vector_parts.append(nearest.take(pair, axis=1).T + chunk.take(cell, axis=0))
    return np.concatenate(i_parts), np.concatenate(j_parts), np.concatenate(vector_parts)


@lru_cache(maxsize=4)  # the frames of a system have the same number of atoms
def _atom_pairs(natoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Return i ≤ j of all pairs of so many atoms, an atom with itself included, sorted by j."""
    j, i = np.tril_indices(natoms)
    return i, j


@lru_cache(maxsize=64)
def _cells_within(*reach: float) -> np.ndarray:
    """Return all translations up to `reach` along each axis, (ncells, 3); zero is in the middle."""
    axes = (np.arange(-n, n + 1) for n in reach)
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


def _nearest_vectors(
    points: np.ndarray, box: np.ndarray | None, inverse: np.ndarray | None
) -> np.ndarray:
    """Return the vectors of the pairs of `_atom_pairs`, the nearest along each cell vector.

    The shape is (3, npairs) [Å]. Rows are components: numpy gathers and rounds long rows four times
    faster than short ones.
    """
    i, j = _atom_pairs(len(points))
    fractions = points if inverse is None else points @ inverse
    vectors = np.empty((3, len(i)))
    for axis in range(3):
        column = fractions[:, axis]
        np.subtract(column.take(j), column.take(i), out=vectors[axis])
    if box is None or inverse is None:
        return vectors
    vectors -= np.round(vectors)
    return np.asarray(box.T @ vectors)


def _squared_lengths(columns: np.ndarray, translations: np.ndarray) -> np.ndarray:
    """Return |a + s|² `(ncells, npairs)` [Å²] of columns (a, 1, |a|²) and translations s."""
    rows = np.ones((len(translations), 5))  # (2s, |s|², 1)
    rows[:, :3] = 2.0 * translations
    rows[:, 3] = (translations * translations).sum(axis=-1)
    npairs = columns.shape[1]
    squared = np.empty((len(translations), npairs))
    step = max(1, _ONE_THREAD // (5 * len(translations)))
    for begin in range(0, npairs, step):
        chunk = slice(begin, begin + step)
        np.matmul(rows, columns[:, chunk], out=squared[:, chunk])
    return squared
