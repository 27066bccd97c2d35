"""`dp model-devi`: how far several models disagree on the frames of systems."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.models import add_model_options, load_predictors, require_readable
from deepmd_muon.cli.systems import add_label_options, begin, open_listed

HELP = "write how far several models disagree on the frames of systems"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's."""
    parser.add_argument(
        "-m",
        "--models",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="checkpoints or frozen files, two or more",
    )
    parser.add_argument(
        "-s",
        "--system",
        nargs="+",
        default=["."],
        metavar="DATA",
        help="systems, or folders or files of systems [.]",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="model_devi.out", help="the table [%(default)s]"
    )
    parser.add_argument(
        "-f",
        "--frequency",
        type=int,
        default=1,
        metavar="N",
        help="steps between two frames, for the first column [1]",
    )
    parser.add_argument(
        "--real_error", action="store_true", help="errors against labels instead of disagreement"
    )
    parser.add_argument(
        "--atomic", action="store_true", help="add the deviation of the force on every atom"
    )
    parser.add_argument(
        "--relative",
        type=float,
        metavar="LEVEL",
        help="divide deviations of forces by the force plus LEVEL [eV/Å]",
    )
    parser.add_argument(
        "--relative_v",
        type=float,
        metavar="LEVEL",
        help="divide deviations of virials by the virial plus LEVEL",
    )
    add_model_options(parser, "head", "trust")
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Evaluate every system with every model."""
    for name in options.models:
        require_readable(name, trust=options.trust)
    if len(options.models) < 2 and not options.real_error:
        raise CommandError(
            "-m needs at least two models; found one: its deviation from itself is zero"
        )
    if options.frequency < 1:
        raise CommandError(f"-f must be a number of steps, 1 or more; found {options.frequency}")
    for name in ("relative", "relative_v"):
        level = getattr(options, name)
        if level is not None and not (math.isfinite(level) and level >= 0):
            raise CommandError(f"--{name} must be a number, 0 or more; found {level}")
    import numpy as np

    from deepmd_muon.checkpoint_file.file import checkpoint_path
    from deepmd_muon.data import with_parameters
    from deepmd_muon.infer.model_deviation import (
        DeviationFile,
        DeviationSettings,
        common_parameters,
        system_deviation,
    )

    models = {f"the model {name}": checkpoint_path(name) for name in options.models}
    begin(options, {"-o": options.output}, models, {"the data": options.system})
    predictors = load_predictors(options.models, options)
    settings = DeviationSettings(options.real_error, options.relative, options.relative_v)
    systems = with_parameters(
        open_listed(options.system, predictors[0].type_map, options), common_parameters(predictors)
    )
    output = DeviationFile(Path(options.output), atomic=options.atomic)
    for system in systems:
        batches = list(system_deviation(predictors, system, settings))
        table, of_force = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        output.add(system.name, np.arange(len(table)) * options.frequency, table, of_force)
        largest = table[:, 3].max()
        log.info(
            "%s: %d frames, largest deviation of a force %.3e eV/Å",
            system.name,
            len(table),
            largest,
        )
    log.info("%s written", options.output)
    return 0
