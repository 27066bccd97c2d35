"""Frames that stand out from others of their system, and frames that repeat, in one pass.

All frames are read where the data are small, else an even share of them. What is wrong in every
frame is left to the checks of units, signs and labels (`labels`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data.checks.close_atoms import close_pairs
from deepmd_muon.data.checks.near_pairs import MOST_PAIRS, NearPairs, pairs_to_try
from deepmd_muon.data.checks.structures import same_structure, structure_keys, tolerance
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import Frames, evenly_spread, nearest_images
from deepmd_muon.data.system import System

# Atoms of all frames that are read, frames, and systems, at most: 0.06 s of work, of which each
# system takes 0.3 ms.
_ATOMS = 1 << 16
_FRAMES = 1 << 14
_SYSTEMS = 128
# Energies per atom [eV] so far from the median of other frames, and so many times as far as the
# median frame, are not energies of the same atoms: the cohesive energy of tungsten is 8.9 eV.
_FAR_ENERGY = 10.0
_FAR_TIMES = 20.0  # large forces are so many times the median force, too
# Forces that do so much work on their atoms along this way explain a high energy [Å].
_WAY = 2.0
# A force this large [eV/Å] needs an atom nearer than this share of the sum of covalent radii.
_LARGE_FORCE = 100.0
_PUSHED = 0.75
# Without known radii an atom this near explains a force [Å].
_PUSHED_DISTANCE = 1.0
# Forces are zero by symmetry if the pulls of neighbours add up to less than this share of the
# largest pull.
_SYMMETRIC = 1e-3
# Most frames without forces that are looked at for symmetry.
_MOST_WITHOUT = 4
# Share of the largest virial by which it may differ from its transpose.
_ASYMMETRIC = 0.05
# Energies of the same structure differ by less than this [eV], and less than this for each atom.
_CONTRADICTION = 0.2
_CONTRADICTION_PER_ATOM = 0.005
# Copies of one frame are named if there are so many, and this share of the frames of the system.
_COPIES = 5
_COPIED_SHARE = 0.1
# Energies of copies differ by less than this share.
_EQUAL = 1e-6
# Groups of equal frames that are looked at, and frames of each, at most.
_MOST_GROUPS = 200
_MOST_VERIFIED = 64
# Coordinates of float16: at least so many values that are no multiples of 1 / _SIMPLE, as sites of
# crystals are.
_FEWEST_VALUES = 60
_SIMPLE = 64


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
    scanned = chosen_systems(systems)
    atoms = sum(system.natoms * system.nframes for system in scanned)
    frames = sum(system.nframes for system in scanned)
    return min(1.0, _ATOMS / max(1, atoms), _FRAMES / max(1, frames))


def chosen_systems(systems: Sequence[System]) -> Sequence[System]:
    """Return the systems that are scanned: all, or an even share of very many."""
    if len(systems) <= _SYSTEMS:
        return systems
    return [systems[k] for k in evenly_spread(len(systems), _SYSTEMS)]


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # labels may be absurdly large
def scan(system: System, share: float) -> Scanned | None:
    """Read a share of the frames of a system, evenly spread.

    Return None if they cannot be read: training reads them again, and says why.
    """
    count = max(1, round(share * system.nframes))
    numbers = evenly_spread(system.nframes, count)
    try:
        frames = system.frames(numbers)
    except DataError:
        return None
    energy = np.full(frames.nframes, np.nan) if frames.energy is None else frames.energy
    if frames.box is not None and not (np.abs(np.linalg.det(frames.box)) > 1e-9).all():
        no_keys = np.zeros((frames.nframes, 6))
        return Scanned(system, numbers, sentences=(), keys=no_keys, energy=energy)
    sentences = (
        *_close_atoms(frames, numbers),
        *_far_energies(frames, numbers),
        *_equal_energies(frames),
        *_large_forces(frames, numbers, system.type_map),
        *_zero_forces(frames, numbers),
        *_asymmetric_virials(frames, numbers),
        *_coarse_positions(frames),
    )
    return Scanned(system, numbers, sentences, structure_keys(frames), energy)


def _close_atoms(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    pairs = close_pairs(frames)
    close = np.flatnonzero(np.isfinite(pairs.distance))
    if len(close):
        worst = int(pairs.distance.argmin())
        yield (
            f"atoms nearly coincide in {frame_words(numbers[close])} (frame {numbers[worst]}: "
            f"{pairs.words(worst)}); remove such frames, or see that positions are in Å"
        )


def _far_energies(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    """Find energies that these atoms do not have: placeholders, or of other structures."""
    if frames.energy is None:
        return
    for same_atoms in _same_atoms(frames):
        rows = same_atoms[frames.present("energy")[same_atoms]]
        if len(rows) < 5:
            continue
        natoms = int((frames.atype[rows[0]] >= 0).sum())
        energy = frames.energy[rows]
        median = float(np.median(energy))
        distance = np.abs(energy - median)
        usual = _FAR_TIMES * float(np.median(distance))
        is_far = distance > np.maximum(usual, _FAR_ENERGY * natoms)
        if frames.force is not None:
            total_force = np.nansum(np.abs(frames.force[rows]), axis=(1, 2))
            is_far &= ~(distance < _WAY * total_force)
        is_missing = (energy == 0.0) & (abs(median) > max(usual, 1.0))
        wrong = np.flatnonzero(is_far | is_missing)
        if len(wrong):
            worst = wrong[distance[wrong].argmax()]
            usual_energies = np.delete(energy, wrong)
            usual_words = ""
            if len(usual_energies):
                usual_words = f"{usual_energies.min():.6g} to {usual_energies.max():.6g} eV"
            yield (
                f"the energy of {frame_words(numbers[rows[wrong]])} is {energy[worst]:.6g} eV, "
                f"that of the other frames {usual_words}; remove such frames, or see where the "
                "number comes from"
            )


def _same_atoms(frames: Frames) -> list[np.ndarray]:
    """Return the rows of frames with the same numbers of atoms of every type."""
    if (frames.atype == frames.atype[:1]).all():
        return [np.arange(frames.nframes)]
    sorted_types = np.sort(frames.atype, axis=1)
    _, kind = np.unique(sorted_types, axis=0, return_inverse=True)
    kind = kind.reshape(-1)  # numpy 2.0 returns (nframes, 1)
    return [np.flatnonzero(kind == k) for k in range(int(kind.max()) + 1)]


def _equal_energies(frames: Frames) -> Iterator[str]:
    """Find one energy for all frames though forces differ.

    Forces of symmetric copies differ, too, but have the same sizes.
    """
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
            f"the energy is {frames.energy[0]:.6g} eV in all frames, though forces differ; is it "
            "of one frame, or a placeholder?"
        )


def _large_forces(
    frames: Frames, numbers: np.ndarray, names: Sequence[str] | None
) -> Iterator[str]:
    """Find forces that no near atom explains, much larger than the largest ones of other frames."""
    if frames.force is None or not np.nanmax(np.abs(frames.force), initial=0.0) > _LARGE_FORCE / 2:
        return
    size = np.nan_to_num(np.sqrt((frames.force**2).sum(axis=-1)))  # (nframes, natoms)
    largest = size.max(axis=1, initial=0.0)
    median = np.median(largest)
    limit = max(_LARGE_FORCE, _FAR_TIMES * float(median))
    wrong = [
        row
        for row in np.flatnonzero(largest > limit).tolist()
        if not _is_pushed(frames, row, int(size[row].argmax()), names)
    ]
    if wrong:
        worst = wrong[int(largest[wrong].argmax())]
        yield (
            f"a force is much too large in {frame_words(numbers[wrong])} (frame {numbers[worst]}: "
            f"{largest[worst]:.4g} eV/Å on atom {int(size[worst].argmax())}, which no atom is near "
            f"enough for; the median of the frames' largest forces is {median:.3g}); remove such "
            "frames"
        )


def _is_pushed(frames: Frames, row: int, atom: int, names: Sequence[str] | None) -> bool:
    """Whether an atom has a neighbour so near that its force may be large."""
    neighbors = np.flatnonzero(frames.atype[row] >= 0)
    neighbors = neighbors[neighbors != atom]
    apart = frames.coord[row, neighbors] - frames.coord[row, atom]
    if frames.box is not None:
        apart = nearest_images(apart, frames.box[row])
    distance = np.sqrt((apart**2).sum(axis=1))
    limit = np.full(len(neighbors), _PUSHED_DISTANCE)
    if names is not None:
        radii = np.array([COVALENT_RADII.get(name, np.nan) for name in names])
        sums = radii[frames.atype[row, neighbors]] + radii[frames.atype[row, atom]]
        limit = np.where(np.isnan(sums), limit, _PUSHED * sums)
    return bool((distance < limit).any())


def _zero_forces(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    """Find frames with forces that are all zero, but not by symmetry."""
    if frames.force is None:
        return
    if (frames.force[:, 0] != 0.0).any(axis=1).all():  # the usual case
        return
    natoms = (frames.atype >= 0).sum(axis=1)
    zero = np.flatnonzero((frames.force == 0.0).all(axis=(1, 2)) & (natoms > 1))
    # Two atoms in one frame may well be at their minimum.
    if not len(zero) or (natoms[zero].max() == 2 and len(zero) == 1):
        return
    rows = zero[:: -(-len(zero) // _MOST_WITHOUT)]
    looked_at = frames.rows(rows.tolist())
    if pairs_to_try(looked_at.natoms, looked_at.box) * len(rows) > MOST_PAIRS:
        return
    if not _are_pulled(looked_at).all():
        return
    in_all = len(zero) == frames.nframes > 1
    where = "all frames" if in_all else frame_words(numbers[zero])
    yield (
        f"all forces are zero in {where}, though neighbours pull the atoms; labels without forces "
        "must not have force.npy"
    )


def _are_pulled(frames: Frames) -> np.ndarray:
    """Return in which frames the pulls on an atom, 1 / r³ of each neighbour, are not in balance."""
    pairs = NearPairs.of(frames)
    pull = pairs.vector / (pairs.distance[:, None] ** 4 + 1e-6)
    size = np.sqrt((pull**2).sum(axis=1))
    net = np.zeros((frames.nframes, frames.natoms, 3))
    np.add.at(net, (pairs.frame, pairs.i), pull)
    np.add.at(net, (pairs.frame, pairs.j), -pull)
    largest_pull = np.zeros(frames.nframes)
    np.maximum.at(largest_pull, pairs.frame, size)
    largest_net = np.sqrt((net**2).sum(axis=-1)).max(axis=1, initial=0.0)
    return np.asarray(largest_net > _SYMMETRIC * largest_pull + 1e-12)


def _asymmetric_virials(frames: Frames, numbers: np.ndarray) -> Iterator[str]:
    if frames.virial is None:
        return
    virial = np.nan_to_num(frames.virial).reshape(-1, 3, 3)
    asymmetry = np.abs(virial - virial.transpose(0, 2, 1)).max(axis=(1, 2))
    wrong = np.flatnonzero(asymmetry > _ASYMMETRIC * np.abs(virial).max())
    if len(wrong):
        in_all = len(wrong) == frames.nframes > 1
        where = "all frames" if in_all else frame_words(numbers[wrong])
        yield (
            f"the virial is not symmetric in {where} (by up to {asymmetry.max():.3g} eV); its nine "
            "numbers are xx, xy, xz, yx, …, zz"
        )


def _coarse_positions(frames: Frames) -> Iterator[str]:
    """Find positions that float16 holds: at 8 Å its numbers are 0.008 Å apart."""
    values = frames.coord[:20][frames.atype[:20] >= 0][:1000].ravel()
    # float16 ends at 65,504.
    if np.abs(values).max(initial=0.0) > 6e4 or (values.astype(np.float16) != values).any():
        return
    values = np.unique(values[values % (1.0 / _SIMPLE) != 0.0])
    if len(values) >= _FEWEST_VALUES:
        step = float(np.spacing(np.float16(np.abs(values).max())))
        yield (
            f"positions are rounded as float16 rounds them, to {step:.2g} Å; write them as float32 "
            "or float64, and label what was written"
        )


# ----- frames that repeat ------------------------------------------------------------------------


# Header words that a sentence names.
_MOST_WORDS = 5


def repeated_frames(scanned: Sequence[Scanned]) -> list[str]:
    """Name structures that occur many times in a system, or with other energies anywhere."""
    frames = _AllFrames.of([scan for scan in scanned if len(scan.numbers)])
    copies: list[str] = []
    # Rows with different energies for one structure, by the numbers of their systems.
    contradictions: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for group in itertools.islice(frames.groups(), _MOST_GROUPS):
        low, high = frames.extremes(group)
        if frames.contradict(low, high) and high in frames.verified(low, group):
            owners = (int(frames.owner[low]), int(frames.owner[high]))
            contradictions.setdefault(owners, []).append((low, high))
        copies += frames.copies(group)
    return copies + [frames.contradiction(rows) for rows in contradictions.values()]


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
        counts = [len(scan.numbers) for scan in scanned]
        # The empty arrays are for no systems.
        return cls(
            systems=[scan.system for scan in scanned],
            owner=np.repeat(np.arange(len(scanned)), counts),
            number=np.concatenate([np.zeros(0, dtype=int), *(scan.numbers for scan in scanned)]),
            keys=np.concatenate([np.zeros((0, 6)), *(scan.keys for scan in scanned)]),
            energy=np.concatenate([np.zeros(0), *(scan.energy for scan in scanned)]),
        )

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the rows of each group of frames with the same keys that are not zero."""
        tolerances = np.array([tolerance(system.natoms) for system in self.systems])
        within = tolerances[self.owner][:, None]
        # Sort by coarse keys, then cut where neighbours in this order differ.
        order = np.lexsort(np.round(self.keys / (8.0 * within)).T[::-1])
        steps = np.abs(np.diff(self.keys[order], axis=0))
        is_same = (steps <= 2.0 * within[order[1:]]).all(axis=1)
        is_same &= self.keys[order[1:]].any(axis=1)
        cuts = np.flatnonzero(~is_same) + 1
        for rows in np.split(order, cuts):
            if len(rows) > 1:
                yield np.sort(rows)

    def extremes(self, group: np.ndarray) -> tuple[int, int]:
        """Return the rows of a group with the lowest and the highest energy.

        Without energies they are its first row twice.
        """
        labeled = group[np.isfinite(self.energy[group])]
        if not len(labeled):
            return int(group[0]), int(group[0])
        energy = self.energy[labeled]
        return int(labeled[energy.argmin()]), int(labeled[energy.argmax()])

    def copies(self, group: np.ndarray) -> list[str]:
        """Say if many frames of the first system of a group are copies of one structure."""
        owner = self.owner[group[0]]
        system = self.systems[owner]
        of_system = group[self.owner[group] == owner]
        nframes = np.count_nonzero(self.owner == owner)
        if system.natoms <= 1 or len(of_system) < max(_COPIES, _COPIED_SHARE * nframes):
            return []
        same = np.sort(self.verified(of_system[0], of_system))
        if len(same) < _COPIES or not self._equal_energies(same):
            return []
        words = frame_words(self.number[same])
        return [f"{system.name}: {words} are copies of one structure; one is enough"]

    def _equal_energies(self, rows: np.ndarray) -> bool:
        """Whether energies differ by rounding at most: other spins or charges change them more."""
        energy = self.energy[rows]
        energy = energy[np.isfinite(energy)]
        return not len(energy) or bool(np.ptp(energy) <= _EQUAL * (1.0 + np.abs(energy).max()))

    def contradict(self, low: int, high: int) -> bool:
        """Whether two energies of one structure are too far apart.

        Further inputs of a system, such as a charge, may explain that.
        """
        pair = [self.systems[self.owner[row]] for row in (low, high)]
        limit = max(_CONTRADICTION, _CONTRADICTION_PER_ATOM * pair[0].natoms)
        gap = self.energy[high] - self.energy[low]
        return bool(gap > limit) and not any(system.has_other_inputs for system in pair)

    def verified(self, row: int, group: np.ndarray) -> np.ndarray:
        """Return the rows of a group that have the structure of `row`, which is among them.

        Of a large group, only some rows are compared.
        """
        rows = [row, *(r for r in group.tolist() if r != row)][:_MOST_VERIFIED]
        frames = [self.systems[self.owner[r]].structures([int(self.number[r])]) for r in rows]
        shapes = {(frame.natoms, frame.box is None) for frame in frames}
        if len(shapes) > 1:
            return np.array(rows[:1])
        same: np.ndarray = np.array(rows)[same_structure(Frames.concatenate(frames))]
        return same

    def contradiction(self, pairs: Sequence[tuple[int, int]]) -> str:
        """Say which frames of one or two systems have other energies for the same structures."""
        low, high = np.array(sorted(pairs)).T
        low_system = self.systems[self.owner[low[0]]]
        high_system = self.systems[self.owner[high[0]]]
        place = "" if low_system is high_system else f" of {high_system.name}"
        gap = float(np.median(self.energy[high] - self.energy[low]))
        are_the_same = "is the same structure as" if len(low) == 1 else "are the same structures as"
        return (
            f"{low_system.name}: {frame_words(self.number[low])} {are_the_same} "
            f"{frame_words(self.number[high])}{place}, but their energies are {gap:.4g} eV apart; "
            f"{self._cause(low[0], high[0])}"
        )

    def _cause(self, low: int, high: int) -> str:
        """Say what the headers of two frames differ in, else ask."""
        words, other_words = (
            self.systems[self.owner[row]].origin(int(self.number[row])).words or {}
            for row in (low, high)
        )
        differing = [
            f"{name} ({words.get(name, 'none')} and {other_words.get(name, 'none')})"
            for name in sorted({*words, *other_words})
            if words.get(name) != other_words.get(name)
        ]
        if not differing:
            return "are method, reference and charge the same?"
        return (
            f"their headers differ in {', '.join(differing[:_MOST_WORDS])}: name numbers of this kind "
            "in frame_parameters, or keep frames of one kind"
        )
