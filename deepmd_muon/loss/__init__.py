"""The loss that training minimises."""

from deepmd_muon.loss.ener import EnergyLoss, LossError
from deepmd_muon.loss.labels import LabelCheck, check_labels

__all__ = ["EnergyLoss", "LabelCheck", "LossError", "check_labels"]
