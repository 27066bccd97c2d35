"""Read an input file, check it, and write its normalised form."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck.check import Checked, check
from deepmd_muon.argcheck.elsewhere import only_in_deepmd_kit, with_unknown_models
from deepmd_muon.argcheck.errors import DeepmdKitOnlyError, InputError, Problem
from deepmd_muon.argcheck.files import read
from deepmd_muon.argcheck.hosted import can_host, host
from deepmd_muon.argcheck.legacy import upgrade
from deepmd_muon.argcheck.multi_task import Expanded, References, expand, fold, is_multi_task
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.argcheck.training import BranchDataSettings
from deepmd_muon.files import write_text
from deepmd_muon.loss.settings import LossSettings
from deepmd_muon.model.branch_settings import SINGLE, HostedBranchSettings
from deepmd_muon.model.settings import HostedSettings, ModelSettings, changed
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
        The settings as frozen dataclasses. With several models, each has its shared parts in full.
    source
        Name of its file.
    notices
        One line for each translated older spelling, and for each key without effect.
    idle
        One line for each given setting that has no effect with the values of the others.
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
            single = Branch(
                model=settings.model,
                loss=settings.loss,
                data=settings.training,
                model_path="model",
                data_path="training",
            )
            return {SINGLE: single}
        return {
            name: Branch(
                model=model.alone,
                loss=settings.loss_dict[name],
                data=settings.training.data_dict[name],
                model_path=f"model/model_dict/{name}",
                data_path=f"training/data_dict/{name}",
            )
            for name, model in settings.model.model_dict.items()
        }

    @property
    def descriptor_sections(self) -> dict[str, list[str]]:
        """Paths of the descriptors' sections, with the branches that use each."""
        sections: dict[str, list[str]] = {}
        for name, branch in self.branches.items():
            path = f"{branch.model_path}/descriptor"
            shared = self.references.get(name, {}).get("descriptor")
            if shared:
                path = f"model/shared_dict/{shared.key}"
            sections.setdefault(path, []).append(name)
        return sections

    @property
    def normalized(self) -> dict[str, Any]:
        """The settings as plain dicts and lists, in today's spelling and with every default.

        `out.json` holds this. Normalizing it again returns the same.
        """
        plain: dict[str, Any] = thaw(self.settings)
        return fold(plain, self.references) if self.multi_task else plain

    def changed(self, **sections: Any) -> Input:
        """Return the input with some sections replaced."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **sections))

    def with_models(self, models: Mapping[str, ModelSettings]) -> Input:
        """Return the input with the model settings of some branches replaced."""
        settings = self.settings
        if isinstance(settings, Settings):
            return self.changed(model=models.get(SINGLE, settings.model))
        branches = {
            name: branch.with_model(models.get(name, branch))
            for name, branch in settings.model.model_dict.items()
        }
        return self.changed(model=dataclasses.replace(settings.model, model_dict=branches))

    def with_model(self, names: Sequence[str], **changes: Any) -> Input:
        """Return the input with `changes` made to the models of some branches."""
        models = {}
        for name in names:
            branch = self.branches[name]
            models[name] = changed(branch.model, changes, branch.model_path)
        return self.with_models(models)

    def with_scales(self, scales: OmittedScales) -> Input:
        """Return the input with these scales set in its optimizer."""
        config: Any = self.settings.optimizer
        optimizer = dataclasses.replace(config, **scales.values)
        return dataclasses.replace(self.changed(optimizer=optimizer), scales=scales)

    def with_default_scales(self) -> Input:
        """Return the input with deepmd-kit's defaults for the scales that it omits."""
        if self.scales is None:
            return self
        config: Any = self.settings.optimizer
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(config)
            if field.name in self.scales.values
        }
        optimizer = dataclasses.replace(config, **defaults)
        changed_input = self.changed(optimizer=optimizer)
        return dataclasses.replace(changed_input, scales=None, small_steps=None)


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


def normalize(data: Mapping[str, Any], source: str = "the input") -> Input:
    """Check the contents of an input and complete them; `source` names its file in messages.

    Raises
    ------
    DeepmdKitOnlyError
        When deepmd-kit, not this package, has the features that the input requests.
    InputError
        With every problem of the input at once.
    """
    if not isinstance(data, Mapping):
        problem = Problem("", f"must be an object with sections; found {shown(data)}")
        raise InputError([problem], source)

    # Today's spelling, every branch in full; then the check. Problems have paths of these forms.
    upgraded = upgrade(dict(data))
    checked: Checked[Settings | MultiTaskSettings]
    multi_task = is_multi_task(upgraded.data)
    expanded = expand(upgraded.data) if multi_task else Expanded(upgraded.data)
    settings_class: type[Settings | MultiTaskSettings] = (
        MultiTaskSettings if multi_task else Settings
    )
    elsewhere = _only_in_deepmd_kit(expanded)
    checked = check(settings_class, expanded.data)
    model = expanded.data.get("model")
    if can_host(model, elsewhere or expanded.located(checked.problems)):
        refused = _host_models(expanded)
        if refused:
            raise InputError(refused, source)
        elsewhere = _only_in_deepmd_kit(expanded)
        checked = check(settings_class, expanded.data)

    def in_file(problems: Iterable[Problem]) -> list[Problem]:
        """Return problems of the upgraded input with their paths in the file."""
        return [
            dataclasses.replace(problem, path=upgraded.origin(problem.path)) for problem in problems
        ]

    problems = in_file(elsewhere)  # if there are any, they are the only ones to report
    if not elsewhere:
        problems = [*upgraded.problems, *in_file(expanded.located(checked.problems))]
        if not multi_task:
            problems = with_unknown_models(problems, expanded.data, tree(Settings))
    if problems and all(problem.elsewhere for problem in problems):
        raise DeepmdKitOnlyError(problems, source)
    settings = checked.settings
    if problems or settings is None:
        raise InputError(problems, source)

    # What the input leaves open: scales, which depend on the length of the run and its rate.
    optimizer_keys = upgraded.data.get("optimizer", {})
    start_lr = settings.learning_rate.start_lr
    numb_steps = settings.training.numb_steps
    small_steps = scales = None
    # The scales were measured on our models; deepmd-kit's suit its own.
    if not isinstance(settings.model, HostedSettings) and not _has_hosted_branch(settings):
        small_steps = deepmd_kits_default_scale(
            settings.optimizer, optimizer_keys, start_lr, numb_steps
        )
        scales = omitted_scales(settings.optimizer, optimizer_keys, start_lr, numb_steps)
    notices = (*upgraded.notices, *expanded.notices, *checked.notices)
    completed = Input(
        settings=settings,
        source=source,
        # A notice about a shared part comes once for each branch.
        notices=tuple(dict.fromkeys(notices)),
        idle=tuple(map(str, in_file(expanded.located(checked.idle)))),
        remarks=() if "optimizer" in upgraded.data else (_NO_OPTIMIZER,),
        small_steps=small_steps,
        references=expanded.references,
    )
    return completed.with_scales(scales) if scales else completed


def _has_hosted_branch(settings: Settings | MultiTaskSettings) -> bool:
    branches = getattr(settings.model, "model_dict", {})
    return any(isinstance(branch, HostedSettings) for branch in branches.values())


def _host_models(expanded: Expanded) -> list[Problem]:
    """Replace the models of an input by the settings of deepmd-kit's; return its objections."""
    model = expanded.data["model"]
    if "model_dict" not in model:
        hosted = host(model, "model")
        if isinstance(hosted, Problem):
            return [hosted]
        expanded.data["model"] = hosted
        return []
    problems = []
    for name, branch in model["model_dict"].items():
        own_keys = ("finetune_head", "model_branch_alias")
        hosted = host(branch, f"model/model_dict/{name}", own_keys)
        if isinstance(hosted, Problem):
            problems.append(hosted)
        else:
            model["model_dict"][name] = HostedBranchSettings.around(hosted, branch)
    return expanded.located(problems) if problems else []


def _only_in_deepmd_kit(expanded: Expanded) -> list[Problem]:
    """Apply `only_in_deepmd_kit` to each model of an input."""
    data = expanded.data
    if not is_multi_task(data):
        return only_in_deepmd_kit(data, tree(Settings))
    branches = data["model"]["model_dict"]
    losses = data.get("loss_dict")
    problems: dict[str, Problem] = {}  # by path: one for a shared part
    for name, branch in branches.items() if isinstance(branches, dict) else ():
        loss = losses.get(name) if isinstance(losses, dict) else None
        single = {**data, "model": branch, "loss": loss}
        sections = {"model": f"model/model_dict/{name}", "loss": f"loss_dict/{name}"}
        for problem in only_in_deepmd_kit(single, tree(Settings)):
            section, slash, key = problem.path.partition("/")
            path = expanded.origin(sections.get(section, section) + slash + key)
            problems[path] = dataclasses.replace(problem, path=path)
    return list(problems.values())


def dump(normalized: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `Input.normalized` as JSON, usually out.json.

    A reader sees the old file or the new one, never a part.
    """
    text = json.dumps(normalized, indent=4, ensure_ascii=False) + "\n"
    write_text(Path(path), text)
