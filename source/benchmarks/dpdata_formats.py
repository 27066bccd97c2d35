"""Read every file that dpdata's own tests read, with and without a format, and compare with dpdata.

The tests come from a clone of dpdata's repository; the script runs them to learn which files they
read in which format. `python source/benchmarks/dpdata_formats.py DPDATA/tests` prints the table of
doc/benchmarks/raw/dpdata_formats_2026-11-28.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import textwrap
import unittest
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ase
import dpdata
import numpy as np
from dpdata.format import Format

from deepmd_muon.data import DataError, System, open_systems
from deepmd_muon.data.stores.foreign import OWN_FORMATS
from deepmd_muon.label_keys import Reading

# Largest differences relative to the largest number: the same numbers, or those of ASE's constants.
_EXACT = 1e-10
_OTHER_CONSTANTS = 1e-4
_SHOWN = 60  # characters of a reason


class Call(NamedTuple):
    """A file, a folder or the beginning of several files that a test reads."""

    path: str
    format: str


class Frames(NamedTuple):
    """Frames of one file in an order that does not depend on the reader."""

    natoms: np.ndarray  # (nframes,)
    energy: np.ndarray  # (nframes,) [eV]
    forces: np.ndarray  # lengths of all forces [eV/Å]
    virials: np.ndarray  # traces of all virials [eV]

    @classmethod
    def join(cls, parts: Sequence[Frames]) -> Frames:
        """Join frames of several systems, ordered by atoms and energies."""
        natoms = np.concatenate([part.natoms for part in parts])
        energy = np.concatenate([part.energy for part in parts])
        order = np.lexsort((energy, natoms))
        return cls(
            natoms[order],
            energy[order],
            np.sort(np.concatenate([part.forces for part in parts])),
            np.sort(np.concatenate([part.virials for part in parts])),
        )


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="folder tests/ of dpdata's repository")
    folder = parser.parse_args().tests.resolve()
    os.chdir(folder)
    logging.disable()
    warnings.simplefilter("ignore")
    print(f"dpdata {dpdata.__version__}, ASE {ase.__version__}\n")
    print("| file of dpdata's tests | format | `--format` | without |")
    print("|---|---|---|---|")
    for call, row in sorted(rows_of_tests(folder).items()):
        print(f"| {call.path} | {call.format} | {row.named} | {row.unnamed} |")


class Row(NamedTuple):
    """How our readers compare with dpdata, with the format named and without."""

    expected: Frames | str
    named: str
    unnamed: str


def rows_of_tests(folder: Path) -> dict[Call, Row]:
    """Run dpdata's tests, and compare when they read a file: some copy files to it before."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    rows: dict[Call, Row] = {}
    names: dict[type, str] = {}
    for name, format_class in Format.get_formats().items():
        if "/" in name or format_class not in names:
            names[format_class] = name
    busy: list[Call] = []

    def compare(call: Call) -> None:
        row = rows.get(call)
        if busy or (row is not None and isinstance(row.expected, Frames)):
            return
        busy.append(call)
        expected = _by_dpdata(call)
        named = _compare(expected, call.path, call.format)
        rows[call] = Row(expected, named, _compare(expected, call.path, None))
        busy.clear()

    def recording(method: Any) -> Any:
        def recorded(self: Any, format_object: Any, file_name: Any, *args: Any, **kw: Any) -> Any:
            name = names[type(format_object)]
            if isinstance(file_name, (str, Path)) and name not in OWN_FORMATS:
                path = os.path.normpath(file_name)
                if not os.path.isabs(path) and any(file.startswith(path) for file in files):
                    compare(Call(path, name))
            return method(self, format_object, file_name, *args, **kw)

        return recorded

    for system_class in (dpdata.LabeledSystem, dpdata.MultiSystems):
        system_class.from_fmt_obj = recording(system_class.from_fmt_obj)
    sys.path.insert(0, str(folder))
    with _silence():
        suite = unittest.defaultTestLoader.discover(str(folder), top_level_dir=str(folder))
        unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    return rows


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def _by_dpdata(call: Call) -> Frames | str:
    """Return what dpdata reads, or why it reads nothing."""
    try:
        if "xyz" in call.format or (call.format == "vasp/outcar" and os.path.isdir(call.path)):
            systems = list(dpdata.MultiSystems.from_file(call.path, fmt=call.format))
        else:
            systems = [dpdata.LabeledSystem(call.path, fmt=call.format)]
    except BaseException as error:  # dpdata's readers raise whatever their parsing does
        return f"{type(error).__name__}"
    if not sum(len(system) for system in systems):
        return "no frames"
    return Frames.join([_of_dpdata(system.data) for system in systems])


def _of_dpdata(data: dict[str, Any]) -> Frames:
    nframes, natoms, _ = data["coords"].shape
    virials = np.zeros(0)
    if "virials" in data and not data.get("nopbc", False):
        virials = np.trace(data["virials"], axis1=1, axis2=2)
    return Frames(
        np.full(nframes, natoms),
        data["energies"],
        np.linalg.norm(data["forces"], axis=-1).ravel(),
        virials,
    )


def _of_system(system: System) -> Frames:
    frames = system.frames(np.arange(system.nframes))
    labelled = np.flatnonzero(frames.present("energy") & frames.present("force"))
    frames = frames.rows(labelled.tolist())
    virials = np.zeros(0)
    if frames.virial is not None:
        virials = frames.virial.reshape(-1, 3, 3).trace(axis1=1, axis2=2)
    force = np.zeros((0, 3)) if frames.force is None else frames.force
    return Frames(
        np.full(len(labelled), system.natoms),
        np.full(len(labelled), np.nan) if frames.energy is None else frames.energy,
        np.linalg.norm(force, axis=-1).ravel(),
        virials,
    )


def _compare(expected: Frames | str, path: str, name: str | None) -> str:
    """Return in words how our frames differ from dpdata's."""
    try:
        systems = open_systems(path, reading=Reading(format=name))
    except DataError as error:
        reason = str(error).removeprefix("system ").removeprefix(f"{path}: ")
        reason = reason.partition(" (relative paths")[0].replace("\n", " ").replace("|", "\\|")
        agreed = "by both: " if isinstance(expected, str) else ""
        reason = textwrap.shorten(reason, _SHOWN, placeholder=" …")
        return f"refused: {agreed}{reason}"
    if isinstance(expected, str):
        return f"read, dpdata does not ({expected})"
    frames = Frames.join([_of_system(system) for system in systems])
    if len(frames.natoms) != len(expected.natoms):
        return f"**{len(frames.natoms)} frames, dpdata {len(expected.natoms)}**"
    differences = {
        label: _difference(getattr(frames, label), getattr(expected, label))
        for label in Frames._fields
    }
    if max(differences.values()) < _EXACT:
        return f"same ({len(frames.natoms)})"
    if max(differences.values()) < _OTHER_CONSTANTS:
        return f"same to {max(differences.values()):.0e} ({len(frames.natoms)})"
    listed = ", ".join(f"{k} {v:.1e}" for k, v in differences.items() if v > _OTHER_CONSTANTS)
    return f"**differs: {listed}**"


def _difference(values: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest number; inf if one has none."""
    if len(values) != len(expected):
        return np.inf
    scale = max(np.abs(expected).max(initial=0.0), 1e-8)
    return float(np.abs(values - expected).max(initial=0.0) / scale)


if __name__ == "__main__":
    main()
