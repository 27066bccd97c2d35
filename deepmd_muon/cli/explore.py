"""`dp explore`: close gaps of a potential with structures of its own dynamics."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from deepmd_muon.cli.systems import begin

HELP = (
    "close gaps of potentials: draw structures by their own dynamics, label them, train on, check; "
    "in rounds"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Rounds that are done are kept, and a command that was stopped goes on where it was. The "
        "exit status is 0 when the last check is good enough, 1 when it is not, 2 after an error "
        "and 3 when structures wait for labels. The keys of the input: dp doc-train-input "
        "--explore."
    )
    parser.add_argument(
        "INPUT", help="what to do, JSON or YAML; its paths are relative to its folder"
    )


def run(options: argparse.Namespace) -> int:
    """Do the rounds that are left."""
    from deepmd_muon.explore.loop import Explorer, load_settings

    path = Path(options.INPUT)
    settings = load_settings(path)
    begin(options)
    return Explorer(settings, path.parent, functools.partial(print, flush=True)).run()
