"""Log lines of a run in DeePMD's form."""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Mapping

from deepmd_muon.train.validation.columns import branch_of

log = logging.getLogger(__name__)

# No end is predicted beyond a century, where dates overflow [s].
_LONGEST = 100 * 365.25 * 86400
# A log without a new line for longer than this looks like a run that hangs [s].
_SILENCE = 30.0


def metrics_line(
    step: int, kind: str, metrics: Mapping[str, float], lr: float | None = None
) -> str:
    """Return one line such as `Batch     100: trn: rmse = 1.20e+00, lr = 1.00e-03`."""
    figures = [f"{name} = {value:8.2e}" for name, value in sorted(metrics.items())]
    if lr is not None:
        figures.append(f"lr = {lr:8.2e}")
    return f"Batch {step:7d}: {kind}: {', '.join(figures)}"


def _metrics_of(branch: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one branch under their own names."""
    return {
        name.partition("/")[0]: value
        for name, value in metrics.items()
        if branch_of(name) == branch
    }


def timing_line(
    step: int,
    total: float,
    each: float,
    remaining: float | None,
    now: datetime.datetime,
    atoms: float = 0.0,
) -> str:
    """Return the line that says how long the command has run, and when it will end [s].

    `atoms` is the number of atoms in a second; 0 if it is not known.
    """
    line = f"Batch {step:7d}: total wall time = {total:.2f} s, {each:.4f} s/batch"
    if atoms:
        line += f", {atoms:.4g} atoms/s"
    if remaining is None or not remaining < _LONGEST:
        return line
    duration = datetime.timedelta(seconds=int(remaining))
    return f"{line}, eta = {duration} at {now + duration:%Y-%m-%d %H:%M}"


class ConsoleReport:
    """Write metrics and timing to the log.

    Parameters
    ----------
    frequency
        Every how many steps.
    num_steps, start_step
        Last step of the run, and the steps done before it began.
    timing
        Whether to write a timing line below the metrics, and between them after half a minute
        without one.
    begun
        When the command began, as `clock` counts; now by default.
    clock
        Returns the time [s].
    atoms
        Returns the atoms of all batches so far; an interval without new ones shows none.
    """

    validates = True

    def __init__(
        self,
        frequency: int,
        num_steps: int,
        *,
        start_step: int = 0,
        timing: bool = True,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        atoms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        now = clock()
        self.frequency = frequency
        self._atoms = atoms
        self._num_steps = num_steps
        self._start_step = start_step
        self._timing = timing
        self._clock = clock
        self._begun = now if begun is None else begun
        self._last_line = now
        # The end of the last interval between metrics.
        self._last_step = start_step
        self._last_time = now
        self._last_atoms = atoms()
        # Of all intervals but the first.
        self._timed_steps = 0
        self._timed_seconds = 0.0

    def step(
        self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]
    ) -> None:
        """Log the metrics of the 1-based `step`, and times."""
        for branch in dict.fromkeys(map(branch_of, train)):
            prefix = f"{branch}_" if branch else ""  # deepmd-kit's words
            trained = _metrics_of(branch, train)
            if not branch or not all(map(math.isnan, trained.values())):  # it may have had no step
                log.info(metrics_line(step, f"{prefix}trn", trained, lr))
            if validated := _metrics_of(branch, valid):
                log.info(metrics_line(step, f"{prefix}val", validated))
        if self._timing:
            self._log_time(step)

    def advance(self, step: int) -> None:
        """Log the time after a long silence, without reading from the device."""
        if self._timing and self._clock() - self._last_line >= _SILENCE:
            # An interval between metrics goes on, so that a single slow step does not set the time
            # left.
            self._log_time(step, ends=self._in_first_interval)

    @property
    def _in_first_interval(self) -> bool:
        """Whether no interval has ended: the first one compiles and predicts nothing."""
        return self._last_step == self._start_step

    def _log_time(self, step: int, *, ends: bool = True) -> None:
        """Log the time since the last interval; `ends` begins another."""
        now = self._clock()
        seconds = now - self._last_time
        steps = max(1, step - self._last_step)
        atoms = self._atoms() - self._last_atoms
        is_first = self._in_first_interval
        remaining = None if is_first else (self._num_steps - step) * seconds / steps
        line = timing_line(
            step,
            total=now - self._begun,
            each=seconds / steps,
            remaining=remaining,
            now=datetime.datetime.now().astimezone(),
            atoms=atoms / seconds if seconds > 0.0 else 0.0,
        )
        log.info(line)
        self._last_line = now
        if not ends:
            return
        if not is_first:
            self._timed_steps += steps
            self._timed_seconds += seconds
        self._last_step = step
        self._last_time = now
        self._last_atoms += atoms

    def close(self) -> None:
        """Log the average time of a step."""
        if self._timing and self._timed_steps:
            excluded = self._last_step - self._start_step - self._timed_steps
            average = self._timed_seconds / self._timed_steps
            log.info(f"average training time: {average:.4f} s/batch ({excluded} batches excluded)")
