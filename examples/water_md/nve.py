"""NVE of water with ASE: python nve.py [MODEL [STEPS]]."""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from ase.io import read
from ase.md.verlet import VelocityVerlet

from deepmd_muon.infer import DeepPotCalculator

parser = argparse.ArgumentParser(description="NVE of water with ASE")
parser.add_argument("model", nargs="?", default="model.pth", help="a checkpoint or a frozen file")
parser.add_argument("steps", nargs="?", type=int, default=200, help="steps of 0.5 fs")
options = parser.parse_args()
if not Path("water.xyz").exists():
    parser.error("there is no water.xyz: run make_structure.py first")

water = read("water.xyz")
water.calc = DeepPotCalculator(options.model)
masses = water.get_masses()[:, None]
momenta = np.random.default_rng(1).normal(size=(len(water), 3)) * np.sqrt(units.kB * 300 * masses)
water.set_momenta(momenta - masses * momenta.sum(axis=0) / masses.sum())
dynamics = VelocityVerlet(water, timestep=0.5 * units.fs)


def report() -> None:
    """Print time, temperature and energies."""
    potential, kinetic = water.get_potential_energy(), water.get_kinetic_energy()
    time = dynamics.get_number_of_steps() * 0.5
    print(
        f"{time:6.1f} fs  {water.get_temperature():6.1f} K  {potential:.6f} eV  {potential + kinetic:.6f} eV"
    )


dynamics.attach(report, interval=10)
dynamics.run(options.steps)
