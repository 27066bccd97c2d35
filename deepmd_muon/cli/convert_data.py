"""`dp convert-data`: turn data of any form that training reads into another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmd_muon.data import System

HELP = "convert data between extended XYZ (or any file that ASE reads), npy folders, HDF5 and LMDB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "input", metavar="IN", nargs="+", help="systems: folders, HDF5 files, LMDB databases, files that ASE reads"
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help="name.hdf5 or name.h5, name.lmdb, name.xyz or name.extxyz, or else a folder of npy systems",
    )
    parser.add_argument("-t", "--type-map", nargs="+", metavar="ELEMENT", help="order of the elements in the output")
    keys = parser.add_argument_group("labels of files that ASE reads", "by default ASE's own energy, forces and stress")
    keys.add_argument("--energy-key", metavar="KEY", help="name of the energy [eV], e.g. REF_energy")
    keys.add_argument("--force-key", metavar="KEY", help="name of the forces [eV/Å]")
    keys.add_argument("--virial-key", metavar="KEY", help="name of the virial [eV], −dE/dε")
    keys.add_argument("--stress-key", metavar="KEY", help="name of the stress [eV/Å³], positive under tension")


def run(options: argparse.Namespace) -> int:
    """Convert, and print the systems that were found."""
    from deepmd_muon.data import open_systems
    from deepmd_muon.data.ase_reading import LabelKeys
    from deepmd_muon.data.lmdb_writing import write_lmdb
    from deepmd_muon.data.plausible import suspicions
    from deepmd_muon.data.writing import write_extxyz, write_hdf5, write_npy

    keys = LabelKeys(options.energy_key, options.force_key, options.virial_key, options.stress_key)
    systems = open_systems(options.input, options.type_map, keys)
    output = Path(options.output)
    writers = {
        ".hdf5": write_hdf5,
        ".h5": write_hdf5,
        ".lmdb": write_lmdb,
        ".xyz": write_extxyz,
        ".extxyz": write_extxyz,
    }
    places = writers.get(output.suffix.lower(), write_npy)(systems, output)
    print(_summary(systems))
    for system in systems:
        for suspicion in suspicions(system):
            print(f"warning: {system.name}: {suspicion}")
    print(f"written: {places[0] if len(places) == 1 else f'{len(places)} systems below {output}'}")
    return 0


def _summary(systems: list[System]) -> str:
    """Return a line for every system and their sum."""
    from deepmd_muon.data.writing import formula_of

    lines = [
        f"{system.name}: {formula_of(system)}, {system.nframes} frames of {system.natoms} atoms, "
        f"{'periodic' if system.pbc else 'no cell'}, labels {', '.join(sorted(system.labels)) or 'none'}"
        for system in systems
    ]
    return "\n".join([*lines, f"{len(systems)} systems, {sum(s.nframes for s in systems)} frames"])
