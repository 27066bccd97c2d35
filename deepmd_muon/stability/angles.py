"""Which angles between near neighbours a data set holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepmd_muon.data import Frames, System
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.stability.coverage import Coverage, sampled_pairs

#: A neighbour is near within this many times the shortest distance of its pair in the data: bonds, and first shells of
#: dense crystals.
SHELL = 1.3
# Atoms looked at: angles need fewer frames than distances.
_MOST_ATOMS = 50_000


@dataclass(frozen=True)
class Angles:
    """Extremes of the angles between near neighbours."""

    type_map: tuple[str, ...]  # names of the types
    # Distance up to which a neighbour is near, of each pair of types `(ntypes, ntypes)` [Å]; 0 without data.
    reach: np.ndarray
    # Of each centre and pair of neighbours `(ntypes, ntypes, ntypes)`, centre first, the smaller neighbour type second
    # [degrees]; inf and −inf without data.
    smallest: np.ndarray
    largest: np.ndarray

    @property
    def triples(self) -> list[tuple[int, int, int]]:
        """Centre and neighbours of the angles that the data hold."""
        return [
            (int(c), int(a), int(b))
            for c, a, b in zip(*np.nonzero(np.isfinite(self.smallest)), strict=True)
        ]

    def name(self, triple: tuple[int, int, int]) -> str:
        """Return a triple in words with the centre in the middle, e.g. H-O-H."""
        centre, first, second = triple
        return "-".join(self.type_map[k] for k in (first, centre, second))

    def empty(self) -> Angles:
        """Return the same without any angle."""
        nothing = np.full_like(self.smallest, np.inf)
        return Angles(self.type_map, self.reach, nothing, -nothing)

    def add(self, frames: Frames, k: int, pairs: Pairs) -> None:
        """Take the angles of a frame into the extremes."""
        triple, degrees = angles_of_frame(frames, k, pairs, self.reach)
        np.minimum.at(self.smallest, triple, degrees)
        np.maximum.at(self.largest, triple, degrees)

    def excess(self, reached: Angles) -> tuple[float, tuple[int, int, int]] | None:
        """Return how far other extremes lie beyond these at most [degrees], and for which triple; None without any."""
        both = [triple for triple in self.triples if np.isfinite(reached.smallest[triple])]
        beyond = [
            (
                max(
                    self.smallest[t] - reached.smallest[t],
                    reached.largest[t] - self.largest[t],
                    0.0,
                ),
                t,
            )
            for t in both
        ]
        return max(beyond, default=None)


def angles_of_frame(
    frames: Frames, k: int, pairs: Pairs, reach: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return the angles between near neighbours of a frame: centre and neighbour types, each `(n,)`, and degrees."""
    near = np.flatnonzero(pairs.distance < reach[pairs.types[pairs.i], pairs.types[pairs.j]])
    i, j = pairs.i[near], pairs.j[near]
    coord = frames.coord[k][pairs.real]
    vector = coord[j] - coord[i]
    if (cell := frames.cell(k)) is not None:
        vector = vector + pairs.shift[near] @ cell
    own, other, vectors, types = map(torch.from_numpy, (i, j, vector, pairs.types))
    _, triple, degrees = angles_between(own, other, vectors, types)
    centre, low, high = (x.numpy() for x in triple)
    return (centre, low, high), degrees.numpy()


def angles_between(
    i: torch.Tensor, j: torch.Tensor, vector: torch.Tensor, types: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return all angles between neighbours of the same atom.

    Parameters
    ----------
    i, j, vector
        Atoms of each pair `(npairs,)`, both ways, and the vector from i to j `(npairs, 3)` [Å].
    types
        Of all atoms.

    Returns
    -------
    tuple
        Centres `(nangles,)`; their types and those of the neighbours, the smaller first; degrees.
    """
    order = torch.argsort(i, stable=True)
    i, kind = i[order], types[j[order]]
    unit = vector[order] / vector[order].norm(dim=1, keepdim=True)
    most = int(torch.bincount(i).max()) if len(i) else 0
    first = [torch.nonzero(i[:-apart] == i[apart:]).flatten() for apart in range(1, most)]
    second = [here + apart for apart, here in enumerate(first, 1)]
    a, b = (torch.cat([i.new_zeros(0), *parts]) for parts in (first, second))
    degrees = torch.rad2deg((unit[a] * unit[b]).sum(1).clamp(-1.0, 1.0).arccos())
    return (
        i[a],
        (types[i[a]], torch.minimum(kind[a], kind[b]), torch.maximum(kind[a], kind[b])),
        degrees,
    )


def angles_of(systems: Sequence[System], coverage: Coverage) -> Angles:
    """Measure the angles of a data set whose distances are known."""
    ntypes = len(coverage.type_map)
    reach = np.where(np.isfinite(coverage.shortest), SHELL * coverage.shortest, 0.0)
    nothing = np.full((ntypes, ntypes, ntypes), np.inf)
    angles = Angles(coverage.type_map, reach, nothing, -nothing)
    longest = float(reach.max())
    for frame, pairs in sampled_pairs(systems, longest, _MOST_ATOMS):
        angles.add(frame, 0, pairs)
    return angles
