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
    """Append a row of errors at every full validation; at a restart, rows beyond `start_step` are dropped.

    The virial stands in the place of the stress when it decides, such as by the `metric` "v:rmse". A new file (no steps
    done) keeps an earlier one as ``val.log.1``.
    """

    def __init__(self, path: str | os.PathLike[str], metric: str, *, start_step: int = 0) -> None:
        self._path = Path(path)
        make_folder_of(self._path)
        families = ("e", "f", "v" if metric.startswith("v") else "s")
        self._columns = [f"{family}:{kind}" for family in families for kind in ("mae", "rmse")]
        lines = earlier_lines(self._path, start_step, first_number)
        if not start_step and self._path.is_file() and self._path.stat().st_size:
            number = 1
            while (kept := self._path.with_name(f"{self._path.name}.{number}")).exists():
                number += 1
            with writing(kept):
                self._path.rename(kept)
        names = [f"{name.replace(':', '_').upper()}({_UNITS[name[0]]})" for name in self._columns]
        header = f"# {'step':>8s}" + "".join(f"   {name:>{_WIDTH}s}" for name in names)
        if header not in lines:
            lines.append(header)
        super().__init__(self._path, lines)

    def row(self, step: int, errors: Mapping[str, float], note: str | None) -> None:
        """Write the errors [eV, Å] of the 1-based `step` and flush them; a note becomes a comment line."""
        values = "".join(f"   {1e3 * errors[name]:>{_WIDTH}.6g}" for name in self._columns)
        self.write(f"  {step:8d}{values}" + (f"\n# {note}" if note else ""))
