"""Learning rate as a function of the step: exponential, cosine and warmup-stable-decay schedules.

A schedule is a plain function `step -> learning rate`; `learning_rate` builds it from the input's
section. All settings mean the same as in deepmd-kit 3.2.0, so an input gives the same rates in
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from deepmd_muon.argcheck import ExpSettings, LearningRateSettings, WSDSettings

Schedule: TypeAlias = Callable[[int], float]
DecayType: TypeAlias = Literal["inverse_linear", "cosine", "linear"]


class LearningRateError(ValueError):
    """A schedule that does not fit the length of the run."""


def learning_rate(settings: LearningRateSettings, num_steps: int) -> Schedule:
    """Build the schedule of a `learning_rate` section for the 0-based steps of a run.

    Raises
    ------
    LearningRateError
        If the warm-up does not leave a single step of the run.
    """
    start = settings.start_lr
    stop = settings.stop_lr
    if settings.stop_lr_ratio is not None:
        stop = start * settings.stop_lr_ratio
    assert stop is not None  # the settings have exactly one of the two
    warmup = settings.warmup_steps
    if settings.warmup_ratio is not None:
        warmup = int(settings.warmup_ratio * num_steps)
    if warmup and warmup >= num_steps:
        raise LearningRateError(
            f"the warm-up takes {warmup} steps, the whole run only {num_steps}; shorten it"
        )
    steps = num_steps - warmup
    if isinstance(settings, ExpSettings):
        decay = exponential(
            start,
            stop,
            num_steps=steps,
            decay_steps=settings.decay_steps,
            decay_rate=settings.decay_rate,
            smooth=settings.smooth,
        )
    elif isinstance(settings, WSDSettings):
        # The ratio counts from the whole run, but the decay starts after the warm-up at the
        # earliest.
        phase = max(1, min(int(settings.decay_phase_ratio * num_steps), steps))
        decay = stable_then_decay(
            start, stop, num_steps=steps, phase_steps=phase, decay_type=settings.decay_type
        )
    else:
        decay = cosine(start, stop, steps)
    return with_warmup(decay, start, warmup_steps=warmup, start_factor=settings.warmup_start_factor)


def with_warmup(
    decay: Schedule, start_lr: float, warmup_steps: int, start_factor: float
) -> Schedule:
    """Rise linearly from `start_factor * start_lr` to `start_lr`, then follow `decay`."""
    if warmup_steps == 0:
        return decay
    warmup_start = start_factor * start_lr

    def rate(step: int) -> float:
        if step < warmup_steps:
            return warmup_start + (start_lr - warmup_start) * (step / warmup_steps)
        return decay(step - warmup_steps)

    return rate


def exponential(
    start_lr: float,
    stop_lr: float,
    num_steps: int,
    decay_steps: int = 5000,
    decay_rate: float | None = None,
    *,
    smooth: bool = False,
) -> Schedule:
    """Multiply the rate by `decay_rate` every `decay_steps` steps; never fall below `stop_lr`.

    Without `decay_rate` the last of `num_steps` rates is `stop_lr`. A `decay_steps` that does not
    fit into the run then becomes a hundredth of it, at most 100. `smooth` spreads each drop evenly
    over its steps.
    """
    if decay_rate is None:
        if decay_steps >= num_steps:
            decay_steps = 100 if num_steps // 10 > 100 else num_steps // 100 + 1
        # A floor of exactly 0 has no logarithm; 1e-10 stands for it in the factor, not in the
        # floor.
        ratio = max(stop_lr, 1e-10) / start_lr
        decay_rate = math.exp(math.log(ratio) / (num_steps / decay_steps)) if num_steps else 1.0

    def rate(step: int) -> float:
        drops = step / decay_steps if smooth else step // decay_steps
        return max(start_lr * decay_rate**drops, stop_lr)

    return rate


def cosine(start_lr: float, stop_lr: float, num_steps: int) -> Schedule:
    """Fall along half a cosine to `stop_lr` at `num_steps`, and stay there."""

    def rate(step: int) -> float:
        if num_steps == 0:
            return start_lr
        if step >= num_steps:
            return stop_lr
        return stop_lr + (start_lr - stop_lr) * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))

    return rate


def stable_then_decay(
    start_lr: float,
    stop_lr: float,
    num_steps: int,
    phase_steps: int,
    decay_type: DecayType = "inverse_linear",
) -> Schedule:
    """Keep `start_lr`, then fall to `stop_lr` during the last `phase_steps` of `num_steps` steps.

    With "inverse_linear", 1/lr grows linearly; both rates are positive.
    """
    stable_steps = num_steps - phase_steps

    def rate(step: int) -> float:
        if step < stable_steps:
            return start_lr
        if step >= num_steps:
            return stop_lr
        progress = (step - stable_steps) / phase_steps
        if decay_type == "inverse_linear":
            return 1.0 / (progress / stop_lr + (1.0 - progress) / start_lr)
        if decay_type == "cosine":
            return stop_lr + (start_lr - stop_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return start_lr + (stop_lr - start_lr) * progress

    return rate
