"""Find out at the end of a run whether it diverged, from its reported errors and its weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

# A run diverged if its errors are this many times the first ones, and above the limits.
_GROWTH = 10.0
# A single batch may hold an odd frame: the least error of this many reports counts.
_REPORTS = 3
# Weights of trained models are at most some hundred.
_LARGEST_WEIGHT = 1e6


class _Limit(NamedTuple):
    value: float
    unit: str


_ENERGY_LIMIT = _Limit(1.0, "eV/atom")
_FORCE_LIMIT = _Limit(10.0, "eV/Å")
_LIMITS = {
    "rmse_e": _ENERGY_LIMIT,
    "mae_e": _ENERGY_LIMIT,
    "rmse_f": _FORCE_LIMIT,
    "rmse_fr": _FORCE_LIMIT,
    "mae_fr": _FORCE_LIMIT,
    "mae_f": _FORCE_LIMIT,
}


@dataclass
class _Errors:
    """The first error of a run, and the last ones."""

    first: float
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_REPORTS))


class Divergence:
    """Compares the last reported errors of a run with its first ones."""

    def __init__(self) -> None:
        self._errors: dict[str, _Errors] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a report; of several branches, names are metric/branch."""
        for name, value in metrics.items():
            if name.partition("/")[0] not in _LIMITS or not math.isfinite(value):
                continue
            if name in self._errors:
                self._errors[name].last.append(value)
            else:
                self._errors[name] = _Errors(value)

    def describe(self, parameters: Iterable[Tensor]) -> str | None:
        """Describe how the run diverged; None if it did not.

        `parameters` are those at its end.
        """
        problems = []
        for name, errors in self._errors.items():
            metric, _, branch = name.partition("/")
            limit = _LIMITS[metric]
            least_recent = min(errors.last, default=0.0)
            if least_recent > max(limit.value, _GROWTH * errors.first):
                of_branch = f" of {branch}" if branch else ""
                problems.append(
                    f"{metric}{of_branch} was {errors.first:.3g} {limit.unit} at first "
                    f"and is at least {least_recent:.3g} {limit.unit} "
                    f"in the last {len(errors.last)} reports"
                )
        largest = max((float(p.detach().abs().max()) for p in parameters if p.numel()), default=0.0)
        if not largest <= _LARGEST_WEIGHT:  # also NaN
            problems.append(f"the largest weight is {largest:.3g}")
        return "; ".join(problems) or None
