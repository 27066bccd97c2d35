"""Keep numbers that are not finite out of the weights.

Two guards do the same at different times. `HostGuard` reads loss and gradient norm in every step,
which costs nothing on a CPU. `DeviceGuard` decides on the device, so that a step waits for nothing
and can be captured in a CUDA graph; from the first bad step on it freezes weights, optimizer state
and average, and `check` reports that step later.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

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
    """Return the reaction to a step that is not finite: the optimizer's, else 'error'.

    A training run treats 'ignore' as 'error'; outside a run, HybridMuon then lets the parameter
    become NaN.
    """
    setting = getattr(optimizer, "on_nonfinite", "error")
    return "skip" if setting == "skip" else "error"


def _describe(loss: float, norm: float, frames: str) -> str:
    return f"the loss is {loss:g} and the norm of its gradient {norm:g} on a batch of {frames}"


class SkipCount:
    """Count skipped steps: a run that skips nearly all of its steps does not train.

    At least `LEAST` steps are judged together, so that one bad step does not end a run.
    """

    LEAST = 10

    def __init__(self, interval: int) -> None:
        self._interval = max(interval, self.LEAST)
        self._seen = 0
        self._bad = 0

    def add(self, seen: int, bad: int, done: int) -> None:
        """Count steps up to update `done`.

        Raises
        ------
        NonFiniteError
            When all steps of an interval were skipped.
        """
        self._seen += seen
        self._bad += bad
        if self._seen < self._interval:
            return
        seen_together = self._seen
        bad_together = self._bad
        self._seen = 0
        self._bad = 0
        if bad_together == seen_together:
            raise NonFiniteError(
                f"all of the last {seen_together} steps were skipped, because their loss or "
                "gradient was not finite"
            )
        if 2 * bad_together > seen_together:
            log.warning(
                "%d of the %d steps up to update %d were skipped: the model hardly trains",
                bad_together,
                seen_together,
                done,
            )


class Guard(ABC):
    """Decides whether a step may change anything; `ends_run` says that a bad step ends the run."""

    ends_run: bool

    @abstractmethod
    def admits(self, reduced: Reduced, frames: Callable[[], str]) -> bool:
        """Return whether to call the optimizer for a step; `frames` names those of its batch.

        Under 'error', loss or gradient that is not finite is a NonFiniteError.
        """

    def weight(self, value: float | Tensor) -> float | Tensor:
        """Return `value`, or zero on the device if a step must not change the average."""
        return value

    @abstractmethod
    def check(self, done: int) -> None:
        """Report bad steps since the last check, under 'error' by raising NonFiniteError.

        `done` updates have been asked for by now.
        """


class HostGuard(Guard):
    """Reads loss and gradient norm in every step; 'skip' leaves bad ones out with a warning."""

    def __init__(self, policy: OnNonFinite, interval: int = 1) -> None:
        self._policy = policy
        self.ends_run = policy == "error"
        self._skipped = SkipCount(interval)
        self._seen = 0
        self._bad = 0

    def check(self, done: int) -> None:
        """Judge the steps since the last check; see `Guard.check`."""
        seen = self._seen
        bad = self._bad
        self._seen = 0
        self._bad = 0
        self._skipped.add(seen, bad, done)

    def admits(self, reduced: Reduced, frames: Callable[[], str]) -> bool:
        """Return whether loss and gradient are finite; see `Guard.admits`."""
        self._seen += 1
        if bool(torch.isfinite(reduced.norm + reduced.loss)):
            return True
        problem = _describe(float(reduced.loss), float(reduced.norm), frames())
        if self._policy == "error":
            raise NonFiniteError(problem)
        log.warning("%s: the step is skipped", problem)
        self._bad += 1
        return False


class _Record(NamedTuple):
    """What `DeviceGuard` keeps on the device, in the order of `_judge_kernel`; float64."""

    seen: float  # steps since `begin`
    bad: float
    # Number, loss and gradient norm of the first bad step; of the last step while none was bad.
    first: float
    loss: float
    norm: float


class DeviceGuard(Guard):
    """Decides on the device through `found_inf`, the predicate of torch's gradient scaler.

    The optimizer reads it in its `step`; its own treatment of gradients that are not finite is
    switched off. The policy 'error' freezes everything from the first bad step on, 'skip' leaves
    bad steps out and counts them.

    Parameters
    ----------
    policy, optimizer, device
        What to do with a bad step, whose steps these are, and on which device.
    interval
        Steps that are judged together under 'skip'.
    gather
        Collects every rank's report of a bad step; all ranks detect it in the same step.

    Attributes
    ----------
    skip
        Scalar on the device, float32: 1 leaves the present step out.
    """

    def __init__(
        self,
        policy: OnNonFinite,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        interval: int = 1,
        gather: Callable[[Any], Sequence[Any]] = lambda frames: [frames],
    ) -> None:
        self._policy = policy
        self.ends_run = policy == "error"
        self._gather = gather
        self._skipped = SkipCount(interval)
        self.skip = torch.zeros((), dtype=torch.float32, device=device)
        # Adam reads the attribute, too, but has no setting of that name.
        if hasattr(optimizer, "on_nonfinite"):
            optimizer.on_nonfinite = "ignore"
        # torch's protocol for gradient scalers
        optimizer.found_inf = self.skip  # type: ignore[attr-defined]
        if hasattr(optimizer, "agreed_skip"):
            optimizer.agreed_skip = True  # from the loss and norm of all ranks
        if hasattr(optimizer, "agreed_gradients"):
            # The mean over all ranks gives each of them the same gradients. Each rank captures the
            # shapes of its own batches, so that one may step eagerly while another replays.
            optimizer.agreed_gradients = True
        self._record = torch.zeros(len(_Record._fields), dtype=torch.float64, device=device)
        self._origins: list[tuple[Origin, Callable[[Origin], list[FrameLoss]]]] = []
        self._begun: int | None = None

    def expect(self, done: int) -> None:
        """Begin to count before the first step; `done` updates have been made."""
        if self._begun is None:
            self.begin(done)

    def begin(self, done: int) -> None:
        """Count steps from here on: `done` updates have been made."""
        self._begun = done
        self._origins.clear()
        self._record.zero_()
        self.skip.zero_()

    def note(self, origin: Origin, evaluate: Callable[[Origin], list[FrameLoss]]) -> None:
        """Remember where the batch of the next step comes from; `evaluate` judges its frames."""
        self._origins.append((origin, evaluate))

    def admits(self, reduced: Reduced, frames: Callable[[], str]) -> bool:
        """Set `skip` for this step and return True, without waiting for the device."""
        if triton_support.usable(self.skip.device):
            from deepmd_muon.train.step.guard_kernel import judge

            judge(
                self._record, self.skip, reduced.loss, reduced.norm, freeze=self._policy == "error"
            )
            return True
        norm = reduced.norm.double()
        loss = reduced.loss.double()
        total = norm + loss
        is_bad = (total - total).ne(0.0).double()  # NaN unless finite
        seen, bad_before, *first_bad = self._record.unbind()
        seen = seen + 1.0
        bad = bad_before + is_bad
        # The record of the first bad step stays.
        was_bad = bad_before.gt(0.0)
        first_bad = [
            torch.where(was_bad, old, new)
            for old, new in zip(first_bad, (seen, loss, norm), strict=True)
        ]
        self._record.copy_(torch.stack([seen, bad, *first_bad]))
        self.skip.copy_(bad if self._policy == "error" else is_bad)
        self.skip.clamp_(max=1.0)
        return True

    def weight(self, value: float | Tensor) -> float | Tensor:
        """Return `value` as a tensor; zero from the first bad step on under 'error'."""
        return value * (1.0 - self.skip.double()) if self._policy == "error" else value

    def check(self, done: int) -> None:
        """Read the record, one transfer; see `Guard.check`."""
        record = _Record(*self._record.tolist())
        origins = list(self._origins)
        begun = self._begun or 0
        self.begin(done)
        if not record.bad:
            self._skipped.add(round(record.seen), 0, done)
            return
        number = round(record.first)
        frames: list[FrameLoss] = []
        if number <= len(origins):
            origin, evaluate = origins[number - 1]
            frames = evaluate(origin) if self.ends_run else without_losses(origin)
        frames_of_ranks = itertools.chain(*self._gather(frames))
        where = describe_batch(list(frames_of_ranks)) or "an unknown system"
        problem = _describe(record.loss, record.norm, where)
        if self._policy == "error":
            raise NonFiniteError(problem, update=begun + number)
        if record.bad > 1:
            log.warning("%s: %.0f steps since update %d are skipped", problem, record.bad, begun)
        else:
            log.warning("%s: update %d is skipped", problem, begun + number)
        self._skipped.add(round(record.seen), round(record.bad), done)
