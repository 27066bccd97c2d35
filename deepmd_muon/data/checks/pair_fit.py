"""A pair potential fitted to the forces of some frames: what energies and virials the forces imply.

Forces, energies and virials of E = ½ Σ φ_ab(r_ij) are linear in the coefficients of φ, so that one small system of
equations gives φ, whatever potential made the labels. Its energies and virials show factors and signs, not values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.images import (
    cells_within,
    nearest_images,
    pairs_of,
    places_of,
    reach_of,
    squares,
    with_squares,
)

#: Cut-off of the potential [Å]. Cells of liquids have more than twice this, which spares their images.
RCUT = 4.5
#: Cubic B-splines for every pair of types, evenly spaced in ln r from `_FIRST` [Å] to the cut-off.
FUNCTIONS = 12
_FIRST = 0.4
_SPACING = np.log(RCUT / _FIRST) / (FUNCTIONS - 3)
_RIDGE = 1e-6
# Distances below this act as if they were it [Å]: functions of ln r have no value at zero.
_SMALLEST = 1e-3
#: Pairs that one system may cost: those of atoms times images times frames.
MOST_PAIRS = 3_000_000
# Part of the weight of a function in one system that another must have to know the potential there.
_THERE = 0.3
# Pairs that are compared at once: few enough for the caches, enough to make Python's share small.
_AT_ONCE = 30_000


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
        """Find the pairs of frames, whose cells have a volume; the caller has checked `pairs_to_try`."""
        inverse = None if frames.box is None else np.linalg.inv(frames.box)
        found = [
            _pairs_of(frames, k, None if inverse is None else inverse[k])
            for k in range(frames.nframes)
        ]
        i, j, vector = (np.concatenate(part) for part in zip(*found, strict=True))
        frame = np.repeat(np.arange(len(found)), [len(part[0]) for part in found])
        return cls(frame, i, j, vector, np.sqrt((vector**2).sum(axis=1)))


def pairs_to_try(natoms: int, box: np.ndarray | None) -> float:
    """Count the pairs of atoms and images that `NearPairs` compares in the frame that has most of them."""
    images = (
        1.0 if box is None else (2.0 * reach_of(np.linalg.inv(box), RCUT) + 1.0).prod(axis=-1).max()
    )
    return float(natoms**2 * images)


def _pairs_of(
    frames: Frames, k: int, inverse: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return i, j and vectors [Å] of one frame; `inverse` is that of its cell."""
    real = np.flatnonzero(frames.atype[k] >= 0)
    first, second = pairs_of(len(real))
    box = None if frames.box is None else frames.box[k]
    apart, _ = nearest_images(frames.coord[k][real], box, inverse)
    shifts = np.zeros((1, 3))
    if box is not None and inverse is not None:
        shifts = cells_within(*reach_of(inverse, RCUT).tolist()) @ box
    columns = with_squares(apart)
    own = np.flatnonzero(first == second)
    parts = []
    many = max(1, _AT_ONCE // max(1, len(first)))
    for begin in range(0, len(shifts), many):
        some = shifts[begin : begin + many]
        squared = squares(columns, some)
        # An atom meets its images in pairs of opposite shifts; the shift in the middle leads to itself.
        squared[: max(0, len(shifts) // 2 + 1 - begin), own] = np.inf
        s, p = places_of(squared < RCUT**2)
        i, j = real.take(first.take(p)), real.take(second.take(p))
        parts.append((i, j, apart.take(p, axis=1).T + some.take(s, axis=0)))
    i, j, vector = (np.concatenate(part) for part in zip(*parts, strict=True))
    return i, j, vector


class PairFit:
    """A pair potential of some frames with forces, from their pairs.

    Attributes
    ----------
    kinds : tuple of (int, int)
        Pairs of types that occur, lower type first.
    """

    def __init__(self, frames: Frames, pairs: NearPairs) -> None:
        assert frames.force is not None
        first, second = (frames.atype[pairs.frame, atom].astype(int) for atom in (pairs.i, pairs.j))
        ntypes = int(frames.atype.max(initial=0)) + 1
        codes, kind = np.unique(
            np.minimum(first, second) * ntypes + np.maximum(first, second), return_inverse=True
        )
        self.kinds = tuple((int(code) // ntypes, int(code) % ntypes) for code in codes)
        self.labels = frames.force.reshape(-1)
        self._pairs, self._nframes = pairs, frames.nframes
        r = np.maximum(pairs.distance, _SMALLEST)
        self._value, slope, start = _splines(r)
        self._slope = slope / r[:, None]
        self._column = (kind * FUNCTIONS + start)[:, None] + np.arange(4)
        self._force = self._force_design(frames)

    def _force_design(self, frames: Frames) -> np.ndarray:
        """Return the derivatives of the forces by the coefficients, (rows, p)."""
        pairs, size = self._pairs, len(self.kinds) * FUNCTIONS
        rows = frames.nframes * frames.natoms
        atoms = pairs.frame * frames.natoms + np.stack([pairs.i, pairs.j])
        place = (atoms[..., None] * size + self._column).ravel()  # (2 · npairs · 4,)

        def gather(x: int) -> np.ndarray:
            pull = self._slope * pairs.vector[:, x, None]
            return np.bincount(place, np.stack([pull, -pull]).ravel(), rows * size).reshape(
                rows, size
            )

        return np.stack([gather(x) for x in range(3)], axis=1).reshape(-1, size)

    def _of_pairs(self, functions: np.ndarray) -> np.ndarray:
        """Add up the functions of each pair times their coefficients, (npairs,)."""
        found: np.ndarray = np.einsum("pk,pk->p", functions, self.coefficients[self._column])
        return found

    def _of_frames(self, values: np.ndarray) -> np.ndarray:
        """Add up values of pairs in each frame, (nframes,)."""
        return np.bincount(self._pairs.frame, values, self._nframes)

    @cached_property
    def _normal(self) -> tuple[np.ndarray, np.ndarray]:
        return self._force.T @ self._force, self._force.T @ self.labels

    @property
    def enough(self) -> bool:
        """Whether there are enough forces to tell chance from physics."""
        return (
            bool(self.kinds)
            and len(self.labels) >= 4 * self._force.shape[1]
            and bool(self.labels.any())
        )

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Coefficients of φ [eV], (nkinds · FUNCTIONS,)."""
        matrix, vector = self._normal
        ridge = _RIDGE * np.trace(matrix) / len(matrix) + 1e-300
        found: np.ndarray = np.linalg.solve(matrix + ridge * np.eye(len(matrix)), vector)
        return found

    @cached_property
    def explained(self) -> float:
        """Share of the squares of the forces that φ explains, less what so many coefficients explain by chance."""
        rest = float(
            ((self.labels - self._force @ self.coefficients) ** 2).sum() / (self.labels**2).sum()
        )
        return 1 - rest * len(self.labels) / (len(self.labels) - self.coefficients.size)

    @cached_property
    def least_explained(self) -> float:
        """Share of the squares of the forces that φ explains in the frame where this is least."""
        rest = (self.labels - self._force @ self.coefficients).reshape(self._nframes, -1)
        labels = self.labels.reshape(self._nframes, -1)
        shares = 1.0 - (rest**2).sum(axis=1) / (labels**2).sum(axis=1).clip(1e-300)
        return float(shares.min())

    @property
    def energies(self) -> np.ndarray:
        """Energies that the forces imply [eV], but for a constant, (nframes,)."""
        return self._of_frames(self._of_pairs(self._value))

    @property
    def virials(self) -> np.ndarray:
        """Virials that the forces imply [eV], but for a constant, (nframes, 9)."""
        vector, slope = self._pairs.vector, self._of_pairs(self._slope)
        return np.stack(
            [self._of_frames(-slope * vector[:, k // 3] * vector[:, k % 3]) for k in range(9)],
            axis=1,
        )

    def slope_and_stiffness(self, kind: tuple[int, int], distance: float) -> tuple[float, float]:
        """Return dφ/dr [eV/Å] and d²φ/dr² [eV/Å²] of a pair of types around a distance [Å]."""
        r = distance * np.linspace(0.93, 1.07, 9)
        _, slope, start = _splines(r)
        blocks = self.coefficients.reshape(-1, FUNCTIONS)[self.kinds.index(kind)]
        first = (slope * blocks[start[:, None] + np.arange(4)]).sum(axis=1)
        stiffness, middle = np.polyfit(r - distance, first, 1).tolist()
        return middle, stiffness

    def agreement(self, other: PairFit, swap: Sequence[int] | None = None) -> tuple[float, float]:
        """Compare these forces with those that the potential of another system predicts.

        Return the factor of these forces over the prediction, and their correlation; zeros where `other` lacks a pair
        of types. `swap` gives the type that takes the place of each type of these frames.
        """
        kinds = [tuple(sorted((swap[a], swap[b]))) if swap else (a, b) for a, b in self.kinds]
        if not set(kinds) <= set(other.kinds):
            return 0.0, 0.0
        blocks = other.coefficients.reshape(-1, FUNCTIONS)
        taken = np.concatenate([blocks[other.kinds.index(kind)] for kind in kinds])
        matrix, vector = self._normal
        own, product = float(taken @ matrix @ taken), float(taken @ vector)
        size = np.sqrt(own * float((self.labels**2).sum()))
        return (product / own, product / size) if size > 0 else (0.0, 0.0)

    def covered(self, other: PairFit, swap: Sequence[int]) -> float:
        """Share of these forces that comes from distances at which another system has pairs of the same types.

        At other distances its potential is a guess. `swap` is that of `agreement`.
        """
        wanted, known = self._weights, other._weights
        there = sum(
            float(
                row[
                    known.get(tuple(sorted((swap[a], swap[b]))), np.zeros(FUNCTIONS)) > _THERE * row
                ].sum()
            )
            for (a, b), row in wanted.items()
        )
        return there / sum(float(row.sum()) for row in wanted.values())

    @property
    def _weights(self) -> dict[tuple[int, ...], np.ndarray]:
        """Mean squares of the forces of each function, by pairs of types."""
        blocks = np.diag(self._normal[0]).reshape(-1, FUNCTIONS) / len(self.labels)
        return dict(zip(self.kinds, blocks, strict=True))


def _splines(r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and slopes [1/Å] of the four B-splines that are not zero at each distance, and the first one's number."""
    place = np.clip((np.log(r) - np.log(_FIRST)) / _SPACING, 0, FUNCTIONS - 3 - 1e-9)
    start = place.astype(int)
    t = (place - start)[:, None]
    left, square = 1 - t, t * t  # products: powers of arrays are slow
    cube = square * t
    value = (
        np.concatenate(
            [left * left * left, 3 * cube - 6 * square + 4, 3 * (square - cube + t) + 1, cube],
            axis=1,
        )
        / 6
    )
    slope = (
        np.concatenate([-left * left, 3 * square - 4 * t, -3 * square + 2 * t + 1, square], axis=1)
        / 2
    )
    cut = (1 - (r / RCUT) ** 2)[:, None]
    radius = r[:, None]
    return (
        value * cut**2,
        slope / (_SPACING * radius) * cut**2 - 4 * value * cut * radius / RCUT**2,
        start,
    )
