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
    force_mag : ndarray of float64, (nframes, natoms, 3), or None
        Magnetic forces −dE/dspin, of models that read spins; zero for atoms that are not magnetic.
    mask_mag : ndarray of bool, (nframes, natoms), or None
        Which atoms are magnetic.
    """

    energy: np.ndarray
    force: np.ndarray
    virial: np.ndarray
    atom_energy: np.ndarray
    force_mag: np.ndarray | None = None
    mask_mag: np.ndarray | None = None

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
        return Prediction(**{name: values[rows] for name, values in self._arrays().items()})

    @property
    def not_finite(self) -> list[str]:
        """Names of the quantities that hold NaN or infinity."""
        return [name for name, values in self._arrays().items() if not np.isfinite(values).all()]

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the quantities that the model predicts, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in values.items() if array is not None}

    @classmethod
    def concatenate(cls, predictions: Sequence[Prediction]) -> Prediction:
        """Join predictions of one model."""
        arrays = [prediction._arrays() for prediction in predictions]
        return cls(**{name: np.concatenate([x[name] for x in arrays]) for name in arrays[0]})
