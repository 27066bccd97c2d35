"""Log lines of a run in DeePMD's form, and a progress line for terminals."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

# No end is foretold beyond a century, where dates overflow [s].
_LONGEST = 100 * 365.25 * 86400


def metrics_line(step: int, kind: str, metrics: Mapping[str, float], lr: float | None = None) -> str:
    """Return one line such as `Batch     100: trn: rmse = 1.20e+00, rmse_f = 3.10e-02, lr = 1.00e-03`."""
    figures = [f"{name} = {value:8.2e}" for name, value in sorted(metrics.items())]
    if lr is not None:
        figures.append(f"lr = {lr:8.2e}")
    return f"Batch {step:7d}: {kind}: {', '.join(figures)}"


def timing_line(step: int, seconds: float, remaining: float | None, now: datetime.datetime) -> str:
    """Return the line that says how long the last interval took and when the run will end [s]."""
    line = f"Batch {step:7d}: total wall time = {seconds:.2f} s"
    if remaining is None or not remaining < _LONGEST:
        return line
    left = datetime.timedelta(seconds=int(remaining))
    return f"{line}, eta = {left} at {now + left:%Y-%m-%d %H:%M}"


class ConsoleReport:
    """Write metrics and timing to the log.

    Parameters
    ----------
    frequency
        Every how many steps.
    num_steps, start_step
        Last step of the run, and the steps done before it began.
    timing
        Whether to write a timing line below the metrics.
    """

    validates = True

    def __init__(self, frequency: int, num_steps: int, *, start_step: int = 0, timing: bool = True) -> None:
        self.frequency = frequency
        self._num_steps = num_steps
        self._first = start_step
        self._timing = timing
        self._last_step, self._last_time = start_step, time.monotonic()
        self._timed_steps, self._timed_seconds = 0, 0.0

    def step(self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]) -> None:
        """Log the metrics of the 1-based `step`, and the time since the last call."""
        log.info(metrics_line(step, "trn", train, lr))
        if valid:
            log.info(metrics_line(step, "val", valid))
        if self._timing:
            self._log_time(step)

    def _log_time(self, step: int) -> None:
        now = time.monotonic()
        seconds, steps = now - self._last_time, max(1, step - self._last_step)
        opening = self._last_step == self._first
        self._last_step, self._last_time = step, now
        # The opening interval pays for compiling and first reads of data: it predicts nothing, and it is left
        # out of the average.
        remaining = None if opening else (self._num_steps - step) * seconds / steps
        if not opening:
            self._timed_steps += steps
            self._timed_seconds += seconds
        log.info(timing_line(step, seconds, remaining, datetime.datetime.now().astimezone()))

    def close(self) -> None:
        """Log the average time of a step."""
        if self._timing and self._timed_steps:
            excluded = self._last_step - self._first - self._timed_steps
            average = self._timed_seconds / self._timed_steps
            log.info(f"average training time: {average:.4f} s/batch ({excluded} batches excluded)")


class ProgressLine:
    """A bar with steps, elapsed and remaining time, kept below the log lines of a terminal.

    Parameters
    ----------
    num_steps, start_step
        Last step of the run, and the steps done before it began.
    progress
        The bar; `on_terminal` makes it.
    """

    def __init__(self, num_steps: int, start_step: int, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=num_steps, completed=start_step)
        progress.start()

    @classmethod
    def on_terminal(cls, num_steps: int, start_step: int = 0) -> ProgressLine | None:
        """Return a started line when stderr is a terminal; None in pipes and log files."""
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        return cls(num_steps, start_step, Progress(*columns, console=Console(stderr=True), transient=True))

    def advance(self, step: int) -> None:
        """Show that the 1-based `step` is done; the screen itself is refreshed ten times a second."""
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Take the line off the screen."""
        self._progress.stop()
