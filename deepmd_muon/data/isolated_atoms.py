"""Energies of free atoms among the frames of data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System


def isolated_energies(systems: Sequence[System], rcut: float) -> dict[str, list[float]]:
    """Return the labelled energies [eV] of isolated atoms by element.

    See `are_isolated`.
    """
    energies: dict[str, list[float]] = {}
    for system in systems:
        if system.natoms > 1 or "energy" not in system.labels or system.type_map is None:
            continue
        frames = system.frames(np.arange(system.nframes))
        alone = are_isolated(frames, rcut)
        assert frames.energy is not None
        for kind, energy in zip(frames.atype[alone, 0], frames.energy[alone], strict=True):
            if np.isfinite(energy):
                energies.setdefault(system.type_map[kind], []).append(float(energy))
    return energies


def are_isolated(frames: Frames, rcut: float) -> np.ndarray:
    """Return which frames are isolated atoms, bool (nframes,).

    An isolated atom is alone in its frame, and its images, if any, are beyond `rcut` [Å]: whatever
    words a file has for such frames ("IsolatedAtom" of MACE's sets), models see nothing else.
    """
    is_single: np.ndarray = (frames.atype >= 0).sum(axis=1) == 1
    if frames.box is None or not is_single.any():
        return is_single
    # Of a skewed cell, images farther than the next may be nearer.
    steps = [step for step in itertools.product(range(-2, 3), repeat=3) if any(step)]
    images = np.einsum("sa,fac->fsc", np.array(steps, dtype=np.float64), frames.box)
    is_isolated: np.ndarray = is_single & (np.linalg.norm(images, axis=2).min(axis=1) > rcut)
    return is_isolated
