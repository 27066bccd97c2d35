"""An ASE calculator for trained potentials."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from deepmd_muon.data.elements import types_of_numbers
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
    from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
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

    A model that reads frame or atomic parameters gets them from `fparam`, `charge_spin` and `aparam`
    in `atoms.info`, as in deepmd-kit. Atomic ones may also be an array `aparam` of the atoms. Without
    these, the arguments below are taken. Results are recomputed when the values change. A model that
    reads spins gets them from the array `spin` (natoms, 3); `results["force_mag"]` has −dE/dspin.

    A system that is periodic along some axes only is computed in a cell that is wider along the
    others, so that no atom has an image within the cut-off there. Its stress is a force on an area of
    its own cell, vacuum included, as of other calculators of ASE: a slab needs three cell vectors.

    Several models are a committee. Results are their means. `results` also has the values of every
    model under MACE's names, and their disagreement under the names of `model_devi.out` and by
    deepmd-kit's definitions (`deepmd_muon.infer.model_deviation`; standard deviations divide by the
    number of models):

    - `energy_comm` (nmodels,) [eV], `forces_comm` (nmodels, natoms, 3) [eV/Å], `stress_comm`
      (nmodels, 6) [eV/Å³];
    - `devi_f` (natoms,): standard deviation of the force on each atom, the square root of the
      summed variances of its components [eV/Å]; `max_devi_f`, `min_devi_f` and `avg_devi_f`, its
      largest, smallest and mean value;
    - `max_devi_v`, `min_devi_v`, `avg_devi_v`: largest, smallest and root mean square standard
      deviation of the nine components of the virial [eV/atom];
    - `devi_e`: standard deviation of the energy [eV/atom].

    Parameters
    ----------
    model
        A `Predictor`, or the path of a checkpoint or frozen file; a list of them for a committee.
    device
        Where to compute, when `model` is a path.
    trust
        As in `Predictor`, when `model` is a path.
    fparam, aparam, charge_spin
        Frame parameters (numb_fparam,), atomic parameters (natoms, numb_aparam) or (numb_aparam,),
        and charge and spin (2,), for atoms that carry none.
    **kwargs
        Options of ASE's `Calculator`.
    """

    # ASE declares a list and never changes it.
    implemented_properties = [  # noqa: RUF012
        "energy",
        "free_energy",
        "forces",
        "stress",
        "energies",
    ]

    def __init__(
        self,
        model: Model | Sequence[Model],
        *,
        device: str | torch.device | None = None,
        trust: bool = False,
        fparam: ArrayLike | None = None,
        aparam: ArrayLike | None = None,
        charge_spin: ArrayLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.fparam = fparam
        self.aparam = aparam
        self.charge_spin = charge_spin
        self._used_parameters: dict[str, np.ndarray] = {}  # in the last calculation
        models = [model] if isinstance(model, (Predictor, str, os.PathLike)) else list(model)
        if not models:
            raise PredictionInputError("DeepPotCalculator needs a model; found an empty list")
        self.predictors = [
            model if isinstance(model, Predictor) else Predictor(model, device=device, trust=trust)
            for model in models
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
        parameters = self._parameters(atoms)
        self._used_parameters = parameters
        predictions = [
            predictor.predict(atoms.positions, cell, _types(atoms, predictor), **parameters)
            for predictor in self.predictors
        ]
        committee = {
            "energy": np.stack([prediction.energy[0] for prediction in predictions]),
            "forces": np.stack([prediction.force[0] for prediction in predictions]),
        }
        if atoms.pbc.any() and atoms.cell.rank == 3:
            volume = atoms.get_volume()
            stresses = [_stress(prediction, volume) for prediction in predictions]
            committee["stress"] = np.stack(stresses)
        self.results = {name: values.mean(axis=0) for name, values in committee.items()}
        energy = float(self.results["energy"])
        self.results["energy"] = energy
        self.results["free_energy"] = energy
        atom_energies = [prediction.atom_energy[0] for prediction in predictions]
        self.results["energies"] = np.mean(atom_energies, axis=0)
        magnetic = [x.force_mag[0] for x in predictions if x.force_mag is not None]
        if magnetic:
            self.results["force_mag"] = np.mean(magnetic, axis=0)
        if len(predictions) > 1:
            self.results |= {f"{name}_comm": values for name, values in committee.items()}
            table, force_deviation = deviations(predictions, DeviationSettings())
            self.results |= dict(zip(COLUMNS, table[0].tolist(), strict=True))
            self.results["devi_f"] = force_deviation[0]

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """Return a property of atoms, as ASE's calculators do.

        Raises
        ------
        PropertyNotImplementedError
            When it does not exist; of a stress, the message says why.
        """
        try:
            return super().get_property(name, atoms, allow_calculation)
        except PropertyNotImplementedError as error:
            atoms = atoms or self.atoms
            if name != "stress" or atoms is None:
                raise
            reason = "a molecule has no stress (pbc is False along all axes)"
            if atoms.pbc.any():
                periodic = " ".join("T" if axis else "F" for axis in atoms.pbc)
                reason = (
                    f'pbc="{periodic}" and the cell has volume 0: a stress is a force on an area; '
                    "give the free axes a cell vector, such as atoms.center(vacuum=10, axis=2)"
                )
            raise PropertyNotImplementedError(f"there is no stress: {reason}") from error

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Return the changes since the last calculation.

        They include those of parameters, which ASE does not compare.
        """
        changes: list[str] = super().check_state(atoms, tol)
        used = self._used_parameters
        parameters = self._parameters(atoms)
        same_names = parameters.keys() == used.keys()
        if not same_names or not all(np.array_equal(parameters[name], used[name]) for name in used):
            changes.append("parameters")
        return changes

    def _parameters(self, atoms: Atoms) -> dict[str, np.ndarray]:
        """Return the parameters of atoms that the models read, as far as they have values."""
        needed = common_parameters(self.predictors)
        defaults = {
            "fparam": self.fparam,
            "aparam": atoms.arrays.get("aparam", self.aparam),
            "charge_spin": self.charge_spin,
        }
        parameters = {}
        for name, default in defaults.items():
            values = atoms.info.get(name, default)
            if getattr(needed, name) and values is not None:
                # A copy: a caller may change its array, and `check_state` must notice.
                parameters[name] = np.array(values, dtype=np.float64)
        # Not `atoms.info["spin"]`, which is the spin of all atoms together in many files.
        if needed.spin and atoms.has("spin"):
            parameters["spin"] = np.array(atoms.arrays["spin"], dtype=np.float64)
        return parameters

    def _cell(self, atoms: Atoms) -> np.ndarray | None:
        """Return the cell (3, 3) [Å] to compute in, or None without any periodic axis."""
        if not atoms.pbc.any():
            return None
        cell: np.ndarray = np.array(atoms.cell)
        if np.linalg.matrix_rank(cell[atoms.pbc]) < atoms.pbc.sum():
            periodic = " ".join("T" if axis else "F" for axis in atoms.pbc)
            raise PredictionInputError(
                f'these atoms are periodic (pbc="{periodic}"), but the vectors of the cell '
                f"{cell.tolist()} do not span the periodic axes: set the cell, or pbc to False"
            )
        if atoms.pbc.all():
            return cell
        cell[~atoms.pbc] = 0.0
        cell = complete_cell(cell)
        # A completed vector is perpendicular to the periodic ones and has length 1.
        rcut = max(predictor.model.rcut for predictor in self.predictors)
        for axis in np.flatnonzero(~atoms.pbc):
            extent = np.ptp(atoms.positions @ cell[axis])
            cell[axis] *= extent + 2.0 * rcut
        return cell


def _types(atoms: Atoms, predictor: Predictor) -> np.ndarray:
    """Return the types (natoms,) of atoms as one model numbers them."""
    types: np.ndarray = np.array(types_of_numbers(predictor.type_map))[atoms.numbers]
    if (types < 0).any():
        unknown = sorted(set(atoms[types < 0].symbols))
        raise PredictionInputError(
            f"the potential knows {', '.join(predictor.type_map)}; these atoms hold "
            f"{', '.join(unknown)}"
        )
    return types


def _stress(prediction: Prediction, volume: float) -> np.ndarray:
    """Return the stress of a single frame (6,) [eV/Å³].

    Tension is positive in ASE, and a negative virial in DeePMD.
    """
    virial = prediction.virial[0].reshape(3, 3)
    stress: np.ndarray = full_3x3_to_voigt_6_stress(-0.5 * (virial + virial.T) / volume)
    return stress
