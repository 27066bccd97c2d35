"""`dp test`: compare a model with reference data."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import DeepmdKitOption, HandOver

if TYPE_CHECKING:
    from deepmd_muon.data import System
    from deepmd_muon.infer.metrics import Errors
    from deepmd_muon.infer.parity import ParityPicture

HELP = "compare a model's energies, forces and virials with reference data"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; names and meaning are deepmd-kit's, `--plot` and `--ema` are ours."""
    parser.add_argument("-m", "--model", required=True, metavar="CKPT", help="checkpoint, ours or deepmd-kit's")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("-s", "--system", default=".", help="system, or a folder or HDF5 file of systems [%(default)s]")
    data.add_argument("-f", "--datafile", metavar="LIST", help="text file with one system a line")
    data.add_argument("--train-data", metavar="INPUT", help="test on the training data of an input file")
    data.add_argument("--valid-data", metavar="INPUT", help="test on the validation data of an input file")
    parser.add_argument(
        "-n", "--numb-test", type=int, default=0, metavar="N", help="most frames of each system; 0 takes all [0]"
    )
    parser.add_argument("--shuffle-test", action="store_true", help="take frames in random order")
    parser.add_argument("-r", "--rand-seed", type=int, metavar="SEED", help="seed of that order")
    parser.add_argument("-d", "--detail-file", metavar="PREFIX", help="write every value and its prediction")
    parser.add_argument("-a", "--atomic", action="store_true", help="compare atomic energies as well")
    parser.add_argument("--plot", metavar="FILE", help="draw predictions against reference values (.png, .pdf, …)")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of the checkpoint")
    parser.add_argument(
        "--head", "--model-branch", metavar="NAME", action=DeepmdKitOption, help="branch of a multi-task model"
    )


def run(options: argparse.Namespace) -> int:
    """Test every system, then report the errors of all."""
    if Path(options.model).suffix in (".pth", ".pb", ".pt2", ".dp", ".yaml", ".savedmodel", ".hlo"):
        raise HandOver(f"the model format {Path(options.model).suffix}")
    if options.numb_test < 0:
        raise CommandError(f"-n must be 0 (all frames) or a number of frames; found {options.numb_test}")
    import numpy as np

    from deepmd_muon.infer.details import DetailFiles
    from deepmd_muon.infer.evaluation import evaluate_system
    from deepmd_muon.infer.metrics import add_errors
    from deepmd_muon.infer.predictor import Predictor
    from deepmd_muon.model.errors import CheckpointError as ForeignModelError
    from deepmd_muon.train.report import set_up_logging

    set_up_logging(options.log_level, options.log_path)
    try:
        predictor = Predictor(options.model, ema=options.ema)
    except ForeignModelError as error:
        raise HandOver(f"this model ({error})") from error
    details = DetailFiles(options.detail_file) if options.detail_file else None
    picture = _picture(options.plot)
    shuffle = np.random.default_rng(options.rand_seed) if options.shuffle_test else None
    total: Errors = {}
    systems = _open(options, predictor.type_map)
    for system in systems:
        log.info("# testing system : %s", system.name)
        errors: Errors = {}
        frames = 0
        for part in evaluate_system(
            predictor, system, limit=options.numb_test or None, shuffle=shuffle, atomic=options.atomic
        ):
            errors = add_errors(errors, part.errors)
            frames += part.reference.nframes
            if details is not None:
                details.add(system.name, part.reference, part.prediction)
            if picture is not None:
                picture.add(part.reference, part.prediction)
        _report(errors, f"# number of test data : {frames}")
        total = add_errors(total, errors)
    log.info("# ----------weighted average of errors-----------")
    _report(total, f"# number of systems : {len(systems)}")
    if picture is not None:
        picture.save()
    return 0


def _picture(path: str | None) -> ParityPicture | None:
    """Return the picture to fill, checked before the work begins; matplotlib is imported for it alone."""
    if path is None:
        return None
    from deepmd_muon.infer.parity import ParityPicture

    return ParityPicture(Path(path))


def _report(errors: Errors, title: str) -> None:
    from deepmd_muon.infer.metrics import report_lines

    log.info(title)
    for line in report_lines(errors):
        log.info(line)


def _open(options: argparse.Namespace, type_map: tuple[str, ...]) -> list[System]:
    """Open the systems that the options name, with the model's types."""
    from deepmd_muon.data import open_systems

    if options.datafile:
        path = Path(options.datafile)
        if not path.exists():
            raise CommandError(f"there is no list of systems {path}")
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        return open_systems([name for name in names if name and not name.startswith("#")], type_map)
    if options.train_data or options.valid_data:
        return open_systems(_systems_of_input(options), type_map)
    return open_systems([options.system], type_map)


def _systems_of_input(options: argparse.Namespace) -> list[str]:
    """Return the systems that an input file names; they are relative to the file's folder, as in deepmd-kit."""
    from deepmd_muon.argcheck import load

    path = Path(options.train_data or options.valid_data)
    training = load(path).settings.training
    data = training.training_data if options.train_data else training.validation_data
    if data is None:
        raise CommandError(f"{path} has no validation data")
    return [str(path.parent / system) for system in data.systems]
