"""What stops a training run, each with a message that says what to do."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the command line prints the message without a traceback."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be read, or does not fit the run."""


class NonFiniteError(TrainingError):
    """Loss or gradient is no longer a finite number; the parameters are those before the step."""
