"""Learning rate as a function of the step: exponential, cosine and warmup-stable-decay schedules.

A schedule is a plain function `step -> learning rate`; `learning_rate` builds it from the input's section.
Meaning of every setting as in deepmd-kit 3.2.0, so that an input gives the same rates here and there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from deepmd_muon.argcheck import CosineSettings, ExpSettings, WSDSettings

    Settings: TypeAlias = ExpSettings | CosineSettings | WSDSettings

Schedule: TypeAlias = Callable[[int], float]


class LearningRateError(ValueError):
    """A learning-rate section that cannot give a rate for every step of the run."""


def learning_rate(settings: Settings, num_steps: int) -> Schedule:
    """Build the schedule that a `learning_rate` section describes.

    Parameters
    ----------
    settings
        The section, with `type` one of "exp", "cosine" and "wsd".
    num_steps
        Length of the run in steps, warm-up included.

    Returns
    -------
    Schedule
        The learning rate of the 0-based step: step 0 is the first update.

    Raises
    ------
    LearningRateError
        When the section contradicts itself or does not fit `num_steps`.
    """
    stop_lr = _stop_lr(settings)
    warmup = _warmup_steps(settings, num_steps)
    start, decay_steps = settings.start_lr, num_steps - warmup
    if settings.type == "exp":
        exp = cast("ExpSettings", settings)
        decay = exponential(start, stop_lr, decay_steps, exp.decay_steps, exp.decay_rate, smooth=exp.smooth)
    elif settings.type == "cosine":
        decay = cosine(start, stop_lr, decay_steps)
    elif settings.type == "wsd":
        wsd = cast("WSDSettings", settings)
        # The ratio counts from the whole run, but the decay phase starts after the warm-up at the earliest.
        phase = max(1, min(int(wsd.decay_phase_ratio * num_steps), decay_steps))
        decay = stable_then_decay(start, stop_lr, decay_steps, phase, wsd.decay_type)
    else:
        raise LearningRateError(f"learning_rate.type is {settings.type!r}; choose exp, cosine or wsd")
    return with_warmup(decay, start, warmup, settings.warmup_start_factor)


def with_warmup(decay: Schedule, start_lr: float, warmup_steps: int, start_factor: float) -> Schedule:
    """Rise linearly from `start_factor * start_lr` to `start_lr`, then follow `decay` from its step 0.

    Parameters
    ----------
    decay
        The schedule after the warm-up.
    start_lr
        Rate at the end of the warm-up.
    warmup_steps
        Length of the rise; 0 returns `decay` itself.
    start_factor
        Rate of step 0 in units of `start_lr`.
    """
    if warmup_steps == 0:
        return decay
    first = start_factor * start_lr

    def rate(step: int) -> float:
        if step < warmup_steps:
            return first + (start_lr - first) * (step / warmup_steps)
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
    """Multiply the rate by a constant factor every `decay_steps` steps; never fall below `stop_lr`.

    Parameters
    ----------
    start_lr, stop_lr
        First rate and floor. Without `decay_rate` the factor is chosen such that the last rate is `stop_lr`.
    num_steps
        Length of the decay in steps.
    decay_steps
        Steps between two drops. When it does not fit into `num_steps` and `decay_rate` is not given, a
        hundredth of `num_steps`, at most 100, takes its place.
    decay_rate
        Factor of one drop.
    smooth
        Spread each drop evenly over its `decay_steps`.
    """
    if decay_rate is None:
        if decay_steps >= num_steps:
            decay_steps = 100 if num_steps // 10 > 100 else num_steps // 100 + 1
        # A floor of exactly 0 has no logarithm; 1e-10 stands for it in the factor, not in the floor.
        ratio = max(stop_lr, 1e-10) / start_lr
        decay_rate = math.exp(math.log(ratio) / (num_steps / decay_steps)) if num_steps else 1.0

    def rate(step: int) -> float:
        drops = step / decay_steps if smooth else step // decay_steps
        return max(start_lr * decay_rate**drops, stop_lr)

    return rate


def cosine(start_lr: float, stop_lr: float, num_steps: int) -> Schedule:
    """Fall along half a cosine from `start_lr` at step 0 to `stop_lr` at `num_steps`, and stay there."""

    def rate(step: int) -> float:
        if num_steps == 0:
            return start_lr
        if step >= num_steps:
            return stop_lr
        return stop_lr + (start_lr - stop_lr) * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))

    return rate


def stable_then_decay(
    start_lr: float, stop_lr: float, num_steps: int, phase_steps: int, decay_type: str = "inverse_linear"
) -> Schedule:
    """Keep `start_lr`, then fall to `stop_lr` during the last `phase_steps` of `num_steps` steps.

    Parameters
    ----------
    start_lr, stop_lr
        First and last rate.
    num_steps, phase_steps
        Length of both phases together, and of the decay.
    decay_type
        "inverse_linear" (1/lr grows linearly), "cosine" or "linear".
    """
    if stop_lr <= 0:
        raise LearningRateError(f"learning_rate of type wsd needs a positive stop_lr; found {stop_lr:g}")
    shapes: dict[str, Schedule | Callable[[float], float]] = {
        "inverse_linear": lambda t: 1.0 / (t / stop_lr + (1.0 - t) / start_lr),
        "cosine": lambda t: stop_lr + (start_lr - stop_lr) * 0.5 * (1.0 + math.cos(math.pi * t)),
        "linear": lambda t: start_lr + (stop_lr - start_lr) * t,
    }
    if decay_type not in shapes:
        raise LearningRateError(f"learning_rate.decay_type is {decay_type!r}; choose {', '.join(shapes)}")
    shape = cast("Callable[[float], float]", shapes[decay_type])
    stable_steps = num_steps - phase_steps

    def rate(step: int) -> float:
        if step < stable_steps:
            return start_lr
        if step >= num_steps:
            return stop_lr
        return shape((step - stable_steps) / phase_steps)

    return rate


def _stop_lr(settings: Settings) -> float:
    """Return the last rate, given directly or as a ratio of the first."""
    stop, ratio = settings.stop_lr, settings.stop_lr_ratio
    if (stop is None) == (ratio is None):
        found = "neither" if stop is None else f"stop_lr={stop:g} and stop_lr_ratio={ratio:g}"
        raise LearningRateError(
            f"learning_rate needs exactly one of stop_lr and stop_lr_ratio; found {found}"
        )
    return float(stop if stop is not None else settings.start_lr * cast("float", ratio))


def _warmup_steps(settings: Settings, num_steps: int) -> int:
    """Return the length of the warm-up, given directly or as a ratio of the run."""
    steps, ratio = settings.warmup_steps, settings.warmup_ratio
    if steps and ratio is not None:
        raise LearningRateError(
            f"learning_rate takes one of warmup_steps and warmup_ratio; found {steps} and {ratio:g}"
        )
    if ratio is not None:
        steps = int(ratio * num_steps)
    # A run of 0 steps (statistics only) has no room for a warm-up and needs none.
    if steps and steps >= num_steps:
        raise LearningRateError(
            f"the warm-up takes {steps} steps, the whole run only {num_steps}; shorten it"
        )
    return int(steps)
