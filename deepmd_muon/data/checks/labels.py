"""Signs of wrong units, signs and labels, found from a sample of the frames before a run begins.

A pair potential is fitted to the forces (`pair_fit`). The energies and virials it predicts, and −F·dx between near
frames, show by which factor labels differ. Distances are compared with covalent radii.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.near_pairs import MOST_PAIRS, NearPairs, pairs_to_try
from deepmd_muon.data.checks.pair_fit import PairFit
from deepmd_muon.data.checks.scan import (
    Scanned,
    chosen_systems,
    repeated_frames,
    scan,
    share_of,
)
from deepmd_muon.data.checks.systems import FittedSystem, differing_systems
from deepmd_muon.data.checks.units import (
    ENERGY_UNITS,
    POSITION_UNITS,
    VIRIAL_ORDERS,
    VIRIAL_UNITS,
    explain,
)
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.cache import worker_count
from deepmd_muon.data.system import System

# Most systems that are looked at, and systems of which energies and virials are compared.
_SYSTEMS, _COMPARED = 128, 12
# Atoms of all frames of a system, and fewest frames: of those that are compared, and of others.
_ATOMS, _FEWEST, _MOST_FRAMES = (768, 192), (8, 2), 20
# Shortest distance between atoms [Å]: H2 has 0.74. Without elements these are the limits of positions in Å.
_SHORTEST, _LONGEST = 0.6, 4.0
# Frames that are named one by one, as a share of those looked at.
_FEW = 0.25
# The same over the sum of covalent radii: bonds have 0.9 to 1.1, contacts of metals and salts up to 1.3.
_CLOSE, _APART, _BONDED = 0.5, 1.5, 1.2
_NOBLE = frozenset(("He", "Ne", "Ar", "Kr", "Xe", "Rn"))
# Root-mean-square force [eV/Å] and energy per atom [eV]: an all-electron total energy of uranium is 8e5 eV.
_LARGEST_FORCE, _LARGEST_ENERGY = 1e3, 1e6
# Coordinates this many cell lengths outside of the cell are probably in other units than the cell.
_CELLS = 50.0
# Net force and torque over those of forces without order, and the smallest forces [eV/Å] where noise does not count.
_UNBALANCED, _SMALL_FORCE = 0.1, 0.02
# A pair potential explains 0.5 (liquid silicon) to 1.0 of the forces of atoms that move.
_UNRELATED = 0.15
# A potential that explains less than this says nothing about energies and virials.
_TELLING = 0.3
# Atoms that have moved less than this from frame to frame [Å, root mean square]: their forces are those that angles and
# other terms balance, which no pair potential gives; phonons and the ends of relaxations are such. Where the forces are
# larger than this [eV/Å, root mean square] they are far from balance, and a pair potential explains more than this of
# them: 0.1 in a piece that was cut out of a metal.
_HARDLY_MOVED, _FAR_FROM_BALANCE, _UNRELATED_AT_REST = 0.08, 0.5, 0.04
# Factors of good labels lie between 0.7 and 1.4 where the correlation is so large.
_CORRELATED, _FACTORS, _POINTS = 0.8, (0.6, 1.7), 6
# A pair potential in place of −F·dx implies energies of water between oxides that are too large by a factor of 1.8, and
# those of phases of GeTe, where it explains less of the forces than this, that are too small by 1.9.
_FACTORS_OF_FIT = (0.4, 1.7)
_SURE, _WIDE_FACTORS = 0.85, (0.4, 2.2)
# Types are doubtful where a pair potential explains less than this; in the right order it leaves less than this share of
# what it leaves of the forces.
_DOUBTFUL_TYPES, _LESS_REST = 0.9, 0.6
# Frames whose atoms have moved less than this [Å, root mean square], and whose forces differ by less than this share of
# the square of their sum (0.1: by 0.6 of their mean): −F·dx is the change of energy. So it is where atoms hardly move,
# whatever their forces do.
_NEAR, _LIKE = 0.25, 0.1
# Work below this [eV], or below this share of the total energy (float32 rounds by 6e-8), may be noise of the labels.
_NOISE, _ROUNDING = 5e-3, 5e-7
# Energies that follow from the forces correlate with −F·dx by 1.00, and by 0.95 or more with a pair potential that
# explains so much of the forces, of all frames together and of each: where bonds break, it may miss some frames.
# Energies of other frames correlate by chance alone.
_UNCORRELATED, _EXPLAINED, _OF_EVERY_FRAME, _FRAMES = 0.5, 0.965, 0.9, 10
# Fewest frames of each of two groups, their distance over their width, the least constant between them [eV], and rounds
# in which the groups and the work of the pressure are fitted.
_FEWEST_OF_GROUP, _APART_BY, _LEAST_SHIFT, _ROUNDS = 3, 6.0, 0.1, 5
# A constant of so many standard deviations of the implied energies stands out where a pair potential explains so much
# of all forces and of those of every frame.
_LARGE_SHIFT, _LARGE_EXPLAINED = 3.0, (0.85, 0.75)
# Energies that change by less than this share of the work of the forces are constant; units make them smaller, too, but
# not by as much as the second number.
_CONSTANT, _CONSTANT_FACTOR = 0.2, 0.02
# Stretching N2 at 1.1 Å takes 143 eV/Å²; bonds at other distances have up to 1.7, and 0.05 or more, of this envelope.
_STIFFNESS, _BOND, _STIFF, _SOFT = 150.0, 1.1, 3.0, 0.02
# Atoms that are nearer than this to their minimum [Å] are at rest. Those that are pressed against each other, as in
# cells of half the volume, have up to 6 of the envelope.
_AT_REST, _STIFF_PRESSED = 0.12, 10.0


@dataclass(frozen=True)
class Sample:
    """Some frames of a system."""

    system: System
    frames: Frames
    numbers: np.ndarray  # of the frames in the system (nframes,)
    compared: bool  # whether there is time for more than a look

    @classmethod
    def of(cls, system: System, *, compared: bool) -> Sample:
        """Read pairs of consecutive frames, evenly spread."""
        kind = 0 if compared else 1
        count = int(np.clip(_ATOMS[kind] // system.natoms, _FEWEST[kind], _MOST_FRAMES))
        first = np.linspace(0, max(system.nframes - 2, 0), max(count // 2, 1)).astype(int)
        numbers = np.unique([*first, *np.minimum(first + 1, system.nframes - 1)])
        return cls(system, system.frames(numbers), numbers, compared)

    @cached_property
    def pairs(self) -> NearPairs | None:
        """Near pairs of the frames that the budget allows; None where one frame has too many or a cell is flat."""
        kept = self.fitted_frames
        return NearPairs.of(kept) if kept is not None else None

    @cached_property
    def fitted_frames(self) -> Frames | None:
        """The frames of which pairs are taken."""
        cost = pairs_to_try(self.frames.natoms, self.frames.box)
        count = int(min(MOST_PAIRS // cost, self.frames.nframes))
        return self.frames.rows(slice(0, count)) if count else None

    @cached_property
    def fit(self) -> PairFit | None:
        """The pair potential of the forces; None without enough of them."""
        frames = self.fitted_frames
        if (
            frames is None
            or self.pairs is None
            or not len(self.pairs.frame)
            or not frames.present("force").all()
        ):
            return None
        fit = PairFit(frames, self.pairs)
        return fit if fit.enough and self.force > _SMALL_FORCE / 10 else None

    @cached_property
    def force(self) -> float:
        """Root-mean-square force [eV/Å]; zero without forces."""
        force = self.frames.force
        return (
            float(np.sqrt(np.nanmean(force**2)))
            if force is not None and not np.isnan(force).all()
            else 0.0
        )

    @cached_property
    def hardly_moves(self) -> bool:
        """Whether atoms are nearly at the same places, in the cells of the frames, in all frames that are fitted."""
        frames = self.fitted_frames
        return frames is not None and _largest_move(frames) < _HARDLY_MOVED

    @property
    def energy(self) -> float:
        """Largest size of an energy per atom [eV]; zero without energies."""
        energy = self.frames.energy
        if energy is None:
            return 0.0
        return float(
            np.fmax.reduce(np.abs(energy) / (self.frames.atype >= 0).sum(axis=1), initial=0.0)
        )


def suspicions(systems: Sequence[System]) -> list[str]:
    """Look at some frames of the systems of a model and say what suggests wrong units, signs or labels.

    Return one sentence each, which begins with the name of the system; empty when nothing looks wrong. At most 128
    systems, spread evenly, and 20 frames of each are looked at; energies and virials are compared in 12 of them.
    """
    looked = systems[:: -(-len(systems) // _SYSTEMS)] if systems else []
    step = -(-len(looked) // _COMPARED) or 1
    compared = [k % step == 0 for k in range(len(looked))]
    read = chosen_systems(systems)
    shares = [share_of(systems)] * len(read)
    workers = worker_count() // 2  # a good part of the work holds Python's lock
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="deepmd_muon-checks") as pool:
            seen = [*pool.map(_look, looked, compared)]
            scans = [*pool.map(scan, read, shares)]
    else:
        seen = [*map(_look, looked, compared)]
        scans = [*map(scan, read, shares)]
    of_system = {id(one.sample.system): one for one in seen}
    scan_of = {id(system): one for system, one in zip(read, scans, strict=True)}
    sentences = []
    fits = []
    for system in systems:
        one, scanned = of_system.get(id(system)), scan_of.get(id(system))
        every = list(one.of_positions) if one is not None else []
        if not every:  # wrong units make frames of any system stand out
            every = list(scanned.sentences) if scanned is not None else []
            if one is not None:
                fits.append(one.fitted(usable=not every))
        if not every and one is not None:  # frames that stand out spoil the fits
            every = list(one.of_labels)
        sentences += [f"{system.name}: {sentence}" for sentence in every]
    # Elsewhere a type has another number.
    of_map: dict[tuple[str, ...] | None, list[Scanned]] = {}
    for scanned in scans:
        if scanned is not None:
            of_map.setdefault(scanned.system.type_map, []).append(scanned)
    for alike in of_map.values():
        sentences += repeated_frames(alike)
    return sentences + differing_systems(fits)


@dataclass(frozen=True)
class _Looked:
    """A sample of a system, and what is wrong with it."""

    sample: Sample
    of_positions: tuple[str, ...]
    of_labels: tuple[str, ...]

    def fitted(self, *, usable: bool) -> FittedSystem:
        """Return what is compared with other systems; no potential if it is not usable."""
        sample = self.sample
        # Frames that hardly move need other parts of φ than those of other systems.
        fit = sample.fit if usable and not sample.hardly_moves else None
        return FittedSystem(sample.system, sample.frames, fit)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # labels may be absurdly large
def _look(system: System, compared: bool) -> _Looked:
    """Look at a sample of a system; at its labels only where its positions are sound."""
    sample = Sample.of(system, compared=compared)
    of_positions = tuple(_of_positions(sample))
    if of_positions:
        return _Looked(sample, of_positions, ())
    return _Looked(
        sample, (), tuple(_of_sizes(sample)) or (*_of_balance(sample), *_of_factors(sample))
    )


# -- positions ---------------------------------------------------------------------------------------------------


def _of_positions(sample: Sample) -> Iterator[str]:
    """Yield what is wrong with positions and cells; nothing else is worth a look then."""
    frames = sample.frames
    if frames.box is not None:
        size = np.abs(frames.box).max(axis=(1, 2))
        flat = np.abs(np.linalg.det(frames.box)) <= 1e-9 * size**3
        if flat.any():
            where = frame_words(sample.numbers[np.flatnonzero(flat)])
            yield f"a cell has no volume ({where}); a system without a cell needs a file nopbc"
            return
        fractions = np.linalg.solve(frames.box.transpose(0, 2, 1), frames.coord.transpose(0, 2, 1))
        outside = np.abs(fractions).max(axis=(1, 2))
        if outside.max() > _CELLS:
            yield (
                f"atoms lie {outside.max():.0f} cell lengths away from the cell in frame "
                f"{sample.numbers[outside.argmax()]}; box and coord must be in Å"
            )
            return
    names = sample.system.type_map
    distances, ratios = _shortest(frames, names)
    shortest, ratio = float(distances.min()), float(ratios.min())
    known = np.isfinite(ratio)
    close = np.flatnonzero((distances < _SHORTEST) | (ratios < _CLOSE))
    if 0 < len(close) <= _FEW * frames.nframes:
        yield (
            f"atoms are {distances[close].min():.3g} Å apart in {frame_words(sample.numbers[close])} of those looked "
            "at; remove such frames"
        )
    elif len(close):
        yield f"atoms are {shortest:.3g} Å apart; {_remedy(sample, names)}"
    elif np.isfinite(shortest) and _too_far(sample, shortest, ratio):
        bonds = f", {ratio:.2f} times the sum of covalent radii" if known else ""
        yield (
            f"the closest atoms are {shortest:.3g} Å apart{bonds}; positions and cells must be in Å "
            "(multiply by 0.529 if they are in Bohr)"
        )
    elif known and frames.box is not None and ratio < 0.8:
        transposed = replace(frames, box=frames.box.transpose(0, 2, 1))
        if _shortest(transposed, names)[1].min() > max(1.15 * ratio, 0.8):
            further = "further with the transposed cell; rows of box are the cell vectors"
            yield f"atoms are {shortest:.3g} Å apart, and {further}"


def _too_far(sample: Sample, shortest: float, ratio: float) -> bool:
    """Whether even the closest atoms are too far apart for positions in Å.

    Where a type has no covalent radius, such as Fe1, the closest atoms may be of that type. Noble gases may be dilute.
    """
    names = sample.system.type_map
    present = [kind for kind in np.unique(sample.frames.atype).tolist() if kind >= 0]
    elements = {names[kind] for kind in present} if names is not None else {""}
    if elements <= COVALENT_RADII.keys() - _NOBLE:
        return ratio > _APART
    return shortest > _LONGEST and not elements <= _NOBLE


def _shortest(frames: Frames, names: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the shortest distance of each frame [Å], and the least distance over the sum of covalent radii.

    Both are `(nframes,)`, and infinite where there are no pairs, or no known radii.
    """
    radii = [
        COVALENT_RADII.get(name, np.nan) if name not in _NOBLE else np.nan for name in names or ()
    ]
    reach = np.array([*radii, np.nan])  # the last one is that of padding
    shortest = np.full(frames.nframes, np.inf)
    ratio = np.full(frames.nframes, np.inf)
    inverse = None if frames.box is None else np.linalg.inv(frames.box)
    # Rounded fractions tell the nearest image up to half of the cell's least height; primitive cells are smaller.
    exact = np.zeros(0) if inverse is None else 0.5 / np.sqrt((inverse**2).sum(axis=1)).max(axis=1)
    for k in range(frames.nframes):
        real = frames.atype[k] >= 0
        coord, types = frames.coord[k][real], np.minimum(frames.atype[k][real], len(reach) - 1)
        chosen = _spread(len(coord))
        apart = (coord[chosen, None] - coord).reshape(-1, 3)
        if frames.box is not None and inverse is not None:
            apart -= np.round(apart @ inverse[k]) @ frames.box[k]
        distance = np.sqrt(np.einsum("pc,pc->p", apart, apart)).reshape(len(chosen), len(coord))
        itself = np.arange(len(chosen)), chosen
        distance[itself] = np.inf
        if frames.box is not None and not distance.min(initial=np.inf) < exact[k]:
            distance = _over_images(apart, frames.box[k]).reshape(distance.shape)
            distance[itself] = np.inf
        shortest[k] = distance.min(initial=np.inf)
        over = distance / (reach[types[chosen], None] + reach[types])
        ratio[k] = np.fmin.reduce(over, axis=None, initial=np.inf)
    return shortest, ratio


def _over_images(apart: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the least lengths of vectors `(npairs, 3)` over the 27 nearest images of a cell."""
    least = np.full(len(apart), np.inf)
    for image in product((-1.0, 0.0, 1.0), repeat=3):
        moved = apart + image @ box
        np.minimum(least, np.einsum("pc,pc->p", moved, moved), out=least)
    return np.asarray(np.sqrt(least))


@lru_cache(maxsize=4)  # the frames of a system have the same number of atoms
def _spread(natoms: int) -> np.ndarray:
    """Return 64 atoms of a frame, spread evenly over their numbers, which are compared with all; fewer of few."""
    return np.unique(np.linspace(0, max(natoms - 1, 0), 64).astype(int))[:natoms]


def _remedy(sample: Sample, names: Sequence[str] | None) -> str:
    """Say which change of units makes the distances ordinary."""
    frames, box = sample.frames, sample.frames.box
    tried = [("nm? multiply coord by 10", frames.coord * 10, box)]
    if box is not None:
        tried = [
            ("fractional positions? coord must be Cartesian", frames.coord @ box, box),
            ("nm with a cell in Å? multiply coord by 10", frames.coord * 10, box),
            ("nm? multiply coord and box by 10", frames.coord * 10, box * 10),
            ("Bohr with a cell in Å? multiply coord by 0.529", frames.coord * 0.529177, box),
            (
                "a transposed cell? rows of box are the cell vectors",
                frames.coord,
                box.transpose(0, 2, 1),
            ),
        ]
        if np.ptp(frames.coord, axis=1).max() > 1.05:
            tried.pop(0)
    for words, coord, cell in tried:
        distances, ratios = _shortest(replace(frames, coord=coord, box=cell), names)
        shortest, ratio = distances.min(), ratios.min()
        if 0.8 < ratio < _APART if np.isfinite(ratio) else _SHORTEST < shortest < _LONGEST:
            return f"positions must be in Å ({words})"
    return "positions must be in Å (nm would look like this); remove frames in which atoms overlap"


# -- labels --------------------------------------------------------------------------------------------------------


def _of_sizes(sample: Sample) -> Iterator[str]:
    """Yield labels that no unit of energy or force would make so large."""
    if sample.force > _LARGEST_FORCE:
        yield f"the root-mean-square force is {sample.force:.3g} eV/Å; forces must be in eV/Å"
    if sample.energy > _LARGEST_ENERGY:
        yield f"the energy is {sample.energy:.3g} eV per atom; energies must be in eV"


def _of_balance(sample: Sample) -> Iterator[str]:
    """Check that forces sum to zero, and torques of atoms without a cell."""
    frames = sample.frames
    if frames.force is not None and sample.force > _SMALL_FORCE and frames.natoms > 1:
        force = frames.force[frames.present("force")]
        net = np.sqrt(
            (force.sum(axis=1) ** 2).sum(axis=-1) / (force**2).sum(axis=(1, 2)).clip(1e-12)
        )
        if np.median(net) > _UNBALANCED:
            yield (
                f"forces do not sum to zero (net force {np.median(net):.2f} of that of unrelated forces); do they "
                "belong to these positions? Forces of fixed atoms set to zero look like this, too"
            )
        elif not sample.system.pbc:
            yield from _of_torque(frames)


def _of_torque(frames: Frames) -> Iterator[str]:
    assert frames.force is not None
    here = frames.present("force")
    real = (frames.atype[here] >= 0)[..., None]
    centre = (frames.coord[here] * real).sum(axis=1, keepdims=True) / real.sum(
        axis=1, keepdims=True
    )
    torque = np.cross((frames.coord[here] - centre) * real, frames.force[here])
    turn = np.sqrt(
        (torque.sum(axis=1) ** 2).sum(axis=-1) / (torque**2).sum(axis=(1, 2)).clip(1e-12)
    )
    if np.median(turn) > _UNBALANCED:
        yield (
            f"forces turn the atoms (torque {np.median(turn):.2f} of that of unrelated forces), which those of atoms "
            "without a cell cannot: periodic data need box.npy and no file nopbc"
        )


def _of_factors(sample: Sample) -> Iterator[str]:
    """Yield what does not follow from the forces: themselves, energies, virials."""
    fit, frames = sample.fit, sample.fitted_frames
    if fit is None or frames is None or sample.pairs is None:
        return
    work = Work.of(frames)
    least = _UNRELATED
    if sample.hardly_moves:
        least = -np.inf if sample.force < _FAR_FROM_BALANCE else _UNRELATED_AT_REST
    if fit.explained < least and not work.agrees:
        yield (
            f"forces do not follow from the positions (a pair potential explains {max(fit.explained, 0):.0%}): are "
            "they of other frames or of atoms in another order?"
        )
        return
    if (order := _better_order(sample, fit)) is not None:
        names = sample.system.type_map or [str(t) for t in range(int(order.types.max()) + 1)]
        shown = " ".join(names[t] for t in order.types[:6])
        yield (
            f"forces fit the positions with atoms in the order {shown} … (a pair potential explains "
            f"{order.explained:.0%}), not with the types as they are ({max(fit.explained, 0):.0%}): check type.raw and "
            "the order of the atoms"
        )
        return
    yield from _of_energies(sample, fit, work)
    if sample.hardly_moves or fit.explained < _TELLING:
        return
    if frames.box is not None and frames.present("virial").all():
        yield from _of_virials(frames, fit)
    yield from _of_stiffness(sample, fit, sample.pairs)


class _Order(NamedTuple):
    """Types in another order, and the share of the forces that a pair potential explains with them."""

    types: np.ndarray  # (natoms,)
    explained: float


def _better_order(sample: Sample, fit: PairFit) -> _Order | None:
    """Find an order of the types, element by element or molecule by molecule, that fits the forces much better."""
    frames, pairs = sample.fitted_frames, sample.pairs
    if frames is None or pairs is None or not sample.compared or sample.hardly_moves:
        return None
    types = frames.atype[0]
    kinds, counts = np.unique(types, return_counts=True)
    if fit.explained > _DOUBTFUL_TYPES or not 2 <= len(kinds) <= 3 or (frames.atype != types).any():
        return None
    units = int(np.gcd.reduce(counts))
    best = _Order(types, fit.explained)
    for order in permutations(range(len(kinds))):
        chosen = list(order)
        by_element = np.repeat(kinds[chosen], counts[chosen])
        by_molecule = np.tile(np.repeat(kinds[chosen], counts[chosen] // units), units)
        for other in (by_element, by_molecule):
            changed = replace(frames, atype=np.repeat(other[None], frames.nframes, axis=0))
            explained = PairFit(changed, pairs).explained
            if explained > best.explained:
                best = _Order(other, explained)
    return best if 1.0 - best.explained < _LESS_REST * (1.0 - fit.explained) else None


@dataclass(frozen=True)
class Work:
    """Work of the forces between near frames and the change of the energy label, in the same order [eV]."""

    first: np.ndarray  # (npairs,): frames
    second: np.ndarray
    implied: np.ndarray  # (npairs,): −F·dx
    label: np.ndarray  # (npairs,)
    noise: float  # of the labels

    @classmethod
    def of(cls, frames: Frames) -> Work:
        """Compare near frames of the same atoms; none without energies or forces."""
        if not (frames.present("energy").all() and frames.present("force").all()):
            none = np.zeros(0)
            return cls(none.astype(int), none.astype(int), none, none, 0.0)
        assert frames.energy is not None
        assert frames.force is not None
        i, j, moved = _near_frames(frames)
        implied = -0.5 * ((frames.force[i] + frames.force[j]) * moved).sum(axis=(1, 2))
        noise = max(_NOISE, _ROUNDING * float(np.abs(frames.energy).max()))
        return cls(i, j, implied, frames.energy[j] - frames.energy[i], noise)

    @property
    def tells(self) -> bool:
        """Whether there is enough work, and more than noise."""
        size = np.sqrt((self.implied**2).mean()) if len(self.implied) else 0.0
        return len(self.implied) >= _POINTS and bool(size > self.noise)

    @cached_property
    def ratio(self) -> tuple[float, float]:
        """Factor of the labels over the work, and the size of their correlation."""
        return _ratio(self.implied, self.label) if self.tells else (1.0, 0.0)

    @property
    def agrees(self) -> bool:
        """Whether energies change as the forces say, but for a factor: forces belong to the positions then."""
        return self.ratio[1] >= _CORRELATED


def _of_energies(sample: Sample, fit: PairFit, work: Work) -> Iterator[str]:
    """Compare the energies with the work of the forces, or with the energies that the pair potential implies."""
    frames = sample.fitted_frames
    if frames is None or frames.energy is None or not frames.present("energy").all():
        return
    if len(np.unique(np.sort(frames.atype, axis=1), axis=0)) > 1 or sample.system.has_other_inputs:
        return  # other compositions, charges or temperatures have other constants
    implied = _without_volume(fit.energies, frames)
    label = _without_volume(frames.energy, frames)
    factor, correlation = work.ratio
    if not work.agrees and not sample.hardly_moves and fit.explained > _TELLING:
        factor, correlation = _ratio(implied, label)
    atoms = float((frames.atype[0] >= 0).sum())
    # Energies per atom may be as small as the changes of energies that dynamics keep constant.
    kept_constant = abs(factor) < min(_CONSTANT_FACTOR, 0.5 / atoms)
    if correlation >= _CORRELATED and not kept_constant:
        usual = _FACTORS
        if not work.agrees:
            usual = _FACTORS_OF_FIT if fit.explained > _SURE else _WIDE_FACTORS
        if not usual[0] <= factor <= usual[1]:
            known = {**ENERGY_UNITS, "energies per atom": 1 / atoms}
            if not np.isfinite(_shortest(frames, sample.system.type_map)[1]).any():
                known |= POSITION_UNITS  # distances between elements would show them before
            yield explain("energies", "−F·dx", factor, known)
        return
    fit_tells = (
        not sample.hardly_moves
        and fit.explained > _EXPLAINED
        and fit.least_explained > _OF_EVERY_FRAME
        and frames.nframes >= _FRAMES
        and np.sqrt((implied**2).mean()) > work.noise
    )
    groups = None
    if fit_tells or _shows_large_shifts(sample, fit):
        least = _LEAST_SHIFT if fit_tells else _LARGE_SHIFT * float(implied.std())
        groups = _shifted_groups(frames.energy - fit.energies, frames, least)
    if groups is not None:
        numbers = sample.numbers
        yield (
            f"of {len(numbers)} frames looked at, energies of {frame_words(numbers[groups.high])} are about "
            f"{groups.apart:.3g} eV above those of {frame_words(numbers[groups.low])}, which forces and positions do "
            "not explain: are reference, method and charge the same in all frames?"
        )
        return
    unlike_fit = correlation < _UNCORRELATED or label.std() < _CONSTANT * implied.std()
    unlike_work = work.ratio[1] < _UNCORRELATED or kept_constant
    if (fit_tells and unlike_fit) or (work.tells and unlike_work):
        yield _unrelated_energies(sample, work, implied, label)


class _Groups(NamedTuple):
    """Two groups of frames whose energies differ by a constant."""

    low: np.ndarray  # rows
    high: np.ndarray
    apart: float  # [eV]


def _shows_large_shifts(sample: Sample, fit: PairFit) -> bool:
    """Whether energies that are far apart from those of the pair potential stand out, as they do in water."""
    return (
        not sample.hardly_moves
        and len(sample.numbers) >= _FEWEST[0]
        and fit.explained > _LARGE_EXPLAINED[0]
        and fit.least_explained > _LARGE_EXPLAINED[1]
    )


def _shifted_groups(rest: np.ndarray, frames: Frames, least: float) -> _Groups | None:
    """Split frames into two groups whose energies differ by a constant; None unless they clearly do.

    The work of the pressure is fitted together with the constant.

    Parameters
    ----------
    rest
        Energies less those that the forces imply `(nframes,)` [eV].
    frames
        The frames.
    least
        Least distance of the groups [eV].
    """
    powers = _volume_powers(frames)
    constants = np.zeros(len(rest))
    for _ in range(_ROUNDS):
        pressure = powers @ np.linalg.lstsq(powers, rest - constants, rcond=None)[0]
        flat = rest - pressure
        order = np.argsort(flat, kind="stable")
        steps = np.diff(flat[order])[_FEWEST_OF_GROUP - 1 : 1 - _FEWEST_OF_GROUP]
        if not len(steps):
            return None
        cut = int(steps.argmax()) + _FEWEST_OF_GROUP
        low, high = np.sort(order[:cut]), np.sort(order[cut:])
        apart = float(flat[high].mean() - flat[low].mean())
        constants = np.zeros(len(rest))
        constants[high] = apart
    spread = (flat - constants).std()
    if steps.max() < max(_APART_BY * spread, least):
        return None
    return _Groups(low, high, apart)


def _unrelated_energies(sample: Sample, work: Work, implied: np.ndarray, label: np.ndarray) -> str:
    """Say that energies do not follow from the forces, and name the frames where they are farthest from that."""
    if work.tells:
        worst = int(np.abs(work.label - work.implied).argmax())
        pair = sample.numbers[[work.first[worst], work.second[worst]]]
        seen = (
            f"from {frame_words(pair[:1])} to {frame_words(pair[1:])} it changes by {work.label[worst]:.3g} eV, "
            f"−F·dx is {work.implied[worst]:.3g} eV"
        )
        size, expected = work.label.std(), work.implied.std()
    else:
        worst = int(np.abs(label - implied).argmax())
        seen = f"it is {label[worst] - implied[worst]:.3g} eV off in {frame_words(sample.numbers[[worst]])}"
        size, expected = label.std(), implied.std()
    if size < _CONSTANT * expected:
        cause = "are they total energies with kinetic energy, which dynamics keep constant?"
    else:
        cause = "are they of other frames, or do they contain kinetic energy?"
    return f"the energy does not follow from forces and positions ({seen}): {cause}"


def _of_virials(frames: Frames, fit: PairFit) -> Iterator[str]:
    """Compare the changes of virials between frames with those that the pair potential implies."""
    assert frames.virial is not None
    assert frames.box is not None
    implied, label = _without_pressure(fit.virials), _without_pressure(frames.virial)
    factor, correlation = _ratio(implied, label)
    if correlation >= _CORRELATED and not _FACTORS[0] <= factor <= _FACTORS[1]:
        volume = float(np.abs(np.linalg.det(frames.box)).mean())
        known = {words: of_volume(volume) for words, of_volume in VIRIAL_UNITS.items()}
        yield explain("virials", "forces and positions", factor, known)
    if correlation >= _UNCORRELATED or frames.nframes < _FEWEST[0]:
        return
    numbers = label.reshape(-1, 9)
    fits = {
        words: _ratio(implied, numbers[:, order].reshape(-1))[1]
        for words, order in VIRIAL_ORDERS.items()
    }
    best = max(fits, key=lambda words: fits[words])
    if fits[best] >= _CORRELATED:
        yield f"virials fit forces and positions only with {best}; their nine numbers are xx, xy, xz, yx, …, zz"


def _largest_move(frames: Frames) -> float:
    """Return the largest root-mean-square distance of the atoms of a frame from those of the first one [Å].

    Positions are compared as fractions of the cells. Frames with other types have moved far.
    """
    if (frames.atype != frames.atype[:1]).any():
        return np.inf
    moved = frames.coord - frames.coord[:1]
    if frames.box is not None:
        fractions = np.linalg.solve(
            frames.box.transpose(0, 2, 1), frames.coord.transpose(0, 2, 1)
        ).transpose(0, 2, 1)
        moved = fractions - fractions[:1]
        moved = (moved - np.round(moved)) @ frames.box[0]
    moved = moved - moved.mean(axis=1, keepdims=True)
    return float(np.sqrt((moved**2).sum(axis=-1).mean(axis=-1)).max())


def _near_frames(frames: Frames) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of frames with nearly the same positions and forces in the same cell, and the way of each atom [Å]."""
    i, j = np.triu_indices(frames.nframes, 1)
    moved = frames.coord[j] - frames.coord[i]
    same = (frames.atype[i] == frames.atype[j]).all(axis=1)
    if frames.box is not None:
        moved -= (
            np.round(np.einsum("fac,fcd->fad", moved, np.linalg.inv(frames.box[i]))) @ frames.box[i]
        )
        same &= np.abs(frames.box[i] - frames.box[j]).max(axis=(1, 2)) < 1e-6
    assert frames.force is not None
    change = ((frames.force[j] - frames.force[i]) ** 2).sum(axis=(1, 2))
    like = change < _LIKE * ((frames.force[i] + frames.force[j]) ** 2).sum(axis=(1, 2))
    distance = np.sqrt((moved**2).sum(axis=-1).mean(axis=-1))
    same &= (distance < _HARDLY_MOVED) | (like & (distance < _NEAR))
    return i[same], j[same], moved[same]


def _without_volume(energies: np.ndarray, frames: Frames) -> np.ndarray:
    """Energies [eV] less a parabola of ln V: forces say nothing about the work of the pressure, see below."""
    powers = _volume_powers(frames)
    return np.asarray(energies - powers @ np.linalg.lstsq(powers, energies, rcond=None)[0])


def _volume_powers(frames: Frames) -> np.ndarray:
    """Return 1, ln V and its square for each frame, but for constants `(nframes, 3)`; 1 alone where V is constant."""
    if frames.box is None:
        return np.ones((frames.nframes, 1))
    volume = np.log(np.abs(np.linalg.det(frames.box)))
    powers = (volume - volume.mean())[:, None] ** np.arange(3)
    return np.asarray(powers if np.ptp(volume) > 1e-6 else powers[:, :1])


def _without_pressure(virial: np.ndarray) -> np.ndarray:
    """Fluctuations of virials but for their trace: a pair potential misses the pressure of metals."""
    change = (virial - virial.mean(axis=0)).reshape(-1, 3, 3)
    pressure = np.trace(change, axis1=1, axis2=2)[:, None, None] / 3 * np.eye(3)
    return np.asarray((change - pressure).reshape(-1))


def _ratio(implied: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """Ratio of the widths of two quantities with the sign of their correlation, and the size of the correlation."""
    implied_size, size = float((implied**2).sum()), float((label**2).sum())
    if len(implied) < _POINTS or not implied_size > 1e-12 or not size > 1e-24:
        return 1.0, 0.0
    product = float((implied * label).sum())
    return float(np.copysign(np.sqrt(size / implied_size), product)), abs(product) / np.sqrt(
        implied_size * size
    )


def _of_stiffness(sample: Sample, fit: PairFit, pairs: NearPairs) -> Iterator[str]:
    """Bonds stiffer or softer than any: energies and forces in the same wrong unit."""
    frames, names = sample.frames, sample.system.type_map
    near = np.flatnonzero(pairs.distance < 1.3 * pairs.distance.min())
    kind = np.sort(
        [frames.atype[pairs.frame[near], atom[near]] for atom in (pairs.i, pairs.j)], axis=0
    )
    a, b = kind[:, pairs.distance[near].argmin()].tolist()
    lengths = pairs.distance[near[(kind[0] == a) & (kind[1] == b)]]
    length = float(np.median(lengths))
    slope, stiffness = fit.elasticity((a, b), length)
    share = stiffness / _usual_stiffness(length)
    radii = sum(COVALENT_RADII.get(names[t], np.nan) for t in (a, b)) if names else np.nan
    pressed = -slope > _AT_REST * stiffness
    if share > (_STIFF_PRESSED if pressed else _STIFF):
        yield (
            f"bonds of {length:.2f} Å are {share:.0f} times stiffer than the stiffest known: energies and forces in "
            "kcal/mol (divide by 23.06) or kJ/mol (96.49)? They must be in eV and eV/Å"
        )
    elif 0 < share < _SOFT and fit.explained > 0.8 and length < _BONDED * radii:
        # Stretched bonds go through zero on their way to a negative curvature; compressed ones do not.
        short = float(np.quantile(lengths, 0.05))
        if fit.elasticity((a, b), short).stiffness > _SOFT * _usual_stiffness(short):
            return
        yield (
            f"bonds of {length:.2f} Å are {share:.4f} times as stiff as is usual: energies and forces in Hartree and "
            "Hartree/Bohr (multiply by 27.21 and 51.42)? They must be in eV and eV/Å"
        )


def _usual_stiffness(length: float) -> float:
    """Return the largest stiffness of a bond of a length [eV/Å²]."""
    return _STIFFNESS * (_BOND / length) ** 4
