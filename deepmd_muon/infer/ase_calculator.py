"""An ASE calculator, so that a potential runs molecular dynamics, relaxations and everything else ASE has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.predictor import Predictor

try:
    from ase import Atoms
    from ase.calculators.calculator import Calculator, all_changes
    from ase.geometry import complete_cell
    from ase.stress import full_3x3_to_voigt_6_stress
except ImportError as error:
    raise ImportError("DeepPotCalculator needs ASE: install the package ase (3.23 or later)") from error


class DeepPotCalculator(Calculator):
    """Energy [eV], forces [eV/Å], stress [eV/Å³] and atomic energies [eV] of a potential, for ASE.

    A system that is periodic along some axes only is computed in a cell that is widened along the others, so far
    that no atom sees an image there. Stress is for systems with three periodic axes.

    Parameters
    ----------
    model
        A `Predictor`, or the path of a checkpoint.
    device
        Where to compute, when `model` is a path.
    trust
        As in `Predictor`, when `model` is a path.
    **kwargs
        Options of ASE's `Calculator`.
    """

    # ASE declares a list and never changes it.
    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies"]  # noqa: RUF012

    def __init__(
        self,
        model: Predictor | str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        trust: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.predictor = model if isinstance(model, Predictor) else Predictor(model, device=device, trust=trust)
        self._types = {symbol: number for number, symbol in enumerate(self.predictor.type_map)}

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Fill `results`; one evaluation gives everything, so `properties` only says whether stress is missed."""
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms  # the copy that ASE compares with at the next call
        assert atoms is not None
        unknown = sorted(set(atoms.symbols) - self._types.keys())
        if unknown:
            known = ", ".join(self._types)
            raise PredictionInputError(f"the potential knows {known}; these atoms hold {', '.join(unknown)}")
        types = np.array([self._types[symbol] for symbol in atoms.symbols])
        prediction = self.predictor.predict(atoms.positions, self._cell(atoms), types)
        energy = float(prediction.energy[0])
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "forces": prediction.force[0],
            "energies": prediction.atom_energy[0],
        }
        if atoms.pbc.all():
            # Tension is positive in ASE and a negative virial in DeePMD.
            virial = prediction.virial[0].reshape(3, 3)
            stress = -0.5 * (virial + virial.T) / atoms.get_volume()
            self.results["stress"] = full_3x3_to_voigt_6_stress(stress)

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
            cell[axis] *= extent + 2.0 * self.predictor.model.rcut
        return cell
