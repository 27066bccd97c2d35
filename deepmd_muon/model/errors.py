"""Exceptions of the model room."""

from __future__ import annotations


class ModelError(ValueError):
    """A model section, its weights or its inputs cannot be used; the message names the cause."""


class CheckpointError(ModelError):
    """A deepmd-kit state dict describes a model of a kind that this package does not have."""


class CheckpointFileError(ModelError):
    """The file is not a checkpoint, or this release cannot read it."""
