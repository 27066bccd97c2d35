"""Distances and angles of all structures of a run at once, compared with those of the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.dynamics.distances import Distances, may_search
from deepmd_muon.dynamics.systems import Systems
from deepmd_muon.stability.angles import Angles, angles_between
from deepmd_muon.stability.coverage import WIDTH, Coverage

# Atoms whose pairs the device holds at once: 2 GB with a few hundred neighbours each. It searches
# no larger structure.
_MAX_ATOMS = 16384


@dataclass(frozen=True)
class Compared:
    """What the structures of a snapshot show.

    Attributes
    ----------
    closest
        Smallest ratio of a distance to the shortest of its pair of types in the data `(nsystems,)`,
        as by `Coverage.compare`. NaN if atoms lie at the same place, or the structure was not asked
        for.
    departs
        Whether some distance lies outside the data, bool `(nsystems,)`.
    bends
        How far an angle between near neighbours lies beyond the data's `(nsystems,)` [degrees].
    """

    closest: np.ndarray
    departs: np.ndarray
    bends: np.ndarray


class Snapshots:
    """Compares the snapshots of a run with data, on the device of the run; stores the extremes.

    Positions must be finite, as those of snapshots are.
    """

    def __init__(self, coverage: Coverage, angles: Angles, device: torch.device) -> None:
        self._coverage = coverage
        self._angles = angles
        self._device = device
        # Of the data:
        self._expected = torch.from_numpy(coverage.expected).to(device)  # (ntypes, ntypes)
        self._known = torch.from_numpy(coverage.seen).to(device)  # (ntypes, ntypes, nbins)
        self._reach = torch.from_numpy(angles.reach).to(device)  # (ntypes, ntypes)
        self._smallest = torch.from_numpy(angles.smallest).to(device)  # (ntypes, ntypes, ntypes)
        self._largest = torch.from_numpy(angles.largest).to(device)
        # Of the snapshots, flat:
        self._reached = torch.full_like(self._expected, torch.inf).flatten()
        self._reached_smallest = torch.full_like(self._smallest, torch.inf).flatten()
        self._reached_largest = -self._reached_smallest
        self._on_device = may_search(device)
        self._distances: list[Distances] = []  # of each group of structures

    @property
    def reached(self) -> np.ndarray:
        """Shortest distance so far of each pair of types `(ntypes, ntypes)` [Å].

        Infinite for a pair that never met.
        """
        return self._reached.view_as(self._expected).cpu().numpy()

    @property
    def angles(self) -> Angles:
        """Extremes of the angles so far."""
        return Angles(
            type_map=self._angles.type_map,
            reach=self._angles.reach,
            smallest=self._reached_smallest.view_as(self._smallest).cpu().numpy(),
            largest=self._reached_largest.view_as(self._largest).cpu().numpy(),
        )

    def compare(self, systems: Systems, mask: np.ndarray) -> Compared:
        """Compare the structures of a mask `(nsystems,)`, and take them into the extremes."""
        natoms = systems.atype.shape[1]
        size = max(1, _MAX_ATOMS // natoms)
        groups = [slice(start, start + size) for start in range(0, max(1, len(systems)), size)]
        on_device = self._on_device and natoms <= _MAX_ATOMS
        # A run loses structures but never gains any, so there may be fewer groups than before.
        del self._distances[len(groups) :]
        while len(self._distances) < len(groups):
            self._distances.append(
                Distances(self._coverage.rcut, len(self._coverage.type_map), on_device=on_device)
            )
        results = [
            self._compare_group(distances, systems.rows(group), mask[group])
            for distances, group in zip(self._distances, groups, strict=True)
        ]
        return Compared(
            closest=np.concatenate([result.closest for result in results]),
            departs=np.concatenate([result.departs for result in results]),
            bends=np.concatenate([result.bends for result in results]),
        )

    def _compare_group(self, distances: Distances, systems: Systems, mask: np.ndarray) -> Compared:
        count, natoms = systems.atype.shape
        ntypes = len(self._expected)
        i, j, vector = distances.of(systems, mask)
        square = vector.square().sum(1)
        # Leave out structures with two atoms at the same place.
        compared = torch.from_numpy(mask).to(self._device)
        nearest = self._least(count, i // natoms, square, torch.inf)
        compared = compared & (nearest >= SAME_PLACE**2)
        near = (square < self._coverage.rcut**2) & compared[i // natoms]
        near = torch.nonzero(near).flatten()
        i = i[near]
        j = j[near]
        vector = vector[near]
        distance = square[near].sqrt()
        frame = i // natoms

        types = systems.atype.reshape(-1)
        type_i = types[i]
        type_j = types[j]
        closest = self._least(count, frame, distance / self._expected[type_i, type_j], torch.inf)
        self._reached.scatter_reduce_(0, type_i * ntypes + type_j, distance, "amin")
        bins = (distance / WIDTH).long().clamp(max=self._known.shape[-1] - 1)
        departs = torch.zeros(count, dtype=torch.bool, device=self._device)
        departs[frame[~self._known[type_i, type_j, bins]]] = True

        bonded = torch.nonzero(distance < self._reach[type_i, type_j]).flatten()
        angles = angles_between(i[bonded], j[bonded], vector[bonded], types)
        centre_type, low_type, high_type = angles.triple
        flat_triple = (centre_type * ntypes + low_type) * ntypes + high_type
        self._reached_smallest.scatter_reduce_(0, flat_triple, angles.degrees, "amin")
        self._reached_largest.scatter_reduce_(0, flat_triple, angles.degrees, "amax")
        below = self._smallest[angles.triple] - angles.degrees
        above = angles.degrees - self._largest[angles.triple]
        beyond = torch.maximum(below, above)
        # Infinite if the data hold no such angle: then there is nothing to compare with.
        beyond = torch.where(beyond.isfinite(), beyond, 0.0)
        bends = self._least(count, angles.centre // natoms, -beyond, 0.0).abs()
        return Compared(
            closest=torch.where(compared, closest, torch.nan).cpu().numpy(),
            departs=departs.cpu().numpy(),
            bends=bends.cpu().numpy(),
        )

    def _least(self, count: int, frame: Tensor, values: Tensor, start: float) -> Tensor:
        """Return the least value of each structure, at most `start`."""
        starts = torch.full((count,), start, dtype=torch.float64, device=self._device)
        return starts.scatter_reduce_(0, frame, values, "amin")
