"""Which distances of which pairs of elements a data set holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import MASSES
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.lists import Pairs, find_pairs
from deepmd_muon.stability.errors import StabilityError

#: Width of a bin of distances [Å].
WIDTH = 0.02
#: A distance is known when the data hold one that differs by less than this share of it, or than `NEAR` [Å].
SHARE, NEAR = 0.05, 0.05
# Atoms looked at; larger data are sampled evenly. 10 s on one core.
_MOST_ATOMS = 1_000_000
_TO_GRAMS = 1.66053906892  # u/Å³ in g/cm³


@dataclass(frozen=True)
class Coverage:
    """Distances of a data set."""

    type_map: tuple[str, ...]  # names of the types
    rcut: float  # largest distance looked at [Å]
    # Of each pair of types `(ntypes, ntypes)` [Å], symmetric; inf and 0 for a pair that the data do not hold.
    shortest: np.ndarray
    largest: np.ndarray
    known: np.ndarray  # bins of distances `(ntypes, ntypes, nbins)` that the data hold, bool, with a margin of `SHARE`
    nframes: int  # of the data
    used: int  # frames looked at
    density: tuple[float, float] | None  # smallest and largest mass density [g/cm³]; None without cells

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of types that the data hold, the smaller first."""
        first, second = np.nonzero(np.triu(np.isfinite(self.shortest)))
        return list(zip(first.tolist(), second.tolist(), strict=True))

    def name(self, pair: tuple[int, int]) -> str:
        """Return a pair in words, e.g. O-H."""
        return "-".join(self.type_map[k] for k in pair)

    def outside(self, first: np.ndarray, second: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Tell which distances of types are not known; those beyond the cut-off always are."""
        bins = np.minimum((distance / WIDTH).astype(np.int64), self.known.shape[-1] - 1)
        outside: np.ndarray = ~self.known[first, second, bins] & (distance < self.rcut)
        return outside

    def gaps(self, pair: tuple[int, int]) -> list[tuple[float, float]]:
        """Return the intervals between shortest and largest distance that no frame has [Å]."""
        ends = np.flatnonzero(np.diff(self.known[pair].astype(np.int8))) + 1
        edges = [float(end) * WIDTH for end in ends]
        inner = edges[1:] if not self.known[(*pair, 0)] else edges
        return list(zip(inner[0::2], inner[1::2], strict=False))


def pairs_of(frames: Frames, k: int, rcut: float) -> Pairs:
    """Return the pairs of one frame."""
    box = None if frames.box is None or not frames.box[k].any() else frames.box[k]
    return find_pairs(frames.coord[k], box, frames.atype[k], rcut)


def sampled(systems: Sequence[System], most_atoms: int = _MOST_ATOMS) -> Iterator[tuple[System, int, Frames]]:
    """Yield single frames of systems with their numbers, evenly spaced where there are more atoms than these."""
    share = most_atoms / max(1, sum(system.nframes * system.natoms for system in systems))
    for system in systems:
        count = min(system.nframes, max(1, int(system.nframes * share)))
        numbers = np.unique(np.linspace(0, max(0, system.nframes - 1), count).astype(int))
        for number in numbers:
            yield system, int(number), system.frames([int(number)])


def coverage_of(systems: Sequence[System], type_map: Sequence[str], rcut: float) -> Coverage:
    """Measure the distances of a data set up to a cut-off [Å].

    Raises
    ------
    StabilityError
        When the data hold no frame, or no two atoms within the cut-off.
    NeighborError
        When distances of a frame cannot be measured; it names system and frame.
    """
    ntypes, nbins = len(type_map), int(rcut / WIDTH) + 2
    counts = np.zeros((ntypes, ntypes, nbins), dtype=np.int64)
    shortest, largest = np.full((ntypes, ntypes), np.inf), np.zeros((ntypes, ntypes))
    masses = np.array([MASSES.get(name, np.nan) for name in type_map])
    densities: list[float] = []
    used = 0
    for system, number, frames in sampled(systems):
        try:
            pairs = pairs_of(frames, 0, rcut)
        except NeighborError as error:
            raise NeighborError(error.problem, number, system.name) from error
        first, second = pairs.types[pairs.i], pairs.types[pairs.j]
        np.add.at(counts, (first, second, (pairs.distance / WIDTH).astype(np.int64)), 1)
        np.minimum.at(shortest, (first, second), pairs.distance)
        np.maximum.at(largest, (first, second), pairs.distance)
        if frames.box is not None:
            densities.append(_TO_GRAMS * masses[pairs.types].sum() / abs(np.linalg.det(frames.box[0])))
        used += 1
    if not np.isfinite(shortest).any():
        raise StabilityError(f"{used} frames hold no two atoms within the cut-off of {rcut:g} Å: nothing to check")
    known = np.zeros_like(counts, dtype=bool)
    for first, second, at in zip(*np.nonzero(counts), strict=True):
        distance = (at + 0.5) * WIDTH
        margin = max(SHARE * distance, NEAR)
        known[first, second, max(0, int((distance - margin) / WIDTH)) : int((distance + margin) / WIDTH) + 1] = True
    density = (min(densities), max(densities)) if densities and np.isfinite(densities).all() else None
    total = sum(system.nframes for system in systems)
    return Coverage(tuple(type_map), rcut, shortest, largest, known, total, used, density)
