"""Metrics of steps on their way to the reports: of which branch, averaged over which steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_muon.train.batches.streamed import feeds_of
from deepmd_muon.train.validation.validate import (
    WeightedMetrics,
    mean_metrics,
    metrics_by_batch,
)

if TYPE_CHECKING:
    from deepmd_muon.train.batches.streamed import StepFeed
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.ranks.ranks import Ranks


class RecentMetrics:
    """Metrics since the last report, of each branch's last step or averaged over its steps.

    In a stratified run a rank may have had no step of a branch that others have trained.
    """

    def __init__(
        self, branches: Mapping[str, RunBranch], *, averaged: bool, stratified: bool = False
    ) -> None:
        self._branches = branches
        self._averaged = averaged
        self._stratified = stratified
        self._recent: dict[str, list[WeightedMetrics]] = {}

    def add(self, name: str, metrics: Mapping[str, Tensor], batch: StepFeed, *, due: bool) -> None:
        """Take the metrics of a step of a branch; earlier steps count if they are averaged."""
        if not (due or self._averaged or len(self._branches) > 1):
            return
        of_step = metrics_by_batch(self._branches[name].loss, metrics, feeds_of(batch))
        if self._averaged:
            self._recent.setdefault(name, []).extend(of_step)
        else:
            self._recent[name] = of_step

    def take(self, ranks: Ranks) -> dict[str, Tensor]:
        """Return the metrics of all branches, by `RunBranch.named`; NaN without a step."""
        metrics: dict[str, Tensor] = {}
        for name, branch in self._branches.items():
            recent = self._recent.get(name, [])
            names = branch.metric_names()
            if not recent and self._stratified and ranks.size > 1:
                # All ranks take part in the sum.
                zeros = {metric: torch.zeros((), device=ranks.device) for metric in names}
                recent = [WeightedMetrics(zeros, dict.fromkeys(names, 0.0))]
            if not recent:
                values = {metric: torch.tensor(torch.nan) for metric in names}
            elif len(recent) > 1 or ranks.size > 1:
                values = mean_metrics(recent, ranks.sum)
            else:
                values = dict(recent[0].values)
            metrics.update({branch.named(metric): value for metric, value in values.items()})
        self._recent.clear()
        return metrics
