"""Outputs of a run that are its inputs, or each other: refused before anything is written."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.files import is_special
from deepmd_muon.train.errors import TrainingError

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input

# Files of a system beside its sets.
_OF_SYSTEM = frozenset({"type.raw", "type_map.raw", "nopbc", "data.mdb"})


def check_outputs(
    given: Input, input_path: str, output: str, log_path: str | None, checkpoint: str | None = None
) -> None:
    """Refuse to write over the input, the data, the checkpoint that a run starts from, or one output over another.

    Parameters
    ----------
    given
        The checked input, which names data and outputs.
    input_path, checkpoint
        Files that the run reads.
    output, log_path
        Where the normalised input and the log go.

    Raises
    ------
    TrainingError
        Naming every output that is something else as well.
    """
    training, validating = given.settings.training, given.settings.validating
    outputs = {"-o": output, "-l": log_path, "training/jsonl_file": training.jsonl_file}
    outputs |= {"training/stat_file": training.stat_file}
    if training.disp_training:
        outputs["training/disp_file"] = training.disp_file
    if validating.full_validation:
        outputs["validating/full_val_file"] = validating.full_val_file
    places = {name: Path(path) for name, path in outputs.items() if path is not None and not is_special(Path(path))}
    problems = list(_twice(places))
    link = Path(f"{training.save_ckpt}.pt")
    if not link.is_symlink():  # a link is what an earlier run has left
        places["training/save_ckpt"] = link
    read = {"the input": input_path, "the checkpoint": checkpoint}
    existing = {name: path for name, path in places.items() if path.is_file()}
    for name, path in existing.items():
        problems += [f"{name} is {what}: {path}" for what, file in read.items() if file and _same(path, file)]
    sections = {"training": training.training_data, "validation": training.validation_data}
    for kind, section in sections.items():
        for system in section.systems if section and existing else ():
            problems += [
                f"{name} is a file of the {kind} data {system}: {path}"
                for name, path in existing.items()
                if _is_data(path, system)
            ]
    if problems:
        raise TrainingError("; ".join(problems) + ". Give the output another name: it would be overwritten")


def _twice(places: Mapping[str, Path]) -> Iterator[str]:
    """Yield a problem for every output that is an earlier one, too."""
    seen: dict[str, str] = {}
    for name, path in places.items():
        other = seen.setdefault(os.path.realpath(path), name)
        if other != name:
            yield f"{name} is {other}: {path}"


def _same(path: Path, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _is_data(path: Path, system: str) -> bool:
    """Return whether a file that exists is one of a system, which is a path or a pattern as `open_systems` takes."""
    system = system if os.path.exists(system) else system.partition("#")[0]
    for place in [system] if os.path.exists(system) else glob.iglob(system, recursive=True):
        if _same(path, place):
            return True
        real, folder = os.path.realpath(path), os.path.realpath(place)
        if os.path.isdir(folder) and real.startswith(f"{folder}{os.sep}"):
            parts = Path(real).relative_to(folder).parts
            if parts[-1] in _OF_SYSTEM or any(part.startswith("set.") for part in parts[:-1]):
                return True
    return False
