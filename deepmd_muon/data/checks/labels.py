"""Signs of wrong units, signs and labels, found from a sample of the frames before a run begins.

A pair potential is fitted to the forces (`pair_fit`). The energies and virials it predicts, and
−F·dx between near frames, show by which factor labels differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.energies import (
    CORRELATED,
    FACTORS,
    TELLING,
    UNCORRELATED,
    Work,
    compare,
    energy_problems,
)
from deepmd_muon.data.checks.near_pairs import NearPairs
from deepmd_muon.data.checks.pair_fit import PairFit
from deepmd_muon.data.checks.positions import position_problems
from deepmd_muon.data.checks.sample import FEWEST_COMPARED, SMALL_FORCE, Sample
from deepmd_muon.data.checks.scan import (
    Scanned,
    chosen_systems,
    repeated_frames,
    scan,
    share_of,
)
from deepmd_muon.data.checks.systems import FittedSystem, differing_systems
from deepmd_muon.data.checks.units import VIRIAL_ORDERS, VIRIAL_UNITS, explain
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.cache import worker_count
from deepmd_muon.data.system import System

# Most systems that are sampled, and most systems with compared energies and virials.
_SAMPLED = 128
_COMPARED = 12
# Root-mean-square force [eV/Å] and energy per atom [eV] that no unit explains: an all-electron
# total energy of uranium is 8e5 eV.
_LARGEST_FORCE = 1e3
_LARGEST_ENERGY = 1e6
# Net force and torque over the size that unrelated forces would give.
_UNBALANCED = 0.1

# A pair potential explains 0.5 (liquid silicon) to 1.0 of the forces of atoms that move.
_UNRELATED = 0.15
# Of atoms that hardly move it explains more than this if their forces are larger than this [eV/Å,
# root mean square], far from balance: 0.1 in a piece that was cut out of a metal.
_UNRELATED_AT_REST = 0.04
_FAR_FROM_BALANCE = 0.5
# Types are doubtful if a pair potential explains less than this. In the right order it leaves less
# than this share of what it leaves of the forces.
_DOUBTFUL_TYPES = 0.9
_LESS_REST = 0.6
# Types in an order that is doubtful, too, must strain bonds this much less: 0.87 in formic acid with
# carbon in the place of an oxygen, 0.1 and less where water's types are mixed up.
_LESS_STRAIN = 0.5

# The stiffness of bonds [eV/Å²] is compared with this envelope: 143 for N2 at 1.1 Å.
_STIFFNESS = 150.0
_BOND = 1.1
# Bonds at any distance have 0.05 to 1.7 of the envelope.
_STIFF = 3.0
_SOFT = 0.02
# Atoms nearer than this to their minimum [Å] are at rest. Those that are pressed against each
# other, as in cells of half the volume, have up to 6 of the envelope.
_AT_REST = 0.12
_STIFF_PRESSED = 10.0
# Bonds are shorter than this times the sum of covalent radii.
_BONDED = 1.2


def suspicions(systems: Sequence[System]) -> list[str]:
    """Look at some frames of the systems of a model and say what suggests wrong data.

    Return one sentence for each problem, which begins with the name of the system; empty if nothing
    looks wrong. At most 128 systems, spread evenly, and 20 frames of each are sampled; energies and
    virials are compared in 12 of them. `scan` reads more frames for what single frames show.
    """
    sampled = systems[:: -(-len(systems) // _SAMPLED)] if systems else []
    step = -(-len(sampled) // _COMPARED) or 1
    compared = [k % step == 0 for k in range(len(sampled))]
    scanned = chosen_systems(systems)
    shares = [share_of(systems)] * len(scanned)
    workers = worker_count() // 2  # a good part of the work holds Python's lock
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="deepmd_muon-checks") as pool:
            findings = list(pool.map(_examine, sampled, compared))
            scans = list(pool.map(scan, scanned, shares))
    else:
        findings = list(map(_examine, sampled, compared))
        scans = list(map(scan, scanned, shares))

    finding_of = {id(finding.sample.system): finding for finding in findings}
    scan_of = {id(system): result for system, result in zip(scanned, scans, strict=True)}
    sentences = []
    fits = []
    for system in systems:
        finding = finding_of.get(id(system))
        result = scan_of.get(id(system))
        problems: list[str] = []
        if finding is not None:
            problems += finding.of_positions
        # In this order: wrong units make frames of any system stand out, and frames that stand out
        # spoil the fits.
        if not problems:
            if result is not None:
                problems += result.sentences
            if finding is not None:
                fits.append(_fitted(finding.sample, usable=not problems))
        if not problems and finding is not None:
            problems += finding.of_labels
        sentences += [f"{system.name}: {problem}" for problem in problems]

    # With another type map a type has another number.
    by_type_map: dict[tuple[str, ...] | None, list[Scanned]] = {}
    for result in scans:
        if result is not None:
            by_type_map.setdefault(result.system.type_map, []).append(result)
    for alike in by_type_map.values():
        sentences += repeated_frames(alike)
    return sentences + differing_systems(fits)


@dataclass(frozen=True)
class _Finding:
    """A sample of a system, and what is wrong with it."""

    sample: Sample
    of_positions: tuple[str, ...]
    of_labels: tuple[str, ...]


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # labels may be absurdly large
def _examine(system: System, compared: bool) -> _Finding:
    """Look at a sample of a system; at its labels only if its positions are sound."""
    sample = Sample.of(system, compared=compared)
    of_positions = tuple(position_problems(sample))
    if of_positions:
        return _Finding(sample, of_positions, ())
    of_labels = tuple(_size_problems(sample))
    if not of_labels:
        of_labels = (*_balance_problems(sample), *_factor_problems(sample))
    return _Finding(sample, (), of_labels)


def _fitted(sample: Sample, *, usable: bool) -> FittedSystem:
    """Return what is compared with other systems; without a potential if it is not usable."""
    # Frames that hardly move need other parts of φ than frames of other systems.
    fit = sample.fit if usable and not sample.hardly_moves else None
    return FittedSystem(sample.system, sample.frames, fit)


def _size_problems(sample: Sample) -> Iterator[str]:
    """Yield labels that no unit of energy or force would make so large."""
    if sample.force > _LARGEST_FORCE:
        yield f"the root-mean-square force is {sample.force:.3g} eV/Å; forces must be in eV/Å"
    if sample.energy > _LARGEST_ENERGY:
        yield f"the energy is {sample.energy:.3g} eV per atom; energies must be in eV"


# ----- balance of forces -------------------------------------------------------------------------


def _balance_problems(sample: Sample) -> Iterator[str]:
    """Check that forces sum to zero, and torques of atoms without a cell."""
    frames = sample.frames
    if frames.force is None or sample.force <= SMALL_FORCE or frames.natoms <= 1:
        return
    present = frames.present("force")
    force = frames.force[present]
    net = np.median(_sum_over_unrelated(force))
    if net > _UNBALANCED:
        yield (
            f"forces do not sum to zero (net force {net:.2f} of that of unrelated forces); do they "
            "belong to these positions? Forces of fixed atoms set to zero look like this, too"
        )
        return
    if sample.system.pbc:
        return
    real = (frames.atype[present] >= 0)[..., None]
    coord = frames.coord[present]
    centre = (coord * real).sum(axis=1, keepdims=True) / real.sum(axis=1, keepdims=True)
    arm = (coord - centre) * real
    # Arms and forces of unrelated directions have torques of √(2/3) |arm| |force|. Their own size
    # would be rounding in linear molecules, where both lie on one line.
    unrelated = (arm**2).sum(axis=-1) * (force**2).sum(axis=-1) * 2 / 3
    total = np.cross(arm, force).sum(axis=1)
    size = np.sqrt(unrelated.sum(axis=1).clip(1e-12))
    torque = np.median(np.linalg.norm(total, axis=-1) / size)
    if torque > _UNBALANCED:
        yield (
            f"forces turn the atoms (torque {torque:.2f} of that of unrelated forces), which those "
            "of atoms without a cell cannot: periodic data need box.npy and no file nopbc"
        )


def _sum_over_unrelated(vectors: np.ndarray) -> np.ndarray:
    """Return |Σ v| over the size that the sum of unrelated vectors has, for each frame.

    Vectors are `(nframes, natoms, 3)`; the sum of unrelated ones has the size √(Σ v²).
    """
    total = (vectors.sum(axis=1) ** 2).sum(axis=-1)
    return np.asarray(np.sqrt(total / (vectors**2).sum(axis=(1, 2)).clip(1e-12)))


# ----- what the forces imply ---------------------------------------------------------------------


def _factor_problems(sample: Sample) -> Iterator[str]:
    """Yield what does not follow from the forces: themselves, types, energies, virials."""
    fit = sample.fit
    frames = sample.fitted_frames
    if fit is None or frames is None or sample.pairs is None:
        return
    work = Work.of(frames)
    threshold = _UNRELATED
    if sample.hardly_moves:
        threshold = -np.inf if sample.force < _FAR_FROM_BALANCE else _UNRELATED_AT_REST
    if fit.explained < threshold and not work.agrees:
        yield (
            "forces do not follow from the positions (a pair potential explains "
            f"{max(fit.explained, 0):.0%}): are they of other frames or of atoms in another order?"
        )
        return
    order = _better_order(sample, fit)
    if order is not None:
        names = sample.system.type_map or [str(t) for t in range(int(order.types.max()) + 1)]
        shown = " ".join(names[kind] for kind in order.types[:6])
        yield (
            f"forces fit the positions with atoms in the order {shown} … (a pair potential "
            f"explains {order.explained:.0%}), not with the types as they are "
            f"({max(fit.explained, 0):.0%}): check type.raw and the order of the atoms"
        )
        return
    yield from energy_problems(sample, fit, work)
    if sample.hardly_moves or fit.explained < TELLING:
        return
    if frames.box is not None and frames.present("virial").all():
        yield from _virial_problems(frames, fit)
    yield from _stiffness_problems(sample, fit, sample.pairs)


class _Order(NamedTuple):
    """Types in another order, and the share of the forces that a pair potential explains then."""

    types: np.ndarray  # (natoms,)
    explained: float


def _better_order(sample: Sample, fit: PairFit) -> _Order | None:
    """Find an order of the types that fits the forces much better, and the distances not worse.

    The types are sorted by element, or by molecule. Forces alone are not enough: in formic acid, a
    pair potential explains more of them if carbon and an oxygen change places.
    """
    frames = sample.fitted_frames
    pairs = sample.pairs
    if frames is None or pairs is None or not sample.compared or sample.hardly_moves:
        return None
    types = frames.atype[0]
    kinds, counts = np.unique(types, return_counts=True)
    if fit.explained > _DOUBTFUL_TYPES or not 2 <= len(kinds) <= 3 or (frames.atype != types).any():
        return None
    n_molecules = int(np.gcd.reduce(counts))
    best = _Order(types, fit.explained)
    for permutation in permutations(range(len(kinds))):
        rows = list(permutation)
        by_element = np.repeat(kinds[rows], counts[rows])
        molecule = np.repeat(kinds[rows], counts[rows] // n_molecules)
        by_molecule = np.tile(molecule, n_molecules)
        for reordered in (by_element, by_molecule):
            atype = np.repeat(reordered[None], frames.nframes, axis=0)
            explained = PairFit(replace(frames, atype=atype), pairs).explained
            if explained > best.explained:
                best = _Order(reordered, explained)
    if 1.0 - best.explained >= _LESS_REST * (1.0 - fit.explained):
        return None
    radii = [COVALENT_RADII.get(name, np.nan) for name in sample.system.type_map or ()]
    most = 1.0 if best.explained > _DOUBTFUL_TYPES else _LESS_STRAIN
    if radii and _strain(pairs, best.types, radii) > most * _strain(pairs, types, radii):
        return None
    return best


def _strain(pairs: NearPairs, types: np.ndarray, radii: list[float]) -> float:
    """Return the mean square of d / (r_i + r_j) − 1 over the shortest distance of every atom.

    r are covalent radii; nan if one is unknown. `types` are those of all frames `(natoms,)`.
    """
    radius = np.asarray(radii)[types]
    relative = pairs.distance / (radius[pairs.i] + radius[pairs.j])
    shortest = np.full((pairs.frame.max() + 1, len(types)), np.inf)
    for atom in (pairs.i, pairs.j):
        np.minimum.at(shortest, (pairs.frame, atom), relative)
    return float(np.mean((shortest[shortest != np.inf] - 1.0) ** 2))  # nan stays


def _virial_problems(frames: Frames, fit: PairFit) -> Iterator[str]:
    """Compare changes of virials between frames with changes that the pair potential implies."""
    assert frames.virial is not None
    assert frames.box is not None
    implied = _without_pressure(fit.virials)
    label = _without_pressure(frames.virial)
    factor, correlation = compare(implied, label)
    smallest, largest = FACTORS
    if correlation >= CORRELATED and not smallest <= factor <= largest:
        volume = float(np.abs(np.linalg.det(frames.box)).mean())
        causes = {words: factor_of(volume) for words, factor_of in VIRIAL_UNITS.items()}
        yield explain("virials", "forces and positions", factor, causes)
    if correlation >= UNCORRELATED or frames.nframes < FEWEST_COMPARED:
        return
    components = label.reshape(-1, 9)
    correlations = {
        words: compare(implied, components[:, order].reshape(-1)).correlation
        for words, order in VIRIAL_ORDERS.items()
    }
    best = max(correlations, key=lambda words: correlations[words])
    if correlations[best] >= CORRELATED:
        yield (
            f"virials fit forces and positions only with {best}; their nine numbers are "
            "xx, xy, xz, yx, …, zz"
        )


def _without_pressure(virial: np.ndarray) -> np.ndarray:
    """Return fluctuations of virials less their trace: a pair potential misses metals' pressure."""
    change = (virial - virial.mean(axis=0)).reshape(-1, 3, 3)
    pressure = np.trace(change, axis1=1, axis2=2)[:, None, None] / 3 * np.eye(3)
    return np.asarray((change - pressure).reshape(-1))


def _stiffness_problems(sample: Sample, fit: PairFit, pairs: NearPairs) -> Iterator[str]:
    """Find bonds stiffer or softer than any: energies and forces in the same wrong unit."""
    frames = sample.frames
    names = sample.system.type_map
    near = np.flatnonzero(pairs.distance < 1.3 * pairs.distance.min())
    i_type = frames.atype[pairs.frame[near], pairs.i[near]]
    j_type = frames.atype[pairs.frame[near], pairs.j[near]]
    kinds = np.sort([i_type, j_type], axis=0)  # (2, nnear)
    a, b = kinds[:, pairs.distance[near].argmin()].tolist()
    lengths = pairs.distance[near[(kinds[0] == a) & (kinds[1] == b)]]
    length = float(np.median(lengths))
    slope, stiffness = fit.elasticity((a, b), length)
    share = stiffness / _usual_stiffness(length)
    radii = sum(COVALENT_RADII.get(names[kind], np.nan) for kind in (a, b)) if names else np.nan
    is_pressed = -slope > _AT_REST * stiffness
    if share > (_STIFF_PRESSED if is_pressed else _STIFF):
        yield (
            f"bonds of {length:.2f} Å are {share:.0f} times stiffer than the stiffest known: "
            "energies and forces in kcal/mol (divide by 23.06) or kJ/mol (96.49)? They must be in "
            "eV and eV/Å"
        )
    elif 0 < share < _SOFT and fit.explained > 0.8 and length < _BONDED * radii:
        # Stretched bonds go through zero on their way to a negative curvature; compressed ones do
        # not.
        short = float(np.quantile(lengths, 0.05))
        if fit.elasticity((a, b), short).stiffness > _SOFT * _usual_stiffness(short):
            return
        yield (
            f"bonds of {length:.2f} Å are {share:.4f} times as stiff as is usual: energies and "
            "forces in Hartree and Hartree/Bohr (multiply by 27.21 and 51.42)? They must be in eV "
            "and eV/Å"
        )


def _usual_stiffness(length: float) -> float:
    """Return the largest stiffness of a bond of a length [eV/Å²]."""
    return _STIFFNESS * (_BOND / length) ** 4
