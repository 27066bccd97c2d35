"""Make a tiny data set of copper with ASE's EMT potential, in seconds: ``python examples/cu_emt/make_data.py``.

Needs ASE (the extra ``[examples]``). Three systems, chosen for what they exercise rather than for their physics:

``fcc32``
    cubic supercell of 32 atoms, random strain (off-diagonal too) and displacements;
``triclinic8``
    2×2×2 primitive cells, 4.2 Å high, less than a usual cutoff: an atom neighbours several images of itself;
``cluster13``
    an icosahedron without a cell (``nopbc``): no box, no virial.

The frames are independent random draws, so training and validation share no trajectory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from ase.stress import voigt_6_to_full_3x3_stress

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# examples/ is not a package: the path above must be set before its shared module can be found
from write_system import LabelledSystem, write_all  # noqa: E402

LATTICE_CONSTANT = 3.61  # Å
LARGEST_STRAIN = 0.03
DISPLACEMENTS = (0.03, 0.13)  # Å, range of the standard deviation of a frame's displacements


def perturbed(ideal: Atoms, rng: np.random.Generator) -> Atoms:
    """Return a strained and rattled copy; the width of the displacements is itself random."""
    atoms = ideal.copy()
    if atoms.pbc.any():
        strain = rng.uniform(-LARGEST_STRAIN, LARGEST_STRAIN, (3, 3))
        deformation = np.eye(3) + 0.5 * (strain + strain.T)
        atoms.set_cell(atoms.cell.array @ deformation, scale_atoms=True)
    atoms.positions += rng.uniform(*DISPLACEMENTS) * rng.standard_normal((len(atoms), 3))
    # float32 is what the files hold: labels must belong to the rounded positions
    atoms.positions = atoms.positions.astype(np.float32).astype(np.float64)
    return atoms


def labelled_system(ideal: Atoms, frames: int, rng: np.random.Generator) -> LabelledSystem:
    """Draw frames around an ideal structure and label them with EMT; the virial is −volume·stress."""
    drawn = [perturbed(ideal, rng) for _ in range(frames)]
    for atoms in drawn:
        atoms.calc = EMT()
    periodic = bool(ideal.pbc.all())
    return LabelledSystem(
        atype=np.zeros(len(ideal), dtype=np.int64),
        type_map=("Cu",),
        coord=np.array([a.positions for a in drawn]),
        box=np.array([a.cell.array for a in drawn]) if periodic else None,
        energy=np.array([a.get_potential_energy() for a in drawn]),
        force=np.array([a.get_forces() for a in drawn]),
        virial=np.array(
            [-a.get_volume() * voigt_6_to_full_3x3_stress(a.get_stress()) for a in drawn]
        )
        if periodic
        else None,
    )


def main() -> None:
    """Draw, label and write the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-frames", type=int, default=40, help="frames a system")
    parser.add_argument("--valid-frames", type=int, default=10, help="frames a system")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--out", type=Path, default=HERE, help="receives data/ and cu_emt.hdf5")
    args = parser.parse_args()
    ideals = {
        "fcc32": bulk("Cu", "fcc", a=LATTICE_CONSTANT, cubic=True).repeat(2),
        "triclinic8": bulk("Cu", "fcc", a=LATTICE_CONSTANT).repeat(2),
        "cluster13": Icosahedron("Cu", noshells=2, latticeconstant=LATTICE_CONSTANT),
    }
    rng = np.random.default_rng(args.seed)
    systems = {
        f"{part}/{name}": labelled_system(ideal, frames, rng)
        for part, frames in (("train", args.train_frames), ("valid", args.valid_frames))
        for name, ideal in ideals.items()
    }
    write_all(args.out / "data", args.out / "cu_emt.hdf5", systems)
    for name, system in systems.items():
        natoms = len(system.atype)
        print(
            f"{name}: {len(system.energy)} frames, {natoms} atoms, energy {system.energy.min() / natoms:.3f} to "
            f"{system.energy.max() / natoms:.3f} eV/atom, largest force {np.abs(system.force).max():.2f} eV/Å"
        )


if __name__ == "__main__":
    main()
