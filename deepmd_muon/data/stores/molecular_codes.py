"""Frames of Gaussian and ORCA that did not converge: ASE reads them like all others."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ase import Atoms

_NOT_MET = "Convergence criterion not met"
_ENERGY = re.compile(r"SCF Done:.*?=\s*(\S+)")  # [Hartree]
_SAME_ENERGY = 1e-6  # two printed forms of one energy [eV]


def gaussian_convergence(path: str, frames: Sequence[Atoms]) -> list[bool]:
    """Return whether each frame of an output of Gaussian converged.

    ASE does not say which lines a frame comes from, so that energies tell the frames.
    """
    from ase.io.formats import open_with_compression
    from ase.units import Hartree

    failed: list[float] = []
    met = True
    with open_with_compression(path, "rt") as file:
        for line in file:
            if _NOT_MET in line:
                met = False
            elif match := _ENERGY.search(line):
                if not met:
                    failed.append(float(match[1].replace("D", "e")) * Hartree)
                met = True
    return [
        not any(abs(_energy_of(atoms) - energy) < _SAME_ENERGY for energy in failed)
        for atoms in frames
    ]


def orca_convergence(frames: Sequence[Atoms]) -> list[bool]:
    """Return whether each frame of ORCA converged; ASE sets the energy of others to NaN."""
    return [not math.isnan(_energy_of(atoms, absent=0.0)) for atoms in frames]


def _energy_of(atoms: Atoms, absent: float = math.nan) -> float:
    """Return the energy of a frame [eV]."""
    results = getattr(atoms.calc, "results", None) or {}
    energy = results.get("energy")
    return absent if energy is None else float(energy)
