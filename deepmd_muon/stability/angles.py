"""Which angles between near neighbours a data set holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, System
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.stability.coverage import Coverage, sampled_pairs

#: A neighbour is near within this many times the shortest distance of its pair in the data: bonds,
#: and first shells of dense crystals.
SHELL = 1.3
# Atoms looked at: angles need fewer frames than distances.
_MAX_ATOMS = 50_000


@dataclass(frozen=True)
class Angles:
    """Extremes of the angles between near neighbours.

    A triple of types is the centre, the smaller neighbour type, and the larger.
    """

    type_map: tuple[str, ...]  # names of the types
    # (ntypes, ntypes): distance up to which a neighbour is near [Å]; 0 without data.
    reach: np.ndarray
    # (ntypes, ntypes, ntypes): extremes of each triple [degrees]; inf and −inf without data.
    smallest: np.ndarray
    largest: np.ndarray

    @property
    def triples(self) -> list[tuple[int, int, int]]:
        """Triples of the angles that the data hold."""
        rows = np.argwhere(np.isfinite(self.smallest)).tolist()
        return [(centre, low, high) for centre, low, high in rows]

    def name(self, triple: tuple[int, int, int]) -> str:
        """Return a triple in words with the centre in the middle, e.g. H-O-H."""
        centre, low, high = triple
        return "-".join(self.type_map[k] for k in (low, centre, high))

    def range(self, triple: tuple[int, int, int]) -> str:
        """Return the extremes of a triple in words [degrees]."""
        return f"{self.smallest[triple]:.0f} to {self.largest[triple]:.0f}"

    def empty(self) -> Angles:
        """Return the same without any angle."""
        infinite = np.full_like(self.smallest, np.inf)
        return Angles(self.type_map, self.reach, smallest=infinite, largest=-infinite)

    def add(self, frames: Frames, k: int, pairs: Pairs) -> None:
        """Take the angles of a frame into the extremes."""
        near = np.flatnonzero(
            pairs.distance < self.reach[pairs.types[pairs.i], pairs.types[pairs.j]]
        )
        i = pairs.i[near]
        j = pairs.j[near]
        coord = frames.coord[k][pairs.real]
        vector = coord[j] - coord[i]
        cell = frames.cell(k)
        if cell is not None:
            vector = vector + pairs.shift[near] @ cell
        angles = angles_between(
            torch.from_numpy(i),
            torch.from_numpy(j),
            torch.from_numpy(vector),
            torch.from_numpy(pairs.types),
        )
        triple = tuple(types.numpy() for types in angles.triple)
        np.minimum.at(self.smallest, triple, angles.degrees.numpy())
        np.maximum.at(self.largest, triple, angles.degrees.numpy())

    def excess(self, reached: Angles) -> tuple[float, tuple[int, int, int]] | None:
        """Return how far other extremes lie beyond these [degrees], and for which triple.

        None if no triple is in both.
        """
        beyond = []
        for triple in self.triples:
            if np.isfinite(reached.smallest[triple]):
                below = self.smallest[triple] - reached.smallest[triple]
                above = reached.largest[triple] - self.largest[triple]
                beyond.append((max(below, above, 0.0), triple))
        return max(beyond, default=None)


class AnglesBetween(NamedTuple):
    """Angles of a structure, in one row."""

    centre: Tensor  # (nangles,): atoms
    triple: tuple[Tensor, Tensor, Tensor]  # (nangles,) each: types, as in `Angles`
    degrees: Tensor  # (nangles,)


def angles_between(i: Tensor, j: Tensor, vector: Tensor, types: Tensor) -> AnglesBetween:
    """Return all angles between neighbours of the same atom.

    Parameters
    ----------
    i, j
        Atoms of each pair `(npairs,)`, both ways.
    vector
        From i to j `(npairs, 3)` [Å].
    types
        Types of all atoms.
    """
    # In order of i, two neighbours of an atom are at most `max_neighbors` − 1 rows apart.
    order = torch.argsort(i, stable=True)
    i = i[order]
    neighbor_type = types[j[order]]
    unit = vector[order] / vector[order].norm(dim=1, keepdim=True)
    max_neighbors = int(torch.bincount(i).max()) if len(i) else 0
    rows_a = [i.new_zeros(0)]
    rows_b = [i.new_zeros(0)]
    for apart in range(1, max_neighbors):
        rows = torch.nonzero(i[:-apart] == i[apart:]).flatten()
        rows_a.append(rows)
        rows_b.append(rows + apart)
    a = torch.cat(rows_a)
    b = torch.cat(rows_b)
    cosine = (unit[a] * unit[b]).sum(1).clamp(-1.0, 1.0)
    type_a = neighbor_type[a]
    type_b = neighbor_type[b]
    return AnglesBetween(
        centre=i[a],
        triple=(types[i[a]], torch.minimum(type_a, type_b), torch.maximum(type_a, type_b)),
        degrees=torch.rad2deg(cosine.arccos()),
    )


def angles_of(systems: Sequence[System], coverage: Coverage) -> Angles:
    """Measure the angles of a data set with known distances."""
    ntypes = len(coverage.type_map)
    reach = np.where(np.isfinite(coverage.shortest), SHELL * coverage.shortest, 0.0)
    infinite = np.full((ntypes, ntypes, ntypes), np.inf)
    angles = Angles(coverage.type_map, reach, smallest=infinite, largest=-infinite)
    for frame, pairs in sampled_pairs(systems, float(reach.max()), _MAX_ATOMS):
        angles.add(frame, 0, pairs)
    return angles
