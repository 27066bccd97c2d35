"""A log of JSON lines: one object a reported step, for scripts and pictures."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deepmd_muon.files import make_folder_of
from deepmd_muon.train.report.earlier_lines import LinesFile, earlier_lines
from deepmd_muon.train.validation.columns import column


class JsonLinesFile(LinesFile):
    """Append one JSON object at every reported step.

    Its keys are "step", "time" [s] in training since the run began (of all parts of a restarted
    run), "lr", and every metric with the ending "_trn" or "_val"; a value that is not finite is
    null. At a restart, lines beyond the restart step are dropped.

    Parameters are those of `LearningCurveFile`.
    """

    validates = True

    def __init__(
        self, path: str | os.PathLike[str], frequency: int, *, start_step: int = 0
    ) -> None:
        self.frequency = frequency
        path = Path(path)
        make_folder_of(path)
        lines = earlier_lines(path, start_step, lambda line: _read(line).step)
        seconds_before = _read(lines[-1]).seconds if lines else 0.0
        self._begin = time.perf_counter() - seconds_before
        super().__init__(path, lines)

    def step(
        self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]
    ) -> None:
        """Write the line of the 1-based `step` and flush it."""
        record: dict[str, float | None] = {
            "step": step,
            "time": round(time.perf_counter() - self._begin, 3),
            "lr": lr,
        }
        for ending, metrics in (("trn", train), ("val", valid)):
            for name, value in metrics.items():
                record[column(name, ending)] = value if math.isfinite(value) else None
        self.write(json.dumps(record))


class _Line(NamedTuple):
    step: int
    seconds: float


def _read(line: str) -> _Line:
    """Return step and time of a line; ValueError if it is damaged."""
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("no record of a step")
    seconds = record.get("time") or 0.0
    if type(seconds) not in (int, float) or not 0.0 <= seconds < 1e15:
        raise ValueError("no time")
    return _Line(record["step"], float(seconds))
