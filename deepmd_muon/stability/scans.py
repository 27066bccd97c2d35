"""Energies along paths: dimers in vacuum, and atoms or molecules of the data in place.

In place, an atom or a rigid molecule of a frame of the data moves towards a neighbour; a bond is
also stretched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.progress import tracked
from deepmd_muon.stability.coverage import Coverage, pairs_of, sampled
from deepmd_muon.stability.curves import Feature, Verdict, features_of

#: Shortest distance of a path [Å].
SHORTEST = 0.5
#: Distance of neighbouring points of a path [Å].
STEP = 0.05
#: Bonds are stretched by this [Å].
STRETCH = 1.0
# Two atoms are bonded below this times the sum of their covalent radii.
_BOND = 1.25
# Largest number of atoms in all points of the scans in place: 20 s on one core.
_MAX_ATOMS = 120_000

Kind = Literal["dimer", "between molecules", "within a molecule", "atom in place"]


@dataclass(frozen=True)
class Curve:
    """The energy along one path."""

    pair: tuple[int, int]  # types of the two atoms
    kind: Kind  # what moves
    distance: np.ndarray  # (n,): of the points, from the structure of the data on [Å]
    energy: np.ndarray  # (n,): relative to that structure [eV]
    outside: np.ndarray  # (n,): which points the data do not hold
    place: str  # system, frame and atoms, in words
    features: tuple[Feature, ...] = ()  # faults of the energy

    @property
    def verdict(self) -> Verdict:
        """The worst of the features."""
        return max((feature.verdict for feature in self.features), default=Verdict.holds)


@dataclass(frozen=True)
class _Path:
    """Structures to evaluate; fields as in `Curve`."""

    pair: tuple[int, int]
    kind: Kind
    distance: np.ndarray
    frames: Frames
    moves: np.ndarray  # (natoms,): which atoms move
    direction: np.ndarray  # (3,): unit vector towards the neighbour
    outside: np.ndarray
    place: str = ""


def scan_dimers(
    predictor: Predictor, coverage: Coverage, kt: float, *, in_data: bool
) -> list[Curve]:
    """Scan a dimer of each pair of elements of the data from the cut-off to 0.5 Å.

    An isolated dimer tells what the model has learnt of two atoms alone. Unless the data hold
    dimers (`in_data`), its faults make the check doubtful at most.
    """
    curves = []
    distance = np.arange(coverage.rcut - STEP, SHORTEST - 1e-9, -STEP)
    n_points = len(distance)
    coord = np.zeros((n_points, 2, 3))
    coord[:, 1, 0] = distance
    for pair in coverage.pairs:
        atype = np.tile(np.array(pair, dtype=np.int32), (n_points, 1))
        path = _Path(
            pair=pair,
            kind="dimer",
            distance=distance,
            frames=Frames(atype=atype, coord=coord),
            moves=np.array([True, False]),
            direction=np.array([1.0, 0.0, 0.0]),
            outside=coverage.outside(atype[:, 0], atype[:, 1], distance),
        )
        curve = _curve(predictor, path, kt)
        if not in_data:
            features = [
                replace(feature, verdict=min(feature.verdict, Verdict.doubtful))
                for feature in curve.features
            ]
            curve = replace(curve, features=tuple(features))
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
    """Move atoms and molecules of frames of the data.

    There are at most `probes` moves for each pair and kind.
    """
    random = np.random.default_rng(seed)
    probed: Counter[tuple[tuple[int, int], Kind]] = Counter()
    curves: list[Curve] = []
    remaining_atoms = _MAX_ATOMS
    frames_of_data = list(sampled(systems, 40 * max(system.natoms for system in systems)))
    order = random.permutation(len(frames_of_data)).tolist()
    for k in tracked(order, "scans", total=len(order)):
        system, number, frames = frames_of_data[k]
        pairs = pairs_of(frames, 0, coverage.rcut)
        moves = _moves(
            pairs,
            coverage,
            periodic=frames.box is not None,
            random=random,
            probed=probed,
            probes=probes,
        )
        for move in moves:
            place = f"{system.name}, frame {number}"
            for path in _paths(frames, coverage, pairs, move, place):
                n_atoms = len(path.distance) * frames.natoms
                # The first probe of each pair and kind is scanned at any cost.
                if remaining_atoms < n_atoms and probed[path.pair, path.kind] > 1:
                    continue
                remaining_atoms -= n_atoms
                curves.append(_curve(predictor, path, kt))
    return curves


@dataclass(frozen=True)
class _Move:
    """The atoms of a frame that move along one of its pairs."""

    pair_number: int
    kind: Kind
    atoms: np.ndarray  # numbers of the moving atoms


def _moves(
    pairs: Pairs,
    coverage: Coverage,
    *,
    periodic: bool,
    random: np.random.Generator,
    probed: Counter[tuple[tuple[int, int], Kind]],
    probes: int,
) -> Iterator[_Move]:
    """Yield one move of each pair and kind that has fewer than `probes`; count it in `probed`."""
    if not len(pairs.i):
        return
    molecule = molecules(pairs, coverage.type_map)
    same_molecule = molecule[pairs.i] == molecule[pairs.j]
    # In a crystal whose atoms are all bonded, "within a molecule" would say nothing.
    is_network = periodic and bool((molecule == molecule[0]).all())
    inner_kind: Kind = "atom in place" if is_network else "within a molecule"
    kinds: tuple[tuple[bool, Kind], ...] = ((False, "between molecules"), (True, inner_kind))
    for pair in coverage.pairs:
        is_pair = (
            (pairs.types[pairs.i] == pair[0])
            & (pairs.types[pairs.j] == pair[1])
            & (pairs.i != pairs.j)
        )
        for within, kind in kinds:
            candidates = np.flatnonzero(is_pair & (same_molecule == within))
            if not len(candidates) or probed[pair, kind] >= probes:
                continue
            by_distance = candidates[np.argsort(pairs.distance[candidates])]
            nearest = by_distance[: max(1, len(candidates) // 5)]
            k = int(random.choice(nearest))
            probed[pair, kind] += 1
            if within:
                atoms = pairs.real[pairs.i[k : k + 1]]
            else:
                atoms = pairs.real[molecule == molecule[pairs.i[k]]]
            yield _Move(k, kind, atoms)


def _paths(
    frames: Frames, coverage: Coverage, pairs: Pairs, move: _Move, place: str
) -> Iterator[_Path]:
    """Yield the path inwards and, for a bond, the path outwards."""
    k = move.pair_number
    i = int(pairs.real[pairs.i[k]])
    j = int(pairs.real[pairs.j[k]])
    box = np.zeros((3, 3)) if frames.box is None else frames.box[0]
    vector = frames.coord[0, j] + pairs.shift[k] @ box - frames.coord[0, i]
    start = float(np.linalg.norm(vector))
    direction = vector / start
    moves = np.zeros(frames.natoms, dtype=bool)
    moves[move.atoms] = True
    distances = [np.arange(start, SHORTEST - 1e-9, -STEP)]
    if move.kind != "between molecules":
        distances.append(np.arange(start, start + STRETCH, STEP))
    for distance in distances:
        n_points = len(distance)
        if n_points < 3:
            continue
        coord = np.tile(frames.coord, (n_points, 1, 1))
        coord[:, moves] += ((start - distance)[:, None] * direction)[:, None]
        points = Frames(
            atype=np.tile(frames.atype, (n_points, 1)),
            coord=coord,
            box=None if frames.box is None else np.tile(frames.box, (n_points, 1, 1)),
        )
        outside = _outside(points, coverage, moves)
        until_meeting = slice(0, len(outside))
        yield _Path(
            pair=(int(frames.atype[0, i]), int(frames.atype[0, j])),
            kind=move.kind,
            distance=distance[until_meeting],
            frames=points.rows(until_meeting),
            moves=moves,
            direction=direction,
            outside=outside,
            place=f"{place}, atoms {i} and {j}",
        )


def _outside(frames: Frames, coverage: Coverage, moves: np.ndarray) -> np.ndarray:
    """Return at which points a distance of a moving atom is not known.

    The array ends before the first point at which two atoms meet.
    """
    outside: list[bool] = []
    for k in range(frames.nframes):
        try:
            pairs = pairs_of(frames, k, coverage.rcut)
        except NeighborError:
            break
        flags = moves[pairs.real]
        changing = flags[pairs.i] != flags[pairs.j]  # distances between moving and resting atoms
        unknown = coverage.outside(
            pairs.types[pairs.i[changing]],
            pairs.types[pairs.j[changing]],
            pairs.distance[changing],
        )
        outside.append(bool(unknown.any()))
    return np.array(outside, dtype=bool)


def _curve(predictor: Predictor, path: _Path, kt: float) -> Curve:
    prediction = predictor.evaluate(path.frames)
    if path.kind == "dimer":
        slope = -prediction.force[:, 1, 0]
    else:
        # Moving by t along the direction shortens the distance by t.
        slope = prediction.force[:, path.moves].sum(1) @ path.direction
    energy = prediction.energy - prediction.energy[0]
    features = features_of(path.distance, energy, slope, path.outside, kt)
    return Curve(
        pair=path.pair,
        kind=path.kind,
        distance=path.distance,
        energy=energy,
        outside=path.outside,
        place=path.place,
        features=tuple(features),
    )


def molecules(pairs: Pairs, type_map: Sequence[str]) -> np.ndarray:
    """Return the number of each atom's molecule `(nreal,)`.

    Covalent radii tell which atoms are bonded.
    """
    radii = np.array([COVALENT_RADII.get(name, 0.7) for name in type_map])[pairs.types]
    bonded = pairs.distance < _BOND * (radii[pairs.i] + radii[pairs.j])
    i = pairs.i[bonded]
    j = pairs.j[bonded]
    # Atoms take the smallest number of their neighbours until none changes.
    number = np.arange(len(pairs.real))
    while True:
        smaller = number.copy()
        np.minimum.at(smaller, i, number[j])
        if (smaller == number).all():
            return number
        number = smaller
