"""Data and outputs of a command line: lists of systems, names of labels, files to write."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.files import refuse_clashes, regular_text

if TYPE_CHECKING:
    from deepmd_muon.argcheck.training import TrainingDataSettings
    from deepmd_muon.data import System
    from deepmd_muon.label_keys import Reading


def begin(
    options: argparse.Namespace,
    outputs: Mapping[str, str | Path | None] = MappingProxyType({}),
    inputs: Mapping[str, str | Path | None] = MappingProxyType({}),
    systems: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Refuse outputs that are inputs or each other (see `refuse_clashes`), then begin the log."""
    from deepmd_muon.train.report import set_up_logging

    refuse_clashes(CommandError, {**outputs, "-l": options.log_path}, inputs, systems)
    set_up_logging(options.log_level, options.log_path)


def add_label_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options about files that ASE or dpdata read."""
    parser.add_argument(
        "--format",
        metavar="NAME",
        help=(
            "format of the data, by its name in ASE (vasp-out) or dpdata (cp2k/output); by default "
            "their content and name tell"
        ),
    )
    parser.add_argument(
        "--max-force",
        type=float,
        metavar="FORCE",
        help="leave out frames with a larger force on an atom [eV/Å], and name them",
    )
    keys = parser.add_argument_group(
        "files that ASE reads",
        "by default their usual names are recognized: energy, forces, REF_energy, dft_forces, …",
    )
    keys.add_argument(
        "--energy-key", metavar="KEY", help="name of the energy [eV], e.g. REF_energy"
    )
    keys.add_argument("--force-key", metavar="KEY", help="name of the forces [eV/Å]")
    keys.add_argument("--virial-key", metavar="KEY", help="name of the virial [eV], −dE/dε")
    keys.add_argument(
        "--stress-key", metavar="KEY", help="name of the stress [eV/Å³], positive under tension"
    )
    keys.add_argument(
        "--config-weights",
        nargs="+",
        metavar="TYPE=WEIGHT",
        help="weights of frames in the loss by their config_type, e.g. dimer=10 Default=1",
    )
    keys.add_argument(
        "--frame-parameters",
        nargs="+",
        metavar="NAME",
        help="names of the frame parameters that the model reads, e.g. charge spin",
    )
    keys.add_argument(
        "--keep-unconverged",
        action="store_true",
        help="keep frames whose electronic loop did not converge",
    )


def open_listed(
    paths: str | Sequence[str], type_map: Sequence[str] | None, options: argparse.Namespace
) -> list[System]:
    """Open systems with the options of `add_label_options`."""
    if type_map and len(set(type_map)) < len(type_map):
        raise CommandError(f"the type map {' '.join(type_map)} names an element twice")
    from deepmd_muon.data import open_systems

    return open_systems(paths, type_map, reading_of(options))


def reading_of(options: argparse.Namespace) -> Reading:
    """Return the values of the options of `add_label_options`."""
    if options.max_force is not None and not options.max_force > 0.0:
        raise CommandError(f"--max-force must be above 0 eV/Å; found {options.max_force:g}")
    from deepmd_muon.label_keys import LabelKeys, Reading

    keys = LabelKeys(options.energy_key, options.force_key, options.virial_key, options.stress_key)
    return Reading(
        keys=keys,
        format=options.format,
        keep_unconverged=options.keep_unconverged,
        config_weights=_config_weights(options.config_weights or ()),
        max_force=options.max_force,
        frame_parameters=tuple(options.frame_parameters or ()),
    )


def _config_weights(words: Sequence[str]) -> dict[str, float]:
    """Return the weights that --config-weights gives."""
    weights = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or "=" in name or not 0.0 <= weight < float("inf"):
            raise CommandError(
                f"--config-weights takes a config_type, = and a number from 0 on; found {word!r}"
            )
        weights[name] = weight
    return weights


def write_systems(systems: list[System], output: Path) -> list[str]:
    """Write systems in the form that the ending of `output` names, else as npy folders.

    Return their names.
    """
    from deepmd_muon.data.writing import write_extxyz, write_hdf5, write_lmdb, write_npy

    writers = {
        ".hdf5": write_hdf5,
        ".h5": write_hdf5,
        ".lmdb": write_lmdb,
        ".xyz": write_extxyz,
        ".extxyz": write_extxyz,
    }
    write = writers.get(output.suffix.lower(), write_npy)
    return write(systems, output)


def listed_systems(path: str) -> list[str]:
    """Return the systems of a text file, one a line, without empty lines and comments (#)."""
    if not Path(path).exists():
        raise CommandError(f"there is no list of systems {path}")
    try:
        names = [line.strip() for line in regular_text(path).splitlines()]
    except OSError as error:
        raise CommandError(
            f"the list of systems {path} cannot be read: {error.strerror}"
        ) from error
    return [name for name in names if name and not name.startswith("#")]


def section_of_input(path: Path, name: str, head: str | None = None) -> TrainingDataSettings:
    """Return a data section of an input file.

    Its systems are relative to the file's folder, as in deepmd-kit.
    """
    from deepmd_muon.argcheck import load

    checked = load(path)
    branches = checked.branches
    if not checked.multi_task:
        (branch,) = branches.values()
    elif head in branches:
        branch = branches[head]
    else:
        wrong_head = "" if head is None else f"; found {head!r}"
        raise CommandError(
            f"{path} has data of several branches ({', '.join(branches)}): choose one with "
            f"--head{wrong_head}"
        )
    data = branch.data.training_data if name == "training" else branch.data.validation_data
    if data is None:
        of_branch = f" of {head}" if checked.multi_task else ""
        raise CommandError(
            f"{path} has no validation data{of_branch}: name other data (-s), or the training data "
            f"(--train-data {path})"
        )
    systems = tuple(str(path.parent / system) for system in data.systems)
    return dataclasses.replace(data, systems=systems)
