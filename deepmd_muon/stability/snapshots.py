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

# Atoms whose pairs the device holds at once: 2 GB with a few hundred neighbours each. It searches no larger structure.
_MOST_ATOMS = 16384


@dataclass(frozen=True)
class Compared:
    """What the structures of a snapshot show.

    Attributes
    ----------
    closest
        Smallest ratio of a distance to the shortest of its pair of types in the data `(nsystems,)`, as by
        `Coverage.compare`; NaN where atoms lie at the same place, and where it was not asked for. Positions must be
        finite, as those of snapshots are.
    departs
        Whether some distance lies outside the data, bool `(nsystems,)`.
    bends
        How far an angle between near neighbours lies beyond the data's `(nsystems,)` [degrees].
    """

    closest: np.ndarray
    departs: np.ndarray
    bends: np.ndarray


class Snapshots:
    """Compares the snapshots of a run with data, on the device of the run, and keeps the extremes."""

    def __init__(self, coverage: Coverage, angles: Angles, device: torch.device) -> None:
        self._coverage, self._angles, self._device = coverage, angles, device

        def placed(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        self._expected, self._known, self._reach = map(
            placed, (coverage.expected, coverage.known, angles.reach)
        )
        self._smallest, self._largest = placed(angles.smallest), placed(angles.largest)
        self._reached = torch.full_like(self._expected, torch.inf).flatten()
        self._low = torch.full_like(self._smallest, torch.inf).flatten()
        self._high = -self._low
        self._on_device = may_search(device)
        self._distances: list[Distances] = []  # of each group of structures

    @property
    def reached(self) -> np.ndarray:
        """Shortest distance so far of each pair of types `(ntypes, ntypes)` [Å]; infinite for one that never met."""
        return self._reached.view_as(self._expected).cpu().numpy()

    @property
    def angles(self) -> Angles:
        """Extremes of the angles so far."""
        low, high = (x.view_as(self._smallest).cpu().numpy() for x in (self._low, self._high))
        return Angles(self._angles.type_map, self._angles.reach, low, high)

    def compare(self, systems: Systems, chosen: np.ndarray) -> Compared:
        """Compare the structures that a mask `(nsystems,)` chooses, and take them into the extremes."""
        natoms = systems.atype.shape[1]
        count = max(1, _MOST_ATOMS // natoms)
        groups = [slice(first, first + count) for first in range(0, max(1, len(systems)), count)]
        on_device = self._on_device and natoms <= _MOST_ATOMS
        del self._distances[len(groups) :]
        while len(self._distances) < len(groups):
            rcut, ntypes = self._coverage.rcut, len(self._coverage.type_map)
            self._distances.append(Distances(rcut, ntypes, on_device=on_device))
        parts = [
            self._compared(distances, systems.rows(group), chosen[group])
            for distances, group in zip(self._distances, groups, strict=True)
        ]
        columns = zip(*((part.closest, part.departs, part.bends) for part in parts), strict=True)
        return Compared(*map(np.concatenate, columns))

    def _compared(self, distances: Distances, systems: Systems, chosen: np.ndarray) -> Compared:
        count, natoms = systems.atype.shape
        i, j, vector = distances.of(systems, chosen)
        square = vector.square().sum(1)
        whole = torch.from_numpy(chosen).to(self._device)
        whole = whole & (self._least(count, i // natoms, square, torch.inf) >= SAME_PLACE**2)
        near = torch.nonzero((square < self._coverage.rcut**2) & whole[i // natoms]).flatten()
        i, j, vector, distance = i[near], j[near], vector[near], square[near].sqrt()
        frame, types = i // natoms, systems.atype.reshape(-1)
        first, second = types[i], types[j]
        closest = self._least(count, frame, distance / self._expected[first, second], torch.inf)
        self._reached.scatter_reduce_(0, first * len(self._expected) + second, distance, "amin")
        bins = (distance / WIDTH).long().clamp(max=self._known.shape[-1] - 1)
        departs = torch.zeros(count, dtype=torch.bool, device=self._device)
        departs[frame[~self._known[first, second, bins]]] = True
        bonded = torch.nonzero(distance < self._reach[first, second]).flatten()
        centre, triple, degrees = angles_between(i[bonded], j[bonded], vector[bonded], types)
        place = (triple[0] * len(self._expected) + triple[1]) * len(self._expected) + triple[2]
        self._low.scatter_reduce_(0, place, degrees, "amin")
        self._high.scatter_reduce_(0, place, degrees, "amax")
        beyond = torch.maximum(self._smallest[triple] - degrees, degrees - self._largest[triple])
        beyond = torch.where(beyond.isfinite(), beyond, 0.0)  # the data hold no such angle
        bends = self._least(count, centre // natoms, -beyond, 0.0).abs()
        closest = torch.where(whole, closest, torch.nan)
        return Compared(*(x.cpu().numpy() for x in (closest, departs, bends)))

    def _least(self, count: int, frame: Tensor, values: Tensor, start: float) -> Tensor:
        """Return the least value of each structure, at most `start`."""
        least = torch.full((count,), start, dtype=torch.float64, device=self._device)
        return least.scatter_reduce_(0, frame, values, "amin")
