"""`dp init`: look at data and write a first input."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.systems import add_label_options, begin, open_listed, reading_of

HELP = "look at data, split off validation data, and write an input that trains on them"

_MAX_MODELS = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "DATA", nargs="+", help="systems: folders, HDF5 files, LMDB databases, files that ASE reads"
    )
    parser.add_argument(
        "--valid-data", nargs="+", metavar="DATA", help="validation data; then nothing is split off"
    )
    parser.add_argument(
        "--valid-share",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the data that is split off [0.1]",
    )
    parser.add_argument(
        "--descriptor",
        choices=("se_e2_a", "dpa1"),
        help="kind of model; by default by the number of elements",
    )
    parser.add_argument(
        "--rcut", type=float, default=6.0, metavar="RADIUS", help="cut-off radius [Å] [6.0]"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="length of the training [15000 for se_e2_a if all structures have cells, else 10000]",
    )
    parser.add_argument(
        "-t", "--type-map", nargs="+", metavar="ELEMENT", help="types; by default those of the data"
    )
    parser.add_argument(
        "-o", "--output", default="input.json", metavar="FILE", help="the input [%(default)s]"
    )
    parser.add_argument(
        "--models",
        type=int,
        default=1,
        metavar="N",
        help=(
            "also write model-2/FILE to model-N/FILE: the same with other seeds, to measure "
            "uncertainty"
        ),
    )
    parser.add_argument(
        "--split-folder",
        default="split",
        metavar="FOLDER",
        help="where split data are written [%(default)s]",
    )
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Write input and split, and print the data and the choices."""
    from deepmd_muon.cli.proposal import Wishes, propose

    begin(
        options,
        {"-o": options.output},
        systems={"the data": [*options.DATA, *(options.valid_data or ())]},
    )
    if not 0.0 < options.valid_share < 1.0:
        raise CommandError(f"--valid-share must be between 0 and 1; found {options.valid_share:g}")
    if not 1 <= options.models <= _MAX_MODELS:
        raise CommandError(f"--models must be between 1 and {_MAX_MODELS}; found {options.models}")
    output = Path(options.output)
    folder = Path(options.split_folder)
    ensemble_outputs = [
        output.parent / f"model-{k}" / output.name for k in range(2, options.models + 1)
    ]
    for place in (output, *ensemble_outputs, folder):
        if place.exists():
            option = "--split-folder" if place == folder else "-o"
            raise CommandError(f"{place} exists; remove it or give another name ({option})")
    wishes = Wishes(
        data=tuple(options.DATA),
        valid_data=tuple(options.valid_data or ()),
        share=options.valid_share,
        descriptor=options.descriptor,
        rcut=options.rcut,
        steps=options.steps,
        type_map=tuple(options.type_map or ()),
        reading=reading_of(options),
        folder=folder,
    )
    proposal = propose(wishes, lambda paths: open_listed(paths, wishes.type_map, options))
    proposal.write([output, *ensemble_outputs])
    print(proposal.report())
    print(f"written: {output}; train with: dp --pt train {output}")
    for path in ensemble_outputs:
        print(f"written: {path}; train with: (cd {path.parent} && dp --pt train {path.name})")
    return 0
