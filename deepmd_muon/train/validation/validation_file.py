"""The file of full validations, `val.log`, in deepmd-kit's columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deepmd_muon.files import make_folder_of, writing
from deepmd_muon.train.report.earlier_lines import LinesFile, earlier_lines, first_number

_UNITS = {"e": "meV/atom", "f": "meV/Å", "s": "meV/Å³", "v": "meV/atom"}
_WIDTH = 18


class ValidationFile(LinesFile):
    """Append a row of errors at every full validation; a restart drops later rows.

    Columns of the virial replace those of the stress if it decides, such as by the `metric`
    "v:rmse". A new file (no steps done) keeps an earlier one as ``val.log.1``.
    """

    def __init__(self, path: str | os.PathLike[str], metric: str, *, start_step: int = 0) -> None:
        self._path = Path(path)
        make_folder_of(self._path)
        families = ("e", "f", "v" if metric.startswith("v") else "s")
        self._columns = [f"{family}:{kind}" for family in families for kind in ("mae", "rmse")]
        lines = earlier_lines(self._path, start_step, first_number)
        if not start_step:
            self._keep_earlier()
        header = f"# {'step':>8s}"
        for name in self._columns:
            title = f"{name.replace(':', '_').upper()}({_UNITS[name[0]]})"
            header += f"   {title:>{_WIDTH}s}"
        if header not in lines:
            lines.append(header)
        super().__init__(self._path, lines)

    def _keep_earlier(self) -> None:
        """Give the file of an earlier run a number."""
        if not self._path.is_file() or not self._path.stat().st_size:
            return
        number = 1
        while (renamed := self._path.with_name(f"{self._path.name}.{number}")).exists():
            number += 1
        with writing(renamed):
            self._path.rename(renamed)

    def row(self, step: int, errors: Mapping[str, float], note: str | None) -> None:
        """Write the errors [eV, Å] of the 1-based `step`; a note becomes a comment line."""
        row = f"  {step:8d}"
        for name in self._columns:
            row += f"   {1e3 * errors[name]:>{_WIDTH}.6g}"
        if note:
            row += f"\n# {note}"
        self.write(row)
