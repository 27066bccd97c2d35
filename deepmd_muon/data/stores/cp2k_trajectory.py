"""Trajectories of CP2K: positions, forces and cells in files of their own (PROJECT-pos-1.xyz, …)."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from glob import escape, glob
from itertools import islice
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError
from deepmd_muon.data.stores.memory import FrameOrigin, MemoryStore
from deepmd_muon.files import open_regular

log = logging.getLogger(__name__)

# CODATA 2018
_HARTREE = 27.211386245988  # [eV]
_BOHR = 0.529177210903  # [Å]
_NAME = re.compile(r"(?P<project>.+)-pos-(?P<number>\d+)\.xyz\Z")
_COMMENT = re.compile(r"\bi\s*=\s*(?P<step>\d+)\b.*\bE\s*=\s*(?P<energy>[-+.\dEeD]+)")
_ELEMENT = re.compile(r"[A-Z][a-z]?")
# Of a section &CELL; CP2K ignores case.
_CELL = re.compile(r"^\s*&CELL\b(.*?)^\s*&END", re.IGNORECASE | re.MULTILINE | re.DOTALL)
_CELL_LINE = re.compile(r"CELL\| Vector [abc] \[angstrom\]:?\s+(\S+)\s+(\S+)\s+(\S+)")
_VARIES = re.compile(r"^\s*ENSEMBLE\s+NP", re.IGNORECASE | re.MULTILINE)


class _Step(NamedTuple):
    symbols: tuple[str, ...]
    energy: float  # [Hartree]
    vectors: np.ndarray  # (natoms, 3)


def is_trajectory(path: str) -> bool:
    """Return whether a file holds the positions of a trajectory of CP2K."""
    if not _NAME.match(os.path.basename(path)):
        return False
    try:
        with open_regular(path) as file:
            return bool(_COMMENT.search(file.read(512).decode("utf-8", "replace")))
    except OSError:
        return False


def has_forces(path: str) -> bool:
    """Return whether the forces of a trajectory are next to it."""
    return os.path.isfile(_Siblings.of(path).forces)


def read_trajectory(path: str) -> list[MemoryStore]:
    """Read positions [Å] and energies [Hartree], and from files next to them forces and cells.

    Forces [Hartree/Bohr] are in PROJECT-frc-1.xyz. A step that lacks them is left out, and of a
    step that a restart wrote again the last counts. Cells [Å] come from PROJECT-1.cell, else from
    the section &CELL of an input or a restart file, else from the output.

    Raises
    ------
    SystemFormatError
        When a file is no trajectory, or no file has the cell.
    """
    positions = _steps(path)
    siblings = _Siblings.of(path)
    forces = _steps(siblings.forces) if has_forces(path) else {}
    if not forces:
        log.warning(
            "%s: no forces, because there is no %s (MOTION/PRINT/FORCES of CP2K writes it): a "
            "potential learns far less from energies alone",
            path,
            os.path.basename(siblings.forces),
        )
    steps = sorted(positions.keys() & forces.keys() if forces else positions)
    if not steps:
        raise SystemFormatError(path, "", f"no step has forces in {siblings.forces}")
    if len(steps) < len(positions):
        log.warning(
            "%s: %d of %d steps are left out, because %s lacks them",
            path,
            len(positions) - len(steps),
            len(positions),
            siblings.forces,
        )
    symbols = positions[steps[0]].symbols
    if any(positions[step].symbols != symbols for step in steps):
        raise SystemFormatError(path, "", "atoms change along the trajectory")
    arrays = {
        "coord": np.stack([positions[step].vectors.ravel() for step in steps]),
        "energy": np.array([positions[step].energy for step in steps]) * _HARTREE,
    }
    if forces:
        atomic_units = np.stack([forces[step].vectors.ravel() for step in steps])
        arrays["force"] = atomic_units * _HARTREE / _BOHR
    cells = siblings.cells(steps)
    if cells is not None:
        arrays["box"] = cells
    origins = [FrameOrigin(file=path, number=number) for number in range(len(steps))]
    return [MemoryStore(path, symbols, [arrays], pbc=cells is not None, origins=origins)]


def _steps(path: str) -> Mapping[int, _Step]:
    """Return the frames of a file by their step; a frame that was cut off is left out."""
    steps: dict[int, _Step] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for lines in _blocks(file, path):
            comment = _COMMENT.search(lines[0])
            if comment is None:
                raise SystemFormatError(path, "", f"no step and energy in the line {lines[0]!r}")
            rows = [line.split() for line in lines[1:]]
            try:
                symbols = tuple(_ELEMENT.match(row[0])[0] for row in rows)  # type: ignore[index]
                vectors = np.array([row[1:4] for row in rows], dtype=np.float64)
                energy = float(comment["energy"].replace("D", "E"))
            except (TypeError, ValueError, IndexError) as error:
                raise SystemFormatError(
                    path, f"step {comment['step']}", f"cannot be read: {error}"
                ) from error
            steps[int(comment["step"])] = _Step(symbols, energy, vectors)
    return steps


def _blocks(file: Iterator[str], path: str) -> Iterator[list[str]]:
    """Yield comment and atoms of each frame."""
    for line in file:
        if not line.strip():
            continue
        try:
            natoms = int(line)
        except ValueError as error:
            raise SystemFormatError(
                path, "", f"a number of atoms was expected, found {line.strip()[:60]!r}"
            ) from error
        block = list(islice(file, natoms + 1))
        if len(block) < natoms + 1:
            log.warning("%s: the last frame is cut off and left out", path)
            return
        yield block


class _Siblings(NamedTuple):
    """Files next to the positions."""

    positions: str
    folder: str
    project: str
    number: str

    @classmethod
    def of(cls, path: str) -> _Siblings:
        folder, name = os.path.split(path)
        match = _NAME.match(name)
        if match is None:
            raise SystemFormatError(path, "", "CP2K names positions PROJECT-pos-1.xyz")
        return cls(path, folder, match["project"], match["number"])

    @property
    def forces(self) -> str:
        return os.path.join(self.folder, f"{self.project}-frc-{self.number}.xyz")

    def cells(self, steps: Sequence[int]) -> np.ndarray | None:
        """Return the cell of each step (steps, 9) [Å]; None if the input says PERIODIC NONE."""
        own_file = os.path.join(self.folder, f"{self.project}-{self.number}.cell")
        if os.path.isfile(own_file):
            rows = np.loadtxt(own_file, ndmin=2)
            by_step = {int(row[0]): row[2:11] for row in rows}
            missing = [step for step in steps if step not in by_step]
            if missing:
                raise SystemFormatError(own_file, "", f"lacks the cell of step {missing[0]}")
            return np.stack([by_step[step] for step in steps])
        for name in self._below("*.inp", "*.restart"):
            text = _text(name)
            section = _CELL.search(text)
            if section is None:
                continue
            if _VARIES.search(text):
                raise SystemFormatError(
                    self.positions,
                    "",
                    f"{name} lets the cell vary, and there is no {own_file}: print it "
                    "(MOTION/PRINT/CELL)",
                )
            cell = _cell_of_section(section[1], name)
            return None if cell is None else np.tile(cell.ravel(), (len(steps), 1))
        for name in self._below("*.out", "*.log"):
            vectors = _CELL_LINE.findall(_text(name))[:3]
            if len(vectors) == 3:
                return np.tile(np.array(vectors, dtype=np.float64).ravel(), (len(steps), 1))
        raise SystemFormatError(
            self.positions,
            "",
            f"no cell: put {os.path.basename(own_file)} (MOTION/PRINT/CELL), CP2K's input (*.inp) or "
            "its output (*.out, *.log) into the same folder",
        )

    def _below(self, *patterns: str) -> list[str]:
        place = escape(self.folder)
        return [name for pattern in patterns for name in sorted(glob(os.path.join(place, pattern)))]


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _cell_of_section(section: str, name: str) -> np.ndarray | None:
    """Return the cell (3, 3) [Å] of a section &CELL, None if it is not periodic."""
    values: dict[str, list[str]] = {}
    for line in section.splitlines():
        words = [word for word in re.split(r"[!#]", line)[0].split() if word != "[angstrom]"]
        if words:
            values[words[0].upper()] = words[1:]
    periodic = "".join(values.get("PERIODIC", ["XYZ"])).upper()
    if periodic == "NONE":
        return None
    if set(periodic) != set("XYZ"):
        raise SystemFormatError(
            name, "", f"PERIODIC {periodic}: data are periodic along all axes or none"
        )
    try:
        if "ABC" in values:
            angles = values.get("ALPHA_BETA_GAMMA", ["90", "90", "90"])
            lengths = np.array(values["ABC"], dtype=np.float64)
            return np.asarray(lengths[:, None] * _directions(np.array(angles, dtype=np.float64)))
        cell = np.array([values[axis] for axis in "ABC"], dtype=np.float64)
        return cell.reshape(3, 3)
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{name}: its section &CELL has no plain numbers in Å (ABC, or A, B and C): print the cell "
            "with MOTION/PRINT/CELL"
        ) from error


def _directions(angles: np.ndarray) -> np.ndarray:
    """Return unit vectors with the angles α, β, γ [°]: the first along x, the second in the xy plane."""
    alpha, beta, gamma = np.cos(np.radians(angles))
    sine = np.sqrt(1 - gamma**2)
    y = (alpha - beta * gamma) / sine
    return np.array([[1, 0, 0], [gamma, sine, 0], [beta, y, np.sqrt(1 - beta**2 - y**2)]])
