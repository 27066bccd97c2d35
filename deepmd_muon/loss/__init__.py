"""Losses: the functions that training minimises.

Importing this package imports no torch: the input check reads the settings.
"""

from __future__ import annotations

from deepmd_muon.loss.interface import ComparedAtoms, Loss, Term
from deepmd_muon.loss.labels import LabelCheck, check_labels
from deepmd_muon.loss.registry import build_loss, register_loss
from deepmd_muon.loss.settings import LossSettings

__all__ = [
    "ComparedAtoms",
    "LabelCheck",
    "Loss",
    "LossSettings",
    "Term",
    "build_loss",
    "check_labels",
    "register_loss",
]
