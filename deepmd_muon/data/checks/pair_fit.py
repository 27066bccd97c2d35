"""A pair potential fitted to the forces of some frames: what energies and virials the forces imply.

Forces, energies and virials of E = ½ Σ φ_ab(r_ij) are linear in the coefficients of φ, so that one
small system of equations gives φ, whatever potential made the labels. Its energies and virials show
factors and signs, not values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.near_pairs import RCUT, NearPairs
from deepmd_muon.data.frames import Frames

#: Cubic B-splines for every pair of types, evenly spaced in ln r from `_FIRST` [Å] to the cut-off.
FUNCTIONS = 12
_FIRST = 0.4
_SPACING = np.log(RCUT / _FIRST) / (FUNCTIONS - 3)
# Of the normal equations, over the mean of their diagonal.
_RIDGE = 1e-6
# Distances below this act as if they were it [Å]: functions of ln r have no value at zero.
_SMALLEST = 1e-3
# Two systems know the potential at the same distances if the weight of a function in one is this
# share of that in the other.
_COVERED = 0.3


class Agreement(NamedTuple):
    """Forces of a system, compared with a prediction."""

    factor: float  # of the forces over the prediction; 0 if nothing could be compared
    correlation: float  # 0 if nothing could be compared


class Elasticity(NamedTuple):
    """Derivatives of φ at a distance."""

    slope: float  # dφ/dr [eV/Å]
    stiffness: float  # d²φ/dr² [eV/Å²]


class PairFit:
    """A pair potential of some frames with forces, from their pairs.

    Attributes
    ----------
    kinds : tuple of (int, int)
        Pairs of types that occur, lower type first.
    labels : ndarray, (nframes · natoms · 3,)
        The forces [eV/Å].
    """

    def __init__(self, frames: Frames, pairs: NearPairs) -> None:
        assert frames.force is not None
        i_type = frames.atype[pairs.frame, pairs.i].astype(int)
        j_type = frames.atype[pairs.frame, pairs.j].astype(int)
        ntypes = int(frames.atype.max(initial=0)) + 1
        code = np.minimum(i_type, j_type) * ntypes + np.maximum(i_type, j_type)
        codes, kind = np.unique(code, return_inverse=True)
        self.kinds = tuple(divmod(code, ntypes) for code in codes.tolist())
        self.labels = frames.force.reshape(-1)
        self._pairs = pairs
        self._nframes = frames.nframes
        r = np.maximum(pairs.distance, _SMALLEST)
        splines = _splines(r)
        # Four functions of each pair are not zero: their values, slopes over r, and coefficients;
        # (npairs, 4) each.
        self._value = splines.value
        self._slope = splines.slope / r[:, None]
        self._column = (kind * FUNCTIONS + splines.start)[:, None] + np.arange(4)
        self._force = self._force_design(frames)

    def _force_design(self, frames: Frames) -> np.ndarray:
        """Return ∂force/∂coefficient, (nframes · natoms · 3, nkinds · FUNCTIONS)."""
        pairs = self._pairs
        ncolumns = len(self.kinds) * FUNCTIONS
        nrows = frames.nframes * frames.natoms
        atoms = pairs.frame * frames.natoms + np.stack([pairs.i, pairs.j])
        place = (atoms[..., None] * ncolumns + self._column).ravel()  # (2 · npairs · 4,)
        components = []
        for x in range(3):
            pull = self._slope * pairs.vector[:, x, None]
            # A pair pulls its two atoms in opposite directions.
            weights = np.stack([pull, -pull]).ravel()
            design = np.bincount(place, weights, nrows * ncolumns)
            components.append(design.reshape(nrows, ncolumns))
        return np.stack(components, axis=1).reshape(-1, ncolumns)

    @cached_property
    def _normal(self) -> tuple[np.ndarray, np.ndarray]:
        """Matrix and right side of the normal equations."""
        return self._force.T @ self._force, self._force.T @ self.labels

    @property
    def enough(self) -> bool:
        """Whether there are enough forces to tell chance from physics."""
        has_rows = len(self.labels) >= 4 * self._force.shape[1]
        return bool(self.kinds) and has_rows and bool(self.labels.any())

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Coefficients of φ [eV], (nkinds · FUNCTIONS,)."""
        matrix, vector = self._normal
        ridge = _RIDGE * np.trace(matrix) / len(matrix) + 1e-300
        return np.asarray(np.linalg.solve(matrix + ridge * np.eye(len(matrix)), vector))

    @cached_property
    def explained(self) -> float:
        """Share of the squares of the forces that φ explains.

        What so many coefficients explain by chance is subtracted.
        """
        residual = self.labels - self._force @ self.coefficients
        share = float((residual**2).sum() / (self.labels**2).sum())
        return 1 - share * len(self.labels) / (len(self.labels) - self.coefficients.size)

    @cached_property
    def least_explained(self) -> float:
        """Share of the squares of the forces that φ explains in the frame where this is least."""
        residual = (self.labels - self._force @ self.coefficients).reshape(self._nframes, -1)
        labels = self.labels.reshape(self._nframes, -1)
        shares = 1.0 - (residual**2).sum(axis=1) / (labels**2).sum(axis=1).clip(1e-300)
        return float(shares.min())

    @property
    def energies(self) -> np.ndarray:
        """Energies that the forces imply [eV], but for a constant, (nframes,)."""
        return self._sum_over_pairs(self._times_coefficients(self._value))

    @property
    def virials(self) -> np.ndarray:
        """Virials that the forces imply [eV], but for a constant, (nframes, 9)."""
        vector = self._pairs.vector
        slope = self._times_coefficients(self._slope)  # dφ/dr / r
        components = []
        for k in range(9):
            a, b = divmod(k, 3)
            components.append(self._sum_over_pairs(-slope * vector[:, a] * vector[:, b]))
        return np.stack(components, axis=1)

    def _times_coefficients(self, functions: np.ndarray) -> np.ndarray:
        """Add up the four functions of each pair times their coefficients, (npairs,)."""
        return np.asarray(np.einsum("pk,pk->p", functions, self.coefficients[self._column]))

    def _sum_over_pairs(self, values: np.ndarray) -> np.ndarray:
        """Add up values of pairs in each frame, (nframes,)."""
        return np.bincount(self._pairs.frame, values, self._nframes)

    def elasticity(self, kind: tuple[int, int], distance: float) -> Elasticity:
        """Return the derivatives of φ of a pair of types around a distance [Å]."""
        r = distance * np.linspace(0.93, 1.07, 9)
        splines = _splines(r)
        coefficients = self.coefficients.reshape(-1, FUNCTIONS)[self.kinds.index(kind)]
        slopes = (splines.slope * coefficients[splines.start[:, None] + np.arange(4)]).sum(axis=1)
        stiffness, slope = np.polyfit(r - distance, slopes, 1).tolist()
        return Elasticity(slope, stiffness)

    def agreement(self, other: PairFit, swap: Sequence[int] | None = None) -> Agreement:
        """Compare these forces with those that the potential of another system predicts.

        `swap` gives the type that takes the place of each type of these frames. Nothing is compared
        if `other` lacks a pair of types.
        """
        kinds = list(self.kinds)
        if swap is not None:
            kinds = [_swapped(kind, swap) for kind in self.kinds]
        if not set(kinds) <= set(other.kinds):
            return Agreement(0.0, 0.0)
        blocks = other.coefficients.reshape(-1, FUNCTIONS)
        coefficients = np.concatenate([blocks[other.kinds.index(kind)] for kind in kinds])
        matrix, vector = self._normal
        predicted = float(coefficients @ matrix @ coefficients)  # |prediction|²
        product = float(coefficients @ vector)  # ⟨prediction, labels⟩
        size = np.sqrt(predicted * float((self.labels**2).sum()))
        if not size > 0:
            return Agreement(0.0, 0.0)
        return Agreement(product / predicted, product / size)

    def covered(self, other: PairFit, swap: Sequence[int]) -> float:
        """Return the share of these forces from distances that `other` has for the same types.

        At other distances its potential is a guess. `swap` is as in `agreement`.
        """
        weights_of_other = other._weights
        covered = 0.0
        total = 0.0
        for kind, weights in self._weights.items():
            other_weights = weights_of_other.get(_swapped(kind, swap), np.zeros(FUNCTIONS))
            covered += float(weights[other_weights > _COVERED * weights].sum())
            total += float(weights.sum())
        return covered / total

    @property
    def _weights(self) -> dict[tuple[int, int], np.ndarray]:
        """Mean squares of the forces of each function, (FUNCTIONS,) by pairs of types."""
        blocks = np.diag(self._normal[0]).reshape(-1, FUNCTIONS) / len(self.labels)
        return dict(zip(self.kinds, blocks, strict=True))


def _swapped(kind: tuple[int, int], swap: Sequence[int]) -> tuple[int, int]:
    """Return the pair of types that takes the place of a pair, lower type first."""
    a, b = (swap[number] for number in kind)
    return min(a, b), max(a, b)


class _Splines(NamedTuple):
    """The four B-splines that are not zero at each distance, cut off smoothly at `RCUT`."""

    value: np.ndarray  # (n, 4)
    slope: np.ndarray  # (n, 4) [1/Å]
    start: np.ndarray  # (n,): number of the first one


def _splines(r: np.ndarray) -> _Splines:
    """Evaluate B(ln r)·(1 − (r/RCUT)²)² and its derivative at distances `(n,)` [Å]."""
    position = np.clip((np.log(r) - np.log(_FIRST)) / _SPACING, 0, FUNCTIONS - 3 - 1e-9)
    start = position.astype(int)
    t = (position - start)[:, None]  # between two knots, 0 to 1
    # Products: numpy's powers of arrays are slow.
    s = 1 - t
    t2 = t * t
    t3 = t2 * t
    pieces = [s * s * s, 3 * t3 - 6 * t2 + 4, 3 * (t2 - t3 + t) + 1, t3]
    value = np.concatenate(pieces, axis=1) / 6
    derivatives = [-s * s, 3 * t2 - 4 * t, -3 * t2 + 2 * t + 1, t2]
    slope = np.concatenate(derivatives, axis=1) / 2  # by t
    cut = (1 - (r / RCUT) ** 2)[:, None]
    radius = r[:, None]
    return _Splines(
        value=value * cut**2,
        slope=slope / (_SPACING * radius) * cut**2 - 4 * value * cut * radius / RCUT**2,
        start=start,
    )
