"""An ASE calculator: molecular dynamics, relaxations and everything else in ASE with a trained potential."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.model_deviation import (
    COLUMNS,
    DeviationSettings,
    common_parameters,
    deviations,
)
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor

try:
    from ase import Atoms
    from ase.calculators.calculator import Calculator, all_changes
    from ase.data import atomic_numbers
    from ase.geometry import complete_cell
    from ase.stress import full_3x3_to_voigt_6_stress
except ImportError as error:
    raise ImportError(
        "DeepPotCalculator needs ASE: install the package ase (3.23 or later)"
    ) from error

Model = Predictor | str | os.PathLike[str]
# The values of every model, under MACE's names (mace/calculators/mace.py of ACEsuit/mace).
_COMMITTEE = ("energy_comm", "forces_comm", "stress_comm")


class DeepPotCalculator(Calculator):
    """Energy [eV], forces [eV/Å], stress [eV/Å³] and atomic energies [eV] of a potential, for ASE.

    A model that reads frame or atomic parameters gets them from `fparam` and `aparam` in `atoms.info`, as in
    deepmd-kit; atomic ones also from an array `aparam` of the atoms; else from the arguments below. Results are
    recomputed when these values change.

    A system that is periodic along some axes only is computed in a cell that is widened along the others until no atom
    has an image within the cut-off there. Only systems with three periodic axes have a stress.

    Several models are a committee. Results are their means, and `results` also has the values of every model under
    MACE's names, and their disagreement under the names of `model_devi.out` and by deepmd-kit's definitions
    (`deepmd_muon.infer.model_deviation`; standard deviations divide by the number of models):

    - `energy_comm` (nmodels,) [eV], `forces_comm` (nmodels, natoms, 3) [eV/Å], `stress_comm` (nmodels, 6) [eV/Å³];
    - `devi_f` (natoms,): standard deviation of the force on each atom, the square root of the summed variances of its
      components [eV/Å]; `max_devi_f`, `min_devi_f` and `avg_devi_f`, its largest, smallest and mean value;
    - `max_devi_v`, `min_devi_v`, `avg_devi_v`: largest, smallest and root mean square standard deviation of the nine
      components of the virial [eV/atom];
    - `devi_e`: standard deviation of the energy [eV/atom].

    Parameters
    ----------
    model
        A `Predictor`, or the path of a checkpoint or frozen file; several of them in a list for a committee.
    device
        Where to compute, when `model` is a path.
    trust
        As in `Predictor`, when `model` is a path.
    fparam, aparam
        Frame parameters (numb_fparam,) and atomic parameters (natoms, numb_aparam) or (numb_aparam,) of atoms that
        carry none.
    **kwargs
        Options of ASE's `Calculator`.
    """

    # ASE declares a list and never changes it.
    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies"]  # noqa: RUF012

    def __init__(
        self,
        model: Model | Sequence[Model],
        *,
        device: str | torch.device | None = None,
        trust: bool = False,
        fparam: ArrayLike | None = None,
        aparam: ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.fparam, self.aparam = fparam, aparam
        self._used: tuple[np.ndarray | None, ...] = ()
        models = [model] if isinstance(model, (Predictor, str, os.PathLike)) else list(model)
        if not models:
            raise PredictionInputError("DeepPotCalculator needs a model; found an empty list")
        self.predictors = [
            one if isinstance(one, Predictor) else Predictor(one, device=device, trust=trust)
            for one in models
        ]
        if len(models) > 1:
            committee = [*_COMMITTEE, "devi_f", *COLUMNS]
            self.implemented_properties = [*type(self).implemented_properties, *committee]

    @property
    def predictor(self) -> Predictor:
        """The first model."""
        return self.predictors[0]

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Fill `results`: one evaluation computes every property, whatever `properties` lists."""
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms  # the copy that ASE compares with at the next call
        assert atoms is not None
        cell = self._cell(atoms)
        self._used = self._given(atoms)
        found = [
            each.predict(atoms.positions, cell, _types(atoms, each), *self._used)
            for each in self.predictors
        ]
        every = {
            "energy": np.stack([prediction.energy[0] for prediction in found]),
            "forces": np.stack([prediction.force[0] for prediction in found]),
        }
        if atoms.pbc.all():
            every["stress"] = np.stack(
                [_stress(prediction, atoms.get_volume()) for prediction in found]
            )
        self.results = {name: values.mean(axis=0) for name, values in every.items()}
        self.results["energy"] = self.results["free_energy"] = float(self.results["energy"])
        self.results["energies"] = np.mean(
            [prediction.atom_energy[0] for prediction in found], axis=0
        )
        if len(found) > 1:
            self.results |= {f"{name}_comm": values for name, values in every.items()}
            (table,), (of_force,) = deviations(found, DeviationSettings())
            self.results |= dict(zip(COLUMNS, table.tolist(), strict=True))
            self.results["devi_f"] = of_force

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Return what has changed since the last calculation, including parameters, which ASE does not compare."""
        changes: list[str] = super().check_state(atoms, tol)
        if self._used and not all(map(_same, self._used, self._given(atoms))):
            changes.append("parameters")
        return changes

    def _given(self, atoms: Atoms) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return frame and atomic parameters, None where the models read none or none are given."""
        wanted = common_parameters(self.predictors)
        fparam = atoms.info.get("fparam", self.fparam) if wanted.fparam else None
        aparam = (
            atoms.info.get("aparam", atoms.arrays.get("aparam", self.aparam))
            if wanted.aparam
            else None
        )
        given = [
            None if values is None else np.array(values, dtype=np.float64)
            for values in (fparam, aparam)
        ]
        return given[0], given[1]

    def _cell(self, atoms: Atoms) -> np.ndarray | None:
        """Return the cell (3, 3) [Å] to compute in, or None without any periodic axis."""
        if not atoms.pbc.any():
            return None
        cell: np.ndarray = np.array(atoms.cell)
        if np.linalg.matrix_rank(cell[atoms.pbc]) < atoms.pbc.sum():
            periodic = " ".join("T" if axis else "F" for axis in atoms.pbc)
            raise PredictionInputError(
                f'these atoms are periodic (pbc="{periodic}"), but the vectors of the cell {cell.tolist()} do not span '
                "the periodic axes: set the cell, or pbc to False"
            )
        if atoms.pbc.all():
            return cell
        cell[~atoms.pbc] = 0.0
        cell = complete_cell(cell)
        # A completed vector is perpendicular to the periodic ones and has length 1.
        for axis in np.flatnonzero(~atoms.pbc):
            extent = np.ptp(atoms.positions @ cell[axis])
            cell[axis] *= extent + 2.0 * max(each.model.rcut for each in self.predictors)
        return cell


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _types(atoms: Atoms, predictor: Predictor) -> np.ndarray:
    """Return the types (natoms,) of atoms as one model numbers them."""
    types: np.ndarray = _kinds(predictor.type_map)[atoms.numbers]
    if (types < 0).any():
        known, unknown = ", ".join(predictor.type_map), sorted(set(atoms[types < 0].symbols))
        raise PredictionInputError(
            f"the potential knows {known}; these atoms hold {', '.join(unknown)}"
        )
    return types


@cache
def _kinds(type_map: tuple[str, ...]) -> np.ndarray:
    """Return the type of every atomic number, −1 for an element that has none."""
    kinds = np.full(max(atomic_numbers.values()) + 1, -1)
    for kind, name in enumerate(type_map):
        if name in atomic_numbers:
            kinds[atomic_numbers[name]] = kind
    return kinds


def _stress(prediction: Prediction, volume: float) -> np.ndarray:
    """Return the stress (6,) [eV/Å³] of a single frame; tension is positive in ASE and a negative virial in DeePMD."""
    virial = prediction.virial[0].reshape(3, 3)
    stress: np.ndarray = full_3x3_to_voigt_6_stress(-0.5 * (virial + virial.T) / volume)
    return stress
