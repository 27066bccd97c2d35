"""Calculators of ASE whose forces and stress are torch's derivatives of an energy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor


class AutogradCalculator(Calculator):
    """Energy, forces and stress; the cell is orthorhombic and longer than twice the cut-off of the energy."""

    implemented_properties: ClassVar[list[str]] = ["energy", "forces", "stress"]

    @abstractmethod
    def energy_of(self, vectors: Tensor, symbols: Sequence[str]) -> Tensor:
        """Return the energy [eV].

        Parameters
        ----------
        vectors
            From each atom to the nearest image of every other [Å], `(natoms, natoms, 3)`. The diagonal is zero.
        symbols
            Elements of the atoms.
        """

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute energy [eV], forces [eV/Å] and stress [eV/Å³]."""
        super().calculate(atoms, properties, system_changes)
        lengths = torch.tensor(self.atoms.cell.lengths())
        positions = torch.tensor(self.atoms.positions).requires_grad_()
        strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        vectors = positions[None, :] - positions[:, None]
        vectors = vectors - lengths * torch.round((vectors / lengths).detach())
        energy = self.energy_of(vectors + vectors @ strain, self.atoms.get_chemical_symbols())
        slope, slope_of_strain = torch.autograd.grad(energy, (positions, strain))
        symmetric = 0.5 * (slope_of_strain + slope_of_strain.mT)
        stress = full_3x3_to_voigt_6_stress((symmetric / self.atoms.get_volume()).numpy())
        self.results = {"energy": energy.item(), "forces": -slope.numpy(), "stress": stress}
