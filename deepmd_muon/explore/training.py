"""The input of a round of training: the user's, with the new frames among its data."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck import load
from deepmd_muon.argcheck.files import read
from deepmd_muon.argcheck.legacy import upgrade
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import Settings
from deepmd_muon.data import System
from deepmd_muon.explore.records import flat
from deepmd_muon.explore.settings import ExploreError, TrainOnSettings
from deepmd_muon.files import make_folder_of, working_folder, write_text
from deepmd_muon.label_keys import LabelKeys
from deepmd_muon.train import run
from deepmd_muon.train.report import separate_log
from deepmd_muon.train.systems import open_section

#: Name of the checkpoints of a round.
CHECKPOINT = "model.ckpt"


class BaseInput:
    """The input that trained the models; its systems are relative to the folder of the file.

    Raises
    ------
    InputError
        When the file is not a good input.
    ExploreError
        When rounds cannot use it: several models, spins, or settings that name each system.
    """

    def __init__(self, path: Path) -> None:
        run_input = load(path)
        if run_input.multi_task:
            raise ExploreError(
                f"{path} trains several models; dp explore follows one: give the input of one model"
            )
        branch = run_input.branches["Default"]
        if branch.model.spins.read:
            raise ExploreError(
                f"{path}: the model reads spins (model/spin), for which dynamics have no values: dp "
                "explore takes models without them"
            )
        section = branch.data.training_data
        for name, value in (("sys_probs", section.sys_probs), ("batch_size", section.batch_size)):
            if isinstance(value, tuple):
                raise ExploreError(
                    f"{path}: training/training_data/{name} is a list, which says nothing of the "
                    "systems that rounds add: give one value that holds for all"
                )
        if ";" in section.auto_prob:
            raise ExploreError(
                f"{path}: training/training_data/auto_prob has blocks of systems, which rounds "
                "replace by their own: leave them out (training/share of the explore input weighs "
                "new frames)"
            )
        if section.rglob_patterns is not None:
            raise ExploreError(
                f"{path}: rglob_patterns fit no file of new frames: name the systems instead"
            )
        if section.format is not None:
            raise ExploreError(
                f"{path}: new frames are not in training/training_data/format: convert your data "
                "to npy folders first (dp convert-data) and leave it out"
            )
        if section.label_keys != LabelKeys():
            raise ExploreError(
                f"{path}: training/training_data/label_keys would be looked for in new frames, "
                "too: convert your data to npy folders first (dp convert-data) and leave the names "
                "out"
            )
        self.path = path
        self.steps = run_input.settings.training.numb_steps
        self.type_map = branch.model.type_map
        self._data: dict[str, Any] = upgrade(read(path)).data
        self._section = section

    def origin(self) -> dict[str, Any]:
        """Return every setting of the input but the names of its training data.

        Their content counts instead.
        """
        settings = flat(self._data, "input")
        return {
            name: value
            for name, value in settings.items()
            if name != "input/training/training_data/systems" and "/_" not in name
        }

    def with_frames(self, added: Sequence[Path]) -> dict[str, Any]:
        """Return the input's content with absolute paths and more training data."""
        data: dict[str, Any] = json.loads(json.dumps(self._data))  # a deep copy
        for name in ("training_data", "validation_data"):
            section = data["training"].get(name)
            if section:
                systems = section["systems"]
                systems = [systems] if isinstance(systems, str) else systems
                section["systems"] = [str(self._absolute(system)) for system in systems]
        data["training"]["training_data"]["systems"] += [str(path) for path in added]
        return data

    def systems(
        self, added: Sequence[Path], type_map: Sequence[str]
    ) -> tuple[list[System], list[System]]:
        """Open the training data: first those of the input, then new frames."""
        names = tuple(str(self._absolute(system)) for system in self._section.systems)
        return self._open(names, type_map), self._open(tuple(map(str, added)), type_map)

    def _open(self, names: tuple[str, ...], type_map: Sequence[str]) -> list[System]:
        if not names:
            return []
        return open_section(dataclasses.replace(self._section, systems=names), type_map)

    def _absolute(self, system: str) -> str:
        return os.path.join(self.path.parent.absolute(), system)


def write_input(
    base: BaseInput,
    added: Sequence[Path],
    counts: tuple[int, int],
    settings: TrainOnSettings,
    *,
    member: int,
    round_: int,
) -> dict[str, Any]:
    """Return the content of the input of one model of a round; each model has another seed.

    Parameters
    ----------
    base
        The input of the models.
    added
        Files of new frames.
    counts
        Numbers of systems of the input's data and of new frames.
    settings
        How a round trains on.
    member
        Number of the model.
    round_
        Number of the round.
    """
    data = base.with_frames(added)
    training = data["training"]
    steps = settings.steps or base.steps
    if settings.start == "restart":
        if base.steps is None or steps is None:
            raise ExploreError(
                f'training/start "restart" adds steps to those of {base.path}, which has '
                "training/numb_epoch: give numb_steps there"
            )
        steps = base.steps + round_ * steps
    if settings.steps or settings.start == "restart":
        training.pop("numb_epoch", None)
        _put(training, "numb_steps", steps)
    if settings.share is not None and added:
        start, n_new = counts
        end = start + n_new
        blocks = f"0:{start}:{1.0 - settings.share:g};{start}:{end}:{settings.share:g}"
        _put(training["training_data"], "auto_prob", f"prob_sys_size;{blocks}", "training_data")
    if "seed" in training:
        training["seed"] = int(training["seed"]) + 1000 * round_ + member
    _put(training, "save_ckpt", CHECKPOINT)
    _put(training, "disp_file", "lcurve.out")
    _put(training, "stat_file", None)
    return data


def _put(section: dict[str, Any], name: str, value: Any, subsection: str | None = None) -> None:
    """Set a key of section `training` or of a subsection, in any spelling of the file.

    None removes it.
    """
    keys = tree(Settings).keys["training"].keys
    if subsection is not None:
        keys = keys[subsection].keys
    for spelling in (name, *keys[name].alias):
        section.pop(spelling, None)
    if value is not None:
        section[name] = value


def train_on(folder: Path, content: dict[str, Any], start: str, source: Path) -> int:
    """Train in a folder, or continue a training there that was stopped.

    `start` and `source` are the option of `dp train` and its checkpoint. Return the exit status of
    `dp train`. The whole log is in the folder, warnings are shown as well.
    """
    input_file = folder / "input.json"
    make_folder_of(input_file)
    write_text(input_file, json.dumps(content, indent=2))
    way: dict[str, Any]
    log_file = "train.log"
    if (folder / f"{CHECKPOINT}.pt").exists():
        way = {"restart": f"{CHECKPOINT}.pt"}
        log_file = "restart.log"
    else:
        way = {start.replace("-", "_"): str(source)}
    with working_folder(folder), separate_log():
        return run(load("input.json"), log_path=log_file, console_level="WARNING", **way)
