"""Ionic steps of VASP: ASE reads their labels, but not whether their electronic loop converged."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, NamedTuple

from deepmd_muon.data.errors import SystemFormatError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ase import Atoms

log = logging.getLogger(__name__)

# An OUTCAR ends an ionic step with this line and four more, which hold its energies.
_STEP_ENDS = "FREE ENERGIE OF THE ION-ELECTRON SYSTEM"
_LINES_OF_ENERGY = 4
_CONVERGED = "aborting loop because EDIFF is reached"
_SETTING = re.compile(r"\b(NELM|EDIFF)\s*=\s*([-+.\dEeDd]+)")
# The change of the total energy, and that of the band structure in parentheses [eV].
_CHANGE = re.compile(r"total energy-change \(2\. order\) :\s*(\S+)\s*\(\s*(\S+)\s*\)")
# Many-body dispersion adds these columns, which ASE takes for energies.
_WITHOUT_DISPERSION = re.compile(r"eV\s+w/o vdW\s*=\s*\S+")


class VaspSteps(NamedTuple):
    """Frames of a file of VASP."""

    frames: list[Atoms]
    converged: list[bool]  # of the electronic loop of each frame


@dataclass
class _Loop:
    """The electronic loop of one ionic step.

    VASP ends it when the energy changes by less than EDIFF, or after NELM steps. VASP 5 writes
    "EDIFF is reached" in both cases, and a vasprun.xml says nothing, so the numbers decide.
    """

    max_steps: int = 0  # NELM, 0 if the file does not say
    threshold: float = 0.0  # EDIFF [eV]
    steps: int = 0
    change: float = math.inf  # of the energy in the last step [eV]
    reason: str = ""  # line of an OUTCAR that ends the loop

    def set(self, name: str, text: str) -> None:
        """Take NELM or EDIFF as VASP writes it."""
        value = _number(text)
        if name == "EDIFF":
            self.threshold = abs(value)
        elif math.isfinite(value):
            self.max_steps = int(value)

    def end(self) -> bool:
        """Return whether the loop converged, and be ready for the next ionic step."""
        exhausted = 0 < self.max_steps <= self.steps and not self.change <= self.threshold
        stopped = bool(self.reason) and _CONVERGED not in self.reason
        self.steps = 0
        self.change = math.inf
        self.reason = ""
        return not exhausted and not stopped


def read_outcar(path: str) -> VaspSteps:
    """Read the ionic steps of an OUTCAR that VASP computed from first principles.

    Steps of VASP's own force field are predictions, and steps without positions (NWRITE = 0) are
    no frames: both are left out with a warning.

    Raises
    ------
    SystemFormatError
        When no step is left.
    """
    from ase.io import read
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rt") as file:
        text = _OutcarText(file, os.path.join(path, "OUTCAR"))
        try:
            frames = read(text, index=":", format="vasp-out")
        except Exception:
            if text.predicted and not text.converged:
                raise SystemFormatError(
                    path,
                    "",
                    f"all {text.predicted} ionic steps are predictions of VASP's machine-learned "
                    "force field (ML_LMLFF); labels come from steps with an electronic loop",
                ) from None
            raise
    for count, reason in (
        (text.predicted, "VASP's machine-learned force field predicted them"),
        (text.incomplete, "VASP wrote no positions and forces (NWRITE); its vasprun.xml has them"),
    ):
        if count:
            log.warning("%s: %d ionic steps are left out: %s", path, count, reason)
    return VaspSteps(frames, text.converged[: len(frames)])


@dataclass
class _OutcarText:
    """The lines of an OUTCAR that ASE understands; ASE iterates over it as over a file."""

    file: IO[str]
    # ASE reads constraints, which no label needs, from a CONTCAR or POSCAR in the folder of this
    # path. Theirs may be half written. So the path has no such folder.
    name: str
    converged: list[bool] = field(default_factory=list)  # of each step that was passed on
    predicted: int = 0  # steps of a machine-learned force field
    incomplete: int = 0  # steps without positions

    def __post_init__(self) -> None:
        self._lines = self._understood()

    def __iter__(self) -> Iterator[str]:
        return self._lines

    def __next__(self) -> str:
        return next(self._lines)

    def _understood(self) -> Iterator[str]:
        loop = _Loop()
        step: list[str] = []
        in_header = True
        for line in self.file:
            _follow(line, loop)
            step.append(line)
            if in_header and "- Iteration" in line:
                in_header = False
                yield from step
                step = []
            elif _STEP_ENDS in line and in_header:
                self.predicted += 1  # a force field that exists before the first electronic loop
            elif _STEP_ENDS in line:
                yield from self._end_of(step, loop)
                step = []
        if in_header:
            yield from step

    def _end_of(self, step: list[str], loop: _Loop) -> Iterator[str]:
        energies = [line for _, line in zip(range(_LINES_OF_ENERGY), self.file, strict=False)]
        converged = loop.end()
        if len(energies) < _LINES_OF_ENERGY:
            return  # the run was killed: ASE leaves the step out, too
        if f"ML {_STEP_ENDS}" in step[-1]:
            self.predicted += 1
        elif not any("TOTAL-FORCE" in line for line in step):
            self.incomplete += 1
        else:
            self.converged.append(converged)
            yield from step
            yield from (_WITHOUT_DISPERSION.sub("", line) for line in energies)


def _follow(line: str, loop: _Loop) -> None:
    """Take from a line of an OUTCAR what it says about the electronic loop."""
    if "- Iteration" in line:
        loop.steps += 1
    elif "total energy-change" in line and (change := _CHANGE.search(line)):
        loop.change = max(abs(_number(change[1])), abs(_number(change[2])))
    elif "aborting loop" in line:
        loop.reason = line
    elif "NELM" in line or "EDIFF" in line:
        for name, value in _SETTING.findall(line):
            loop.set(name, value)


def vasprun_convergence(path: str) -> list[bool]:
    """Return whether the electronic loop converged, for each ionic step of a vasprun.xml."""
    from xml.etree import ElementTree  # takes 15 ms, and few data are VASP's

    from ase.io.formats import open_with_compression

    converged: list[bool] = []
    loop = _Loop()
    last_energy = math.nan
    with open_with_compression(path, "rb") as file:
        try:
            for _, element in ElementTree.iterparse(file):
                if element.tag in ("incar", "parameters"):
                    _settings_of(element, loop)
                elif element.tag == "scstep":
                    energy = _number(element.findtext("energy/i[@name='e_fr_energy']", ""))
                    loop.steps += 1
                    loop.change = abs(energy - last_energy)
                    last_energy = energy
                elif element.tag == "calculation":
                    converged.append(loop.end())
                    last_energy = math.nan
                    element.clear()
        except ElementTree.ParseError:  # a run that was killed: ASE reads the steps before
            converged.append(loop.end())
    return converged


def _settings_of(element: Element, loop: _Loop) -> None:
    """Take NELM and EDIFF from the input (<incar>), then from what VASP used (<parameters>)."""
    for section, name in (("electronic convergence", "NELM"), ("electronic", "EDIFF")):
        # VASP 5 has a second NELM in the section "response functions".
        place = f".//separator[@name='{section}']/i[@name='{name}']"
        text = element.findtext(place if element.tag == "parameters" else f"i[@name='{name}']")
        if text is not None:
            loop.set(name, text)


def _number(text: str) -> float:
    """Return a number as Fortran writes it, nan for stars."""
    try:
        return float(text.replace("D", "E"))
    except ValueError:
        return math.nan
