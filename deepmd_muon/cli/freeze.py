"""`dp freeze`: a checkpoint as a TorchScript file for molecular dynamics."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deepmd_muon.cli.compress import write_compressed
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import DeepmdKitOption, HandOver
from deepmd_muon.cli.models import add_model_options, require_file
from deepmd_muon.cli.systems import begin
from deepmd_muon.files import regular_text

if TYPE_CHECKING:
    from deepmd_muon.model import EnergyModel

HELP = "write the model of a checkpoint as a file for LAMMPS, deepmd-kit and dp test"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's, `--ema` is ours."""
    parser.add_argument(
        "-c",
        "--checkpoint-folder",
        "--checkpoint",
        dest="checkpoint",
        metavar="CKPT",
        default=".",
        help="checkpoint, ours or deepmd-kit's, or a folder of a run: then its latest one [.]",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="frozen_model",
        help="the file; .pth is added [%(default)s]",
    )
    parser.add_argument(
        "--interpolate",
        action="store_true",
        help="tables for embedding nets, as dp compress makes them",
    )
    add_model_options(parser, "head", "ema")
    for words, what in (
        (("-n", "--node-names"), "nodes"),
        (("-w", "--nvnmd-weight"), "NVNMD's file"),
    ):
        parser.add_argument(
            *words, metavar="NAME", action=DeepmdKitOption, help=f"{what}, for other backends"
        )


def run(options: argparse.Namespace) -> int:
    """Freeze."""
    from deepmd_muon.checkpoint_file.file import checkpoint_path

    output = Path(options.output)
    if output.suffix in (".pte", ".pb", ".savedmodel", ".json", ".hlo"):
        require_file(checkpoint_path(options.checkpoint))
        raise HandOver(f"frozen files of the format {output.suffix}")
    if output.suffix == ".pt2":
        _hand_over_compiled(options, output)
    # Of model.v1, "v1" belongs to the name: model.pth may be another model.
    output = (
        output.with_suffix(".pth") if output.suffix in (".pth", ".pt") else Path(f"{output}.pth")
    )
    from deepmd_muon.deploy.freeze import freeze
    from deepmd_muon.infer.predictor import load_min_distance, load_model
    from deepmd_muon.model import DescriptorModel
    from deepmd_muon.model.errors import ForeignModelError

    checkpoint = checkpoint_path(_checkpoint(Path(options.checkpoint)))
    pointer = Path(options.checkpoint, "checkpoint")
    begin(
        options,
        {"-o": output},
        {"the checkpoint": checkpoint, "the pointer": pointer},
    )
    try:
        model = load_model(checkpoint, ema=options.ema, head=options.head)
    except ForeignModelError as error:
        raise HandOver(f"this model ({error})") from error
    if not isinstance(model, DescriptorModel):
        _hand_over_hosted(options, checkpoint, output, model)
    min_distance = load_min_distance(checkpoint, head=options.head)
    if options.interpolate:
        write_compressed(model, output, checkpoint, min_distance=min_distance)
        return 0
    difference = freeze(model, output, min_distance=min_distance)
    log.info("%s written from %s", output, checkpoint)
    log.info("largest differences from the checkpoint on random structures: %s", difference)
    return 0


def _hand_over_compiled(options: argparse.Namespace, output: Path) -> NoReturn:
    """Let deepmd-kit convert the checkpoint: its `freeze` would write a .pth in place of a .pt2."""
    from deepmd_muon.checkpoint_file.file import checkpoint_path

    if options.ema or options.head or options.interpolate:
        raise CommandError(
            "a compiled file (.pt2) takes the last weights of a checkpoint with one model, and no "
            "tables: leave out --ema, --head and --interpolate, or write a .pth"
        )
    checkpoint = checkpoint_path(_checkpoint(Path(options.checkpoint)))
    require_file(checkpoint)
    raise HandOver("compiled files (.pt2)", words=["convert-backend", str(checkpoint), str(output)])


def _hand_over_hosted(
    options: argparse.Namespace, checkpoint: Path, output: Path, model: EnergyModel
) -> NoReturn:
    """Let deepmd-kit freeze a model that its module computes; of DPA-4 it writes a .pt2."""
    from deepmd_muon.model.hosted.module import HostedModel

    if options.ema or options.interpolate:
        raise CommandError(
            "deepmd-kit freezes this model, because its module computes it, and takes the last "
            "weights, without tables: leave out --ema and --interpolate"
        )
    # Otherwise it would fail after minutes of compilation.
    if isinstance(model, HostedModel):
        if problem := model.why_not_frozen:
            raise CommandError(problem)
        if lack := model.frozen_without:
            log.warning("%s", lack)
    head = ["--head", options.head] if options.head else []
    words = ["--pt", "freeze", "-c", str(checkpoint), "-o", str(output), *head]
    raise HandOver(f"a frozen form of this model ({model.why_foreign})", words=words)


def _checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path means; in the folder of a run, the latest one."""
    from deepmd_muon.checkpoint_file.file import DIRECTORY_SUFFIX

    pointer = path / "checkpoint"
    if not path.is_dir() or path.suffix == DIRECTORY_SUFFIX:
        return path
    if not pointer.is_file():
        raise CommandError(
            f"{path} holds no file 'checkpoint' that names the latest one; give the checkpoint "
            "with -c"
        )
    try:
        return path / regular_text(pointer).strip()
    except OSError as error:
        raise CommandError(
            f"{pointer} cannot be read: {error.strerror}; give the checkpoint with -c"
        ) from error
