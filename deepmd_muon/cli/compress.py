"""`dp compress`: a frozen file with tables in place of embedding nets."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver
from deepmd_muon.cli.models import add_model_options, frozen_here
from deepmd_muon.cli.systems import begin

if TYPE_CHECKING:
    from deepmd_muon.model import DescriptorModel

HELP = (
    "write a checkpoint or frozen file of se_e2_a or DPA-1 as a faster file, with tables for its "
    "embedding nets"
)

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names are deepmd-kit's, `--ema` and `--trust` are ours."""
    parser.add_argument(
        "-i",
        "--input",
        metavar="FILE",
        default="frozen_model",
        help=(
            "checkpoint (.pt), ours or deepmd-kit's, or frozen file of dp freeze; .pth is added "
            "[%(default)s]"
        ),
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="frozen_model_compressed",
        help="the file; .pth is added [%(default)s]",
    )
    parser.add_argument(
        "-s",
        "--step",
        type=float,
        metavar="STEP",
        help=(
            "length of an interval in the input of the nets; by default, forces change by less "
            "than 1e-6 eV/Å"
        ),
    )
    parser.add_argument(
        "-e",
        "--extrapolate",
        type=float,
        default=2.0,
        metavar="FACTOR",
        help=(
            "tables end at the smallest distance of the training data over this, the nets serve "
            "below [%(default)s]"
        ),
    )
    add_model_options(parser, "head", "ema", "trust")
    for words, name in (
        (("-f", "--frequency"), "N"),
        (("-c", "--checkpoint-folder"), "FOLDER"),
        (("-t", "--training-script"), "FILE"),
    ):
        parser.add_argument(*words, metavar=name, help="of deepmd-kit, for its own files")


def run(options: argparse.Namespace) -> int:
    """Compress."""
    from deepmd_muon.checkpoint_file.file import DIRECTORY_SUFFIX

    source, output = _source(options.input), Path(options.output)
    if not source.exists():
        raise CommandError(
            f"there is no file {source}; name a checkpoint or a file of dp freeze with -i"
        )
    if source.suffix not in (".pt", ".pth", DIRECTORY_SUFFIX) or (
        source.suffix == ".pth" and not frozen_here(source)
    ):
        raise HandOver(f"compression of {source}, a model of deepmd-kit's")
    output = output if output.suffix == ".pth" else Path(f"{output}.pth")
    _check(options, source)
    from deepmd_muon.deploy.compress import restored
    from deepmd_muon.infer.predictor import load_min_distance, load_model
    from deepmd_muon.model import DescriptorModel

    begin(options, {"-o": output}, {"the model": source})
    if source.suffix == ".pth":
        model, min_distance = restored(source, trust=options.trust)
    else:
        loaded = load_model(source, ema=options.ema, head=options.head)
        if not isinstance(loaded, DescriptorModel):
            raise CommandError(
                f"{source} has no tables here: {loaded.why_foreign}. Freeze it with dp freeze; "
                "deepmd-kit's own dp compress takes its frozen file"
            )
        model = loaded
        min_distance = load_min_distance(source, head=options.head)
    settings = {"step": options.step, "extrapolate": options.extrapolate}
    write_compressed(model, output, source, min_distance=min_distance, **settings)
    return 0


def _source(name: str) -> Path:
    """Return the frozen file or checkpoint that a name means.

    A name without a suffix is that of a .pth file if there is one, otherwise of a checkpoint.
    """
    from deepmd_muon.checkpoint_file.file import checkpoint_path

    frozen = Path(name) if Path(name).suffix else Path(f"{name}.pth")
    checkpoint = checkpoint_path(name)
    return checkpoint if checkpoint.exists() and not frozen.exists() else frozen


def _check(options: argparse.Namespace, source: Path) -> None:
    """Refuse values and options that would have no effect."""
    for name in ("step", "extrapolate"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise CommandError(f"--{name} must be a number above 0; found {value}")
    for name in ("frequency", "checkpoint_folder", "training_script"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise CommandError(
                f"{option} has no effect on {source}, which holds all that is needed; leave it out"
            )
    if source.suffix == ".pth" and (options.ema or options.head):
        raise CommandError(
            f"{source} holds one set of weights: --ema and --head need a checkpoint (-i model.pt)"
        )


def write_compressed(
    model: DescriptorModel, output: Path, source: Path, *, min_distance: float, **settings: Any
) -> None:
    """Compress a model, and log the differences that the tables cause.

    `settings` go to `deploy.compress.compress`.
    """
    from deepmd_muon.deploy.compress import ASSUMED_DISTANCE, compress

    if min_distance <= 0:
        log.info(
            "%s does not name the smallest distance in its data: %g Å is assumed",
            source,
            ASSUMED_DISTANCE,
        )
    done = compress(model, output, min_distance=min_distance, **settings)
    log.info("%s written from %s", output, source)
    log.info(
        "tables of step %g down to %.3g Å; the nets are evaluated at shorter distances",
        done.step,
        done.nearest,
    )
    log.info("largest differences from the model on random structures: %s", done.difference)
    if done.difference.force > done.allowed:
        log.warning(
            "forces change by more than %.0e eV/Å: take a shorter --step, or leave it out",
            done.allowed,
        )
