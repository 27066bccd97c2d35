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
# Added to the mean number of distances in a bin: a distance that no frame has counts twice as much as one that every
# frame has once.
_RARE = 0.25


class Fingerprints:
    """Numbers of distances of each pair of types, in units of their spread over the training data.

    Element b of a vector is n_b/√(m_b + 1/4): n_b distances of a frame lie in bin b, m_b in a mean frame of the data.
    √m_b is the spread of a number that follows a Poisson distribution. Distances that the data do not have weigh most.
    """

    def __init__(self, coverage: Coverage, systems: Sequence[System]) -> None:
        self.rcut = coverage.rcut
        self.ntypes = len(coverage.type_map)
        self.scale = np.ones(0)
        atoms = sum(system.nframes * system.natoms for system in systems) / sum(
            system.nframes for system in systems
        )
        some = sampled_pairs(systems, self.rcut, int(_FRAMES * atoms))
        counts = np.stack([self._counts(pairs) for _, pairs in some])
        self.scale = 1.0 / np.sqrt(counts.mean(0) + _RARE)
        #: Of frames of the training data `(nframes, nbins)`.
        self.known = counts * self.scale

    def of(self, pairs: Pairs) -> np.ndarray:
        """Return the vector `(nbins,)` of a frame, by its pairs."""
        vector: np.ndarray = self._counts(pairs) * self.scale
        return vector

    def _counts(self, pairs: Pairs) -> np.ndarray:
        types = np.sort(np.stack([pairs.types[pairs.i], pairs.types[pairs.j]]), axis=0)
        nbins = int(self.rcut / _WIDTH) + 2
        # Each distance gives to the two bins whose centres are nearest, so that small changes change little.
        place = pairs.distance / _WIDTH - 0.5
        lower = np.floor(place).astype(np.int64)
        upper_share = place - lower
        row = (types[0] * self.ntypes + types[1]) * nbins
        counts = np.zeros(self.ntypes**2 * nbins)
        # A pair of equal types stands twice in the list.
        np.add.at(counts, row + np.clip(lower, 0, nbins - 1), 0.5 * (1.0 - upper_share))
        np.add.at(counts, row + np.clip(lower + 1, 0, nbins - 1), 0.5 * upper_share)
        return counts
