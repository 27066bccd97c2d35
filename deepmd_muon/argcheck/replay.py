"""The two-branch input of fine-tuning with replay, made from an input of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deepmd_muon.argcheck.errors import InputError, Problem
from deepmd_muon.argcheck.load import Input
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
    HostedBranchSettings,
    MultiTaskModelSettings,
    Shared,
)
from deepmd_muon.model.settings import HostedSettings, ModelSettings
from deepmd_muon.setting import InvalidSettingError

FINETUNED = "finetuned"
"""Name of the branch with the data of the input."""
REPLAY = "replay"
"""Name of the branch with the replayed data."""


def replay_of(settings: Settings) -> ReplaySettings:
    """Return section `replay`, or its defaults if the input has none."""
    return settings.replay or ReplaySettings()


def check_replay(single: Input) -> Settings:
    """Return the settings of an input that can be fine-tuned with replay.

    Raises
    ------
    InputError
        With every obstacle at once.
    """
    settings = single.settings
    if not isinstance(settings, Settings):
        problem = Problem(
            "model/model_dict",
            "has branches already, and --replay adds its own: put the data to replay into a branch "
            "instead",
        )
        raise InputError([problem], single.source)
    problems = []
    if settings.training.numb_steps is None:
        problems.append(
            Problem("training/numb_epoch", "cannot set the length with --replay; give numb_steps")
        )
    trainable = getattr(settings.model.descriptor, "trainable", True)
    if not trainable and not replay_of(settings).share_fitting_net:
        problems.append(
            Problem(
                "model/descriptor/trainable",
                "is false, so replayed data would not train any part of the new model: set "
                "replay/share_fitting_net to true, or fine-tune without --replay",
            )
        )
    if isinstance(settings.model, HostedSettings) and "descriptor" not in settings.model.section:
        problems.append(
            Problem(
                "model/type", "has no single descriptor, which --replay shares between branches"
            )
        )
    if settings.training.zero_stage > 1:
        problems.append(
            Problem(
                "training/zero_stage",
                "must be 0 or 1 with --replay, which trains two branches; found "
                f"{settings.training.zero_stage}",
            )
        )
    if problems:
        raise InputError(problems, single.source)
    return settings


def replayed_section(settings: Settings, systems: Sequence[str]) -> TrainingDataSettings:
    """Return the training data of the replay branch.

    Its systems are read with the settings of the input's own training data.
    """
    training_data = settings.training.training_data
    batch_size: int | str | tuple[int, ...] | None = replay_of(settings).batch_size
    if batch_size is None:
        batch_size = training_data.batch_size
    if isinstance(batch_size, tuple):  # a size for each system of the input
        batch_size = batch_size[0] if len(batch_size) == 1 else "auto"
    return TrainingDataSettings(
        systems=tuple(systems),
        batch_size=batch_size,
        label_keys=training_data.label_keys,
        keep_unconverged=training_data.keep_unconverged,
    )


def with_replay(
    single: Input,
    model: ModelSettings,
    head: str | None,
    training: TrainingDataSettings,
    validation: ValidationDataSettings | None,
) -> Input:
    """Return the input of the two-branch run.

    Both branches share the descriptor and, with `replay/share_fitting_net`, the fitting net. Each
    branch fits its atomic energy biases to its own data.

    Parameters
    ----------
    single
        The input of one model; it has passed `check_replay`.
    model
        Its model, with a type map.
    head
        Branch of the checkpoint that both branches start from; None for its only model.
    training, validation
        Data of the replay branch.

    Raises
    ------
    InputError
        When a rule of inputs with several models is broken.
    """
    settings = check_replay(single)
    replay = replay_of(settings)
    finetune_head = head or SINGLE
    if isinstance(model, HostedSettings):
        branch: BranchModelSettings = HostedBranchSettings.around(
            model, {"finetune_head": finetune_head}
        )
    else:
        branch = BranchModelSettings(**_fields(model, ModelSettings), finetune_head=finetune_head)
    data = {
        FINETUNED: BranchDataSettings(**_fields(settings.training, BranchDataSettings)),
        REPLAY: BranchDataSettings(training_data=training, validation_data=validation),
    }
    try:
        both = MultiTaskSettings(
            model=MultiTaskModelSettings(model_dict=dict.fromkeys(data, branch)),
            learning_rate=settings.learning_rate,
            loss_dict=dict.fromkeys(data, settings.loss),
            optimizer=settings.optimizer,
            training=MultiTaskTrainingSettings(
                **_fields(settings.training, RunSettings),
                data_dict=data,
                model_prob={FINETUNED: 1.0 - replay.proportion, REPLAY: replay.proportion},
                export_branch=FINETUNED,
            ),
            validating=settings.validating,
        )
    except InvalidSettingError as error:
        raise InputError([Problem("", str(error))], single.source) from error
    shared_parts = ["type_map", "descriptor"]
    if replay.share_fitting_net:
        shared_parts.append("fitting_net")
    shared = {part: Shared(key=part, level=ENTIRE, given=part) for part in shared_parts}
    references = {FINETUNED: shared, REPLAY: shared}
    return dataclasses.replace(single, settings=both, references=references)


def _fields(settings: TrainingSettings | ModelSettings, declared: Any) -> dict[str, Any]:
    """Return the values of the fields that the dataclass `declared` has."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(declared)}
