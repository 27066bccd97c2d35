"""Exceptions of models and their checkpoints."""

from __future__ import annotations


class ModelError(ValueError):
    """A model section, its weights or its inputs cannot be used; the message names the cause."""


class CheckpointError(ModelError):
    """The file is not a checkpoint, this release cannot read it, or it does not fit its use."""


class ForeignModelError(CheckpointError):
    """A state dict of deepmd-kit holds a model, or a branch, that this package does not have."""
