"""The exception of reading checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The file is not a checkpoint, this release cannot read it, or it does not fit its use."""
