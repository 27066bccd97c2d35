"""Metrics of steps on their way to the reports: of which branch, averaged over which steps, read in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_muon.train.batches.streamed import parts_of
from deepmd_muon.train.validation.validate import mean_metrics, metrics_by_batch

if TYPE_CHECKING:
    from deepmd_muon.train.batches.streamed import StepFeed
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.ranks.ranks import Ranks


class RecentMetrics:
    """Metrics since the last report: of the last step of each branch, or averaged over all its steps.

    In a stratified run a rank may have had no step of a branch that others have trained.
    """

    def __init__(
        self, branches: Mapping[str, RunBranch], *, averaged: bool, stratified: bool = False
    ) -> None:
        self._branches = branches
        self._averaged = averaged
        self._stratified = stratified
        self._recent: dict[str, list[tuple[Mapping[str, Tensor], Mapping[str, float]]]] = {}

    def add(self, name: str, metrics: Mapping[str, Tensor], batch: StepFeed, *, due: bool) -> None:
        """Take the metrics of a step of a branch; those of others than the last step count if they are averaged."""
        if not (due or self._averaged or len(self._branches) > 1):
            return
        found = metrics_by_batch(self._branches[name].loss, metrics, parts_of(batch))
        self._recent[name] = [*self._recent.get(name, []), *found] if self._averaged else found

    def take(self, ranks: Ranks) -> dict[str, Tensor]:
        """Return the metrics of all branches, each as `RunBranch.named` calls it, NaN of a branch without a step."""
        found: dict[str, Tensor] = {}
        for name, branch in self._branches.items():
            recent = self._recent.get(name, [])
            values = {metric: torch.tensor(torch.nan) for metric in branch.metric_names()}
            if not recent and self._stratified and ranks.size > 1:
                nothing = {metric: torch.zeros((), device=ranks.device) for metric in values}
                recent = [(nothing, dict.fromkeys(values, 0.0))]
            if recent:
                several = len(recent) > 1 or ranks.size > 1
                values = mean_metrics(recent, ranks.sum) if several else dict(recent[0][0])
            found.update({branch.named(metric): value for metric, value in values.items()})
        self._recent.clear()
        return found


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Read all metrics from the device in one transfer."""
    device = next((value.device for value in metrics.values() if value.device.type != "cpu"), None)
    values = torch.stack(
        [value.double().to(device) if device else value.double() for value in metrics.values()]
    )
    return dict(zip(metrics, values.tolist(), strict=True))
