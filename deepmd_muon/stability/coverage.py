"""Which distances of which pairs of elements a data set holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import COVALENT_RADII, MASSES
from deepmd_muon.data.errors import naming_frame
from deepmd_muon.data.frames import evenly_spread
from deepmd_muon.data.neighbors.lists import Pairs, find_pairs

#: Width of a bin of distances [Å].
WIDTH = 0.02
#: A distance is known if the data hold one that differs by less than this share of it,
SHARE = 0.05
#: or by less than this [Å].
NEAR = 0.05
# Atoms looked at; larger data are sampled evenly. 10 s on one core.
_MAX_ATOMS = 1_000_000
_GRAMS_PER_CM3 = 1.66053906892  # of 1 u/Å³


class StabilityError(ValueError):
    """Data, a model or settings that cannot be checked."""


@dataclass(frozen=True)
class Coverage:
    """Distances of a data set."""

    type_map: tuple[str, ...]  # names of the types
    rcut: float  # largest distance looked at [Å]
    # (ntypes, ntypes), symmetric [Å]; inf and 0 for a pair that the data do not hold.
    shortest: np.ndarray
    largest: np.ndarray
    # (ntypes, ntypes, nbins): bins of distances that the data hold, with a margin of `SHARE`.
    seen: np.ndarray
    nframes: int  # of the data
    used: int  # frames looked at
    # Smallest and largest mass density [g/cm³]; None without cells.
    density: tuple[float, float] | None

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of types that the data hold, the smaller first."""
        rows, columns = np.nonzero(np.triu(np.isfinite(self.shortest)))
        return list(zip(rows.tolist(), columns.tolist(), strict=True))

    def name(self, pair: Sequence[int]) -> str:
        """Return a pair of types in words, e.g. O-H."""
        return "-".join(self.type_map[k] for k in pair)

    def outside(self, type_i: np.ndarray, type_j: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Return which distances of types the data do not hold; none lies beyond the cut-off."""
        bins = np.minimum((distance / WIDTH).astype(np.int64), self.seen.shape[-1] - 1)
        outside: np.ndarray = ~self.seen[type_i, type_j, bins] & (distance < self.rcut)
        return outside

    def compare(self, pairs: Pairs) -> tuple[float, int | None]:
        """Compare the distances of a frame with those of the data.

        Returns
        -------
        closest : float
            The smallest ratio of a distance to the shortest of its pair of types; see `expected`.
        worst : int or None
            The number of the pair that is farthest from the data; None if the data hold all of
            them.
        """
        type_i = pairs.types[pairs.i]
        type_j = pairs.types[pairs.j]
        ratio = pairs.distance / self.shortest[type_i, type_j]
        outside = self.outside(type_i, type_j, pairs.distance)
        worst = int(np.where(outside, ratio, np.inf).argmin()) if outside.any() else None
        closest = (pairs.distance / self.expected[type_i, type_j]).min(initial=np.inf)
        return float(closest), worst

    @cached_property
    def expected(self) -> np.ndarray:
        """The shortest distances.

        For pairs that the data do not hold, the sums of covalent radii [Å].
        """
        radii = np.array([COVALENT_RADII.get(name, 0.7) for name in self.type_map])
        return np.where(np.isfinite(self.shortest), self.shortest, radii[:, None] + radii)

    def gaps(self, pair: tuple[int, int]) -> list[tuple[float, float]]:
        """Return the intervals between shortest and largest distance that no frame has [Å]."""
        is_known = self.seen[pair]  # (nbins,)
        ends = np.flatnonzero(np.diff(is_known.astype(np.int8))) + 1
        edges = [float(end) * WIDTH for end in ends]
        # The first edge begins the known distances, unless these begin at 0.
        inner = edges if is_known[0] else edges[1:]
        return list(zip(inner[0::2], inner[1::2], strict=False))


def pairs_of(frames: Frames, k: int, rcut: float) -> Pairs:
    """Return the pairs of one frame."""
    return find_pairs(frames.coord[k], frames.cell(k), frames.atype[k], rcut)


def sampled(systems: Sequence[System], max_atoms: int) -> Iterator[tuple[System, int, Frames]]:
    """Yield single frames of systems with their numbers, evenly spaced if there are more atoms."""
    share = max_atoms / max(1, sum(system.nframes * system.natoms for system in systems))
    for system in systems:
        count = min(system.nframes, max(1, int(system.nframes * share)))
        for number in evenly_spread(system.nframes, count).tolist():
            yield system, number, system.frames([number])


def sampled_pairs(
    systems: Sequence[System], rcut: float, max_atoms: int
) -> Iterator[tuple[Frames, Pairs]]:
    """Yield frames as `sampled` does, with their pairs; a NeighborError names system and frame."""
    for system, number, frames in sampled(systems, max_atoms):
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
    ntypes = len(type_map)
    counts = np.zeros((ntypes, ntypes, int(rcut / WIDTH) + 2), dtype=np.int64)
    shortest = np.full((ntypes, ntypes), np.inf)
    largest = np.zeros((ntypes, ntypes))
    masses = np.array([MASSES.get(name, np.nan) for name in type_map])
    densities: list[float] = []
    used = 0
    for frames, pairs in sampled_pairs(systems, rcut, _MAX_ATOMS):
        types = (pairs.types[pairs.i], pairs.types[pairs.j])
        np.add.at(counts, (*types, (pairs.distance / WIDTH).astype(np.int64)), 1)
        np.minimum.at(shortest, types, pairs.distance)
        np.maximum.at(largest, types, pairs.distance)
        if frames.box is not None:
            volume = abs(np.linalg.det(frames.box[0]))
            densities.append(_GRAMS_PER_CM3 * masses[pairs.types].sum() / volume)
        used += 1
    if not np.isfinite(shortest).any():
        raise StabilityError(
            f"{used} frames hold no two atoms within the cut-off of {rcut:g} Å: nothing to check"
        )
    density = None
    if densities and np.isfinite(densities).all():
        density = (min(densities), max(densities))
    return Coverage(
        type_map=tuple(type_map),
        rcut=rcut,
        shortest=shortest,
        largest=largest,
        seen=_with_margin(counts > 0),
        nframes=sum(system.nframes for system in systems),
        used=used,
        density=density,
    )


def _with_margin(occupied: np.ndarray) -> np.ndarray:
    """Return the bins within the margin of an occupied one, bool `(ntypes, ntypes, nbins)`."""
    within = np.zeros_like(occupied)
    for type_i, type_j, k in zip(*np.nonzero(occupied), strict=True):
        distance = (k + 0.5) * WIDTH
        margin = max(SHARE * distance, NEAR)
        start = max(0, int((distance - margin) / WIDTH))
        end = int((distance + margin) / WIDTH) + 1
        within[type_i, type_j, start:end] = True
    return within
