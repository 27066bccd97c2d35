"""`dp zbl`: the repulsion of nuclei as a table for `use_srtab`, or dimers that ZBL or an ASE calculator labels."""

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
        "ZBL describes nuclei closer than about 1 Å: collisions in cascades and shocks. Gaps of a potential at larger "
        "distances need labelled frames (dp explore)."
    )
    parser.add_argument("ELEMENT", nargs="+", help="elements in the order of the model's type map")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a table: distances [Å], energies of all pairs [eV]",
    )
    what.add_argument(
        "--dimers",
        metavar="DATA",
        help="write dimers with forces, as dp convert-data does: a folder of npy systems, name.hdf5 or name.xyz",
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
        help="an ASE calculator that labels the dimers with energies and forces instead, e.g. tblite.ase:TBLite; "
        "its module is imported and may start programs",
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
    import numpy as np

    from deepmd_muon.data.zbl import dimers_of, table_of, zbl_forces
    from deepmd_muon.files import make_folder_of, whole_file

    names = options.ELEMENT
    if len(set(names)) < len(names):
        raise CommandError(
            f"each element stands once, in the order of the type map; found {' '.join(names)}"
        )
    if (options.calculator and not options.dimers) or (
        options.arguments and not options.calculator
    ):
        raise CommandError(
            "--calculator labels dimers (--dimers), and --arguments are those of a --calculator"
        )
    if options.dimers:
        place = Path(options.dimers)
        label = (
            _label_by(options.calculator, options.arguments, options.time_limit)
            if options.calculator
            else zbl_forces
        )
        systems = dimers_of(
            names, _or(options.begin, 0.4), _or(options.end, 1.0), options.frames, label
        )
        write_systems(systems, place)
        kinds = "energies and forces" if options.calculator else "forces"
        print(
            f"{sum(s.nframes for s in systems)} dimers of {len(systems)} pairs, labelled with {kinds}: {place}"
        )
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


def _label_by(name: str, arguments: str | None, time_limit: float) -> Label:
    """Return labels of the ASE calculator module:class; dimers that it fails for are left out."""
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

    def labels(first: str, second: str, coord: np.ndarray) -> dict[str, np.ndarray]:
        jobs = {
            k: Job(choice, Structure((first, second), row.reshape(2, 3), None))
            for k, row in enumerate(coord)
        }
        answers = dict(answers_of(jobs, workers=1, time_limit=time_limit))
        failed = [
            f"{coord[k, 3]:.3f} Å ({answer})"
            for k, answer in answers.items()
            if isinstance(answer, str)
        ]
        results = {k: answer for k, answer in answers.items() if not isinstance(answer, str)}
        if not results:
            raise CommandError(
                f"{name} labels no dimer of {first} and {second}: the first at {failed[0]}"
            )
        if failed:
            print(
                f"{first}-{second}: {len(failed)} dimers without a label, the first at {failed[0]}"
            )
        return {
            "coord": coord[list(results)],
            "energy": np.array([one["energy"] for one in results.values()]),
            "force": np.array([one["forces"].reshape(-1) for one in results.values()]),
        }

    return labels
