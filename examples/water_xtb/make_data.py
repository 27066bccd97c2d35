"""Make a small data set of liquid water with GFN1-xTB labels: ``python examples/water_xtb/make_data.py``.

Needs ASE and tblite (the extra ``[examples]``). For each temperature:

1. molecules with random orientations on a lattice at 1 g/cm³;
2. Langevin dynamics (NVT) with the flexible SPC water written below, whose molecules are fitted to those of
   GFN1-xTB; it costs milliseconds a step, so that frames can stand 0.3 ps apart;
3. the positions of each frame, rounded to float32, are labelled by a tightly converged GFN1-xTB calculation from
   scratch: a label depends on nothing but the numbers that are stored.

``--xtb-steps N`` moves every frame by N steps of GFN1-xTB dynamics before it is labelled and so approaches the
ensemble of xTB itself, at one second a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import ClassVar

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin
from ase.optimize import FIRE
from ase.stress import voigt_6_to_full_3x3_stress

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# examples/ is not a package: the path above must be set before its shared module can be found
from write_system import LabelledSystem, nearest_rms_distance, time_blocks, write_all  # noqa: E402

TYPE_MAP = ("O", "H")
DENSITY = 1.0  # g/cm³
# the canonical distribution of positions knows no masses: heavy hydrogen allows the time step
HYDROGEN_MASS = 4.0  # u
TIME_STEP = 2.0  # fs
FRICTION = 0.002  # 1/fs
MELTING = (600.0, 3.0)  # K, ps: against the memory of the lattice
EQUILIBRATION = 7.0  # ps
STEPS_PER_FRAME = 150
LABEL_ACCURACY = 0.01  # tblite's thresholds scale with it
XTB_ACCURACY = 1.0  # dynamics
TRAIN_FRACTION, VALID_FRACTION = 0.75, 0.15


class FlexibleSPC(Calculator):
    """Flexible SPC water that visits the configurations: atoms ordered O, H, H, cubic cell, nearest images.

    Charges, Lennard-Jones and force constants are those of SPC/Fw (Wu, Tepper and Voth, J. Chem. Phys. 124, 024503
    (2006)). Bond length and angle are smaller, such that a molecule in the liquid has the mean geometry that it has in
    GFN1-xTB dynamics. The bend is a harmonic H–H distance of the same curvature, Coulomb is force-shifted at half the
    box.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces"]
    kcal = units.kcal / units.mol
    bond_length, bond_constant = 0.953, 1059.162 * kcal  # Å, eV/Å²
    angle, angle_constant = np.radians(110.3), 75.90 * kcal  # eV/rad²
    epsilon, sigma, oxygen_charge = 0.1554253 * kcal, 3.165492, -0.82

    def __init__(self, natoms: int) -> None:
        super().__init__()
        i, j = np.triu_indices(natoms, k=1)
        apart = i // 3 != j // 3
        self.first, self.second = i[apart], j[apart]
        charge = np.where(np.arange(natoms) % 3 == 0, self.oxygen_charge, -self.oxygen_charge / 2)
        self.charges = charge[self.first] * charge[self.second] * units.Hartree * units.Bohr
        both_oxygen = (self.first % 3 == 0) & (self.second % 3 == 0)
        self.depth = np.where(both_oxygen, 4 * self.epsilon, 0.0)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute energy [eV] and forces [eV/Å]."""
        super().calculate(atoms, properties, system_changes)
        positions, length = self.atoms.positions, self.atoms.cell[0, 0]
        energy, forces = self._between_molecules(positions, length)
        hh_length = 2 * self.bond_length * np.sin(self.angle / 2)
        # d(H–H distance)/d(angle) = bond length · cos(angle / 2)
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
        cutoff = length / 2
        vector = positions[self.second] - positions[self.first]
        vector -= length * np.round(vector / length)
        distance = np.sqrt(np.einsum("ij,ij->i", vector, vector))
        near = distance < cutoff
        sixth = (self.sigma / distance) ** 6
        energy = self.charges * (1 / distance - 2 / cutoff + distance / cutoff**2)
        energy += self.depth * (sixth**2 - sixth)
        slope = self.charges * (-1 / distance**2 + 1 / cutoff**2)
        slope += self.depth * (-12 * sixth**2 + 6 * sixth) / distance
        pull = np.where(near, slope / distance, 0.0)[:, None] * vector
        forces = np.empty_like(positions)
        for axis in range(3):
            forces[:, axis] = np.bincount(self.first, pull[:, axis], len(positions))
            forces[:, axis] -= np.bincount(self.second, pull[:, axis], len(positions))
        return float(energy[near].sum()), forces


def lattice_of_molecules(
    molecules: int, rng: np.random.Generator, density: float = DENSITY
) -> Atoms:
    """Return randomly oriented water molecules on a simple cubic lattice of a density [g/cm³], atoms O, H, H."""
    volume = molecules * 18.01528 / (density * units.mol / 1e24)  # g/mol over g/cm³, in Å³
    # rounded, so that the box is a short number in every file
    length = round(volume ** (1 / 3), 4)
    sites_per_edge = int(np.ceil(molecules ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(sites_per_edge)] * 3, indexing="ij"), axis=-1).reshape(
        -1, 3
    )
    sites = (rng.permutation(grid)[:molecules] + 0.5) * length / sites_per_edge
    half = FlexibleSPC.angle / 2
    arms = np.array([[np.cos(half), np.sin(half), 0.0], [np.cos(half), -np.sin(half), 0.0]])
    positions = []
    for site in sites:
        rotation, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        positions += [site, *(site + FlexibleSPC.bond_length * arms @ rotation)]
    atoms = Atoms("OHH" * molecules, positions=positions, cell=[length] * 3, pbc=True)
    atoms.set_masses(np.where(atoms.numbers == 1, HYDROGEN_MASS, atoms.get_masses()))
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


def sample(
    molecules: int, temperature: float, frames: int, seed: int, density: float = DENSITY
) -> list[Atoms]:
    """Return frames of flexible SPC water at a temperature [K] and density, `STEPS_PER_FRAME` time steps apart.

    The first N of them do not depend on how many are asked for.
    """
    rng = np.random.default_rng([seed, molecules, round(1000 * temperature)])
    atoms = lattice_of_molecules(molecules, rng, density)
    atoms.calc = FlexibleSPC(len(atoms))
    FIRE(atoms, logfile=None).run(fmax=1.0, steps=500)
    set_momenta(atoms, temperature, rng)
    for kelvin, picoseconds in (MELTING, (temperature, EQUILIBRATION)):
        dynamics(atoms, kelvin, rng).run(round(1000 * picoseconds / TIME_STEP))
    md = dynamics(atoms, temperature, rng)
    snapshots = []
    for _ in range(frames):
        md.run(STEPS_PER_FRAME)
        snapshots.append(atoms.copy())
    return snapshots


def xtb(accuracy: float, method: str = "GFN1-xTB") -> Calculator:
    """Return a new calculator of GFN1-xTB or GFN2-xTB; tblite samples the Brillouin zone at Γ only."""
    from tblite.ase import TBLite

    return TBLite(method=method, accuracy=accuracy, verbosity=0)


def labelled(
    snapshot: Atoms,
    temperature: float,
    xtb_steps: int,
    seed: Sequence[int],
    method: str = "GFN1-xTB",
) -> Atoms:
    """Return a copy with float32 positions, centred in the box, and xTB labels for exactly these.

    Parameters
    ----------
    snapshot, temperature
        A configuration and the temperature [K] it was drawn at.
    xtb_steps, seed
        Steps of xTB dynamics to move it by first, and the seed of their noise.
    method
        "GFN1-xTB" or "GFN2-xTB".
    """
    frame = snapshot.copy()
    if xtb_steps:
        rng = np.random.default_rng(seed)
        frame.calc = xtb(XTB_ACCURACY, method)
        set_momenta(frame, temperature, rng)
        dynamics(frame, temperature, rng).run(xtb_steps)
    # the centre wanders freely in Langevin dynamics, and float32 is finest near zero
    centred = frame.positions - frame.positions.mean(axis=0) + 0.5 * np.diagonal(frame.cell.array)
    frame.positions = centred.astype(np.float32).astype(np.float64)
    calculator = xtb(LABEL_ACCURACY, method)
    calculator.calculate(frame)
    results = {name: calculator.results[name] for name in ("energy", "forces", "stress")}
    frame.calc = SinglePointCalculator(frame, **results)
    return frame


def as_system(frames: Sequence[Atoms]) -> LabelledSystem:
    """Gather frames; ASE's stress is (dE/dε)/volume, so the virial −dE/dε is −volume·stress."""
    return LabelledSystem(
        atype=np.array([TYPE_MAP.index(symbol) for symbol in frames[0].get_chemical_symbols()]),
        type_map=TYPE_MAP,
        coord=np.array([a.positions for a in frames]),
        box=np.array([a.cell.array for a in frames]),
        energy=np.array([a.get_potential_energy() for a in frames]),
        force=np.array([a.get_forces() for a in frames]),
        virial=np.array(
            [-a.get_volume() * voigt_6_to_full_3x3_stress(a.get_stress()) for a in frames]
        ),
    )


def summary(system: LabelledSystem, train: LabelledSystem, valid: LabelledSystem) -> str:
    """Say what a temperature's frames look like and how far validation stands from training."""
    molecule = system.coord.reshape(len(system.energy), -1, 3, 3)
    bonds = molecule[:, :, 1:] - molecule[:, :, :1]
    lengths = np.linalg.norm(bonds, axis=-1)
    cosine = (bonds[:, :, 0] * bonds[:, :, 1]).sum(axis=-1) / lengths.prod(axis=-1)
    nearest = nearest_rms_distance(valid, train)
    energy = system.energy / molecule.shape[1]
    error = energy.std() / np.sqrt(len(energy))
    return (
        f"energy {energy.mean():.4f} ± {error:.4f} eV/molecule, force {np.sqrt((system.force**2).mean()):.3f} eV/Å RMS "
        f"and {np.abs(system.force).max():.2f} largest, O–H {lengths.mean():.4f} ± {lengths.std():.4f} Å, "
        f"H–O–H {np.degrees(np.arccos(cosine)).mean():.2f}°; {len(train.energy)} training and {len(valid.energy)} "
        f"validation frames, nearest training frame of a validation frame {nearest.min():.2f} Å RMS away (smallest), "
        f"{np.median(nearest):.2f} Å (median)"
    )


def main() -> None:
    """Sample, label, split and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--molecules", type=int, default=32)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[300.0, 350.0, 420.0], help="K"
    )
    parser.add_argument("--frames", type=int, default=160, help="frames a temperature")
    parser.add_argument(
        "--xtb-steps", type=int, default=0, help="GFN1-xTB dynamics before each label"
    )
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=HERE, help="receives data/ and water_xtb.hdf5")
    args = parser.parse_args()
    start = time.perf_counter()
    systems = {}
    with ProcessPoolExecutor(args.workers) as pool:
        sampling = [
            pool.submit(sample, args.molecules, t, args.frames, args.seed)
            for t in args.temperatures
        ]
        for temperature, job in zip(args.temperatures, sampling, strict=True):
            seeds = [(args.seed, round(1000 * temperature), k) for k in range(args.frames)]
            frames = list(
                pool.map(labelled, job.result(), repeat(temperature), repeat(args.xtb_steps), seeds)
            )
            whole = as_system(frames)
            in_train, in_valid = time_blocks(args.frames, TRAIN_FRACTION, VALID_FRACTION)
            train, valid = whole.frames(in_train), whole.frames(in_valid)
            systems |= {f"train/{temperature:g}K": train, f"valid/{temperature:g}K": valid}
            minutes = (time.perf_counter() - start) / 60
            print(
                f"{temperature:g} K, after {minutes:.1f} min: {summary(whole, train, valid)}",
                flush=True,
            )
    write_all(args.out / "data", args.out / "water_xtb.hdf5", systems)


if __name__ == "__main__":
    main()
