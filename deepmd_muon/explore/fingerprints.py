"""Structures as vectors of distances, so that a selection can tell which are alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepmd_muon.data import System
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.stability.coverage import Coverage, sampled_pairs

# Width of a bin [Å].
_WIDTH = 0.1
# Frames of the training data that are compared with.
_FRAMES = 200
# Added to the mean number of distances in a bin. A distance that no frame has counts twice as much
# as one that every frame has once.
_RARE = 0.25


class Fingerprints:
    """Numbers of distances of each pair of types, in units of their spread over the training data.

    Element b of a vector is n_b/√(m_b + 1/4). A frame has n_b distances in bin b, and a mean frame
    of the data has m_b. √m_b is the spread of a number that follows a Poisson distribution.
    Distances that the data do not have weigh most.

    Attributes
    ----------
    known
        Vectors of frames of the training data `(nframes, nbins)`.
    """

    def __init__(self, coverage: Coverage, systems: Sequence[System]) -> None:
        self._rcut = coverage.rcut
        self._ntypes = len(coverage.type_map)
        n_atoms = sum(system.nframes * system.natoms for system in systems)
        mean_atoms = n_atoms / sum(system.nframes for system in systems)
        sample = sampled_pairs(systems, self._rcut, int(_FRAMES * mean_atoms))
        counts = np.stack([self._counts(pairs) for _, pairs in sample])
        self._scale = 1.0 / np.sqrt(counts.mean(0) + _RARE)
        self.known = counts * self._scale

    def of(self, pairs: Pairs) -> np.ndarray:
        """Return the vector `(nbins,)` of a frame, by its pairs."""
        vector: np.ndarray = self._counts(pairs) * self._scale
        return vector

    def _counts(self, pairs: Pairs) -> np.ndarray:
        types = np.sort(np.stack([pairs.types[pairs.i], pairs.types[pairs.j]]), axis=0)
        n_bins = int(self._rcut / _WIDTH) + 2
        # Each distance is shared between the two bins with the nearest centres, so that small
        # changes change little.
        position = pairs.distance / _WIDTH - 0.5
        lower = np.floor(position).astype(np.int64)
        upper_share = position - lower
        start = (types[0] * self._ntypes + types[1]) * n_bins
        counts = np.zeros(self._ntypes**2 * n_bins)
        # Every pair is in the list both ways, so each counts half.
        np.add.at(counts, start + np.clip(lower, 0, n_bins - 1), 0.5 * (1.0 - upper_share))
        np.add.at(counts, start + np.clip(lower + 1, 0, n_bins - 1), 0.5 * upper_share)
        return counts
