"""Read an input file, check it, and write its normalised form."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck.check import Checked, check
from deepmd_muon.argcheck.elsewhere import only_in_deepmd_kit
from deepmd_muon.argcheck.errors import DeepmdKitOnlyError, InputError, Problem
from deepmd_muon.argcheck.files import read
from deepmd_muon.argcheck.legacy import upgrade
from deepmd_muon.argcheck.multi_task import Expanded, References, expand, fold, is_multi_task
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.argcheck.training import BranchDataSettings
from deepmd_muon.files import whole_file
from deepmd_muon.loss.settings import LossSettings
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.settings import ModelSettings, changed
from deepmd_muon.optim.omitted_scales import (
    OmittedScales,
    deepmd_kits_default_scale,
    omitted_scales,
)
from deepmd_muon.section import thaw
from deepmd_muon.setting import shown

_NO_OPTIMIZER = (
    'optimizer is not given: the run uses Adam, as deepmd-kit does; "optimizer": '
    '{"type": "HybridMuon"} would orthogonalize the updates of weight matrices and leave the rest '
    "to Adam (doc/optimizer.md; results in doc/benchmarks/race.md)"
)


@dataclasses.dataclass(frozen=True)
class Branch:
    """One model of an input, with the paths of its sections for messages."""

    model: ModelSettings
    loss: LossSettings
    data: BranchDataSettings
    model_path: str
    data_path: str


@dataclasses.dataclass(frozen=True)
class Input:
    """An input that has passed every check.

    Attributes
    ----------
    settings
        The settings as frozen dataclasses; those of several models with their shared parts written
        out.
    source
        Name of its file.
    notices
        One line for each translated older spelling, and for each key without effect.
    idle
        One line for each given setting that has no effect beside the others.
    remarks
        One line if the input omits the optimizer.
    scales
        Scales chosen for HybridMuon because the input omits them; None if it omits none.
    small_steps
        One line if deepmd-kit wrote the input, with its default of HybridMuon's scale; else None.
    references
        The parts that branches share; empty for an input of one model.
    """

    settings: Settings | MultiTaskSettings
    source: str = dataclasses.field(default="the input", compare=False)
    notices: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    scales: OmittedScales | None = None
    small_steps: str | None = None
    references: References = dataclasses.field(default_factory=dict)

    @property
    def multi_task(self) -> bool:
        """Whether the input describes several models."""
        return isinstance(self.settings, MultiTaskSettings)

    @property
    def branches(self) -> dict[str, Branch]:
        """The models by name of the branch; a single model is named "Default"."""
        settings = self.settings
        if isinstance(settings, Settings):
            return {
                SINGLE: Branch(
                    settings.model, settings.loss, settings.training, "model", "training"
                )
            }
        found = {}
        for name, model in settings.model.model_dict.items():
            data = settings.training.data_dict[name]
            places = f"model/model_dict/{name}", f"training/data_dict/{name}"
            found[name] = Branch(model.alone, settings.loss_dict[name], data, *places)
        return found

    def with_models(self, models: Mapping[str, ModelSettings]) -> Input:
        """Return the input with the model settings of some branches replaced."""
        settings = self.settings
        if isinstance(settings, Settings):
            return self.changed(model=models.get(SINGLE, settings.model))
        changed = {
            name: old.with_model(models.get(name, old))
            for name, old in settings.model.model_dict.items()
        }
        return self.changed(model=dataclasses.replace(settings.model, model_dict=changed))

    @property
    def descriptor_sections(self) -> dict[str, list[str]]:
        """Paths of the descriptors' sections, with the branches that use each."""
        found: dict[str, list[str]] = {}
        for name, branch in self.branches.items():
            shared = self.references.get(name, {}).get("descriptor")
            where = (
                f"model/shared_dict/{shared.key}" if shared else f"{branch.model_path}/descriptor"
            )
            found.setdefault(where, []).append(name)
        return found

    def with_model(self, names: Sequence[str], **changes: Any) -> Input:
        """Return the input with `changes` made to section `model` of some branches, which may share it."""
        found = {name: self.branches[name] for name in names}
        return self.with_models(
            {name: changed(one.model, changes, one.model_path) for name, one in found.items()}
        )

    @property
    def normalized(self) -> dict[str, Any]:
        """The settings as plain dicts and lists, in today's spelling and with every default filled in.

        `out.json` holds this. Normalizing it again returns the same.
        """
        plain: dict[str, Any] = thaw(self.settings)
        return fold(plain, self.references) if self.multi_task else plain

    def changed(self, **sections: Any) -> Input:
        """Return the input with some sections replaced."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **sections))

    def with_scales(self, scales: OmittedScales) -> Input:
        """Return the input with these scales set in its optimizer."""
        config: Any = self.settings.optimizer
        optimizer = dataclasses.replace(config, **scales.values)
        return dataclasses.replace(self.changed(optimizer=optimizer), scales=scales)


def normalize(data: Mapping[str, Any], source: str = "the input") -> Input:
    """Check the contents of an input; `source` names its file in messages.

    Raises
    ------
    DeepmdKitOnlyError
        When deepmd-kit, not this package, has the features that the input requests.
    InputError
        With every problem of the input at once.
    """
    if not isinstance(data, Mapping):
        raise InputError(
            [Problem("", f"must be an object with sections; found {shown(data)}")], source
        )
    upgraded = upgrade(dict(data))
    expanded = expand(upgraded.data) if is_multi_task(upgraded.data) else None
    checked: Checked[Settings | MultiTaskSettings]
    if expanded is None:
        checked = check(Settings, upgraded.data)
        elsewhere, found = only_in_deepmd_kit(upgraded.data, tree(Settings)), list(checked.problems)
    else:
        checked = check(MultiTaskSettings, expanded.data)
        elsewhere, found = _only_in_deepmd_kit(expanded), expanded.located(checked.problems)
    found = [
        dataclasses.replace(each, path=upgraded.origin(each.path)) for each in elsewhere or found
    ]
    problems = found if elsewhere else [*upgraded.problems, *found]
    if problems and all(problem.elsewhere for problem in problems):
        raise DeepmdKitOnlyError(problems, source)
    if problems or checked.settings is None:
        raise InputError(problems, source)
    remarks = () if "optimizer" in upgraded.data else (_NO_OPTIMIZER,)
    notices = (*upgraded.notices, *checked.notices)
    given = Input(checked.settings, source, notices, remarks=remarks)
    if expanded is not None:
        notices = tuple(dict.fromkeys((*upgraded.notices, *expanded.notices, *checked.notices)))
        given = dataclasses.replace(given, notices=notices, references=expanded.references)
        idle = expanded.located(checked.idle)
    else:
        idle = list(checked.idle)
    idle = [dataclasses.replace(each, path=upgraded.origin(each.path)) for each in idle]
    given = dataclasses.replace(given, idle=tuple(map(str, idle)))
    run = (
        checked.settings.optimizer,
        upgraded.data.get("optimizer", {}),
        checked.settings.learning_rate.start_lr,
        checked.settings.training.numb_steps,
    )
    given = dataclasses.replace(given, small_steps=deepmd_kits_default_scale(*run))
    scales = omitted_scales(*run)
    return given.with_scales(scales) if scales else given


def _only_in_deepmd_kit(expanded: Expanded) -> list[Problem]:
    """Apply `only_in_deepmd_kit` to each model of an input of several models."""
    data, found = expanded.data, {}
    branches = data["model"]["model_dict"]
    for name, branch in branches.items() if isinstance(branches, dict) else ():
        losses = data.get("loss_dict")
        loss = losses.get(name) if isinstance(losses, dict) else None
        for problem in only_in_deepmd_kit({**data, "model": branch, "loss": loss}, tree(Settings)):
            section, slash, rest = problem.path.partition("/")
            place = {"model": f"model/model_dict/{name}", "loss": f"loss_dict/{name}"}.get(
                section, section
            )
            path = expanded.origin(place + slash + rest)
            found[path] = dataclasses.replace(problem, path=path)
    return list(found.values())


def load(path: str | os.PathLike[str]) -> Input:
    """Read and check an input file: JSON, or YAML when it ends in .yaml or .yml.

    Raises
    ------
    DeepmdKitOnlyError
        When deepmd-kit, not this package, has the features that the input requests.
    InputError
        When the file cannot be read or parsed, or with every problem of its contents at once.
    """
    return normalize(read(Path(path)), str(path))


def dump(normalized: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `Input.normalized` as JSON, usually out.json.

    A reader sees the old file or the new one, never a part.
    """
    with whole_file(Path(path)) as file:
        file.write((json.dumps(normalized, indent=4, ensure_ascii=False) + "\n").encode())
