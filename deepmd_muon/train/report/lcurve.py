"""The learning-curve file `lcurve.out`, in DeePMD's format."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from deepmd_muon.files import make_folder_of
from deepmd_muon.train.report.columns import branch_of, column, in_order
from deepmd_muon.train.report.earlier_lines import LinesFile, earlier_lines, first_number

_NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan"


def header(names: Sequence[str], validated: Collection[str]) -> str:
    """Return the header line: per metric a training column, before it one of validation where it is `validated`."""
    columns = [
        f"   {column(name, 'val'):>11s} {column(name, 'trn'):>11s}"
        if name in validated
        else f"   {column(name, 'trn'):>11s}"
        for name in names
    ]
    return f"# {'step':5s}{''.join(columns)}   {'lr':8s}"


def row(
    step: int,
    lr: float,
    names: Sequence[str],
    validated: Collection[str],
    train: Mapping[str, float],
    valid: Mapping[str, float],
) -> str:
    """Return one row in the columns of `header`; a metric that is not there is nan."""
    nan = float("nan")
    columns = [
        f"   {valid.get(name, nan):11.2e} {train.get(name, nan):11.2e}"
        if name in validated
        else f"   {train.get(name, nan):11.2e}"
        for name in names
    ]
    return f"{step:7d}{''.join(columns)}   {lr:8.1e}"


class LearningCurveFile(LinesFile):
    """Append a row of metrics at every reported step.

    The first row decides the columns: its training metrics in alphabetical order, and whether there is validation, for
    each branch. At a restart, rows beyond `start_step` are dropped: each step stands in the file once.
    """

    validates = True

    def __init__(
        self, path: str | os.PathLike[str], frequency: int, *, start_step: int = 0
    ) -> None:
        self.frequency = frequency
        path = Path(path)
        make_folder_of(path)
        kept = earlier_lines(path, start_step, first_number)
        headers = [line for line in kept if line.startswith("# step")]
        self._header = headers[-1] if headers else None
        super().__init__(path, kept)
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
            wanted = header(self._names, self._validated)
            if wanted.rstrip() != (self._header or "").rstrip():
                self.write(f"{wanted}\n{_NOTE}")
        self.write(row(step, lr, self._names, self._validated, train, valid))
