"""Errors on validation data during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepmd_muon.loss import Loss
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.train.batches.batch import TrainingBatch
    from deepmd_muon.train.batches.streamed import Feed


def metric_weights(loss: Loss, batch: TrainingBatch | Feed) -> dict[str, float]:
    """Return the weight of each metric of a batch in a mean over batches: the atoms of the frames that it compares."""
    weights = {term.metric: batch.labelled_atoms(term.labels) for term in loss.terms}
    return {**weights, "rmse": float(batch.atoms.sum())}


def metrics_by_batch(
    loss: Loss, metrics: Mapping[str, Tensor], feeds: Sequence[Feed]
) -> list[tuple[Mapping[str, Tensor], Mapping[str, float]]]:
    """Return the metrics of each batch of a step, and their weights, for `mean_metrics`.

    Metrics are scalars of one batch, `(nbatches,)` of several.
    """
    columns = {name: values.reshape(len(feeds)).unbind() for name, values in metrics.items()}
    rows = [{name: values[k] for name, values in columns.items()} for k in range(len(feeds))]
    return [(row, metric_weights(loss, feed)) for row, feed in zip(rows, feeds, strict=True)]


def mean_metrics(
    metrics: Iterable[tuple[Mapping[str, Tensor], Mapping[str, float]]],
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Average metrics of several batches: root mean squares are averaged as squares, the others as they are.

    Parameters
    ----------
    metrics
        Metrics of a batch by name, and their weights (see `metric_weights`); those of weight 0 do not count.
    add_up
        Adds a tensor over all ranks, whose batches then count as well; every rank must have metrics of these names.

    Returns
    -------
    dict
        NaN where no batch counts.
    """
    sums: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for values, weights in metrics:
        for name, value in values.items():
            weight = weights[name]
            square = value.square() if name.startswith("rmse") else value
            term = (
                square * weight if weight else torch.zeros_like(value)
            )  # a missing label shows as NaN
            sums[name] = sums[name] + term if name in sums else term
            totals[name] = totals.get(name, 0.0) + weight
    names = sorted(sums)  # one order on all ranks
    summed = torch.stack([sums[name].double() for name in names])
    summed = torch.cat([summed, summed.new_tensor([totals[name] for name in names])])
    if add_up is not None:
        summed = add_up(summed)
    total, count = summed.chunk(2)
    means = dict(zip(names, total / count, strict=True))
    return {name: mean.sqrt() if name.startswith("rmse") else mean for name, mean in means.items()}


@torch.no_grad()
def validate(
    model: EnergyModel,
    loss: Loss,
    batches: Iterable[tuple[TrainingBatch, bool]],
    lr_fraction: float,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the metrics of `model` over some batches, each weighted with the atoms that it compares.

    Batches come with whether each counts; one that does not is passed through the model nevertheless, because the ranks
    of a sharded model must do so together. The prefactors of the loss follow `lr_fraction`, as in training. See
    `mean_metrics` for `add_up`.
    """

    def measured() -> Iterable[tuple[Mapping[str, Tensor], Mapping[str, float]]]:
        for batch, counts in batches:
            prediction = model(batch.structures, force=loss.needs_force, virial=loss.needs_virial)
            mask = batch.counted(model.counted)
            _, metrics = loss(prediction, batch.labels, lr_fraction, batch.structures.natoms, mask)
            yield metrics, metric_weights(loss, batch) if counts else dict.fromkeys(metrics, 0.0)

    return mean_metrics(measured(), add_up)
