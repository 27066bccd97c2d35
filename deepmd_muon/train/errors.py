"""Errors that stop a training run; each message says what to do."""

from __future__ import annotations

from typing import ClassVar


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the command line prints the message without a traceback."""


class RunError(TrainingError):
    """A run that cannot go on although its input was right.

    The message names step, cause and last checkpoint.
    """

    #: Of the command.
    exit_status: ClassVar[int] = 1


class NonFiniteError(RunError):
    """Loss or gradient is no longer a finite number; the parameters are from before the step.

    `update` is the 1-based number of the step, if it is not the present one.
    """

    def __init__(self, message: str, update: int | None = None) -> None:
        super().__init__(message)
        self.update = update
