"""`dp convert-data`: turn data of any form that training reads into another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.cli.systems import add_label_options, begin, open_listed, write_systems

if TYPE_CHECKING:
    from deepmd_muon.data import System

HELP = "convert data between extended XYZ (or any file that ASE reads), npy folders, HDF5 and LMDB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "input",
        metavar="IN",
        nargs="+",
        help="systems: folders, HDF5 files, LMDB databases, files that ASE reads",
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help=(
            "name.hdf5 or name.h5, name.lmdb, name.xyz or name.extxyz, or else a folder of npy "
            "systems"
        ),
    )
    parser.add_argument(
        "-t", "--type-map", nargs="+", metavar="ELEMENT", help="order of the elements in the output"
    )
    parser.add_argument(
        "--unlabelled", action="store_true", help="convert structures without any label, too"
    )
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and print the systems that were found."""
    from deepmd_muon.data.checks.labels import suspicions
    from deepmd_muon.data.opening import check_labels

    begin(options, {"OUT": options.output}, systems={"the data": options.input})
    systems = open_listed(options.input, options.type_map, options)
    if not options.unlabelled:
        check_labels(systems)
    output = Path(options.output)
    places = write_systems(systems, output)
    print(_summary(systems))
    for suspicion in suspicions(_by_element(systems)):
        print(f"warning: {suspicion}")
    print(f"written: {places[0] if len(places) == 1 else f'{len(places)} systems below {output}'}")
    return 0


def _by_element(systems: list[System]) -> list[System]:
    """Return systems whose types are compared by element; without names they keep their numbers."""
    from deepmd_muon.data import TypeMapError, with_common_types

    try:
        return with_common_types(systems)
    except TypeMapError:  # some have no names
        return systems


def _summary(systems: list[System]) -> str:
    """Return a line for every system and their sum."""
    from deepmd_muon.data.writing import formula_of

    lines = [
        f"{system.name}: {formula_of(system)}, {system.nframes} frames of {system.natoms} atoms, "
        f"{'periodic' if system.pbc else 'no cell'}, labels "
        f"{', '.join(sorted(system.labels)) or 'none'}"
        for system in systems
    ]
    return "\n".join([*lines, f"{len(systems)} systems, {sum(s.nframes for s in systems)} frames"])
