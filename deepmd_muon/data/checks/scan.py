"""Frames that stand out from the others of their system, and frames that repeat: one pass over the data.

All frames are read where the data are small, else an even share of them. What is wrong in every frame is left to the
checks of units, signs and labels (`labels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data.checks.close_atoms import close_pairs
from deepmd_muon.data.checks.pair_fit import MOST_PAIRS, NearPairs, pairs_to_try
from deepmd_muon.data.checks.structures import same_structure, structure_keys, tolerance
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

# Atoms of all frames that are read, frames, and systems: 0.06 s of work, of which each system takes 0.3 ms.
_ATOMS, _FRAMES, _SYSTEMS = 1 << 16, 1 << 14, 128
# An energy per atom so far from those of the other frames [eV], and so many times the median distance from their median,
# is none of the same atoms: the cohesive energy of tungsten is 8.9 eV. Large forces are so many times the median, too.
_FAR_ENERGY, _FAR_TIMES = 10.0, 20.0
# Forces that do so much work on their atoms along this way explain a high energy [Å].
_WAY = 2.0
# A force this large [eV/Å] needs an atom nearer than this share of the sum of covalent radii.
_LARGE_FORCE, _PUSHED = 100.0, 0.75
# Without known radii an atom this near explains a force [Å].
_PUSHED_DISTANCE = 1.0
# Forces that are zero by symmetry: pulls of the neighbours add up to less than this share of their sizes.
_SYMMETRIC = 1e-3
# Frames without forces whose symmetry is looked at.
_MOST_WITHOUT = 4
# Share of the largest virial by which it may differ from its transpose.
_ASYMMETRIC = 0.05
# Energies of the same structure differ by less than this [eV], and less than this for each atom.
_CONTRADICTION, _OF_ATOM = 0.2, 0.005
# Copies of one frame that are named: at least so many, and this share of the frames of the system.
_COPIES, _SHARE = 5, 0.1
# Energies of copies differ by less than this share.
_EQUAL = 1e-6
# Groups of equal frames that are looked at, and frames of each.
_MOST_GROUPS, _MOST_VERIFIED = 200, 64
# Coordinates of float16: so many values, and most of them no simple fractions as sites of crystals are.
_FEWEST_VALUES, _SIMPLE = 60, 64


@dataclass(frozen=True)
class Scanned:
    """What one pass over some frames of a system found."""

    system: System
    numbers: np.ndarray  # (nframes,): of the frames that were read
    sentences: tuple[str, ...]
    keys: np.ndarray  # (nframes, 6), see `structure_keys`
    energy: np.ndarray  # (nframes,) [eV]; NaN without


def share_of(systems: Sequence[System]) -> float:
    """Return the share of the frames of systems that a scan reads."""
    chosen = chosen_systems(systems)
    atoms = sum(system.natoms * system.nframes for system in chosen)
    frames = sum(system.nframes for system in chosen)
    return min(1.0, _ATOMS / max(1, atoms), _FRAMES / max(1, frames))


def chosen_systems(systems: Sequence[System]) -> Sequence[System]:
    """Return the systems that are scanned: all, or an even share of very many."""
    if len(systems) <= _SYSTEMS:
        return systems
    return [systems[k] for k in np.linspace(0, len(systems) - 1, _SYSTEMS).astype(int)]


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # labels may be absurdly large
def scan(system: System, share: float) -> Scanned | None:
    """Read a share of the frames of a system, evenly spread; None where they cannot be read.

    Who reads them to train on them says why.
    """
    count = max(1, round(share * system.nframes))
    numbers = np.arange(system.nframes)
    if count < system.nframes:
        numbers = np.unique(np.linspace(0, system.nframes - 1, count).astype(int))
    try:
        frames = system.frames(numbers)
    except DataError:
        return None
    energy = np.full(frames.nframes, np.nan) if frames.energy is None else frames.energy
    if frames.box is not None and not (np.abs(np.linalg.det(frames.box)) > 1e-9).all():
        return Scanned(system, numbers, (), np.zeros((frames.nframes, 6)), energy)
    sentences = [
        *_close_atoms(frames, numbers),
        *_far_energies(frames, numbers),
        *_equal_energies(frames),
        *_large_forces(frames, numbers, system.type_map),
        *_zero_forces(frames, numbers),
        *_asymmetric_virials(frames, numbers),
        *_coarse_positions(frames),
    ]
    return Scanned(system, numbers, tuple(sentences), structure_keys(frames), energy)


def _close_atoms(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    pairs = close_pairs(frames)
    bad = np.flatnonzero(np.isfinite(pairs.distance))
    if len(bad):
        worst = int(pairs.distance.argmin())
        yield (
            f"atoms nearly coincide in {frame_words(numbers[bad])} (frame {numbers[worst]}: "
            f"{pairs.words(worst)}); remove such frames, or see that positions are in Å"
        )


def _far_energies(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    """Energies that frames of the same atoms do not have: placeholders, and those of other structures."""
    if frames.energy is None:
        return
    for rows in _same_atoms(frames):
        rows = rows[frames.present("energy")[rows]]
        if len(rows) < 5:
            continue
        natoms = int((frames.atype[rows[0]] >= 0).sum())
        energy = frames.energy[rows]
        middle = float(np.median(energy))
        distance = np.abs(energy - middle)
        usual = _FAR_TIMES * float(np.median(distance))
        far = distance > np.maximum(usual, _FAR_ENERGY * natoms)
        if frames.force is not None:
            pushed = np.nansum(np.abs(frames.force[rows]), axis=(1, 2))
            far &= ~(distance < _WAY * pushed)
        missing = (energy == 0.0) & (abs(middle) > max(usual, 1.0))
        bad = np.flatnonzero(far | missing)
        if len(bad):
            worst = bad[distance[bad].argmax()]
            good = np.delete(energy, bad)
            usual_words = f"{good.min():.6g} to {good.max():.6g} eV" if len(good) else ""
            yield (
                f"the energy of {frame_words(numbers[rows[bad]])} is {energy[worst]:.6g} eV, that of the other frames "
                f"{usual_words}; remove such frames, or see where the number comes from"
            )


def _same_atoms(frames: Frames) -> list[np.ndarray]:
    """Return the rows of frames with the same numbers of atoms of every type."""
    if (frames.atype == frames.atype[:1]).all():
        return [np.arange(frames.nframes)]
    counts = np.sort(frames.atype, axis=1)
    _, kind = np.unique(counts, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    return [np.flatnonzero(kind == k) for k in range(int(kind.max()) + 1)]


def _equal_energies(frames: Frames) -> Iterator[str]:
    """One energy for all frames, whose forces differ; those of symmetric copies have the same sizes."""
    if frames.energy is None or frames.force is None or frames.nframes < 3:
        return
    if (frames.energy != frames.energy[0]).any():  # the usual case
        return
    if not (frames.present("energy").all() and frames.present("force").all()):
        return
    if len(_same_atoms(frames)) > 1:
        return
    size = np.sqrt((frames.force**2).sum(axis=(1, 2)))
    rounding = 1e-6 * abs(float(frames.energy[0]))
    # Atoms that move by a tenth of an Å gain this energy, many times what float32 rounds off.
    if np.ptp(size) > 0.01 * size.max() and 0.1 * np.ptp(size) > max(1e-3, 10.0 * rounding):
        yield (
            f"the energy is {frames.energy[0]:.6g} eV in all frames, though forces differ; is it of one frame, or a "
            "placeholder?"
        )


def _large_forces(
    frames: Frames, numbers: np.ndarray, names: Sequence[str] | None
) -> Iterator[str]:
    """Find forces that no near atom explains, much larger than the largest ones of other frames."""
    if frames.force is None or not np.nanmax(np.abs(frames.force), initial=0.0) > _LARGE_FORCE / 2:
        return
    size = np.nan_to_num(np.sqrt((frames.force**2).sum(axis=-1)))
    largest = size.max(axis=1, initial=0.0)
    limit = max(_LARGE_FORCE, _FAR_TIMES * float(np.median(largest)))
    suspects = np.flatnonzero(largest > limit)
    bad = []
    for row in suspects.tolist():
        atom = int(size[row].argmax())
        if not _is_pushed(frames, row, atom, names):
            bad.append(row)
    if bad:
        worst = bad[int(largest[bad].argmax())]
        yield (
            f"a force is much too large in {frame_words(numbers[bad])} (frame {numbers[worst]}: "
            f"{largest[worst]:.4g} eV/Å on atom {int(size[worst].argmax())}, which no atom is near enough for; the "
            f"median of the frames' largest forces is {np.median(largest):.3g}); remove such frames"
        )


def _is_pushed(frames: Frames, row: int, atom: int, names: Sequence[str] | None) -> bool:
    """Whether an atom has a neighbour so near that its force may be large."""
    others = np.flatnonzero(frames.atype[row] >= 0)
    others = others[others != atom]
    apart = frames.coord[row, others] - frames.coord[row, atom]
    if frames.box is not None:
        fractions = apart @ np.linalg.inv(frames.box[row])
        apart -= np.round(fractions) @ frames.box[row]
    distance = np.sqrt((apart**2).sum(axis=1))
    limit = np.full(len(others), _PUSHED_DISTANCE)
    if names is not None:
        radii = np.array([COVALENT_RADII.get(name, np.nan) for name in names])
        sums = radii[frames.atype[row, others]] + radii[frames.atype[row, atom]]
        limit = np.where(np.isnan(sums), limit, _PUSHED * sums)
    return bool((distance < limit).any())


def _zero_forces(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    """Frames whose forces are all zero, but not by symmetry."""
    if frames.force is None:
        return
    if (frames.force[:, 0] != 0.0).any(axis=1).all():  # the usual case
        return
    real = (frames.atype >= 0).sum(axis=1)
    zero = np.flatnonzero((frames.force == 0.0).all(axis=(1, 2)) & (real > 1))
    if not len(zero) or (real[zero].max() == 2 and len(zero) == 1):
        return
    looked = zero[:: -(-len(zero) // _MOST_WITHOUT)]
    some = frames.rows(looked.tolist())
    if pairs_to_try(some.natoms, some.box) * len(looked) > MOST_PAIRS:
        return
    uneven = _uneven(some)
    if not uneven.all():
        return
    every = len(zero) == frames.nframes
    where = "all frames" if every and len(zero) > 1 else frame_words(numbers[zero])
    yield (
        f"all forces are zero in {where}, though neighbours pull the atoms; labels without forces must not have "
        "force.npy"
    )


def _uneven(frames: Frames) -> np.ndarray:
    """Return in which frames the neighbours of an atom are not in balance `(nframes,)`."""
    pairs = NearPairs.of(frames)
    pull = pairs.vector / (pairs.distance[:, None] ** 4 + 1e-6)
    size = np.sqrt((pull**2).sum(axis=1))
    net = np.zeros((frames.nframes, frames.natoms, 3))
    np.add.at(net, (pairs.frame, pairs.i), pull)
    np.add.at(net, (pairs.frame, pairs.j), -pull)
    largest = np.zeros(frames.nframes)
    np.maximum.at(largest, pairs.frame, size)
    return np.asarray(
        np.sqrt((net**2).sum(axis=-1)).max(axis=1, initial=0.0) > _SYMMETRIC * largest + 1e-12
    )


def _asymmetric_virials(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    if frames.virial is None:
        return
    virial = np.nan_to_num(frames.virial).reshape(-1, 3, 3)
    odd = np.abs(virial - virial.transpose(0, 2, 1)).max(axis=(1, 2))
    bad = np.flatnonzero(odd > _ASYMMETRIC * np.abs(virial).max())
    if len(bad):
        where = "all frames" if len(bad) == frames.nframes > 1 else frame_words(numbers[bad])
        yield (
            f"the virial is not symmetric in {where} (by up to {odd.max():.3g} eV); its nine numbers are xx, xy, xz, "
            "yx, …, zz"
        )


def _coarse_positions(frames: Frames) -> Iterator[str]:
    """Positions that float16 holds: at 8 Å its numbers are 0.008 Å apart."""
    values = frames.coord[:20][frames.atype[:20] >= 0][:1000].ravel()
    if np.abs(values).max(initial=0.0) > 6e4 or (values.astype(np.float16) != values).any():
        return
    values = np.unique(values[values % (1.0 / _SIMPLE) != 0.0])
    if len(values) >= _FEWEST_VALUES:
        step = float(np.spacing(np.float16(np.abs(values).max())))
        yield (
            f"positions are rounded as float16 rounds them, to {step:.2g} Å; write them as float32 or float64, and "
            "label what was written"
        )


# -- frames that repeat --------------------------------------------------------------------------------------------


def repeated_frames(scanned: Sequence[Scanned]) -> list[str]:
    """Name structures that occur many times in a system, or with other energies anywhere in the data."""
    frames = _AllFrames.of([one for one in scanned if len(one.numbers)])
    copies: list[str] = []
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for looked, group in enumerate(frames.groups()):
        if looked == _MOST_GROUPS:
            break
        low, high = frames.extremes(group)
        if frames.contradict(low, high):
            same = frames.verified(low, group)
            if high in same:
                pairs.setdefault((int(frames.owner[low]), int(frames.owner[high])), []).append(
                    (low, high)
                )
        of_first = group[frames.owner[group] == frames.owner[group[0]]]
        system = frames.systems[frames.owner[group[0]]]
        total = np.count_nonzero(frames.owner == frames.owner[group[0]])
        if system.natoms > 1 and len(of_first) >= max(_COPIES, _SHARE * total):
            same = np.sort(frames.verified(of_first[0], of_first))
            if len(same) >= _COPIES and frames.equal_energies(same):
                copies.append(
                    f"{system.name}: {frame_words(frames.number[same])} are copies of one structure; one is enough"
                )
    return copies + [frames.contradiction(found) for found in pairs.values()]


@dataclass(frozen=True)
class _AllFrames:
    """The frames of all scanned systems in one row; rows are numbered over all of them."""

    systems: list[System]
    owner: np.ndarray  # (nframes,): number of the system
    number: np.ndarray  # (nframes,): of the frame in its system
    keys: np.ndarray  # (nframes, 6)
    energy: np.ndarray  # (nframes,) [eV]; NaN without

    @classmethod
    def of(cls, scanned: Sequence[Scanned]) -> _AllFrames:
        counts = [len(one.numbers) for one in scanned]
        return cls(
            [one.system for one in scanned],
            np.repeat(np.arange(len(scanned)), counts),
            np.concatenate([np.zeros(0, dtype=int), *(one.numbers for one in scanned)]),
            np.concatenate([np.zeros((0, 6)), *(one.keys for one in scanned)]),
            np.concatenate([np.zeros(0), *(one.energy for one in scanned)]),
        )

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the rows of each group of frames with the same keys; frames without keys are left out."""
        within = np.array([tolerance(system.natoms) for system in self.systems])[self.owner][
            :, None
        ]
        order = np.lexsort(np.round(self.keys / (8.0 * within)).T[::-1])
        apart = np.abs(np.diff(self.keys[order], axis=0))
        same = (apart <= 2.0 * within[order[1:]]).all(axis=1) & self.keys[order[1:]].any(axis=1)
        starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else order
        for rows in np.split(order, starts[1:]):
            if len(rows) > 1:
                yield np.sort(rows)

    def extremes(self, group: np.ndarray) -> tuple[int, int]:
        """Return the rows of a group with the lowest and the highest energy; its first row twice without energies."""
        known = group[np.isfinite(self.energy[group])]
        if not len(known):
            return int(group[0]), int(group[0])
        energy = self.energy[known]
        return int(known[energy.argmin()]), int(known[energy.argmax()])

    def equal_energies(self, rows: np.ndarray) -> bool:
        """Whether energies differ by rounding at most: those of other spins or charges differ more."""
        energy = self.energy[rows][np.isfinite(self.energy[rows])]
        return not len(energy) or bool(np.ptp(energy) <= _EQUAL * (1.0 + np.abs(energy).max()))

    def contradict(self, low: int, high: int) -> bool:
        """Whether two energies of one structure are too far apart; parameters, such as a charge, may explain that."""
        pair = [self.systems[self.owner[row]] for row in (low, high)]
        limit = max(_CONTRADICTION, _OF_ATOM * pair[0].natoms)
        apart = self.energy[high] - self.energy[low]
        return bool(apart > limit) and not any(system.has_other_inputs for system in pair)

    def verified(self, first: int, group: np.ndarray) -> np.ndarray:
        """Return the frames of a group, some of many, that are the same structure as `first`, which is among them."""
        rows = [first, *(row for row in group.tolist() if row != first)][:_MOST_VERIFIED]
        parts = [self.systems[self.owner[row]].structures([int(self.number[row])]) for row in rows]
        shapes = {(part.natoms, part.box is None) for part in parts}
        if len(shapes) > 1:
            return np.array(rows[:1])
        same: np.ndarray = np.array(rows)[same_structure(Frames.concatenate(parts))]
        return same

    def contradiction(self, pairs: Sequence[tuple[int, int]]) -> str:
        """Say which frames of two systems, or of one, have other energies for the same structures."""
        low, high = np.array(sorted(pairs)).T
        first, second = self.systems[self.owner[low[0]]], self.systems[self.owner[high[0]]]
        place = "" if first is second else f" of {second.name}"
        apart = float(np.median(self.energy[high] - self.energy[low]))
        one = len(low) == 1
        return (
            f"{first.name}: {frame_words(self.number[low])} {'is' if one else 'are'} the same structure"
            f"{'' if one else 's'} as {frame_words(self.number[high])}{place}, but their energies are {apart:.4g} eV "
            "apart; are method, reference and charge the same?"
        )
