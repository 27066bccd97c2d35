"""`dp zbl`: the repulsion of nuclei as a table for `use_srtab`, or as labelled dimers."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from deepmd_muon.cli.errors import CommandError

HELP = "write the ZBL repulsion of elements: a table for model/use_srtab, or dimers as training data"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "ZBL describes nuclei closer than about 1 Å: collisions in cascades and shocks. Gaps of a potential at larger "
        "distances need labelled frames (dp explore)."
    )
    parser.add_argument("ELEMENT", nargs="+", help="elements in the order of the model's type map")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-o", "--output", metavar="FILE", help="write a table: distances [Å], energies of all pairs [eV]")
    what.add_argument(
        "--dimers",
        metavar="DATA",
        help="write dimers with forces, as dp convert-data does: a folder of npy systems, name.hdf5 or name.xyz",
    )
    parser.add_argument("--step", type=float, default=0.005, metavar="Å", help="rows of the table [%(default)s]")
    parser.add_argument(
        "--begin", type=float, metavar="Å", help="the table falls from here to 0 [1.0]; first distance of dimers [0.4]"
    )
    parser.add_argument("--end", type=float, metavar="Å", help="end of the table [2.0]; last distance of dimers [1.0]")
    parser.add_argument("--frames", type=int, default=20, metavar="N", help="dimers of each pair [%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Write a table or dimers."""
    import numpy as np

    from deepmd_muon.data.writing import write_extxyz, write_hdf5, write_npy
    from deepmd_muon.data.zbl import dimers_of, table_of
    from deepmd_muon.files import make_folder_of, whole_file

    names = options.ELEMENT
    if len(set(names)) < len(names):
        raise CommandError(f"each element stands once, in the order of the type map; found {' '.join(names)}")
    if options.dimers:
        place = Path(options.dimers)
        systems = dimers_of(names, _or(options.begin, 0.4), _or(options.end, 1.0), options.frames)
        writers = {".hdf5": write_hdf5, ".h5": write_hdf5, ".xyz": write_extxyz, ".extxyz": write_extxyz}
        writers.get(place.suffix.lower(), write_npy)(systems, place)
        print(f"{len(systems)} pairs of {options.frames} dimers, labelled with forces: {place}")
        return 0
    begin, end = _or(options.begin, 1.0), _or(options.end, 2.0)
    table, text = table_of(names, options.step, begin, end), io.StringIO()
    np.savetxt(text, table, fmt="%.12g")
    make_folder_of(Path(options.output))
    with whole_file(Path(options.output)) as file:
        file.write(text.getvalue().encode())
    print(f"{len(table)} rows to {table[-1, 0]:g} Å, {table.shape[1] - 1} pairs: {options.output}")
    return 0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
