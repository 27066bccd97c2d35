"""`dp change-bias`: fit the energy bias of a trained model to other data, or set it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver
from deepmd_muon.cli.models import add_model_options, frozen_here, require_file
from deepmd_muon.cli.systems import add_label_options, begin, listed_systems, open_listed

HELP = "change the energy that a trained model adds to each atom by its type"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's."""
    parser.add_argument("INPUT", help="checkpoint, ours or deepmd-kit's")
    energies = parser.add_mutually_exclusive_group()
    energies.add_argument(
        "-s",
        "--system",
        default=".",
        help="system, or a folder or HDF5 file of systems [%(default)s]",
    )
    energies.add_argument(
        "-f", "--datafile", metavar="LIST", help="text file with one system a line"
    )
    energies.add_argument(
        "-b",
        "--bias-value",
        type=float,
        nargs="+",
        metavar="ENERGY",
        help="energies [eV], one for each type",
    )
    parser.add_argument(
        "-n",
        "--numb-batch",
        type=int,
        default=0,
        metavar="N",
        help="most frames of each system; 0 takes all [0]",
    )
    parser.add_argument(
        "-m",
        "--mode",
        choices=("change", "set"),
        default="change",
        help=(
            "change: add the energies that fit the model's errors best; set: those that fit the "
            "data [%(default)s]"
        ),
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="changed checkpoint [INPUT with _updated before .pt]"
    )
    add_model_options(parser, "head")
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Change the bias."""
    if frozen_here(options.INPUT):
        raise CommandError(
            f"{options.INPUT} is a frozen model of deepmd-muon, whose bias is fixed; change the "
            "bias of the checkpoint and freeze that"
        )
    if Path(options.INPUT).suffix in (".pth", ".pb", ".pt2", ".dp"):
        require_file(options.INPUT)
        raise HandOver(f"change-bias for the model format {Path(options.INPUT).suffix}")
    if options.numb_batch < 0:
        raise CommandError(
            f"-n must be 0 (all frames) or a number of frames; found {options.numb_batch}"
        )
    if not all(map(math.isfinite, options.bias_value or ())):
        raise CommandError(f"-b must be finite energies [eV]; found {options.bias_value}")
    from deepmd_muon.checkpoint_file.file import checkpoint_path
    from deepmd_muon.train.statistics import change_bias

    checkpoint = checkpoint_path(options.INPUT)
    if options.output:
        output = Path(options.output)
    else:
        output = checkpoint.with_name(f"{checkpoint.stem}_updated.pt")
    if output.suffix != ".pt":
        raise CommandError(f"-o must end in .pt; found {output}")
    systems = listed_systems(options.datafile) if options.datafile else [options.system]
    inputs = {"the checkpoint": checkpoint, "the list": options.datafile}
    begin(options, {"-o": output}, inputs, {} if options.bias_value else {"the data": systems})
    change_bias(
        checkpoint,
        output,
        branch=options.head,
        values=options.bias_value,
        open_data=lambda type_map: open_listed(systems, type_map, options),
        mode=options.mode,
        frames=options.numb_batch,
    )
    return 0
