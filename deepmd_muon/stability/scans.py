"""Scans: dimers in vacuum, and atoms or rigid molecules of a data frame moved towards a neighbour in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.coverage import Coverage, pairs_of, sampled
from deepmd_muon.stability.curves import Feature, Verdict, features_of

#: Distances begin here [Å], and points lie so far apart [Å].
SHORTEST, STEP = 0.5, 0.05
#: Bonds are stretched by this [Å].
STRETCH = 1.0
# Two atoms are bonded below this times the sum of their covalent radii.
_BOND = 1.25
# Atoms that all points of the scans in place may have together: 20 s on one core.
_MOST_ATOMS = 120_000

Kind = Literal["dimer", "between molecules", "within a molecule", "atom in place"]


@dataclass(frozen=True)
class Curve:
    """The energy along one path."""

    pair: tuple[int, int]  # types of the two atoms
    kind: Kind  # what moves
    distance: np.ndarray  # of the points, from the structure of the data on `(n,)` [Å]
    energy: np.ndarray  # relative to that structure `(n,)` [eV]
    outside: np.ndarray  # which points the data do not hold `(n,)`
    place: str  # system, frame and atoms, in words
    features: tuple[Feature, ...] = ()  # what is wrong

    @property
    def verdict(self) -> Verdict:
        """The worst of the features."""
        return max((feature.verdict for feature in self.features), default=Verdict.holds)


@dataclass(frozen=True)
class _Path:
    """Structures to evaluate."""

    pair: tuple[int, int]
    kind: Kind
    distance: np.ndarray
    frames: Frames
    moved: np.ndarray  # (natoms,) bool
    along: np.ndarray  # (3,) unit vector towards the neighbour
    outside: np.ndarray
    place: str = field(default="")


def scan_dimers(
    predictor: Predictor, coverage: Coverage, kt: float, *, in_data: bool
) -> list[Curve]:
    """Scan a dimer of each pair of elements of the data from the cut-off to 0.5 Å.

    An isolated dimer tells what the model has learnt of two atoms alone. Unless the data hold dimers (`in_data`), what
    is wrong with one makes the check doubtful at most.
    """
    curves = []
    for pair in coverage.pairs:
        distance = np.arange(coverage.rcut - STEP, SHORTEST - 1e-9, -STEP)
        coord = np.zeros((len(distance), 2, 3))
        coord[:, 1, 0] = distance
        frames = Frames(
            atype=np.tile(np.array(pair, dtype=np.int32), (len(distance), 1)), coord=coord
        )
        outside = coverage.outside(
            np.full(len(distance), pair[0]), np.full(len(distance), pair[1]), distance
        )
        path = _Path(
            pair,
            "dimer",
            distance,
            frames,
            np.array([True, False]),
            np.array([1.0, 0.0, 0.0]),
            outside,
        )
        curve = _curve(predictor, path, kt)
        if not in_data:
            milder = (replace(f, verdict=min(f.verdict, Verdict.doubtful)) for f in curve.features)
            curve = replace(curve, features=tuple(milder))
        curves.append(curve)
    return curves


def scan_in_place(
    predictor: Predictor,
    coverage: Coverage,
    systems: Sequence[System],
    kt: float,
    *,
    probes: int,
    seed: int,
) -> list[Curve]:
    """Move atoms and molecules of frames of the data; so many paths of each pair and kind at most."""
    random = np.random.default_rng(seed)
    wanted: dict[tuple[tuple[int, int], Kind], int] = {}
    curves: list[Curve] = []
    left = _MOST_ATOMS
    chosen = list(sampled(systems, 40 * max(system.natoms for system in systems)))
    for order in random.permutation(len(chosen)):
        system, number, frames = chosen[order]
        for path in _paths(
            frames, coverage, random, f"{system.name}, frame {number}", wanted, probes
        ):
            size = len(path.distance) * frames.natoms
            if left < size and wanted[path.pair, path.kind] > 1:
                continue
            left -= size
            curves.append(_curve(predictor, path, kt))
    return curves


def _paths(
    frames: Frames,
    coverage: Coverage,
    random: np.random.Generator,
    place: str,
    done: dict[tuple[tuple[int, int], Kind], int],
    probes: int,
) -> Iterator[_Path]:
    """Yield the paths of one frame that are still wanted, one of each pair and kind, and count them in `done`."""
    pairs = pairs_of(frames, 0, coverage.rcut)
    if not len(pairs.i):
        return
    molecule = molecules(pairs, coverage.type_map)
    alike = molecule[pairs.i] == molecule[pairs.j]
    single = bool((molecule == molecule[0]).all()) and frames.box is not None
    for pair in coverage.pairs:
        ofpair = (
            (pairs.types[pairs.i] == pair[0])
            & (pairs.types[pairs.j] == pair[1])
            & (pairs.i != pairs.j)
        )
        for within in (False, True):
            found = np.flatnonzero(ofpair & (alike == within))
            kind: Kind = (
                ("atom in place" if single else "within a molecule")
                if within
                else "between molecules"
            )
            if not len(found) or done.get((pair, kind), 0) >= probes:
                continue
            near = found[np.argsort(pairs.distance[found])[: max(1, len(found) // 5)]]
            k = int(random.choice(near))
            done[pair, kind] = done.get((pair, kind), 0) + 1
            moved = np.zeros(frames.natoms, dtype=bool)
            moved[
                pairs.real[pairs.i[k]] if within else pairs.real[molecule == molecule[pairs.i[k]]]
            ] = True
            yield from _in_place(frames, coverage, pairs, k, moved, kind, place)


def _in_place(
    frames: Frames,
    coverage: Coverage,
    pairs: Pairs,
    k: int,
    moved: np.ndarray,
    kind: Kind,
    place: str,
) -> Iterator[_Path]:
    """Yield the path inwards and, for a bond, the one outwards."""
    i, j = int(pairs.real[pairs.i[k]]), int(pairs.real[pairs.j[k]])
    box = np.zeros((3, 3)) if frames.box is None else frames.box[0]
    vector = frames.coord[0, j] + pairs.shift[k] @ box - frames.coord[0, i]
    start = float(np.linalg.norm(vector))
    along = vector / start
    ways = [np.arange(start, SHORTEST - 1e-9, -STEP)]
    if kind != "between molecules":
        ways.append(np.arange(start, start + STRETCH, STEP))
    pair = int(frames.atype[0, i]), int(frames.atype[0, j])
    for distance in ways:
        if len(distance) < 3:
            continue
        coord = np.tile(frames.coord, (len(distance), 1, 1))
        coord[:, moved] += ((start - distance)[:, None] * along)[:, None]
        whole = Frames(
            atype=np.tile(frames.atype, (len(distance), 1)),
            coord=coord,
            box=None if frames.box is None else np.tile(frames.box, (len(distance), 1, 1)),
        )
        outside = _outside(whole, coverage, moved)
        kept = slice(0, len(outside))
        where = f"{place}, atoms {i} and {j}"
        yield _Path(pair, kind, distance[kept], whole.rows(kept), moved, along, outside, where)


def _outside(frames: Frames, coverage: Coverage, moved: np.ndarray) -> np.ndarray:
    """Tell at which points a distance of a moved atom is not known; the path ends where two atoms meet."""
    outside: list[bool] = []
    for k in range(frames.nframes):
        try:
            pairs = pairs_of(frames, k, coverage.rcut)
        except NeighborError:
            break
        flags = moved[pairs.real]
        crossing = flags[pairs.i] != flags[pairs.j]
        types = pairs.types[pairs.i[crossing]], pairs.types[pairs.j[crossing]]
        outside.append(bool(coverage.outside(*types, pairs.distance[crossing]).any()))
    return np.array(outside, dtype=bool)


def _curve(predictor: Predictor, path: _Path, kt: float) -> Curve:
    found = predictor.evaluate(path.frames)
    # Moving by t along `along` shortens the distance by t.
    slope = found.force[:, path.moved].sum(1) @ path.along
    if path.kind == "dimer":
        slope = -found.force[:, 1, 0]
    energy = found.energy - found.energy[0]
    features = features_of(path.distance, energy, slope, path.outside, kt)
    return Curve(
        path.pair, path.kind, path.distance, energy, path.outside, path.place, tuple(features)
    )


def molecules(pairs: Pairs, type_map: Sequence[str]) -> np.ndarray:
    """Return the number of each atom's molecule `(nreal,)`; covalent radii tell which atoms are bonded."""
    radii = np.array([COVALENT_RADII.get(name, 0.7) for name in type_map])[pairs.types]
    bonded = pairs.distance < _BOND * (radii[pairs.i] + radii[pairs.j])
    i, j = pairs.i[bonded], pairs.j[bonded]
    number = np.arange(len(pairs.real))
    while True:
        smaller = number.copy()
        np.minimum.at(smaller, i, number[j])
        if (smaller == number).all():
            return number
        number = smaller
