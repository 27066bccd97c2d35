"""Write a frame of the validation data of water_xtb as `water.xyz` for ASE and `water.data` for LAMMPS."""

import argparse
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import write

DATA = Path(__file__).parents[1] / "water_xtb" / "data" / "valid" / "300K"

argparse.ArgumentParser(description=__doc__).parse_args()

symbols = (DATA / "type_map.raw").read_text().split()
types = np.loadtxt(DATA / "type.raw", dtype=int)
coord = np.load(DATA / "set.000" / "coord.npy")[0].reshape(-1, 3).astype(float)
box = np.load(DATA / "set.000" / "box.npy")[0].reshape(3, 3)
water = Atoms([symbols[t] for t in types], positions=coord, cell=box, pbc=True)
water.wrap()
write("water.xyz", water)
write("water.data", water, format="lammps-data", specorder=["O", "H"], atom_style="atomic")
