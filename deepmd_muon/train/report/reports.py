"""The reports of one run behind one object."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from deepmd_muon.progress import tracked
from deepmd_muon.train.report.console import ConsoleReport
from deepmd_muon.train.report.json_lines import JsonLinesFile
from deepmd_muon.train.report.lcurve import LearningCurveFile
from deepmd_muon.train.report.trackers import TensorBoardReport, WandbReport

if TYPE_CHECKING:
    from deepmd_muon.argcheck import RunSettings

Metrics = Mapping[str, float]


class Report(Protocol):
    """A destination of metrics.

    Attributes
    ----------
    frequency
        Every how many steps it wants metrics (and at step 1).
    validates
        Whether it wants metrics of validation data as well.
    """

    @property
    def frequency(self) -> int: ...  # noqa: D102 (documented in the class)

    @property
    def validates(self) -> bool: ...  # noqa: D102

    def step(self, step: int, lr: float, train: Metrics, valid: Metrics) -> None:
        """Take the metrics of the 1-based `step`, whose update used the learning rate `lr`."""

    def close(self) -> None:
        """Write buffered rows and close the files."""


def _due(report: Report, step: int) -> bool:
    return step == 1 or step % report.frequency == 0


class Reports:
    """All reports of a run; each gets the steps that its frequency asks for.

    `progress` is the bar on a terminal: each item that is taken moves it by a step.
    """

    def __init__(
        self,
        reports: Sequence[Report] = (),
        progress: Generator[object, None, None] | None = None,
    ) -> None:
        self._reports = tuple(reports)
        self._progress = progress
        self._consoles = [x for x in self._reports if isinstance(x, ConsoleReport)]

    def due(self, step: int) -> bool:
        """Return whether any report wants the training metrics of the 1-based `step`."""
        return any(_due(report, step) for report in self._reports)

    def due_validation(self, step: int) -> bool:
        """Return whether any report wants validation metrics at the 1-based `step`."""
        return any(_due(report, step) for report in self._reports if report.validates)

    def advance(self, step: int) -> None:
        """Move the bar and end long silences of the log."""
        if self._progress is not None:
            next(self._progress, None)
        for console in self._consoles:
            console.advance(step)

    def step(self, step: int, lr: float, train: Metrics, valid: Metrics | None = None) -> None:
        """Hand the metrics of the 1-based `step`, whose update used `lr`, to the reports.

        Metrics have DeePMD's names ("rmse", "rmse_e", "rmse_f", …), of several branches
        metric/branch.
        """
        for report in self._reports:
            if _due(report, step):
                report.step(step, lr, train, valid or {})

    def close(self) -> None:
        """Close every report; safe to call after an interruption."""
        with contextlib.ExitStack() as stack:  # close all of them, even after an error
            for report in self._reports:
                stack.callback(report.close)
            if self._progress is not None:
                stack.callback(self._progress.close)


@dataclasses.dataclass(frozen=True)
class _Silent:
    """A report that another rank writes; here it only says when metrics are due."""

    frequency: int
    validates: bool

    def step(self, step: int, lr: float, train: Metrics, valid: Metrics) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


def open_reports(
    training: RunSettings,
    *,
    num_steps: int,
    start_step: int = 0,
    begun: float | None = None,
    silent: bool = False,
    atoms: Callable[[], float] = lambda: 0.0,
) -> Reports:
    """Open the reports that `training` asks for; a restart after `start_step` continues files.

    Parameters
    ----------
    begun
        `time.monotonic()` when the command began; now by default.
    silent
        Write nothing, on a rank whose metrics another one reports; `due` answers as there.
    atoms
        Returns the atoms in all batches so far.

    Raises
    ------
    TensorBoardError, WandbError
        When `tensorboard` or `wandb` is on and its package is not installed, or cannot begin a run.
    """
    reports: list[Report] = []
    if silent:
        if training.disp_training or training.jsonl_file is not None or training.wandb:
            reports.append(_Silent(training.disp_freq, validates=True))
        if training.tensorboard:
            reports.append(_Silent(training.tensorboard_freq, validates=False))
        return Reports(reports)
    if training.tensorboard:
        reports.append(
            TensorBoardReport(
                training.tensorboard_log_dir, training.tensorboard_freq, start_step=start_step
            )
        )
    if training.disp_training:
        reports.append(
            ConsoleReport(
                training.disp_freq,
                num_steps,
                start_step=start_step,
                timing=training.time_training,
                begun=begun,
                atoms=atoms,
            )
        )
        reports.append(
            LearningCurveFile(training.disp_file, training.disp_freq, start_step=start_step)
        )
    if training.jsonl_file is not None:
        reports.append(
            JsonLinesFile(training.jsonl_file, training.disp_freq, start_step=start_step)
        )
    if training.wandb:
        reports.append(WandbReport(training.wandb_project, training.disp_freq))
    steps = range(start_step, num_steps)
    progress = tracked(steps, "training", total=num_steps, done=start_step)
    next(progress, None)  # shows the bar before the first step is done
    return Reports(reports, progress)
