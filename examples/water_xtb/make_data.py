"""Make a small data set of liquid water with GFN1-xTB labels: ``python examples/water_xtb/make_data.py``.

Needs ASE and tblite (``pip install ase tblite``). One trajectory per temperature:

1. molecules with random orientations on a lattice at 1 g/cm³;
2. 20 ps of molecular dynamics with a flexible SPC water written below, which costs seconds;
3. molecular dynamics with GFN1-xTB, the first part dropped as equilibration;
4. every 20 fs the positions are rounded to float32 and labelled anew by a tightly converged calculation
   from scratch, so that a label depends on nothing but the stored numbers.

Hydrogen weighs 4 u: the canonical distribution of positions does not depend on masses, and a time step of 2 fs
becomes possible. Frames found in ``run/`` are taken from there: an interrupted trajectory starts again, a
finished one is not repeated, and the first N frames do not depend on how many are asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import Trajectory, read
from ase.md.langevin import Langevin
from ase.optimize import FIRE
from ase.stress import voigt_6_to_full_3x3_stress

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# examples/ is no package: the path above must be set before its shared module can be found
from write_system import LabelledSystem, nearest_rms_distance, time_blocks, write_all  # noqa: E402

TYPE_MAP = ("O", "H")
DENSITY = 1.0  # g/cm³
HYDROGEN_MASS = 4.0  # u
TIME_STEP = 2.0  # fs
FRICTION = 0.01  # 1/fs
STEPS_PER_FRAME = 10
MD_ACCURACY = 1.0
LABEL_ACCURACY = 0.01  # tblite's thresholds scale with it: energy 1e-8 Hartree, density 2e-7 e
TRAIN_FRACTION, VALID_FRACTION = 0.75, 0.15


class FlexibleSPC(Calculator):
    """Flexible SPC water for a rough equilibration, atoms ordered O, H, H, cubic cell, nearest images.

    Charges, Lennard-Jones and bond terms of SPC/Fw (Wu, Tepper and Voth, J. Chem. Phys. 124, 024503 (2006)); the
    bend is replaced by a harmonic H–H distance of the same curvature, and Coulomb is force-shifted at half the box.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces"]
    kcal = units.kcal / units.mol
    bond_length, bond_constant = 1.012, 1059.162 * kcal  # Å, eV/Å²
    angle, angle_constant = np.radians(113.24), 75.90 * kcal  # eV/rad²
    epsilon, sigma, oxygen_charge = 0.1554253 * kcal, 3.165492, -0.82

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute energy [eV] and forces [eV/Å]."""
        super().calculate(atoms, properties, system_changes)
        positions, length = self.atoms.positions, self.atoms.cell[0, 0]
        pair_energy, forces = self._between_molecules(positions, length)
        energy = pair_energy
        hh_length = 2 * self.bond_length * np.sin(self.angle / 2)
        # d(HH distance)/d(angle) = bond length · cos(angle / 2)
        hh_constant = self.angle_constant / (self.bond_length * np.cos(self.angle / 2)) ** 2
        for i, j, rest, constant in (
            (0, 1, self.bond_length, self.bond_constant),
            (0, 2, self.bond_length, self.bond_constant),
            (1, 2, hh_length, hh_constant),
        ):
            bond = positions[j::3] - positions[i::3]
            distance = np.linalg.norm(bond, axis=1, keepdims=True)
            energy += 0.5 * constant * ((distance - rest) ** 2).sum()
            pull = constant * (distance - rest) * bond / distance
            forces[i::3] += pull
            forces[j::3] -= pull
        self.results = {"energy": float(energy), "forces": forces}

    def _between_molecules(self, positions: np.ndarray, length: float) -> tuple[float, np.ndarray]:
        natoms, cutoff = len(positions), length / 2
        i, j = np.triu_indices(natoms, k=1)
        apart = i // 3 != j // 3
        i, j = i[apart], j[apart]
        vector = positions[j] - positions[i]
        vector -= length * np.round(vector / length)
        distance = np.linalg.norm(vector, axis=1)
        near = distance < cutoff
        i, j, vector, distance = i[near], j[near], vector[near], distance[near]
        charge = np.where(np.arange(natoms) % 3 == 0, self.oxygen_charge, -self.oxygen_charge / 2)
        qq = charge[i] * charge[j] * units.Hartree * units.Bohr
        energy = qq * (1 / distance - 2 / cutoff + distance / cutoff**2)
        slope = qq * (-1 / distance**2 + 1 / cutoff**2)
        sixth = np.where((i % 3 == 0) & (j % 3 == 0), (self.sigma / distance) ** 6, 0.0)
        energy = energy + 4 * self.epsilon * (sixth**2 - sixth)
        slope = slope + 4 * self.epsilon * (-12 * sixth**2 + 6 * sixth) / distance
        pull = (slope / distance)[:, None] * vector
        forces = np.zeros((natoms, 3))
        np.add.at(forces, i, pull)
        np.subtract.at(forces, j, pull)
        return float(energy.sum()), forces


def lattice_of_molecules(molecules: int, rng: np.random.Generator) -> Atoms:
    """Return randomly oriented water molecules on a simple cubic lattice at `DENSITY`, atoms ordered O, H, H."""
    volume = molecules * 18.01528 / (DENSITY * units.mol / 1e24)  # g/mol over g/cm³, in Å³
    # rounded, so that the box is a short number in every file
    length = round(volume ** (1 / 3), 4)
    sites_per_edge = int(np.ceil(molecules ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(sites_per_edge)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    sites = (rng.permutation(grid)[:molecules] + 0.5) * length / sites_per_edge
    positions = []
    half = FlexibleSPC.angle / 2
    for site in sites:
        rotation, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        arms = np.array([[np.cos(half), np.sin(half), 0.0], [np.cos(half), -np.sin(half), 0.0]])
        positions += [site, *(site + FlexibleSPC.bond_length * arms @ rotation)]
    atoms = Atoms("OHH" * molecules, positions=positions, cell=[length] * 3, pbc=True)
    atoms.set_masses(np.where(atoms.numbers == 1, HYDROGEN_MASS, atoms.get_masses()))
    return atoms


def classical_liquid(molecules: int, temperature: float, rng: np.random.Generator) -> Atoms:
    """Return a configuration of flexible SPC water: 5 ps at 600 K against the lattice, then 15 ps at temperature."""
    atoms = lattice_of_molecules(molecules, rng)
    atoms.calc = FlexibleSPC()
    FIRE(atoms, logfile=None).run(fmax=1.0, steps=500)
    set_momenta(atoms, temperature, rng)
    for kelvin, picoseconds in ((600.0, 5.0), (temperature, 15.0)):
        dynamics(atoms, kelvin, rng).run(round(1000 * picoseconds / TIME_STEP))
    return atoms


def set_momenta(atoms: Atoms, temperature: float, rng: np.random.Generator) -> None:
    """Draw momenta of the Maxwell–Boltzmann distribution."""
    spread = np.sqrt(atoms.get_masses() * units.kB * temperature)[:, None]
    atoms.set_momenta(spread * rng.standard_normal((len(atoms), 3)))


def dynamics(atoms: Atoms, temperature: float, rng: np.random.Generator) -> Langevin:
    """Return Langevin dynamics with the settings of this data set."""
    return Langevin(
        atoms,
        TIME_STEP * units.fs,
        temperature_K=temperature,
        friction=FRICTION / units.fs,
        fixcm=False,
        rng=rng,
    )


def xtb(accuracy: float) -> Calculator:
    """Return a GFN1-xTB calculator; tblite samples the Brillouin zone at Γ only."""
    from tblite.ase import TBLite

    return TBLite(method="GFN1-xTB", accuracy=accuracy, verbosity=0)


def labelled(atoms: Atoms) -> Atoms:
    """Return a copy with float32 positions, centred in the box, and labels computed from scratch for them."""
    frame = atoms.copy()
    # the centre wanders freely in Langevin dynamics, and float32 has the finest grid near zero
    centred = frame.positions - frame.positions.mean(axis=0) + 0.5 * np.diagonal(frame.cell.array)
    frame.positions = centred.astype(np.float32).astype(np.float64)
    calculator = xtb(LABEL_ACCURACY)
    calculator.calculate(frame)
    results = {name: calculator.results[name] for name in ("energy", "forces", "stress")}
    frame.calc = SinglePointCalculator(frame, **results)
    return frame


def run_trajectory(path: Path, molecules: int, temperature: float, frames: int, equilibration: float, seed: int) -> str:
    """Run one trajectory and write its labelled frames to `path`, unless they stand there already.

    Parameters
    ----------
    path
        An ASE trajectory file.
    molecules, temperature, frames, equilibration, seed
        Number of molecules, temperature [K], number of frames, xTB dynamics before the first of them [ps], seed.

    Returns
    -------
    str
        What was done, for the log.
    """
    if path.exists() and len(Trajectory(path)) >= frames:
        return f"{path.name}: found {len(Trajectory(path))} frames"
    start = time.perf_counter()
    rng = np.random.default_rng([seed, molecules, round(1000 * temperature)])
    atoms = classical_liquid(molecules, temperature, rng)
    atoms.calc = xtb(MD_ACCURACY)
    set_momenta(atoms, temperature, rng)
    md = dynamics(atoms, temperature, rng)
    md.run(round(1000 * equilibration / TIME_STEP))
    kelvins = []
    with Trajectory(path, "w") as file:
        for _ in range(frames):
            md.run(STEPS_PER_FRAME)
            kelvins.append(atoms.get_temperature())
            file.write(labelled(atoms))
    minutes = (time.perf_counter() - start) / 60
    return f"{path.name}: {frames} frames, mean temperature {np.mean(kelvins):.0f} K, {minutes:.1f} min"


def read_system(path: Path, frames: int) -> LabelledSystem:
    """Return the first frames of a trajectory; the virial is −volume·stress, that is −dE/dε."""
    atoms = read(path, index=f":{frames}")
    stress = np.array([voigt_6_to_full_3x3_stress(a.get_stress()) for a in atoms])
    volume = np.array([a.get_volume() for a in atoms])
    return LabelledSystem(
        atype=np.array([TYPE_MAP.index(symbol) for symbol in atoms[0].get_chemical_symbols()]),
        type_map=TYPE_MAP,
        coord=np.array([a.positions for a in atoms]),
        box=np.array([a.cell.array for a in atoms]),
        energy=np.array([a.get_potential_energy() for a in atoms]),
        force=np.array([a.get_forces() for a in atoms]),
        virial=-volume[:, None, None] * stress,
    )


def main() -> None:
    """Run the trajectories that are missing, split them and write the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--molecules", type=int, default=24)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[300.0, 400.0], help="K")
    parser.add_argument("--frames", type=int, default=160, help="frames a temperature, 20 fs apart")
    parser.add_argument("--equilibration", type=float, default=0.8, help="ps of xTB dynamics that are dropped")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--workers", type=int, default=2, help="trajectories at a time")
    parser.add_argument("--out", type=Path, default=HERE, help="receives data/, water_xtb.hdf5 and run/")
    args = parser.parse_args()
    run = args.out / "run"
    run.mkdir(parents=True, exist_ok=True)
    paths = {f"{t:g}K": run / f"{args.molecules}x{t:g}K_seed{args.seed}.traj" for t in args.temperatures}
    with ProcessPoolExecutor(args.workers) as pool:
        jobs = [
            pool.submit(run_trajectory, path, args.molecules, t, args.frames, args.equilibration, args.seed)
            for t, path in zip(args.temperatures, paths.values(), strict=True)
        ]
        for job in jobs:
            print(job.result(), flush=True)
    train_frames, valid_frames = time_blocks(args.frames, TRAIN_FRACTION, VALID_FRACTION)
    systems = {}
    for name, path in paths.items():
        whole = read_system(path, args.frames)
        systems[f"train/{name}"] = train = whole.frames(train_frames)
        systems[f"valid/{name}"] = valid = whole.frames(valid_frames)
        nearest = nearest_rms_distance(valid, train)
        print(
            f"{name}: {len(train.energy)} training and {len(valid.energy)} validation frames; nearest training frame "
            f"at {nearest.min():.3f} Å RMS (smallest), {np.median(nearest):.3f} Å (median)"
        )
    write_all(args.out / "data", args.out / "water_xtb.hdf5", systems)


if __name__ == "__main__":
    main()
