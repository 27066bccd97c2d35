"""Check the stored labels against new calculations: ``python examples/water_xtb/check_labels.py``, about a minute.

Prints, for the first validation frame of a temperature: how well the stored labels are reproduced, how they depend on
tblite's accuracy, and forces and virial against finite differences of the energy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress
from make_data import HERE, LABEL_ACCURACY, TYPE_MAP, XTB_ACCURACY, xtb

DISPLACEMENT = 1e-3  # Å
STRAIN = 1e-3


def calculate(atoms: Atoms, accuracy: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Return energy [eV], forces [eV/Å] and virial [eV] of a calculation from scratch."""
    calculator = xtb(accuracy)
    calculator.calculate(atoms)
    stress = voigt_6_to_full_3x3_stress(calculator.results["stress"])
    return calculator.results["energy"], calculator.results["forces"], -atoms.get_volume() * stress


def numeric_force(atoms: Atoms, atom: int, axis: int) -> float:
    """Return a force component from central differences [eV/Å]."""
    energies = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[atom, axis] += sign * DISPLACEMENT
        energies.append(calculate(moved, LABEL_ACCURACY)[0])
    return -(energies[0] - energies[1]) / (2 * DISPLACEMENT)


def numeric_virial(atoms: Atoms, i: int, j: int) -> float:
    """Return a virial component −dE/dε of symmetric strain from central differences [eV]."""
    energies = []
    for sign in (1, -1):
        strain = np.zeros((3, 3))
        strain[i, j] += 0.5 * sign * STRAIN
        strain[j, i] += 0.5 * sign * STRAIN
        strained = atoms.copy()
        strained.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
        energies.append(calculate(strained, LABEL_ACCURACY)[0])
    return -(energies[0] - energies[1]) / (2 * STRAIN)


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", type=Path, nargs="?", default=HERE / "data" / "valid" / "300K")
    args = parser.parse_args()
    stored = {path.stem: np.load(path)[0] for path in (args.system / "set.000").glob("*.npy")}
    symbols = [TYPE_MAP[t] for t in np.loadtxt(args.system / "type.raw", dtype=int)]
    positions = stored["coord"].astype(float).reshape(-1, 3)
    atoms = Atoms(symbols, positions=positions, cell=stored["box"].reshape(3, 3), pbc=True)
    stored_force, stored_virial = stored["force"].reshape(-1, 3), stored["virial"].reshape(3, 3)
    for accuracy in (XTB_ACCURACY, LABEL_ACCURACY, LABEL_ACCURACY / 10):
        energy, force, virial = calculate(atoms, accuracy)
        print(
            f"accuracy {accuracy:g} against stored, largest differences: "
            f"energy {abs(energy - stored['energy']):.1e} eV, force {np.abs(force - stored_force).max():.1e} eV/Å, "
            f"virial {np.abs(virial - stored_virial).max():.1e} eV"
        )
    for atom, axis in ((0, 0), (1, 1), (5, 2), (30, 0)):
        numeric = numeric_force(atoms, atom, axis)
        print(
            f"force on atom {atom}, {'xyz'[axis]}: stored {stored_force[atom, axis]:.6f}, "
            f"finite difference {numeric:.6f} eV/Å"
        )
    for i, j in ((0, 0), (1, 1), (0, 1), (1, 2)):
        numeric = numeric_virial(atoms, i, j)
        print(
            f"virial {'xyz'[i]}{'xyz'[j]}: stored {stored_virial[i, j]:.5f}, finite difference {numeric:.5f} eV"
        )


if __name__ == "__main__":
    main()
