"""Which distances of which pairs of elements a data set holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import COVALENT_RADII, MASSES
from deepmd_muon.data.errors import naming_frame
from deepmd_muon.data.neighbors.lists import Pairs, find_pairs

#: Width of a bin of distances [Å].
WIDTH = 0.02
#: A distance is known when the data hold one that differs by less than this share of it, or than `NEAR` [Å].
SHARE, NEAR = 0.05, 0.05
# Atoms looked at; larger data are sampled evenly. 10 s on one core.
_MOST_ATOMS = 1_000_000
_TO_GRAMS = 1.66053906892  # u/Å³ in g/cm³


class StabilityError(ValueError):
    """Data, a model or settings that cannot be checked."""


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
    density: (
        tuple[float, float] | None
    )  # smallest and largest mass density [g/cm³]; None without cells

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of types that the data hold, the smaller first."""
        first, second = np.nonzero(np.triu(np.isfinite(self.shortest)))
        return list(zip(first.tolist(), second.tolist(), strict=True))

    def name(self, pair: Sequence[int]) -> str:
        """Return a pair of types in words, e.g. O-H."""
        return "-".join(self.type_map[k] for k in pair)

    def outside(self, first: np.ndarray, second: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Tell which distances of types are not known; those beyond the cut-off always are."""
        bins = np.minimum((distance / WIDTH).astype(np.int64), self.known.shape[-1] - 1)
        outside: np.ndarray = ~self.known[first, second, bins] & (distance < self.rcut)
        return outside

    def compare(self, pairs: Pairs) -> tuple[float, int | None]:
        """Compare the distances of a frame with those of the data.

        Returns
        -------
        tuple
            The smallest ratio of a distance to the shortest of its pair of types, and the number of the pair that lies
            farthest from the data; None where the data hold all of them. Of types that the data do not hold together,
            the shortest is the sum of covalent radii.
        """
        first, second = pairs.types[pairs.i], pairs.types[pairs.j]
        ratio = pairs.distance / self.shortest[first, second]
        outside = self.outside(first, second, pairs.distance)
        worst = int(np.where(outside, ratio, np.inf).argmin()) if outside.any() else None
        return float((pairs.distance / self.expected[first, second]).min(initial=np.inf)), worst

    @cached_property
    def expected(self) -> np.ndarray:
        """The shortest distances; of pairs that the data do not hold, the sums of covalent radii [Å]."""
        radii = np.array([COVALENT_RADII.get(name, 0.7) for name in self.type_map])
        return np.where(np.isfinite(self.shortest), self.shortest, radii[:, None] + radii)

    def gaps(self, pair: tuple[int, int]) -> list[tuple[float, float]]:
        """Return the intervals between shortest and largest distance that no frame has [Å]."""
        known = self.known[pair]
        ends = np.flatnonzero(np.diff(known.astype(np.int8))) + 1
        edges = [float(end) * WIDTH for end in ends]
        inner = edges if known[0] else edges[1:]
        return list(zip(inner[0::2], inner[1::2], strict=False))


def pairs_of(frames: Frames, k: int, rcut: float) -> Pairs:
    """Return the pairs of one frame."""
    return find_pairs(frames.coord[k], frames.cell(k), frames.atype[k], rcut)


def sampled(systems: Sequence[System], most_atoms: int) -> Iterator[tuple[System, int, Frames]]:
    """Yield single frames of systems with their numbers, evenly spaced where there are more atoms than these."""
    share = most_atoms / max(1, sum(system.nframes * system.natoms for system in systems))
    for system in systems:
        count = min(system.nframes, max(1, int(system.nframes * share)))
        numbers = np.unique(np.linspace(0, max(0, system.nframes - 1), count).astype(int))
        for number in numbers:
            yield system, int(number), system.frames([int(number)])


def sampled_pairs(
    systems: Sequence[System], rcut: float, most_atoms: int
) -> Iterator[tuple[Frames, Pairs]]:
    """Yield frames as `sampled` does, with their pairs; a NeighborError names system and frame."""
    for system, number, frames in sampled(systems, most_atoms):
        with naming_frame(number, system.name):
            pairs = pairs_of(frames, 0, rcut)
        yield frames, pairs


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
    for frames, pairs in sampled_pairs(systems, rcut, _MOST_ATOMS):
        first, second = pairs.types[pairs.i], pairs.types[pairs.j]
        np.add.at(counts, (first, second, (pairs.distance / WIDTH).astype(np.int64)), 1)
        np.minimum.at(shortest, (first, second), pairs.distance)
        np.maximum.at(largest, (first, second), pairs.distance)
        if frames.box is not None:
            densities.append(
                _TO_GRAMS * masses[pairs.types].sum() / abs(np.linalg.det(frames.box[0]))
            )
        used += 1
    if not np.isfinite(shortest).any():
        raise StabilityError(
            f"{used} frames hold no two atoms within the cut-off of {rcut:g} Å: nothing to check"
        )
    known = np.zeros_like(counts, dtype=bool)
    for first, second, at in zip(*np.nonzero(counts), strict=True):
        distance = (at + 0.5) * WIDTH
        margin = max(SHARE * distance, NEAR)
        known[
            first,
            second,
            max(0, int((distance - margin) / WIDTH)) : int((distance + margin) / WIDTH) + 1,
        ] = True
    density = (
        (min(densities), max(densities)) if densities and np.isfinite(densities).all() else None
    )
    total = sum(system.nframes for system in systems)
    return Coverage(tuple(type_map), rcut, shortest, largest, known, total, used, density)
