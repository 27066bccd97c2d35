"""`dp zbl`: the repulsion of nuclei, as a table for `use_srtab` or as labelled dimers."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.systems import write_systems

if TYPE_CHECKING:
    import numpy as np

    from deepmd_muon.data.zbl import Label

HELP = (
    "write the ZBL repulsion of elements: a table for model/use_srtab, or dimers as training data"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "ZBL describes nuclei closer than about 1 Å: collisions in cascades and shocks. Gaps of a "
        "potential at larger distances need labelled frames (dp explore)."
    )
    parser.add_argument("ELEMENT", nargs="+", help="elements in the order of the model's type map")
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a table: distances [Å], energies of all pairs [eV]",
    )
    result.add_argument(
        "--dimers",
        metavar="DATA",
        help="write dimers with forces, as dp convert-data does: a folder of npy systems, "
        "name.hdf5 or name.xyz",
    )
    parser.add_argument(
        "--step", type=float, default=0.005, metavar="Å", help="rows of the table [%(default)s]"
    )
    parser.add_argument(
        "--begin",
        type=float,
        metavar="Å",
        help="the table falls from here to 0 [1.0]; first distance of dimers [0.4]",
    )
    parser.add_argument(
        "--end",
        type=float,
        metavar="Å",
        help="end of the table [2.0]; last distance of dimers [1.0]",
    )
    parser.add_argument(
        "--frames", type=int, default=20, metavar="N", help="dimers of each pair [%(default)s]"
    )
    parser.add_argument(
        "--calculator",
        metavar="MODULE:CLASS",
        help="an ASE calculator that labels the dimers with energies and forces instead, e.g. "
        "tblite.ase:TBLite; its module is imported and may start programs",
    )
    parser.add_argument(
        "--arguments", metavar="JSON", help='its keyword arguments, e.g. \'{"method": "GFN1-xTB"}\''
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=3600.0,
        metavar="S",
        help="stop the calculation of one dimer after this time [%(default)s]",
    )


def run(options: argparse.Namespace) -> int:
    """Write a table or dimers."""
    names = options.ELEMENT
    if len(set(names)) < len(names):
        raise CommandError(
            f"each element stands once, in the order of the type map; found {' '.join(names)}"
        )
    only_calculator = options.calculator and not options.dimers
    only_arguments = options.arguments and not options.calculator
    if only_calculator or only_arguments:
        raise CommandError(
            "--calculator labels dimers (--dimers), and --arguments are those of a --calculator"
        )
    if options.dimers:
        _write_dimers(options)
    else:
        _write_table(options)
    return 0


def _write_table(options: argparse.Namespace) -> None:
    import numpy as np

    from deepmd_muon.data.zbl import table_of
    from deepmd_muon.files import make_folder_of, write_text

    begin = 1.0 if options.begin is None else options.begin
    end = 2.0 if options.end is None else options.end
    table = table_of(options.ELEMENT, options.step, begin, end)
    text = io.StringIO()
    np.savetxt(text, table, fmt="%.12g")
    make_folder_of(Path(options.output))
    write_text(Path(options.output), text.getvalue())
    n_rows, n_columns = table.shape  # a column of distances, and one for each pair
    print(f"{n_rows} rows to {table[-1, 0]:g} Å, {n_columns - 1} pairs: {options.output}")


def _write_dimers(options: argparse.Namespace) -> None:
    from deepmd_muon.data.zbl import dimers_of, zbl_forces

    label: Label = zbl_forces
    kinds = "forces"
    if options.calculator:
        label = _label_by(options.calculator, options.arguments, options.time_limit)
        kinds = "energies and forces"
    begin = 0.4 if options.begin is None else options.begin
    end = 1.0 if options.end is None else options.end
    systems = dimers_of(options.ELEMENT, begin, end, options.frames, label)
    path = Path(options.dimers)
    write_systems(systems, path)
    nframes = sum(system.nframes for system in systems)
    print(f"{nframes} dimers of {len(systems)} pairs, labelled with {kinds}: {path}")


def _label_by(name: str, arguments: str | None, time_limit: float) -> Label:
    """Return a function that labels dimers by the ASE calculator module:class.

    It leaves out dimers that the calculator fails for.
    """
    import numpy as np

    from deepmd_muon.explore.calculator import CalculatorChoice, Job, Structure
    from deepmd_muon.explore.labelling import answers_of, try_calculator

    if not time_limit > 0.0:
        raise CommandError(f"--time-limit must be above 0; found {time_limit:g}")
    try:
        keywords: dict[str, Any] = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--arguments are not JSON: {error}") from error
    if not isinstance(keywords, dict):
        raise CommandError(f"--arguments must be an object of keyword arguments; found {arguments}")
    choice = CalculatorChoice(name, keywords, prefix="--")
    try_calculator(choice, time_limit)  # before any work

    def label(first: str, second: str, coord: np.ndarray) -> dict[str, np.ndarray]:
        """Label dimers of two elements, `coord` (nframes, 6) [Å], the first atom at the origin."""
        jobs = {}
        for k, row in enumerate(coord):
            jobs[k] = Job(choice, Structure((first, second), row.reshape(2, 3), None))
        results = {}
        failures = []
        for k, answer in answers_of(jobs, workers=1, time_limit=time_limit):
            if isinstance(answer, str):
                failures.append(f"{coord[k, 3]:.3f} Å ({answer})")
            else:
                results[k] = answer
        if not results:
            raise CommandError(
                f"{name} labels no dimer of {first} and {second}: the first at {failures[0]}"
            )
        if failures:
            print(
                f"{first}-{second}: {len(failures)} dimers without a label, the first at "
                f"{failures[0]}"
            )
        return {
            "coord": coord[list(results)],
            "energy": np.array([result["energy"] for result in results.values()]),
            "force": np.array([result["forces"].reshape(-1) for result in results.values()]),
        }

    return label
