"""`dp test`: compare a model with reference data."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.models import add_model_options, load_predictors, require_readable
from deepmd_muon.cli.systems import (
    add_label_options,
    begin,
    listed_systems,
    open_listed,
    section_of_input,
)

if TYPE_CHECKING:
    from deepmd_muon.argcheck.training import TrainingDataSettings
    from deepmd_muon.data import System
    from deepmd_muon.infer.atomization import AtomizationErrors
    from deepmd_muon.infer.details import DetailFiles
    from deepmd_muon.infer.evaluation import ComparedFrames
    from deepmd_muon.infer.metrics import Errors
    from deepmd_muon.show.parity import ParityPicture

HELP = "compare a model's energies, forces and virials with reference data"

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options.

    Names and meaning are deepmd-kit's, `--plot` and `--ema` are ours.
    """
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="CKPT",
        help="checkpoint or frozen file, ours or deepmd-kit's",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "-s",
        "--system",
        nargs="+",
        metavar="DATA",
        help="systems, or folders or HDF5 files of systems [.]",
    )
    data.add_argument("-f", "--datafile", metavar="LIST", help="text file with one system a line")
    input_data = parser.add_argument_group(
        "data of an input file", "with both, each has its own errors and color"
    )
    input_data.add_argument(
        "--train-data", metavar="INPUT", help="test on the training data of an input file"
    )
    input_data.add_argument(
        "--valid-data", metavar="INPUT", help="test on the validation data of an input file"
    )
    parser.add_argument(
        "-n",
        "--numb-test",
        type=int,
        default=0,
        metavar="N",
        help="most frames of each system; 0 takes all [0]",
    )
    parser.add_argument("--shuffle-test", action="store_true", help="take frames in random order")
    parser.add_argument("-r", "--rand-seed", type=int, metavar="SEED", help="seed of that order")
    parser.add_argument(
        "-d", "--detail-file", metavar="PREFIX", help="write every value and its prediction"
    )
    parser.add_argument(
        "-a", "--atomic", action="store_true", help="compare atomic energies as well"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        nargs="+",
        help="draw predictions against reference values (.png, .pdf, …)",
    )
    add_model_options(parser, "head", "ema", "trust")
    add_label_options(parser)


def run(options: argparse.Namespace) -> int:
    """Test every system, then report the errors of all."""
    require_readable(options.model, trust=options.trust)
    if options.numb_test < 0:
        raise CommandError(
            f"-n must be 0 (all frames) or a number of frames; found {options.numb_test}"
        )
    if (options.rand_seed or 0) < 0:
        raise CommandError(f"-r must be 0 or more; found {options.rand_seed}")
    import numpy as np

    from deepmd_muon.data.opening import check_labels, with_parameters
    from deepmd_muon.infer.atomization import AtomizationErrors
    from deepmd_muon.infer.details import DetailFiles
    from deepmd_muon.infer.evaluation import evaluate_system
    from deepmd_muon.infer.metrics import add_errors

    _begin(options)
    (predictor,) = load_predictors([options.model], options)
    details = DetailFiles(options.detail_file) if options.detail_file else None
    picture = _picture(options.plot)
    shuffle = np.random.default_rng(options.rand_seed) if options.shuffle_test else None
    series = {
        name: with_parameters(systems, predictor.parameters)
        for name, systems in _open(options, predictor.type_map).items()
    }
    check_labels([system for systems in series.values() for system in systems])
    atomization = AtomizationErrors(len(predictor.type_map), predictor.model.rcut)
    for name, systems in series.items():
        total: Errors = {}
        weighted: Errors = {}
        has_weights = False
        by_config_type: dict[str, Errors] = {}
        # `dp init` keeps all free atoms in the training data, which come first.
        atomization = atomization.of_other_frames()
        for system in systems:
            log.info("# testing system : %s", system.name)
            batches = evaluate_system(
                predictor,
                system,
                limit=options.numb_test or None,
                shuffle=shuffle,
                atomic=options.atomic,
            )
            tested = _test_system(
                batches,
                system,
                series=name,
                atomization=atomization,
                details=details,
                picture=picture,
            )
            weighted = add_errors(weighted, tested.weighted)
            has_weights |= tested.has_weights
            for config_type, errors in tested.by_config_type.items():
                total = add_errors(total, errors)
                summed = by_config_type.get(config_type, {})
                by_config_type[config_type] = add_errors(summed, errors)
        total = add_errors(total, atomization.errors())
        of_series = f" of {name} data" if name else ""
        log.info("# ----------weighted average of errors%s-----------", of_series)
        _report(total, f"# number of systems : {len(systems)}")
        if has_weights:
            _report(weighted, "# errors of frames times their weights in the loss")
        if any(by_config_type):
            for config_type, errors in by_config_type.items():
                _report(errors, f"# config_type : {config_type or 'none'}")
    if picture is not None:
        picture.save()
    return 0


class _Tested(NamedTuple):
    """Errors of the frames of one system."""

    by_config_type: dict[str, Errors]  # "" for frames without one
    weighted: Errors  # each times the weight of its frame, 1 without one
    has_weights: bool


def _begin(options: argparse.Namespace) -> None:
    """Refuse outputs that are inputs or each other, then begin the log."""
    from deepmd_muon.checkpoint_file.file import checkpoint_path
    from deepmd_muon.infer.details import DetailFiles

    outputs = {f"--plot {path}": path for path in options.plot or ()}
    if options.detail_file:
        outputs |= {f"-d ({path.name})": path for path in DetailFiles.paths(options.detail_file)}
    inputs = {
        "the model": checkpoint_path(options.model),
        "the list": options.datafile,
        "--train-data": options.train_data,
        "--valid-data": options.valid_data,
    }
    begin(options, outputs, inputs, {"the data": _paths(options)})


def _test_system(
    batches: Iterable[ComparedFrames],
    system: System,
    *,
    series: str,
    atomization: AtomizationErrors,
    details: DetailFiles | None,
    picture: ParityPicture | None,
) -> _Tested:
    """Report the errors of one system; hand its frames on to sums, files and picture."""
    from deepmd_muon.infer.metrics import add_errors, frame_errors, weighted_frame_errors

    errors: Errors = {}
    weighted: Errors = {}
    has_weights = False
    by_config_type: dict[str, Errors] = {}
    nframes = 0
    for batch in batches:
        not_finite = batch.prediction.not_finite
        if not_finite:
            raise CommandError(
                f"{' and '.join(not_finite)} predicted for {batch.system} are not finite: the "
                "weights of the model are spoiled; test an earlier checkpoint"
            )
        errors = add_errors(errors, batch.errors)
        config_types = [system.origin(number).config_type for number in batch.numbers.tolist()]
        for config_type in dict.fromkeys(config_types):
            rows = [row for row, name in enumerate(config_types) if name == config_type]
            of_type = frame_errors(batch.reference.rows(rows), batch.prediction.rows(rows))
            summed = by_config_type.get(config_type, {})
            by_config_type[config_type] = add_errors(summed, of_type)
        of_batch = batch.errors
        if batch.reference.weight is not None:
            has_weights = True
            of_batch = weighted_frame_errors(batch.reference, batch.prediction)
        weighted = add_errors(weighted, of_batch)
        nframes += batch.reference.nframes
        atomization.add(batch.reference, batch.prediction)
        if details is not None:
            details.add(batch.system, batch.reference, batch.prediction)
        if picture is not None:
            picture.add(batch.reference, batch.prediction, series)
    _report(errors, f"# number of test data : {nframes}")
    return _Tested(by_config_type, weighted, has_weights)


def _picture(paths: list[str] | None) -> ParityPicture | None:
    """Return the picture to fill; its paths are checked before the work begins."""
    if paths is None:
        return None
    # Matplotlib is imported only if a picture is asked for.
    from deepmd_muon.show.parity import ParityPicture

    return ParityPicture([Path(path) for path in paths])


def _report(errors: Errors, title: str) -> None:
    from deepmd_muon.infer.metrics import report_lines

    log.info(title)
    for line in report_lines(errors):
        log.info(line)


def _sections(options: argparse.Namespace) -> dict[str, TrainingDataSettings]:
    """Return the data sections of the input files in the options, by name of the series."""
    inputs = {"training": options.train_data, "validation": options.valid_data}
    return {
        name: section_of_input(Path(path), name, options.head)
        for name, path in inputs.items()
        if path
    }


def _paths(options: argparse.Namespace) -> list[str]:
    """Return the paths of all systems that the options name."""
    if sections := _sections(options):
        if options.system or options.datafile:
            raise CommandError(
                "-s and -f exclude --train-data and --valid-data; give one of both kinds"
            )
        return [path for section in sections.values() for path in section.systems]
    return listed_systems(options.datafile) if options.datafile else options.system or ["."]


def _open(options: argparse.Namespace, type_map: tuple[str, ...]) -> dict[str, list[System]]:
    """Open the systems in the options with the model's types, by name of the series."""
    from deepmd_muon.train.systems import open_section

    series = {name: open_section(section, type_map) for name, section in _sections(options).items()}
    if not series:
        return {"": open_listed(_paths(options), type_map, options)}
    return series if len(series) > 1 else {"": next(iter(series.values()))}
