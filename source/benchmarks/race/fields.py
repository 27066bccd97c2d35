"""The race's results by set, model and budget: each contestant's best rate, and how it compares with the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from results import Result, StepTime, last
from sets import SETS

BASELINE = "adamw"
WITHIN = 2.0  # rates whose error is at most this multiple of the best one's
TITLES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "hybrid_muon": "HybridMuon",
    "hybrid_muon_no_magma": "HybridMuon, no Magma",
    "hybrid_muon_decay_01": "HybridMuon, decay 0.1",
    "hybrid_muon_decay_03": "HybridMuon, decay 0.3",
    "hybrid_muon_decay_1": "HybridMuon, decay 1",
    "hybrid_muon_decay_3": "HybridMuon, decay 3",
    "hybrid_muon_adam_3": "HybridMuon, Adam route at 0.003",
    "hybrid_muon_adam_10": "HybridMuon, Adam route at 0.01",
    "hybrid_muon_adam_30": "HybridMuon, Adam route at 0.03",
    "hybrid_muon_untouched": "HybridMuon, nothing set",
    "hybrid_muon_present": "HybridMuon, absent elements stay",
    "deepmd_kit_muon": "deepmd-kit's HybridMuon",
    "torch_muon": "torch.optim.Muon and AdamW",
    "schedule_free": "schedule-free AdamW",
    "soap": "SOAP",
}


@dataclass(frozen=True)
class Field:
    """All runs on a set with one model and budget.

    Attributes
    ----------
    set, model, steps
        Which.
    runs
        Results by contestant and rate; one a seed.
    """

    set: str
    model: str
    steps: int
    runs: Mapping[str, Mapping[float, Sequence[Result]]]

    def error(self, contestant: str, rate: float) -> float:
        """Return the mean force error on the test part over seeds [eV/Å]; infinite where a run failed."""
        return mean(last(result) for result in self.runs[contestant][rate])

    def best(self, contestant: str) -> tuple[float, Sequence[Result]]:
        """Return the best rate of a contestant, and its runs."""
        rates = self.runs[contestant]
        rate = min(rates, key=lambda rate: self.error(contestant, rate))
        return rate, rates[rate]

    def ratio(self, contestant: str, measure: Callable[[Result], float]) -> float:
        """Return a measure at the best rate divided by the baseline's; NaN without a baseline."""
        if BASELINE not in self.runs:
            return math.nan
        ours, theirs = (
            mean(measure(r) for r in self.best(name)[1]) for name in (contestant, BASELINE)
        )
        return ours / theirs if theirs else math.nan

    def robust(self, contestant: str) -> tuple[int, int]:
        """Return how many rates end within a factor `WITHIN` of the best, and how many were tried."""
        rates = self.runs[contestant]
        found = [self.error(contestant, rate) for rate in rates]
        best = min(found)
        return sum(error <= WITHIN * best and math.isfinite(error) for error in found), len(rates)

    def fraction(self, contestant: str) -> float:
        """Return the fraction of the steps after which the baseline's last error is reached; NaN where it is not."""
        if BASELINE not in self.runs:
            return math.nan
        goal = self.error(BASELINE, self.best(BASELINE)[0])
        runs = self.best(contestant)[1]
        for points in zip(*(result.curve for result in runs), strict=False):
            if mean(force for _, force, _ in points) <= goal:
                return points[0][0] / self.steps
        return math.nan


@dataclass(frozen=True)
class Default:
    """HybridMuon with an input that sets nothing, beside the baseline at its best rate.

    Attributes
    ----------
    set, model, steps
        The case.
    test, out
        Force errors of HybridMuon and of the baseline [eV/Å]; NaN where the set has no such part.
    """

    set: str
    model: str
    steps: int
    test: tuple[float, float]
    out: tuple[float, float]

    @property
    def test_ratio(self) -> float:
        """The ratio of force errors on test frames."""
        return self.test[0] / self.test[1]

    @property
    def out_ratio(self) -> float:
        """The ratio of force errors out of distribution."""
        return self.out[0] / self.out[1]


def fields(results: Iterable[Result]) -> list[Field]:
    """Group results by set, model and budget, in the order of the sets and of the budgets."""
    found: dict[tuple[str, str, int], dict[str, dict[float, list[Result]]]] = {}
    for result in sorted(results, key=lambda result: result.key):
        key = result.key
        runs = found.setdefault((key.set, key.model, key.steps), {})
        runs.setdefault(key.contestant, {}).setdefault(key.rate, []).append(result)
    order = list(SETS)
    return [
        Field(*case, found[case])
        for case in sorted(found, key=lambda c: (c[2], c[1], order.index(c[0])))
    ]


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def time_of(times: Iterable[StepTime], field: Field, contestant: str) -> float:
    """Return the milliseconds a step of a contestant alone; NaN where they were not measured.

    A variant of HybridMuon with other numbers takes the time of HybridMuon, a larger set that of the small one.
    """
    same_steps = contestant.startswith(("hybrid_muon_decay", "hybrid_muon_adam"))
    case = (
        field.set.removesuffix("_large"),
        field.model,
        "hybrid_muon" if same_steps else contestant,
    )
    return next((e.milliseconds for e in times if (e.set, e.model, e.contestant) == case), math.nan)
