"""Section `learning_rate`: the rate of every step.

Steps count from 0; step 0 is the first update. Over the first `warmup_steps` of the `numb_steps`
steps the rate rises linearly. Over the rest, the decay, it follows the schedule of the section's
type.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from deepmd_muon.section import Foreign, Rule, Section
from deepmd_muon.setting import Needs, setting

DEFAULT_STOP_LR = 5e-8
"""Last rate when neither `stop_lr` nor `stop_lr_ratio` is given (deepmd-kit)."""


def _one_stop(stop_lr: float | None, stop_lr_ratio: float | None) -> str | None:
    if stop_lr is not None and stop_lr_ratio is not None:
        return f"excludes stop_lr_ratio; found {stop_lr:g} and {stop_lr_ratio:g}, keep one of them"
    return None


def _stop_below_start(
    stop_lr: float | None, stop_lr_ratio: float | None, start_lr: float
) -> str | None:
    stop = DEFAULT_STOP_LR if stop_lr is None and stop_lr_ratio is None else stop_lr
    if stop is not None and stop > start_lr:
        by_default = " (the default)" if stop_lr is None else ""
        return f"must not exceed start_lr; found {stop:g}{by_default} with start_lr {start_lr:g}"
    return None


def _one_warmup(warmup_steps: int, warmup_ratio: float | None) -> str | None:
    if warmup_steps and warmup_ratio is not None:
        return f"excludes warmup_ratio; found {warmup_steps} and {warmup_ratio:g}, keep one of them"
    return None


@dataclasses.dataclass(frozen=True)
class _Schedule(Section):
    """Settings of every schedule."""

    start_lr: float = setting(above=0.0, maximum=1e3, doc="Learning rate when the warm-up is over.")
    stop_lr: float | None = setting(
        None,
        minimum=0.0,
        doc=(
            "Learning rate at the end of the run, or a lower bound if decay_rate is given. "
            "Excludes stop_lr_ratio; 5e-8 when neither is given."
        ),
    )
    stop_lr_ratio: float | None = setting(
        None, minimum=0.0, maximum=1.0, doc="stop_lr in units of start_lr. Excludes stop_lr."
    )
    warmup_steps: int = setting(
        0,
        minimum=0,
        doc=(
            "Steps of the warm-up, in which the rate rises linearly from "
            "warmup_start_factor·start_lr to start_lr. Excludes warmup_ratio."
        ),
    )
    warmup_ratio: float | None = setting(
        None,
        minimum=0.0,
        below=1.0,
        doc="Steps of the warm-up in units of all steps, rounded down. Excludes warmup_steps.",
    )
    warmup_start_factor: float = setting(
        0.0,
        minimum=0.0,
        needs=(
            Needs(
                ("warmup_steps", "warmup_ratio"),
                lambda steps, ratio: bool(steps or ratio),
                "warmup_steps or warmup_ratio",
            ),
        ),
        doc="Rate of the first warm-up step in units of start_lr.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("stop_lr", "stop_lr_ratio"), _one_stop),
        Rule(("stop_lr", "stop_lr_ratio", "start_lr"), _stop_below_start),
        Rule(("warmup_steps", "warmup_ratio"), _one_warmup),
    )
    hints: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("lr", "learning_rate", "initial_lr", "max_lr", "base_lr"), "start_lr"),
        **dict.fromkeys(("min_lr", "end_lr", "final_lr", "eta_min"), "stop_lr"),
    }
    foreign: ClassVar[dict[str, Foreign]] = {
        "scale_by_worker": Foreign(
            "the rate is the same for any number of processes, as in deepmd-kit's PyTorch backend",
            ("linear",),
            inert=True,
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_lr is None and self.stop_lr_ratio is None:
            object.__setattr__(self, "stop_lr", DEFAULT_STOP_LR)


@dataclasses.dataclass(frozen=True)
class ExpSettings(_Schedule):
    """The rate is multiplied by a constant factor every decay_steps steps of the decay."""

    type: ClassVar[str] = "exp"

    decay_steps: int = setting(
        5000,
        minimum=1,
        doc=(
            "Steps between two drops of the rate. If it does not fit into the decay and decay_rate "
            "is not given, the run uses a hundredth of the decay, at most 100 steps."
        ),
    )
    decay_rate: float | None = setting(
        None,
        above=0.0,
        maximum=1.0,
        doc=(
            "Factor of one drop. By default the rate reaches stop_lr at the end of the run: "
            "(stop_lr/start_lr)^(decay_steps/steps of the decay)."
        ),
    )
    smooth: bool = setting(
        False, doc="Let the rate fall at every step instead of once every decay_steps steps."
    )


@dataclasses.dataclass(frozen=True)
class CosineSettings(_Schedule):
    """The rate falls along half a cosine from start_lr to stop_lr."""

    type: ClassVar[str] = "cosine"


def _positive(stop: float | None) -> str | None:
    return "must be > 0 with type 'wsd', whose decay divides by it; found 0" if stop == 0 else None


@dataclasses.dataclass(frozen=True)
class WSDSettings(_Schedule):
    """Warm-up, stable, decay: the rate stays at start_lr and falls to stop_lr at the end."""

    type: ClassVar[str] = "wsd"

    decay_phase_ratio: float = setting(
        0.1,
        above=0.0,
        maximum=1.0,
        doc=(
            "Length of the decay in units of all steps, warm-up included; it starts after the "
            "warm-up at the earliest."
        ),
    )
    decay_type: Literal["inverse_linear", "cosine", "linear"] = setting(
        "inverse_linear", doc="Course of the decay; with 'inverse_linear' 1/rate grows linearly."
    )

    rules = (
        *_Schedule.rules,
        Rule(("stop_lr",), _positive),
        Rule(("stop_lr_ratio",), _positive),
    )


LearningRateSettings = ExpSettings | CosineSettings | WSDSettings
