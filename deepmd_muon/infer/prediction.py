"""Predictions of a model for frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """Predictions of a model for some frames.

    Attributes
    ----------
    energy : ndarray of float64, (nframes,)
        Total energy [eV].
    force : ndarray of float64, (nframes, natoms, 3)
        Forces [eV/Å]; zero for padding atoms.
    virial : ndarray of float64, (nframes, 9)
        −volume·stress [eV], row-major.
    atom_energy : ndarray of float64, (nframes, natoms)
        Energy of each atom [eV].
    """

    energy: np.ndarray
    force: np.ndarray
    virial: np.ndarray
    atom_energy: np.ndarray

    @classmethod
    def zeros(cls, nframes: int, natoms: int) -> Prediction:
        """Return zeros of all quantities."""
        return cls(
            energy=np.zeros(nframes),
            force=np.zeros((nframes, natoms, 3)),
            virial=np.zeros((nframes, 9)),
            atom_energy=np.zeros((nframes, natoms)),
        )

    def rows(self, rows: slice | Sequence[int]) -> Prediction:
        """Return the predictions of some frames."""
        return Prediction(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def not_finite(self) -> list[str]:
        """Names of the quantities that hold NaN or infinity."""
        return [
            field.name for field in fields(self) if not np.isfinite(getattr(self, field.name)).all()
        ]
