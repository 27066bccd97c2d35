"""The loss of a batch."""

from __future__ import annotations

from torch import Tensor

from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.train.batches.batch import TrainingBatch


def evaluate(
    model: EnergyModel, loss: Loss, batch: TrainingBatch, lr_fraction: float | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of a batch."""
    prediction = model(batch.structures, force=loss.needs_force, virial=loss.needs_virial)
    atoms = batch.compared_atoms(model.counted)
    return loss(batch.compared(prediction), batch.labels, lr_fraction, atoms)
