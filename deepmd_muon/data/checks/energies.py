"""Signs of energies that do not follow from the forces of a sample.

Two measures of the change of energy exist: the work −F·dx between near frames, and the energies of
a pair potential that was fitted to the forces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.pair_fit import PairFit
from deepmd_muon.data.checks.positions import closest_atoms
from deepmd_muon.data.checks.sample import FEWEST_COMPARED, HARDLY_MOVED, Sample
from deepmd_muon.data.checks.units import ENERGY_UNITS, POSITION_UNITS, explain
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.frames import Frames, nearest_images

#: Labels are compared with what forces imply if their correlation is at least this.
CORRELATED = 0.8
#: Labels have nothing to do with what forces imply if the correlation is less than this.
UNCORRELATED = 0.5
#: Factors of good labels over what forces imply lie between 0.7 and 1.4.
FACTORS = (0.6, 1.7)
#: A potential that explains less of the forces than this says nothing about energies and virials.
TELLING = 0.3
# Fewest values that are correlated.
_FEWEST_VALUES = 6

# Factors of good energies over the energies of the pair potential, which are 1.8 times too large
# for water between oxides.
_FACTORS_OF_FIT = (0.4, 1.7)
# The same if the potential explains less of the forces than `_SURE`; its energies are 1.9 times too
# small for phases of GeTe.
_WIDE_FACTORS = (0.4, 2.2)
_SURE = 0.85

# −F·dx is the change of energy between frames whose atoms have moved less than this [Å, root mean
# square], and whose forces differ by less than this share of the square of their sum (0.1: by 0.6
# of their mean). It is so as well if atoms hardly move, whatever their forces do.
_NEAR = 0.25
_LIKE = 0.1
# Work below this [eV], or below this share of the total energy, may be noise of the labels: float32
# rounds by 6e-8.
_NOISE = 5e-3
_ROUNDING = 5e-7

# Energies that follow from the forces correlate by 0.95 or more with a pair potential that explains
# so much of the forces of all frames together and of each: where bonds break, it may miss some
# frames. Energies of other frames correlate by chance alone.
_EXPLAINED = 0.965
_EXPLAINED_IN_EACH = 0.9
_FEWEST_FRAMES = 10
# Energies that change by less than this share of the work of the forces are constant. Units make
# energies smaller, too, but not by as much as the second number.
_CONSTANT = 0.2
_CONSTANT_FACTOR = 0.02

# Frames fall into two groups if each has so many, and if the gap between them is so many times
# their width and at least this large [eV].
_FEWEST_OF_GROUP = 3
_GAP_OVER_WIDTH = 6.0
_LEAST_GAP = 0.1
# Rounds in which the groups and the work of the pressure are fitted.
_ROUNDS = 5
# A gap of so many standard deviations of the implied energies stands out even if a pair potential
# explains only so much of the forces of all frames and of each, as in water.
_LARGE_GAP = 3.0
_LARGE_EXPLAINED = 0.85
_LARGE_EXPLAINED_IN_EACH = 0.75


@dataclass(frozen=True)
class Work:
    """Work of the forces between near frames and the change of the energy label."""

    i: np.ndarray  # (npairs,): frames
    j: np.ndarray  # (npairs,)
    implied: np.ndarray  # (npairs,): −F·dx from i to j [eV]
    label: np.ndarray  # (npairs,): change of the label [eV]
    noise: float  # of the labels [eV]

    @classmethod
    def of(cls, frames: Frames) -> Work:
        """Compare near frames of the same atoms; none without energies or forces."""
        if not (frames.present("energy").all() and frames.present("force").all()):
            none = np.zeros(0)
            return cls(none.astype(int), none.astype(int), none, none, 0.0)
        assert frames.energy is not None
        assert frames.force is not None
        i, j, displacements = _near_frames(frames)
        implied = -0.5 * ((frames.force[i] + frames.force[j]) * displacements).sum(axis=(1, 2))
        noise = max(_NOISE, _ROUNDING * float(np.abs(frames.energy).max()))
        return cls(i, j, implied, frames.energy[j] - frames.energy[i], noise)

    @property
    def tells(self) -> bool:
        """Whether there is enough work, and more than noise."""
        size = np.sqrt((self.implied**2).mean()) if len(self.implied) else 0.0
        return len(self.implied) >= _FEWEST_VALUES and bool(size > self.noise)

    @cached_property
    def comparison(self) -> Comparison:
        """The labels, compared with the work."""
        return compare(self.implied, self.label) if self.tells else Comparison(1.0, 0.0)

    @property
    def agrees(self) -> bool:
        """Whether energies change in proportion to −F·dx: forces belong to the positions then."""
        return self.comparison.correlation >= CORRELATED


class Comparison(NamedTuple):
    """Labels, compared with what forces imply."""

    factor: float  # ratio of their widths, with the sign of the correlation
    correlation: float  # its size; 0 if nothing could be compared


def compare(implied: np.ndarray, label: np.ndarray) -> Comparison:
    """Compare two quantities with a mean of zero."""
    implied_squared = float((implied**2).sum())
    label_squared = float((label**2).sum())
    too_few = len(implied) < _FEWEST_VALUES
    if too_few or not implied_squared > 1e-12 or not label_squared > 1e-24:
        return Comparison(1.0, 0.0)
    product = float((implied * label).sum())
    factor = float(np.copysign(np.sqrt(label_squared / implied_squared), product))
    return Comparison(factor, abs(product) / np.sqrt(implied_squared * label_squared))


def energy_problems(sample: Sample, fit: PairFit, work: Work) -> Iterator[str]:
    """Compare energies with the work of the forces, or with the energies of the pair potential."""
    frames = sample.fitted_frames
    if frames is None or frames.energy is None or not frames.present("energy").all():
        return
    compositions = np.unique(np.sort(frames.atype, axis=1), axis=0)
    if len(compositions) > 1 or sample.system.has_other_inputs:
        return  # other compositions, charges or temperatures have other constants
    implied = _without_volume(fit.energies, frames)
    label = _without_volume(frames.energy, frames)
    factor, correlation = work.comparison
    if not work.agrees and not sample.hardly_moves and fit.explained > TELLING:
        factor, correlation = compare(implied, label)
    natoms = float((frames.atype[0] >= 0).sum())
    # Energies per atom may be as small as the changes of energies that dynamics keep constant.
    is_constant = abs(factor) < min(_CONSTANT_FACTOR, 0.5 / natoms)
    if correlation >= CORRELATED and not is_constant:
        smallest, largest = FACTORS
        if not work.agrees:
            smallest, largest = _FACTORS_OF_FIT if fit.explained > _SURE else _WIDE_FACTORS
        if not smallest <= factor <= largest:
            causes = {**ENERGY_UNITS, "energies per atom": 1 / natoms}
            # Distances between known elements would have shown wrong units of positions before.
            if not np.isfinite(closest_atoms(frames, sample.system.type_map).ratio).any():
                causes |= POSITION_UNITS
            yield explain("energies", "−F·dx", factor, causes)
        return

    fit_tells = (
        not sample.hardly_moves
        and fit.explained > _EXPLAINED
        and fit.least_explained > _EXPLAINED_IN_EACH
        and frames.nframes >= _FEWEST_FRAMES
        and np.sqrt((implied**2).mean()) > work.noise
    )
    groups = None
    if fit_tells or _shows_large_gaps(sample, fit):
        least_gap = _LEAST_GAP if fit_tells else _LARGE_GAP * float(implied.std())
        groups = _two_groups(frames.energy - fit.energies, frames, least_gap)
    if groups is not None:
        numbers = sample.numbers
        yield (
            f"of {len(numbers)} frames looked at, energies of {frame_words(numbers[groups.high])} "
            f"are about {groups.gap:.3g} eV above those of {frame_words(numbers[groups.low])}, "
            "which forces and positions do not explain: are reference, method and charge the same "
            "in all frames?"
        )
        return
    unlike_fit = correlation < UNCORRELATED or label.std() < _CONSTANT * implied.std()
    unlike_work = work.comparison.correlation < UNCORRELATED or is_constant
    if (fit_tells and unlike_fit) or (work.tells and unlike_work):
        yield _unrelated_energies(sample, work, implied, label)


class _Groups(NamedTuple):
    """Two groups of frames with energies that differ by a constant."""

    low: np.ndarray  # rows
    high: np.ndarray
    gap: float  # [eV]


def _shows_large_gaps(sample: Sample, fit: PairFit) -> bool:
    """Whether energies far from those of the pair potential stand out."""
    return (
        not sample.hardly_moves
        and len(sample.numbers) >= FEWEST_COMPARED
        and fit.explained > _LARGE_EXPLAINED
        and fit.least_explained > _LARGE_EXPLAINED_IN_EACH
    )


def _two_groups(rest: np.ndarray, frames: Frames, least_gap: float) -> _Groups | None:
    """Split frames into two groups with energies that differ by a constant; None unless they do.

    The work of the pressure is fitted together with the constant.

    Parameters
    ----------
    rest
        Energies less those that the forces imply `(nframes,)` [eV].
    frames
        The frames.
    least_gap
        [eV]
    """
    powers = _volume_powers(frames)
    constants = np.zeros(len(rest))
    for _ in range(_ROUNDS):
        pressure = powers @ np.linalg.lstsq(powers, rest - constants, rcond=None)[0]
        flat = rest - pressure
        order = np.argsort(flat, kind="stable")
        # Gaps between neighbours in this order that leave enough frames on both sides.
        gaps = np.diff(flat[order])[_FEWEST_OF_GROUP - 1 : 1 - _FEWEST_OF_GROUP]
        if not len(gaps):
            return None
        cut = int(gaps.argmax()) + _FEWEST_OF_GROUP
        low = np.sort(order[:cut])
        high = np.sort(order[cut:])
        gap = float(flat[high].mean() - flat[low].mean())
        constants = np.zeros(len(rest))
        constants[high] = gap
    width = (flat - constants).std()
    if gaps.max() < max(_GAP_OVER_WIDTH * width, least_gap):
        return None
    return _Groups(low, high, gap)


def _unrelated_energies(sample: Sample, work: Work, implied: np.ndarray, label: np.ndarray) -> str:
    """Say that energies do not follow from forces, and name the frames where this shows most."""
    if work.tells:
        worst = int(np.abs(work.label - work.implied).argmax())
        start = frame_words(sample.numbers[[work.i[worst]]])
        end = frame_words(sample.numbers[[work.j[worst]]])
        example = (
            f"from {start} to {end} it changes by {work.label[worst]:.3g} eV, "
            f"−F·dx is {work.implied[worst]:.3g} eV"
        )
        width = work.label.std()
        expected = work.implied.std()
    else:
        worst = int(np.abs(label - implied).argmax())
        difference = label[worst] - implied[worst]
        example = f"it is {difference:.3g} eV off in {frame_words(sample.numbers[[worst]])}"
        width = label.std()
        expected = implied.std()
    if width < _CONSTANT * expected:
        cause = "are they total energies with kinetic energy, which dynamics keep constant?"
    else:
        cause = "are they of other frames, or do they contain kinetic energy?"
    return f"the energy does not follow from forces and positions ({example}): {cause}"


def _near_frames(frames: Frames) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pairs i, j of near frames in the same cell, and the ways of their atoms [Å].

    Near frames have nearly the same positions and forces. The ways are `(npairs, natoms, 3)`.
    """
    i, j = np.triu_indices(frames.nframes, 1)
    displacements = frames.coord[j] - frames.coord[i]
    near = (frames.atype[i] == frames.atype[j]).all(axis=1)
    if frames.box is not None:
        displacements = nearest_images(displacements, frames.box[i])
        near &= np.abs(frames.box[i] - frames.box[j]).max(axis=(1, 2)) < 1e-6
    assert frames.force is not None
    difference = ((frames.force[j] - frames.force[i]) ** 2).sum(axis=(1, 2))
    total = ((frames.force[i] + frames.force[j]) ** 2).sum(axis=(1, 2))
    distance = np.sqrt((displacements**2).sum(axis=-1).mean(axis=-1))
    alike = (difference < _LIKE * total) & (distance < _NEAR)
    near &= alike | (distance < HARDLY_MOVED)
    return i[near], j[near], displacements[near]


def _without_volume(energies: np.ndarray, frames: Frames) -> np.ndarray:
    """Return energies [eV] less a parabola of ln V: forces do not tell the work of the pressure."""
    powers = _volume_powers(frames)
    return np.asarray(energies - powers @ np.linalg.lstsq(powers, energies, rcond=None)[0])


def _volume_powers(frames: Frames) -> np.ndarray:
    """Return powers 0, 1 and 2 of ln V less its mean, (nframes, 3); only 1 for constant V."""
    if frames.box is None:
        return np.ones((frames.nframes, 1))
    volume = np.log(np.abs(np.linalg.det(frames.box)))
    powers = (volume - volume.mean())[:, None] ** np.arange(3)
    return np.asarray(powers if np.ptp(volume) > 1e-6 else powers[:, :1])
