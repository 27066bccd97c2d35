"""Errors on validation data during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepmd_muon.loss import EnergyLoss
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.train.batch import TrainingBatch


def mean_metrics(
    metrics: Iterable[tuple[Mapping[str, Tensor], float]], add_up: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Average metrics of several batches: root mean squares are averaged as squares, the others as they are.

    Parameters
    ----------
    metrics
        Metrics of a batch by name, and its weight (number of atoms). A metric that is NaN in some batch is averaged
        over the others.
    add_up
        Adds a tensor over all ranks, whose batches then count as well; every rank must have a batch.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for values, weight in metrics:
        for name, value in values.items():
            there = (~value.isnan()).to(value.dtype) * weight  # a missing label shows as NaN
            term = (value.square() if name.startswith("rmse") else value).nan_to_num() * there
            sums[name] = sums[name] + term if name in sums else term
            weights[name] = weights[name] + there if name in weights else there
    if add_up is not None:
        together = add_up(torch.stack([*sums.values(), *weights.values()]).double())
        sums, weights = (dict(zip(sums, part, strict=True)) for part in together.view(2, -1))
    means = {name: total / weights[name] for name, total in sums.items()}
    return {name: mean.sqrt() if name.startswith("rmse") else mean for name, mean in means.items()}


@torch.no_grad()
def validate(
    model: EnergyModel,
    loss: EnergyLoss,
    batches: Iterable[TrainingBatch],
    lr_fraction: float,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the metrics of `model` over some batches, weighted with their atoms.

    Parameters
    ----------
    model, loss
        As in training.
    batches
        Validation batches on the model's device.
    lr_fraction
        Learning rate divided by the first one, which the prefactors of the loss follow.
    add_up
        See `mean_metrics`.
    """

    def measured() -> Iterable[tuple[Mapping[str, Tensor], float]]:
        for batch in batches:
            prediction = model(batch.structures, force=loss.needs_force, virial=loss.needs_virial)
            _, metrics = loss(prediction, batch.labels, lr_fraction, batch.structures.natoms, batch.mask)
            yield metrics, float(sum(batch.structures.type_counts))

    return mean_metrics(measured(), add_up)
