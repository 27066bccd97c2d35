"""The learning-curve file `lcurve.out`, in DeePMD's format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from deepmd_muon.files import make_folder_of
from deepmd_muon.train.report.earlier_lines import LinesFile, earlier_lines, first_number
from deepmd_muon.train.validation.columns import branch_of, column, in_order

_NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan"


def header(names: Sequence[str], validated: Collection[str]) -> str:
    """Return the header: a training column a metric, after one of validation if `validated`."""
    line = f"# {'step':5s}"
    for name in names:
        line += "  "
        if name in validated:
            line += f" {column(name, 'val'):>11s}"
        line += f" {column(name, 'trn'):>11s}"
    return f"{line}   {'lr':8s}"


def row(
    step: int,
    lr: float,
    names: Sequence[str],
    validated: Collection[str],
    train: Mapping[str, float],
    valid: Mapping[str, float],
) -> str:
    """Return one row in the columns of `header`; a missing metric is nan."""
    line = f"{step:7d}"
    for name in names:
        line += "  "
        if name in validated:
            line += f" {valid.get(name, math.nan):11.2e}"
        line += f" {train.get(name, math.nan):11.2e}"
    return f"{line}   {lr:8.1e}"


class LearningCurveFile(LinesFile):
    """Append a row of metrics at every reported step.

    The first row decides the columns: its training metrics in alphabetical order, and whether there
    is validation, for each branch. At a restart, rows beyond `start_step` are dropped, so that each
    step has one row.
    """

    validates = True

    def __init__(
        self, path: str | os.PathLike[str], frequency: int, *, start_step: int = 0
    ) -> None:
        self.frequency = frequency
        path = Path(path)
        make_folder_of(path)
        lines = earlier_lines(path, start_step, first_number)
        headers = [line for line in lines if line.startswith("# step")]
        self._header = headers[-1] if headers else ""
        super().__init__(path, lines)
        self._names: list[str] = []
        self._validated: list[str] = []

    def step(
        self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]
    ) -> None:
        """Write the row of the 1-based `step` and flush it."""
        if not self._names:
            self._names = in_order(train)
            branches = {branch_of(name) for name in valid}
            self._validated = [name for name in self._names if branch_of(name) in branches]
            present_header = header(self._names, self._validated)
            if present_header.rstrip() != self._header.rstrip():
                self.write(f"{present_header}\n{_NOTE}")
        self.write(row(step, lr, self._names, self._validated, train=train, valid=valid))
