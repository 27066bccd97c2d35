"""What a training step minimises."""

from deepmd_muon.loss.ener import EnergyLoss, LossError

__all__ = ["EnergyLoss", "LossError"]
