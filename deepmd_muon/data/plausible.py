"""Signs of wrong units: distances, energies and forces that no ordinary system has."""

from __future__ import annotations

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

# Shortest distance between atoms [Å]: H2 has 0.74, and nanometres read as Å give about 0.1; in Bohr water has 1.8.
_SHORTEST, _LONGEST = 0.6, 4.0
# Root-mean-square force [eV/Å] and energy per atom [eV]: an all-electron total energy of uranium is 8e5 eV.
_LARGEST_FORCE, _LARGEST_ENERGY = 1e3, 1e6
# Coordinates this many cell lengths outside of the cell are probably in other units than the cell.
_CELLS = 50.0
_FRAMES, _ATOMS = 8, 64


def suspicions(system: System) -> list[str]:
    """Look at some frames of a system and say what suggests wrong units.

    Returns
    -------
    list of str
        One sentence each; empty when nothing looks wrong. Few frames and atoms are looked at, so this takes
        milliseconds.
    """
    frames = system.frames(np.unique(np.linspace(0, system.nframes - 1, _FRAMES).astype(int)))
    found = []
    shortest = min(_shortest_distance(frames, k) for k in range(frames.nframes))
    if shortest < _SHORTEST:
        found.append(f"atoms are {shortest:.3g} Å apart; positions must be in Å (nm would look like this)")
    elif np.isfinite(shortest) and shortest > _LONGEST:
        found.append(f"the closest atoms are {shortest:.3g} Å apart; positions must be in Å")
    if frames.box is not None:
        fractions = np.linalg.solve(frames.box.transpose(0, 2, 1), frames.coord.transpose(0, 2, 1))
        if np.abs(fractions).max() > _CELLS:
            found.append(
                f"atoms lie {np.abs(fractions).max():.0f} cell lengths away from the cell; box and coord must be in Å"
            )
    if frames.force is not None:
        force = np.sqrt(np.nanmean(frames.force**2))
        if force > _LARGEST_FORCE:
            found.append(f"the root-mean-square force is {force:.3g} eV/Å; forces must be in eV/Å")
    if frames.energy is not None:
        energy = np.nanmax(np.abs(frames.energy) / (frames.atype >= 0).sum(axis=1))
        if energy > _LARGEST_ENERGY:
            found.append(f"the energy is {energy:.3g} eV per atom; energies must be in eV")
    return found


def _shortest_distance(frames: Frames, k: int) -> float:
    """Shortest distance [Å] from the first atoms of a frame to all of them, over nearest images; inf of one atom."""
    coord = frames.coord[k][frames.atype[k] >= 0]
    apart = coord[:_ATOMS, None] - coord[None]
    if frames.box is not None:
        cell = frames.box[k]
        apart -= np.round(apart @ np.linalg.inv(cell)) @ cell
    distance = np.sqrt((apart**2).sum(axis=-1))
    distance[np.arange(len(distance)), np.arange(len(distance))] = np.inf
    return float(distance.min(initial=np.inf))
