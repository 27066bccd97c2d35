"""The two-branch input of fine-tuning with replay, made from an input of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from deepmd_muon.argcheck.errors import InputError, Problem
from deepmd_muon.argcheck.load import Input
from deepmd_muon.argcheck.multi_task import References
from deepmd_muon.argcheck.replay_settings import ReplaySettings
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.argcheck.training import (
    BranchDataSettings,
    MultiTaskTrainingSettings,
    RunSettings,
    TrainingDataSettings,
    TrainingSettings,
    ValidationDataSettings,
)
from deepmd_muon.model.branch_settings import (
    ENTIRE,
    SINGLE,
    BranchModelSettings,
    MultiTaskModelSettings,
    Shared,
)
from deepmd_muon.model.settings import ModelSettings
from deepmd_muon.setting import InvalidSettingError

#: Names of the branch with the input's own data, and of the branch with the replayed data.
FINETUNED, REPLAY = "finetuned", "replay"


def replay_of(settings: Settings) -> ReplaySettings:
    """Return section `replay`, or its defaults if the input has none."""
    return settings.replay or ReplaySettings()


def check_replay(given: Input) -> Settings:
    """Return the settings of an input that can be fine-tuned with replay.

    Raises
    ------
    InputError
        With every obstacle at once.
    """
    if not isinstance(given.settings, Settings):
        problem = (
            "has branches already, and --replay adds its own: put the data to replay into a branch "
            "instead"
        )
        raise InputError([Problem("model/model_dict", problem)], given.source)
    settings, problems = given.settings, []
    if settings.training.numb_steps is None:
        problems.append(
            Problem("training/numb_epoch", "cannot set the length with --replay; give numb_steps")
        )
    frozen = not getattr(settings.model.descriptor, "trainable", True)
    if frozen and not replay_of(settings).share_fitting_net:
        problem = (
            "is false, so replayed data would not train any part of the new model: set "
            "replay/share_fitting_net to true, or fine-tune without --replay"
        )
        problems.append(Problem("model/descriptor/trainable", problem))
    if settings.training.zero_stage > 1:
        problem = (
            "must be 0 or 1 with --replay, which trains two branches; found "
            f"{settings.training.zero_stage}"
        )
        problems.append(Problem("training/zero_stage", problem))
    if problems:
        raise InputError(problems, given.source)
    return settings


def replayed_section(settings: Settings, systems: Sequence[str]) -> TrainingDataSettings:
    """Return the training data of the replay branch: other systems, read with the settings of the input's own."""
    own = settings.training.training_data
    asked = replay_of(settings).batch_size
    size = own.batch_size if asked is None else asked
    if isinstance(size, tuple):
        size = "auto" if len(size) > 1 else size[0]
    return TrainingDataSettings(
        systems=tuple(systems),
        batch_size=size,
        label_keys=own.label_keys,
        keep_unconverged=own.keep_unconverged,
    )


def with_replay(
    given: Input,
    model: ModelSettings,
    head: str | None,
    training: TrainingDataSettings,
    validation: ValidationDataSettings | None,
) -> Input:
    """Return the input of the two-branch run, from one that passed `check_replay` and its model with a type map.

    Both branches share the descriptor and, with `replay/share_fitting_net`, the fitting net. Both
    start from the branch `head` of the checkpoint, or from its only model. Each branch fits its
    atomic energy biases to its own data.

    Raises
    ------
    InputError
        When a rule of inputs with several models is broken.
    """
    settings = check_replay(given)
    replay = replay_of(settings)
    branch = BranchModelSettings(**_fields(model, ModelSettings), finetune_head=head or SINGLE)
    own = settings.training
    data = {
        FINETUNED: BranchDataSettings(**_fields(own, BranchDataSettings)),
        REPLAY: BranchDataSettings(training_data=training, validation_data=validation),
    }
    try:
        together = MultiTaskTrainingSettings(
            **_fields(own, RunSettings),
            data_dict=data,
            model_prob={FINETUNED: 1.0 - replay.proportion, REPLAY: replay.proportion},
            export_branch=FINETUNED,
        )
        whole = MultiTaskSettings(
            model=MultiTaskModelSettings(model_dict=dict.fromkeys(data, branch)),
            learning_rate=settings.learning_rate,
            loss_dict=dict.fromkeys(data, settings.loss),
            optimizer=settings.optimizer,
            training=together,
            validating=settings.validating,
        )
    except InvalidSettingError as error:
        raise InputError([Problem("", str(error))], given.source) from error
    return dataclasses.replace(given, settings=whole, references=_references(replay))


def _references(replay: ReplaySettings) -> References:
    parts = ("type_map", "descriptor", *(("fitting_net",) if replay.share_fitting_net else ()))
    shared: Mapping[str, Shared] = {part: Shared(part, ENTIRE, part) for part in parts}
    return {FINETUNED: shared, REPLAY: shared}


def _fields(settings: TrainingSettings | ModelSettings, declared: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(declared)}
