"""Labels of frames that ASE read: which names hold them, in which units and signs."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.label_keys import LabelKeys

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)

# Names that files use, in any case. A prefix such as "mace_" stands for predictions, so only those of references count.
_REFERENCE = r"(?:ref|reference|dft|qm|target)"
_NAMES = {
    label: re.compile(rf"(?:{_REFERENCE}[_-]?)?{word}(?:[_-]{_REFERENCE})?", re.IGNORECASE)
    for label, word in {
        "energy": r"(?:tot(?:al)?_?)?energy",
        "force": "forces?",
        "virial": "virials?",
        "stress": "stress",
    }.items()
}
# Keys that name the unit of a label or of lengths, and the values that are our units.
_UNIT_KEY = re.compile(
    r"(?:.*[-_])?(?:energy|forces?|virials?|stress|positions?|pos|length|cell|lattice)[-_]units?",
    re.IGNORECASE,
)
_OUR_UNIT = re.compile(r"(?:ev)?(?:/?(?:å|a|ang|angstroms?)(?:(?:\^|\*\*)?3|³)?)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names of the labels of one file, settled."""

    # Name of "energy", "force", "virial" and "stress" in the file, None where it has none. A frame takes its virial
    # before its stress.
    names: Mapping[str, str | None]
    free: bool  # take ASE's `free_energy`, the energy whose derivatives the forces are, where a frame has it

    @classmethod
    def of(cls, frames: Sequence[Atoms], path: str, keys: LabelKeys) -> Labels:
        """Find the names of the labels in all frames of a file; `keys` are those that the user gave.

        Raises
        ------
        SystemFormatError
            When no frame has a name that the user gave, two names could be the same label, or a
            frame states other units.
        """
        for number, atoms in enumerate(frames):
            _refuse_units(atoms, path, f"frame {number}")
        known = {name for atoms in frames for name in given(atoms)}
        taken = {
            label: _choose(label, key, known, path)
            for label, key in dataclasses.asdict(keys).items()
        }
        if keys.stress is not None:
            taken["virial"] = None  # the stress is the user's choice
        labels = cls(taken, free=keys.energy is None and taken["energy"] == "energy")
        labels._describe(frames, path, known)
        return labels

    def _describe(self, frames: Sequence[Atoms], path: str, known: set[str]) -> None:
        """Log surprises: other names than ASE's, an energy that is not ASE's first, unknown names."""
        usual = {"energy": "energy", "force": "forces", "virial": "virial", "stress": "stress"}
        if other := [
            f"{label} from {key}"
            for label, key in self.names.items()
            if key not in (None, usual[label])
        ]:
            log.info("%s: %s", path, ", ".join(other))
        largest = 0.0
        for atoms in frames if self.free else ():
            free, energy = map(given(atoms).get, ("free_energy", "energy"))
            if isinstance(free, Real) and isinstance(energy, Real):
                largest = max(largest, abs(float(free) - float(energy)) / len(atoms))
        if largest > 0.0:
            log.info(
                "%s: energies are free energies, whose derivatives the forces are; those extrapolated to sigma = 0 "
                'differ by up to %.3g meV per atom (label_keys {"energy": "energy"} takes them)',
                path,
                1000.0 * largest,
            )
        for label in ("energy", "force"):
            ignored = sorted(
                name
                for name in known
                if re.search(label, name, re.IGNORECASE) and name != "free_energy"
            )
            ignored = [
                name for name in ignored if name not in self.names.values() and name != "energies"
            ]
            if self.names[label] is None and ignored:
                log.warning(
                    "%s: no name of the %s is known; label_keys could name it, found %s",
                    path,
                    label,
                    ", ".join(ignored),
                )
        # Names of atoms are left alone: ASE's `stresses` are one for each atom.
        of_frames = {name for atoms in frames for name in atoms.info}
        tensors = sorted(name for name in of_frames if re.search("virial|stress", name, re.I))
        if tensors and self.names["virial"] is None and self.names["stress"] is None:
            log.warning(
                "%s: no name of the virial or stress is known; label_keys could name it, found %s",
                path,
                ", ".join(tensors),
            )

    def read(self, atoms: Atoms, path: str, place: str, *, cell: bool) -> dict[str, np.ndarray]:
        """Return "energy" (1,), "force" (3·natoms,) and "virial" (9,) of a frame that has them, in our units and signs.

        There is no virial without a cell. `path` and `place` name file and frame in messages.

        Raises
        ------
        SystemFormatError
            When a label does not hold numbers, or has another length than expected.
        """
        from ase.stress import voigt_6_to_full_3x3_stress

        values = given(atoms)
        found = {label: key and values.get(key) for label, key in self.names.items()}
        stress = found.pop("stress")
        if self.free:
            found["energy"] = values.get("free_energy", found["energy"])
        if not cell:
            del found["virial"]
        elif found["virial"] is None and stress is not None:
            numbers = _numbers(stress, "stress", (6, 9), path, place).reshape(-1)
            full = voigt_6_to_full_3x3_stress(numbers) if numbers.size == 6 else numbers
            found["virial"] = -float(atoms.cell.volume) * full
        widths = {"energy": 1, "force": 3 * len(atoms), "virial": 9}
        return {
            name: _numbers(value, name, (widths[name],), path, place).reshape(-1)
            for name, value in found.items()
            if value is not None
        }


def parameters_of(atoms: Atoms, path: str, place: str) -> dict[str, np.ndarray]:
    """Return `info["fparam"]` (numb_fparam,) and `arrays["aparam"]` (natoms·numb_aparam,) of a frame that has them."""
    found: dict[str, np.ndarray] = {}
    for name, value in (
        ("fparam", atoms.info.get("fparam")),
        ("aparam", atoms.arrays.get("aparam")),
    ):
        if value is not None:
            size = max(1, np.size(value))
            found[name] = _numbers(value, name, (size,), path, place).reshape(-1)
    return found


def given(atoms: Atoms) -> dict[str, Any]:
    """Return the values of a frame by name; ASE moves names that it knows from info and arrays to a calculator."""
    results = getattr(atoms.calc, "results", None) or {}
    found = {**atoms.info, **atoms.arrays, **results}
    return {
        name: value
        for name, value in found.items()
        if value is not None and name not in ("numbers", "positions")
    }


def _refuse_units(atoms: Atoms, path: str, place: str) -> None:
    """Refuse a frame that says its numbers are in other units than ours."""
    for key, value in atoms.info.items():
        if not isinstance(value, str) or not _UNIT_KEY.fullmatch(key):
            continue
        if not _OUR_UNIT.fullmatch(re.sub(r"\s", "", value)):
            raise SystemFormatError(
                path,
                place,
                f"{key} is {value!r}; data are in eV, eV/Å and (stress) eV/Å³: convert the numbers "
                'and remove the key, or let dpdata convert the file (fmt="extxyz")',
            )


def _choose(label: str, key: str | None, known: set[str], path: str) -> str | None:
    """Return the name of a label in a file, None where it has none."""
    if key is not None:
        if key not in known:
            has = ", ".join(sorted(known)) or "nothing but positions"
            raise SystemFormatError(
                path,
                "",
                f"no frame has {key!r}, the name given for the {label}; the file has {has}",
            )
        return key
    names = {name for name in known if _NAMES[label].fullmatch(name)}
    if label == "energy" and "free_energy" in known:
        names.add("energy")  # ASE's pair: `Labels.free` decides between them
    if len(names) > 1:
        listed = sorted(names)
        raise SystemFormatError(
            path,
            "",
            f"both {' and '.join(listed)} could be the {label}; name the right one: "
            f'"label_keys": {{"{label}": "{listed[0]}"}} beside systems, or --{label}-key {listed[0]}',
        )
    return next(iter(names), None)


def _numbers(value: Any, name: str, sizes: Sequence[int], path: str, place: str) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SystemFormatError(path, place, f"{name} is {value!r}, not numbers") from error
    if array.size not in sizes:
        raise SystemFormatError(
            path,
            place,
            f"{name} has shape {array.shape}, not {' or '.join(map(str, sizes))} values",
        )
    return array
