"""Folders of calculations: which files of a run to read, and each run once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepmd_muon.data.errors import DataError, SystemNotFoundError
from deepmd_muon.data.stores.cp2k_trajectory import has_forces, is_trajectory
from deepmd_muon.data.stores.dpdata_reading import read_dpdata
from deepmd_muon.data.stores.foreign import read_foreign
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.data.stores.npy_store import refuse_unlisted
from deepmd_muon.data.stores.programs import COMPRESSED, recognize
from deepmd_muon.files import real_folders
from deepmd_muon.label_keys import Reading

log = logging.getLogger(__name__)

_MAX_LISTED = 5  # outputs that a message lists


def read_other(path: str, reading: Reading) -> list[MemoryStore]:
    """Read a file of another program, or all that a folder holds of such files."""
    return read_runs(path, reading) if os.path.isdir(path) else read_foreign(path, reading)


def read_runs(folder: str, reading: Reading) -> list[MemoryStore]:
    """Read the outputs of programs at and below a folder; return nothing if it holds none.

    VASP writes each step into vasprun.xml and OUTCAR: the second is read if the first cannot be. A
    file and its compressed copy count once. CP2K's trajectory is read instead of the output next to
    it, if it has forces. An output that cannot be read is left out with a warning.

    Raises
    ------
    SystemNotFoundError
        When there are outputs, and none can be read.
    """
    stores: list[MemoryStore] = []
    paths: list[str] = []
    problems: list[str] = []
    for choices in _outputs_below(folder):
        problem: DataError | None = None
        for output in choices:
            try:
                stores += output.read(reading)
            except DataError as error:  # noqa: PERF203 - the next choice follows
                problem = problem or error
            else:
                paths.append(output.path)
                problem = None
                break
        if problem is not None:
            problems.append(str(problem))
    if problems and not stores:
        raise SystemNotFoundError(
            f"system {folder}: no output below it can be read: {'; '.join(problems[:_MAX_LISTED])}"
        )
    for text in problems:
        log.warning("left out: %s", text)
    if paths:
        listed = ", ".join(paths[:_MAX_LISTED]) + (", …" if len(paths) > _MAX_LISTED else "")
        log.info("%s: read %s", folder, listed)
    return stores


class _Output(NamedTuple):
    """A file, or a folder in a format of dpdata."""

    path: str
    format: str | None = None

    def read(self, reading: Reading) -> list[MemoryStore]:
        if self.format is None:
            return read_foreign(self.path, reading)
        return read_dpdata(self.path, self.format, keep_unconverged=reading.keep_unconverged)


def _outputs_below(folder: str) -> Iterator[Sequence[_Output]]:
    """Yield the outputs below a folder; of a run with two that hold the same, both."""
    for place, _, names in real_folders(folder, refuse_unlisted):
        copies = {name + ending for name in names for ending in COMPRESSED}
        paths = [os.path.join(place, name) for name in sorted(names) if name not in copies]
        trajectories = [path for path in paths if is_trajectory(path)]
        by_program: dict[str, list[str]] = {}
        for path in paths:
            program = recognize(path)
            if program is not None and not program.takes_folder:
                by_program.setdefault(program.name, []).append(path)
        if trajectories:
            has_output = bool(by_program.pop("CP2K", []))
            if has_output and not any(has_forces(path) for path in trajectories):
                yield [_Output(place, "cp2k/aimd_output")]
            else:
                yield from ([_Output(path)] for path in trajectories)
        vaspruns = by_program.pop("VASP (vasprun.xml)", [])
        outcars = by_program.pop("VASP (OUTCAR)", [])
        if len(vaspruns) == len(outcars) == 1:
            yield [_Output(vaspruns[0]), _Output(outcars[0])]  # the first has more digits
        else:  # runs that were continued may have kept only one of both under other names
            more = vaspruns if len(vaspruns) >= len(outcars) else outcars
            yield from ([_Output(path)] for path in more)
        for outputs in by_program.values():
            yield from ([_Output(path)] for path in outputs)
