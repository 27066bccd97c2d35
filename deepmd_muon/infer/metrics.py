"""Mean absolute and root-mean-square errors that add up exactly over batches and systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data import Frames
from deepmd_muon.infer.prediction import Prediction


@dataclass(frozen=True)
class ErrorSum:
    """Errors of one quantity, kept as sums, so that parts add up to the result of the whole.

    Attributes
    ----------
    absolute, square
        Σ w·|error| and Σ w·error².
    weight
        Σ w: the number of values, or the sum of their weights.
    """

    absolute: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    @classmethod
    def of(cls, error: np.ndarray, weight: np.ndarray | None = None) -> ErrorSum:
        """Sum up an array of errors, each counted once or by its weight."""
        if weight is None:
            return cls(float(np.abs(error).sum()), float(np.square(error).sum()), float(error.size))
        return cls(
            float((weight * np.abs(error)).sum()),
            float((weight * np.square(error)).sum()),
            float(weight.sum()),
        )

    def __add__(self, other: ErrorSum) -> ErrorSum:
        return ErrorSum(
            absolute=self.absolute + other.absolute,
            square=self.square + other.square,
            weight=self.weight + other.weight,
        )

    def __mul__(self, factor: float) -> ErrorSum:
        return ErrorSum(
            absolute=self.absolute * factor,
            square=self.square * factor,
            weight=self.weight * factor,
        )

    @property
    def mae(self) -> float:
        """Mean absolute error; NaN without values."""
        return self.absolute / self.weight if self.weight else float("nan")

    @property
    def rmse(self) -> float:
        """Root-mean-square error; NaN without values."""
        return float(np.sqrt(self.square / self.weight)) if self.weight else float("nan")


@dataclass(frozen=True)
class Quantity:
    """A quantity's row in the report: a title with a place for "MAE" or "RMSE", and its unit."""

    title: str
    unit: str


#: In the order of the report, and in the words of deepmd-kit's.
QUANTITIES = {
    "energy": Quantity("Energy {}", "eV"),
    "energy_per_atom": Quantity("Energy {}/Natoms", "eV"),
    "atomization_per_atom": Quantity("Atomization {}/Natoms", "eV"),
    "force": Quantity("Force  {}", "eV/Å"),
    "force_mag": Quantity("Force spin {}", "eV/uB"),
    "force_weighted": Quantity("Force weighted {}", "eV/Å"),
    "virial": Quantity("Virial {}", "eV"),
    "virial_per_atom": Quantity("Virial {}/Natoms", "eV"),
    "stress": Quantity("Stress {}", "eV/Å³"),
    "atom_energy": Quantity("Atomic ener {}", "eV"),
}

Errors = dict[str, ErrorSum]


def frame_errors(reference: Frames, prediction: Prediction) -> Errors:
    """Return the errors of every quantity that the reference frames have.

    Padding atoms (type −1) count nowhere: neither as force components nor in "per atom".
    """
    real = reference.atype >= 0
    natoms = real.sum(axis=1)
    errors: Errors = {}
    if reference.energy is not None:
        difference = prediction.energy - reference.energy
        errors["energy"] = ErrorSum.of(difference)
        errors["energy_per_atom"] = ErrorSum.of(difference / natoms)
    if reference.force is not None:
        difference = (prediction.force - reference.force)[real]
        errors["force"] = ErrorSum.of(difference)
        if reference.atom_pref is not None:
            weight = np.repeat(reference.atom_pref[real][:, None], 3, axis=1)
            errors["force_weighted"] = ErrorSum.of(difference, weight)
    if reference.force_mag is not None and prediction.force_mag is not None:
        difference = prediction.force_mag - reference.force_mag
        errors["force_mag"] = ErrorSum.of(difference[prediction.mask_mag])
    if reference.virial is not None and reference.box is not None:
        difference = prediction.virial - reference.virial
        errors["virial"] = ErrorSum.of(difference)
        errors["virial_per_atom"] = ErrorSum.of(difference / natoms[:, None])
        errors["stress"] = ErrorSum.of(difference / volumes(reference.box)[:, None])
    if reference.atom_ener is not None:
        errors["atom_energy"] = ErrorSum.of((prediction.atom_energy - reference.atom_ener)[real])
    return errors


def weighted_frame_errors(reference: Frames, prediction: Prediction) -> Errors:
    """Return the errors of frames, each multiplied by the frame's weight in the loss."""
    assert reference.weight is not None
    errors: Errors = {}
    for weight in np.unique(reference.weight):
        rows = np.flatnonzero(reference.weight == weight).tolist()
        alike = frame_errors(reference.rows(rows), prediction.rows(rows))
        weighted = {name: error * float(weight) for name, error in alike.items()}
        errors = add_errors(errors, weighted)
    return errors


def volumes(box: np.ndarray) -> np.ndarray:
    """Return the volume of every cell, (nframes,) [Å³], of `box` (nframes, 3, 3)."""
    return np.asarray(np.abs(np.linalg.det(box)))


def add_errors(total: Errors, part: Mapping[str, ErrorSum]) -> Errors:
    """Return the errors of both together; a quantity may be in only one of them."""
    names = [name for name in QUANTITIES if name in total or name in part]
    return {name: total.get(name, ErrorSum()) + part.get(name, ErrorSum()) for name in names}


def report_lines(errors: Mapping[str, ErrorSum]) -> list[str]:
    """Return the table of errors, one line a figure: `Force  RMSE        : 1.234567e-02 eV/Å`."""
    lines = []
    for name, quantity in QUANTITIES.items():
        if name not in errors:
            continue
        for kind, value in (("MAE", errors[name].mae), ("RMSE", errors[name].rmse)):
            lines.append(f"{quantity.title.format(kind):19s}: {value:e} {quantity.unit}")
    return lines
