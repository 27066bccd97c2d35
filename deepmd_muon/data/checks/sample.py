"""A sample of the frames of a system, which the checks of positions and labels look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepmd_muon.data.checks.near_pairs import MOST_PAIRS, NearPairs, pairs_to_try
from deepmd_muon.data.checks.pair_fit import PairFit
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

#: Forces with a smaller root mean square may be noise [eV/Å].
SMALL_FORCE = 0.02
#: Atoms that move less than this from frame to frame [Å, root mean square] hardly move. Their
#: forces are what angles and other terms balance, which no pair potential gives: phonons and the
#: ends of relaxations.
HARDLY_MOVED = 0.08
#: Fewest frames of a system that is compared.
FEWEST_COMPARED = 8
# Fewest frames of other systems, and most frames of any.
_FEWEST = 2
_MOST_FRAMES = 20
# Atoms of all frames of a system that is compared, and of others.
_ATOMS_COMPARED = 768
_ATOMS = 192


@dataclass(frozen=True)
class Sample:
    """Some frames of a system."""

    system: System
    frames: Frames
    numbers: np.ndarray  # of the frames in the system (nframes,)
    compared: bool  # whether energies and virials are compared, too, which takes longer

    @classmethod
    def of(cls, system: System, *, compared: bool) -> Sample:
        """Read pairs of consecutive frames, evenly spread."""
        atoms = _ATOMS_COMPARED if compared else _ATOMS
        fewest = FEWEST_COMPARED if compared else _FEWEST
        count = int(np.clip(atoms // system.natoms, fewest, _MOST_FRAMES))
        last = system.nframes - 1
        starts = np.linspace(0, max(last - 1, 0), max(count // 2, 1)).astype(int)
        numbers = np.unique([*starts, *np.minimum(starts + 1, last)])
        return cls(system, system.frames(numbers), numbers, compared)

    @cached_property
    def pairs(self) -> NearPairs | None:
        """Near pairs of `fitted_frames`."""
        frames = self.fitted_frames
        return None if frames is None else NearPairs.of(frames)

    @cached_property
    def fitted_frames(self) -> Frames | None:
        """The frames that the budget of pairs allows; None if one frame has too many pairs."""
        pairs_of_frame = pairs_to_try(self.frames.natoms, self.frames.box)
        count = int(min(MOST_PAIRS // pairs_of_frame, self.frames.nframes))
        return self.frames.rows(slice(0, count)) if count else None

    @cached_property
    def fit(self) -> PairFit | None:
        """The pair potential of the forces; None without enough of them."""
        frames = self.fitted_frames
        if frames is None or self.pairs is None or not len(self.pairs.frame):
            return None
        if not frames.present("force").all():
            return None
        fit = PairFit(frames, self.pairs)
        return fit if fit.enough and self.force > SMALL_FORCE / 10 else None

    @cached_property
    def force(self) -> float:
        """Root-mean-square force [eV/Å]; zero without forces."""
        force = self.frames.force
        if force is None or np.isnan(force).all():
            return 0.0
        return float(np.sqrt(np.nanmean(force**2)))

    @property
    def energy(self) -> float:
        """Largest size of an energy per atom [eV]; zero without energies."""
        energy = self.frames.energy
        if energy is None:
            return 0.0
        natoms = (self.frames.atype >= 0).sum(axis=1)
        return float(np.fmax.reduce(np.abs(energy) / natoms, initial=0.0))  # ignores NaN

    @cached_property
    def hardly_moves(self) -> bool:
        """Whether atoms are nearly at the same places of the cells in all fitted frames."""
        frames = self.fitted_frames
        return frames is not None and _largest_move(frames) < HARDLY_MOVED


def _largest_move(frames: Frames) -> float:
    """Return the largest root-mean-square distance of a frame's atoms from frame 0 [Å].

    Positions are compared as fractions of the cells. Frames with other types have moved far.
    """
    if (frames.atype != frames.atype[:1]).any():
        return np.inf
    displacements = frames.coord - frames.coord[:1]
    if frames.box is not None:
        fractions = fractions_of(frames)
        displacements = fractions - fractions[:1]
        displacements = (displacements - np.round(displacements)) @ frames.box[0]
    displacements = displacements - displacements.mean(axis=1, keepdims=True)
    return float(np.sqrt((displacements**2).sum(axis=-1).mean(axis=-1)).max())


def fractions_of(frames: Frames) -> np.ndarray:
    """Return the positions as fractions of the cells `(nframes, natoms, 3)`."""
    assert frames.box is not None
    columns = np.linalg.solve(frames.box.transpose(0, 2, 1), frames.coord.transpose(0, 2, 1))
    return np.asarray(columns.transpose(0, 2, 1))
