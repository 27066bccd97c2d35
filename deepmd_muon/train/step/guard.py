"""Keeping numbers that are not finite out of the weights.

Two guards do the same at different times. `HostGuard` reads loss and gradient norm in every step, which costs nothing
on a CPU. `DeviceGuard` decides on the device, so that a step waits for nothing and can be captured in a CUDA graph;
from the first bad step on it freezes weights, optimizer state and average, and `check` reports that step later.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.model.nn import triton_support
from deepmd_muon.train.errors import NonFiniteError
from deepmd_muon.train.step.bad_frames import FrameLoss, describe_batch, without_losses
from deepmd_muon.train.strategy.base import Reduced

log = logging.getLogger(__name__)

OnNonFinite = Literal["error", "skip"]


def on_nonfinite(optimizer: torch.optim.Optimizer) -> OnNonFinite:
    """Return the reaction to a step whose loss or gradient is not finite: the optimizer's setting, else 'error'.

    A training run treats 'ignore' as 'error'; outside a run, HybridMuon then lets the parameter become NaN.
    """
    wanted = getattr(optimizer, "on_nonfinite", "error")
    return "skip" if wanted == "skip" else "error"


def _problem(loss: float, norm: float, where: str) -> str:
    return f"the loss is {loss:g} and the norm of its gradient {norm:g} on a batch of {where}"


class SkipCount:
    """Count skipped steps: a run that skips nearly all of its steps does not train.

    At least `LEAST` steps are judged together, so that one bad step does not end a run.
    """

    LEAST = 10

    def __init__(self, interval: int) -> None:
        self._interval = max(interval, self.LEAST)
        self._seen = self._bad = 0

    def add(self, seen: int, bad: int, done: int) -> None:
        """Count steps, of which the last is update `done`; a complete interval of skipped steps is a NonFiniteError."""
        self._seen += seen
        self._bad += bad
        if self._seen < self._interval:
            return
        seen, bad = self._seen, self._bad
        self._seen = self._bad = 0
        if bad == seen:
            raise NonFiniteError(
                f"all of the last {seen} steps were skipped, because their loss or gradient was not finite"
            )
        if 2 * bad > seen:
            log.warning(
                "%d of the %d steps up to update %d were skipped: the model hardly trains",
                bad,
                seen,
                done,
            )


class Guard(ABC):
    """Decides whether a step may change anything; `ends_run` says that a bad step ends the run."""

    ends_run: bool

    @abstractmethod
    def admits(self, reduced: Reduced, where: Callable[[], str]) -> bool:
        """Return whether the optimizer is to be called for a step; `where` names the frames of its batch.

        Under 'error', loss or gradient that is not finite is a NonFiniteError.
        """

    def weight(self, value: float | Tensor) -> float | Tensor:
        """Return `value`, or zero on the device where a step must not change the average of the parameters."""
        return value

    def check(self, done: int) -> None:  # noqa: B027 (nothing to report where steps raise themselves)
        """Report bad steps since the last check, under 'error' by raising NonFiniteError.

        `done` updates have been asked for by now.
        """


class HostGuard(Guard):
    """Reads loss and gradient norm in every step; the policy 'skip' leaves bad steps out with a warning."""

    def __init__(self, policy: OnNonFinite, interval: int = 1) -> None:
        self._policy = policy
        self.ends_run = policy == "error"
        self._skipped = SkipCount(interval)
        self._seen = self._bad = 0

    def check(self, done: int) -> None:
        """Judge the steps since the last check; see `Guard.check`."""
        seen, bad, self._seen, self._bad = self._seen, self._bad, 0, 0
        self._skipped.add(seen, bad, done)

    def admits(self, reduced: Reduced, where: Callable[[], str]) -> bool:
        """Return whether loss and gradient are finite; see `Guard.admits`."""
        self._seen += 1
        if bool(torch.isfinite(reduced.norm + reduced.loss)):
            return True
        problem = _problem(float(reduced.loss), float(reduced.norm), where())
        if self._policy == "error":
            raise NonFiniteError(problem)
        log.warning("%s: the step is skipped", problem)
        self._bad += 1
        return False


class DeviceGuard(Guard):
    """Decides on the device through the optimizer's `found_inf`, the predicate of torch's gradient scaler.

    The optimizer reads it in its `step`; its own treatment of gradients that are not finite is switched off. The policy
    'error' freezes everything from the first bad step on, 'skip' leaves bad steps out and counts them. `gather`
    collects every rank's report of a bad step; all ranks detect it in the same step. `skip` is a float32 scalar on the
    device: 1 leaves the present step out.
    """

    #: Values kept on the device: steps seen, bad steps, and number, loss and norm of the first bad one.
    _FIELDS = Literal["seen", "bad", "first", "loss", "norm"]

    def __init__(
        self,
        policy: OnNonFinite,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        interval: int = 1,
        gather: Callable[[Any], Sequence[Any]] = lambda mine: [mine],
    ) -> None:
        self._policy = policy
        self.ends_run = policy == "error"
        self._gather = gather
        self._skipped = SkipCount(interval)
        self.skip = torch.zeros((), dtype=torch.float32, device=device)
        # Adam reads the attribute, too, but has no setting of that name.
        if hasattr(optimizer, "on_nonfinite"):
            optimizer.on_nonfinite = "ignore"
        optimizer.found_inf = self.skip  # type: ignore[attr-defined]  # torch's protocol for gradient scalers
        if hasattr(optimizer, "agreed_skip"):
            optimizer.agreed_skip = True  # from the loss and norm of all ranks
        self._record = torch.zeros(len(get_args(self._FIELDS)), dtype=torch.float64, device=device)
        self._origins: list[tuple[Origin, Callable[[Origin], list[FrameLoss]]]] = []
        self._begun: int | None = None

    def expect(self, done: int) -> None:
        """Before a step: count from here on if nothing has been counted yet; `done` updates have been made."""
        if self._begun is None:
            self.begin(done)

    def begin(self, done: int) -> None:
        """Count steps from here on: `done` updates have been made."""
        self._begun = done
        self._origins.clear()
        self._record.zero_()
        self.skip.zero_()

    def note(self, origin: Origin, evaluate: Callable[[Origin], list[FrameLoss]]) -> None:
        """Remember on the host where the batch of the next step comes from; `evaluate` judges its frames."""
        self._origins.append((origin, evaluate))

    def admits(self, reduced: Reduced, where: Callable[[], str]) -> bool:
        """Set `skip` for this step and return True, without waiting for the device."""
        if triton_support.usable(self.skip.device):
            from deepmd_muon.train.step.guard_kernel import judge

            judge(
                self._record, self.skip, reduced.loss, reduced.norm, freeze=self._policy == "error"
            )
            return True
        norm, loss = reduced.norm.double(), reduced.loss.double()
        total = norm + loss
        bad = (total - total).ne(0.0).double()  # NaN unless finite
        seen, count, *first = self._record.unbind()
        # The record of the first bad step stays.
        known = count.gt(0.0)
        found = (seen + 1.0, loss, norm)
        kept = [torch.where(known, old, new * 1.0) for old, new in zip(first, found, strict=True)]
        count = count + bad
        self._record.copy_(torch.stack([seen + 1.0, count, *kept]))
        self.skip.copy_(count if self._policy == "error" else bad)
        self.skip.clamp_(max=1.0)
        return True

    def weight(self, value: float | Tensor) -> float | Tensor:
        """Return `value` as a tensor; zero from the first bad step on under 'error'."""
        return value * (1.0 - self.skip.double()) if self._policy == "error" else value

    def check(self, done: int) -> None:
        """Read the record, one transfer; see `Guard.check`."""
        seen, count, first, loss, norm = self._record.tolist()
        origins, begun = list(self._origins), self._begun or 0
        self.begin(done)
        if not count:
            self._skipped.add(round(seen), 0, done)
            return
        number = round(first)
        frames: list[FrameLoss] = []
        if number <= len(origins):
            origin, evaluate = origins[number - 1]
            frames = evaluate(origin) if self.ends_run else without_losses(origin)
        where = describe_batch([frame for part in self._gather(frames) for frame in part])
        problem = _problem(loss, norm, where or "an unknown system")
        if self._policy == "error":
            raise NonFiniteError(problem, update=begun + number)
        steps = (
            f"{count:.0f} steps since update {begun} are"
            if count > 1
            else f"update {begun + number} is"
        )
        log.warning("%s: %s skipped", problem, steps)
        self._skipped.add(round(seen), round(count), done)
