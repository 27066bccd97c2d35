"""Reports of lines, and the lines of one that an earlier part of the run has written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from deepmd_muon.files import fresh_file

log = logging.getLogger(__name__)


class LinesFile:
    """A report that grows by lines; its folder is there."""

    def __init__(self, path: Path, lines: Iterable[str] = ()) -> None:
        self._file = fresh_file(path, "".join(f"{line}\n" for line in lines).encode())

    def write(self, line: str) -> None:
        """Write a line, or several, and flush."""
        self._file.write(f"{line}\n".encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def earlier_lines(path: Path, last_step: int, step_of: Callable[[str], int]) -> list[str]:
    """Return the lines that a restart keeps: rows up to `last_step`, with their comments.

    A missing file has no lines. Lines for which `step_of` raises ValueError, because they are not
    rows, are left out with a warning.
    """
    if not last_step or not path.is_file():
        return []
    lines: list[str] = []
    n_damaged = 0
    keeping = True
    # What follows the last line break was cut short by a crash.
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = raw.decode()
            if not line.startswith("#"):
                keeping = step_of(line) <= last_step
        except ValueError:
            n_damaged += 1
            continue
        if keeping:
            lines.append(line)
    if n_damaged:
        log.warning("%s: %d damaged lines are left out", path, n_damaged)
    return lines


def first_number(line: str) -> int:
    """Return the step that a row of columns begins with."""
    words = line.split(maxsplit=1)
    if not words or not words[0].isdecimal():
        raise ValueError("no row")
    return int(words[0])
