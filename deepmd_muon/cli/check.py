"""`dp check`: whether dynamics with a potential can be trusted near its data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deepmd_muon.cli.models import add_model_options, load_predictors, require_readable
from deepmd_muon.cli.systems import add_label_options, begin, open_listed, section_of_input

HELP = (
    "check whether dynamics with models can be trusted near their data: coverage, scans, short "
    "dynamics"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "The exit status is 0 when no item fails (with --strict: when all hold), 1 when one fails, "
        "and 2 when nothing could be checked."
    )
    parser.add_argument(
        "MODEL", nargs="+", help="checkpoints or frozen files; several are compared as well"
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "-s",
        "--system",
        nargs="+",
        metavar="DATA",
        help="training data: systems, or folders or files of",
    )
    data.add_argument("--train-data", metavar="INPUT", help="the training data of an input file")
    parser.add_argument(
        "-t",
        "--temperature",
        type=float,
        metavar="K",
        help=(
            "of the dynamics [1.5 times that of the data, by forces; above 2,000 K you must give "
            "it]"
        ),
    )
    parser.add_argument(
        "--time", type=float, metavar="PS", help="length of the dynamics [2, on a GPU 5]"
    )
    parser.add_argument(
        "--time-step",
        type=float,
        default=1.0,
        metavar="FS",
        help="[%(default)s]; hydrogen weighs 4 u",
    )
    parser.add_argument(
        "--copies", type=int, metavar="N", help="structures followed [4 to 16, on a GPU 4 to 64]"
    )
    parser.add_argument(
        "--probes",
        type=int,
        default=3,
        metavar="N",
        help="scans of each pair and kind [%(default)s]",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of frames and velocities [%(default)s]"
    )
    parser.add_argument(
        "--fparam",
        nargs="+",
        type=float,
        metavar="VALUE",
        help="frame parameters of the scans and dynamics [those of most frames]",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 for doubtful items, too"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was found, curves included")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="draw scans and dynamics (.png, .pdf, …)"
    )
    add_model_options(parser, "head", "ema", "trust")
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check, print the report and write the files."""
    for name in options.MODEL:
        require_readable(name, trust=options.trust)
    from deepmd_muon.checkpoint_file.file import checkpoint_path
    from deepmd_muon.files import make_folder_of, write_text
    from deepmd_muon.stability.check import CheckSettings, check_models
    from deepmd_muon.stability.curves import Verdict
    from deepmd_muon.stability.report import text_of, values_of
    from deepmd_muon.train.systems import open_section

    section = None
    paths = options.system
    if options.train_data:
        section = section_of_input(Path(options.train_data), "training", options.head)
        paths = section.systems
    inputs = {"--train-data": options.train_data}
    inputs |= {f"the model {name}": checkpoint_path(name) for name in options.MODEL}
    outputs = {"--json": options.json, "-o": options.output}
    begin(options, outputs, inputs, {"the data": paths})
    settings = CheckSettings(
        temperature=options.temperature,
        time_step=options.time_step,
        time=options.time,
        copies=options.copies,
        probes=options.probes,
        seed=options.seed,
        fparam=None if options.fparam is None else tuple(options.fparam),
    )
    if options.output:
        from deepmd_muon.show.picture import check_ending

        check_ending(Path(options.output))
    predictors = load_predictors(options.MODEL, options)
    type_map = predictors[0].type_map
    systems = (
        open_listed(paths, type_map, options)
        if section is None
        else open_section(section, type_map)
    )
    check = check_models(options.MODEL, predictors, systems, settings)
    print("\n".join(text_of(check)))
    if options.json:
        make_folder_of(Path(options.json))
        write_text(Path(options.json), json.dumps(values_of(check), allow_nan=False))
    if options.output:
        from deepmd_muon.show.stability import draw_check

        draw_check(check, Path(options.output))
    threshold = Verdict.doubtful if options.strict else Verdict.fails
    return 1 if check.verdict >= threshold else 0
