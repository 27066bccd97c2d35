"""The whole of input.json as one frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from deepmd_muon.argcheck.learning_rate import (
    CosineSettings,
    ExpSettings,
    LearningRateSettings,
    WSDSettings,
)
from deepmd_muon.argcheck.replay_settings import ReplaySettings
from deepmd_muon.argcheck.training import (
    BranchDataSettings,
    MultiTaskTrainingSettings,
    TrainingSettings,
)
from deepmd_muon.argcheck.validating import ValidatingSettings
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.loss.registry import LOSSES
from deepmd_muon.loss.settings import LossSettings, Quantity
from deepmd_muon.model.branch_settings import MultiTaskModelSettings
from deepmd_muon.model.settings import ModelSettings
from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.other_configs import OPTIMIZERS, AdamConfig, AdamWConfig, MuonConfig
from deepmd_muon.section import Foreign, Rule, Section, Variants, declared_like, section


def _warmup_fits(warmup_steps: int, numb_steps: int | None) -> str | None:
    if numb_steps and warmup_steps >= numb_steps:
        return f"must be less than training/numb_steps; found {warmup_steps} of {numb_steps} steps"
    return None


def _decay_keeps_signs(optimizer: Buildable, start_lr: float) -> str | None:
    """Reject a decoupled decay that changes the sign of the weights in a step.

    Beyond 2, `weight_decay` times the rate would make them grow.
    """
    if not isinstance(optimizer, HybridMuonConfig | MuonConfig | AdamWConfig):
        return None  # Adam's is a part of the gradient
    fastest = 1.0
    decay = optimizer.weight_decay
    if isinstance(optimizer, MuonConfig):
        fastest = max(1.0, optimizer.for_potentials().adam_lr_ratio or 1.0)
        decay = max(decay, optimizer.adam_weight_decay or 0.0)
    shrinkage = start_lr * fastest * decay
    if shrinkage < 1.0:
        return None
    ratio = f" · adam_lr_ratio {fastest:g}" if fastest > 1.0 else ""
    return (
        f"weight_decay {decay:g} · start_lr {start_lr:g}{ratio} must be below 1, because each "
        f"step multiplies the weights by 1 minus this product; found {shrinkage:g}"
    )


def _validation_data(full_validation: bool, data: object) -> str | None:
    if full_validation and data is None:
        return "needs training/validation_data; add it or set false"
    return None


_QUANTITIES: dict[str, Quantity] = {"e": "energy", "f": "force", "v": "virial", "s": "virial"}


def _trained_metric(metric: str, enabled: bool, loss: LossSettings) -> str | None:
    return loss.obstacle_to(_QUANTITIES[metric[0].lower()]) if enabled else None


def _spins_of_model(loss: LossSettings, model: ModelSettings) -> str | None:
    """Reject magnetic forces of a model that reads no spins."""
    if not loss.needs_spins or model.spins.read:
        return None
    return "type 'ener_spin' needs model/spin, the spins of a model of deepmd-kit; or set 'ener'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """The whole of input.json, with defaults filled in."""

    model: ModelSettings = section(doc="The model, which maps positions to energy.")
    learning_rate: LearningRateSettings = section(
        doc="Learning rate of every step.",
        variants=Variants(
            {"exp": ExpSettings, "cosine": CosineSettings, "wsd": WSDSettings}, default="exp"
        ),
    )
    loss: LossSettings = section(
        EnerLossSettings(),
        doc="The quantity that training minimises.",
        variants=Variants(LOSSES.settings, default="ener", alias=LOSSES.aliases),
    )
    optimizer: Buildable = section(
        AdamConfig(),
        doc="The optimizer, which updates the parameters.",
        variants=Variants(OPTIMIZERS, default="Adam"),
    )
    training: TrainingSettings = section(doc="Data, length and outputs of the run.")
    validating: ValidatingSettings = section(
        ValidatingSettings(), doc="Passes over all validation data during training."
    )
    replay: ReplaySettings | None = section(
        None, doc="Fine-tuning with `--finetune FILE --replay DATA|pseudo`; other runs ignore it."
    )

    left_out = frozenset({"replay"})
    rules = (
        Rule(("learning_rate/warmup_steps", "training/numb_steps"), _warmup_fits),
        Rule(("optimizer", "learning_rate/start_lr"), _decay_keeps_signs),
        Rule(("validating/full_validation", "training/validation_data"), _validation_data),
        Rule(
            ("validating/validation_metric", "validating/full_validation", "loss"), _trained_metric
        ),
        Rule(("loss", "model"), _spins_of_model),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "nvnmd": Foreign("training for non-von-Neumann hardware"),
        "loss_dict": Foreign("losses of several models, but the input has one", ({},)),
        "use_smooth": Foreign("the layout of DeePMD-kit 0.x inputs"),
    }


def _some_validation_data(
    full_validation: bool, data_dict: Mapping[str, BranchDataSettings]
) -> str | None:
    if full_validation and not any(data.validation_data for data in data_dict.values()):
        return "needs validation_data of a branch in training/data_dict; add it or set false"
    return None


def _trained_metrics(metric: str, enabled: bool, losses: Mapping[str, LossSettings]) -> str | None:
    for name, loss in losses.items():
        problem = _trained_metric(metric, enabled, loss)
        if problem:
            return f"loss_dict/{name}: {problem}"
    return None


def _spins_of_models(
    losses: Mapping[str, LossSettings], model: MultiTaskModelSettings
) -> str | None:
    for name, loss in losses.items():
        branch = model.model_dict.get(name)
        problem = None if branch is None else _spins_of_model(loss, branch)
        if problem:
            return f"{name}: {problem}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTaskSettings(Section):
    """The whole of input.json with a model_dict: several models are trained together."""

    model: MultiTaskModelSettings = section(doc="The models.")
    learning_rate: LearningRateSettings = declared_like(Settings, "learning_rate")
    loss_dict: Mapping[str, LossSettings] = section(
        doc="The quantity that training minimises, for each branch.",
        variants=Variants(LOSSES.settings, default="ener", alias=LOSSES.aliases),
    )
    optimizer: Buildable = declared_like(Settings, "optimizer")
    training: MultiTaskTrainingSettings = section(
        doc="Data of each branch, length and outputs of the run."
    )
    validating: ValidatingSettings = declared_like(Settings, "validating")

    rules = (
        Rule(("learning_rate/warmup_steps", "training/numb_steps"), _warmup_fits),
        Rule(("optimizer", "learning_rate/start_lr"), _decay_keeps_signs),
        Rule(("validating/full_validation", "training/data_dict"), _some_validation_data),
        Rule(
            ("validating/validation_metric", "validating/full_validation", "loss_dict"),
            _trained_metrics,
        ),
        Rule(("loss_dict", "model"), _spins_of_models),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        key: value for key, value in Settings.foreign.items() if key != "loss_dict"
    }
