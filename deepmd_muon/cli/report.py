"""`dp report`: one page about a run."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon import __version__
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.models import add_model_options, load_predictors, require_readable
from deepmd_muon.cli.systems import begin, section_of_input

if TYPE_CHECKING:
    from deepmd_muon.argcheck.training import TrainingDataSettings
    from deepmd_muon.infer.predictor import Predictor
    from deepmd_muon.show.report.errors import DataErrors
    from deepmd_muon.show.report.panels import Panel
    from deepmd_muon.stability.check import Check

HELP = "write one page about a run: learning curve, errors, worst frames, verdict of the check"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("INPUT", help="input file of the run; its data are next to it")
    parser.add_argument(
        "-m",
        "--model",
        metavar="CKPT",
        help="checkpoint or frozen file [the last checkpoint of the run, in this folder]",
    )
    parser.add_argument(
        "--lcurve", metavar="FILE", help="learning curve [training/disp_file, in this folder]"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="the page; a picture of the same name ends in .png [%(default)s]",
    )
    parser.add_argument(
        "-n",
        "--frames",
        type=int,
        default=500,
        metavar="N",
        help="most frames of training and of validation data that are compared [%(default)s]",
    )
    check = parser.add_argument_group("dp check", "its other settings are the defaults")
    check.add_argument("--no-check", action="store_true", help="leave the check of dynamics out")
    check.add_argument(
        "-t", "--temperature", type=float, metavar="K", help="of the dynamics [as in dp check]"
    )
    check.add_argument("--time", type=float, metavar="PS", help="length of the dynamics")
    check.add_argument("--copies", type=int, metavar="N", help="structures followed")
    add_model_options(parser, "head", "ema", "trust")


def run(options: argparse.Namespace) -> int:
    """Compare, check, draw and write."""
    if options.frames < 1:
        raise CommandError(f"-n must be 1 or more; found {options.frames}")
    page = Path(options.output)
    if page.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"-o must end in .html; found {options.output}")
    from deepmd_muon.argcheck import load
    from deepmd_muon.checkpoint_file.file import checkpoint_path
    from deepmd_muon.files import make_folder_of, write_text
    from deepmd_muon.show.report.page import Report, page_of
    from deepmd_muon.show.report.panels import check_panels, curve_panels, draw_all, parity_panels

    training = load(Path(options.INPUT)).settings.training
    model = options.model or f"{training.save_ckpt}.pt"
    require_readable(model, trust=options.trust)
    curve = Path(options.lcurve or training.disp_file)
    sections = _sections(options)
    picture = page.with_suffix(".png")
    begin(
        options,
        {"-o": page, "the picture": picture},
        {"the input": options.INPUT, "the model": checkpoint_path(model), "--lcurve": curve},
        {"the data": [path for section in sections.values() for path in section.systems]},
    )
    options.train_data = options.INPUT  # --head chooses the data as well
    (predictor,) = load_predictors([model], options)
    data = _compare(predictor, sections, options.frames)
    check = None if options.no_check else _check(model, predictor, sections["training"], options)
    notes = []
    panels: list[Panel] = []
    if options.lcurve or curve.exists():
        panels += curve_panels(curve, options.head)
    else:
        notes.append(f"There is no learning curve {curve} here: --lcurve names it.")
    panels += parity_panels(list(data.values())[-1].points)
    if check is not None:
        panels += check_panels(check)
    report = Report(
        title=f"{model}, trained with {Path(options.INPUT).name}",
        facts=_facts(options, model, predictor, sections),
        data=data,
        panels=panels,
        check=check,
        commands=_commands(options, model, curve),
        notes=notes,
        input_text=Path(options.INPUT).read_text(),
    )
    make_folder_of(page)
    write_text(page, page_of(report))
    draw_all(panels, report.headline, picture)
    print(f"{page} and {picture} written")
    return 0


def _sections(options: argparse.Namespace) -> dict[str, TrainingDataSettings]:
    """Return the data sections of the input, by series."""
    path = Path(options.INPUT)
    sections = {"training": section_of_input(path, "training", options.head)}
    with contextlib.suppress(CommandError):  # of an input without validation data
        sections["validation"] = section_of_input(path, "validation", options.head)
    return sections


def _compare(
    predictor: Predictor, sections: dict[str, TrainingDataSettings], budget: int
) -> dict[str, DataErrors]:
    from deepmd_muon.data.opening import check_labels, with_parameters
    from deepmd_muon.show.report.errors import compare
    from deepmd_muon.train.systems import open_section

    data = {}
    for series, section in sections.items():
        systems = with_parameters(open_section(section, predictor.type_map), predictor.parameters)
        check_labels(systems)
        data[series] = compare(predictor, systems, budget, series)
    if "validation" in data:  # a free atom is a system of one frame, which no split holds out
        data["validation"].points.add_free_atoms(data["training"].points)
    return data


def _check(
    model: str,
    predictor: Predictor,
    section: TrainingDataSettings,
    options: argparse.Namespace,
) -> Check:
    from deepmd_muon.stability.check import CheckSettings, check_models
    from deepmd_muon.train.systems import open_section

    settings = CheckSettings(
        temperature=options.temperature, time=options.time, copies=options.copies
    )
    return check_models([model], [predictor], open_section(section, predictor.type_map), settings)


def _facts(
    options: argparse.Namespace,
    model: str,
    predictor: Predictor,
    sections: dict[str, TrainingDataSettings],
) -> dict[str, str]:
    import datetime
    import platform

    import torch

    facts = {"model": model, "elements": ", ".join(predictor.type_map)}
    if options.head:
        facts["branch"] = options.head
    for series, section in sections.items():
        facts[f"{series} data"] = ", ".join(section.systems)
    facts["versions"] = f"deepmd_muon {__version__}, torch {torch.__version__}"
    facts["machine"] = f"{platform.machine()}, {predictor.device}"
    facts["written"] = datetime.datetime.now().isoformat(sep=" ", timespec="minutes")
    return facts


def _commands(options: argparse.Namespace, model: str, curve: Path) -> dict[str, str]:
    """Return commands that repeat the run and the report."""
    words = ["dp", "--pt", "report", options.INPUT, "-m", model, "--lcurve", str(curve)]
    words += ["-o", options.output, "-n", str(options.frames)]
    for name in ("temperature", "time", "copies", "head"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    for name in ("no_check", "ema", "trust"):
        if getattr(options, name):
            words.append(f"--{name.replace('_', '-')}")
    return {
        "train again": shlex.join(["dp", "--pt", "train", options.INPUT]),
        "write this report again": shlex.join(words),
    }
