"""Find out at the end of a run whether it diverged, from its reported errors and its weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

# A run diverged if its errors are this many times the first ones, and above these.
_GROWTH = 10.0
_LARGE = {
    f"{kind}_{quantity}": limit
    for kind in ("rmse", "mae")
    for quantity, limit in (("e", (1.0, "eV/atom")), ("f", (10.0, "eV/Å")))
}
# A single batch may hold an odd frame: the least error of this many reports counts.
_REPORTS = 3
# Weights of trained models are at most some hundred.
_LARGEST_WEIGHT = 1e6


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
        """Take the metrics of a report: "rmse_e", "rmse_f" and others, of several branches metric/branch."""
        for name, value in metrics.items():
            if name.partition("/")[0] not in _LARGE or not math.isfinite(value):
                continue
            if name in self._errors:
                self._errors[name].last.append(value)
            else:
                self._errors[name] = _Errors(value)

    def describe(self, parameters: Iterable[Tensor]) -> str | None:
        """Describe in one phrase how the run diverged; None if it did not. `parameters` are those at its end."""
        found = []
        for name, errors in self._errors.items():
            metric, _, branch = name.partition("/")
            most, unit = _LARGE[metric]
            last = min(errors.last, default=0.0)
            if last > max(most, _GROWTH * errors.first):
                where = f" of {branch}" if branch else ""
                found.append(
                    f"{metric}{where} was {errors.first:.3g} {unit} at first and is at least {last:.3g}"
                    f" {unit} in the last {len(errors.last)} reports"
                )
        largest = max((float(p.detach().abs().max()) for p in parameters if p.numel()), default=0.0)
        if not largest <= _LARGEST_WEIGHT:
            found.append(f"the largest weight is {largest:.3g}")
        return "; ".join(found) or None
