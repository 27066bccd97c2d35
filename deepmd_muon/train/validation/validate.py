"""Errors on validation data during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepmd_muon.loss import Loss
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.train.batches.batch import TrainingBatch
    from deepmd_muon.train.batches.streamed import Feed


class WeightedMetrics(NamedTuple):
    """Metrics of a batch by name, and their weights in a mean over batches."""

    values: Mapping[str, Tensor]
    weights: Mapping[str, float]


def metric_weights(loss: Loss, batch: TrainingBatch | Feed) -> dict[str, float]:
    """Return the weight of each metric of a batch: the atoms of the frames that it compares."""
    weights = {term.metric: batch.labelled_atoms(term.labels) for term in loss.terms}
    return {**weights, "rmse": float(batch.atoms.sum())}


def metrics_by_batch(
    loss: Loss, metrics: Mapping[str, Tensor], feeds: Sequence[Feed]
) -> list[WeightedMetrics]:
    """Return the metrics of each batch of a step, from scalars or `(nbatches,)`."""
    columns = {name: values.reshape(len(feeds)).unbind() for name, values in metrics.items()}
    return [
        WeightedMetrics(
            {name: values[k] for name, values in columns.items()}, metric_weights(loss, feed)
        )
        for k, feed in enumerate(feeds)
    ]


def mean_metrics(
    metrics: Iterable[tuple[Mapping[str, Tensor], Mapping[str, float]]],
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Average metrics of several batches; root mean squares are averaged as squares.

    Parameters
    ----------
    metrics
        `WeightedMetrics` of each batch.
    add_up
        Adds a tensor over all ranks, whose batches then count as well; every rank must have metrics
        of these names.

    Returns
    -------
    dict
        NaN if no batch counts.
    """
    sums: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for values, weights in metrics:
        for name, value in values.items():
            weight = weights[name]
            square = value.square() if name.startswith("rmse") else value
            # A missing label shows as NaN, which a weight of 0 would not remove.
            term = square * weight if weight else torch.zeros_like(value)
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
    """Return the metrics of `model` over batches, weighted with the atoms that they compare.

    Batches come with whether each counts. One that does not is passed through the model
    nevertheless, because the ranks of a sharded model must do so together. The prefactors of the
    loss follow `lr_fraction`, as in training. See `mean_metrics` for `add_up`.
    """

    def measure() -> Iterable[WeightedMetrics]:
        for batch, counts in batches:
            prediction = model(batch.structures, force=loss.needs_force, virial=loss.needs_virial)
            atoms = batch.compared_atoms(model.counted)
            _, metrics = loss(prediction, batch.labels, lr_fraction, atoms)
            weights = metric_weights(loss, batch) if counts else dict.fromkeys(metrics, 0.0)
            yield WeightedMetrics(metrics, weights)

    return mean_metrics(measure(), add_up)


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Read all metrics from the device in one transfer."""
    device = torch.device("cpu")
    for value in metrics.values():
        if value.device.type != "cpu":  # metrics of a branch without a step are on the host
            device = value.device
            break
    values = torch.stack([value.double().to(device) for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))
