"""Exceptions of models."""

from __future__ import annotations

from deepmd_muon.checkpoint_file.errors import CheckpointError


class ModelError(ValueError):
    """A model section, its weights or its inputs cannot be used; the message names the cause."""


class ForeignModelError(CheckpointError):
    """A state dict of deepmd-kit holds a model, or a branch, that this package does not have."""


class BranchError(CheckpointError):
    """A checkpoint holds several models, and the caller named none or an unknown one."""
