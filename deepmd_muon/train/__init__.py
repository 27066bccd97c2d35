"""Training: from an input file to checkpoints."""

from __future__ import annotations

from deepmd_muon.train.errors import CheckpointError, NonFiniteError, TrainingError
from deepmd_muon.train.run import run

__all__ = ["CheckpointError", "NonFiniteError", "TrainingError", "run"]
