"""Labels of frames that ASE read: which names hold them, in which units and signs."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.data.frames import ATOM_PARAMETERS, FRAME_PARAMETERS
from deepmd_muon.label_keys import LabelKeys

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)

# Names that files use, in any case. A prefix such as "mace_" stands for predictions, so only
# prefixes of references count.
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
_NAMES_OF_ASE = {"energy": "energy", "force": "forces", "virial": "virial", "stress": "stress"}
# Keys that name the unit of a label or of lengths, and the values that are our units.
_UNIT_KEY = re.compile(
    r"(?:.*[-_])?(?:energy|forces?|virials?|stress|positions?|pos|length|cell|lattice)[-_]units?",
    re.IGNORECASE,
)
_OUR_UNIT = re.compile(r"(?:ev)?(?:/?(?:å|a|ang|angstroms?)(?:(?:\^|\*\*)?3|³)?)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names of the labels of one file, settled."""

    # Name of "energy", "force", "virial" and "stress" in the file, None if it has none. A frame
    # takes its virial before its stress.
    names: Mapping[str, str | None]
    # Take ASE's `free_energy` of frames that have it: forces are its derivatives.
    free: bool

    @classmethod
    def of(cls, frames: Sequence[Atoms], path: str, keys: LabelKeys) -> Labels:
        """Find the names of the labels in all frames of a file; `keys` are the user's names.

        Raises
        ------
        SystemFormatError
            When no frame has a name that the user gave, two names could be the same label, or a
            frame states other units.
        """
        for number, atoms in enumerate(frames):
            _refuse_units(atoms, path, f"frame {number}")
        names_in_file = {name for atoms in frames for name in values_of(atoms)}
        names = {
            label: _choose_name(label, key, names_in_file, path)
            for label, key in dataclasses.asdict(keys).items()
        }
        if keys.stress is not None:
            names["virial"] = None  # the stress is the user's choice
        labels = cls(names, free=keys.energy is None and names["energy"] == "energy")
        labels._log_other_names(path)
        labels._log_free_energies(frames, path)
        labels._warn_of_unknown_names(frames, names_in_file, path)
        labels._warn_of_stress_without_cell(frames, path)
        _warn_of_calculators(frames, path)
        return labels

    def _log_other_names(self, path: str) -> None:
        """Log which labels come from other names than ASE's."""
        other_names = [
            f"{label} from {name}"
            for label, name in self.names.items()
            if name is not None and name != _NAMES_OF_ASE[label]
        ]
        if other_names:
            log.info("%s: %s", path, ", ".join(other_names))

    def _log_free_energies(self, frames: Sequence[Atoms], path: str) -> None:
        """Log that energies are not the ones that ASE gives first, if they differ."""
        if not self.free:
            return
        largest_difference = 0.0  # [eV/atom]
        for atoms in frames:
            values = values_of(atoms)
            free = values.get("free_energy")
            energy = values.get("energy")
            if isinstance(free, Real) and isinstance(energy, Real):
                difference = abs(float(free) - float(energy)) / len(atoms)
                largest_difference = max(largest_difference, difference)
        if largest_difference > 0.0:
            log.info(
                "%s: energies are free energies, whose derivatives the forces are; those "
                "extrapolated to sigma = 0 differ by up to %.3g meV per atom "
                '(label_keys {"energy": "energy"} takes them)',
                path,
                1000.0 * largest_difference,
            )

    def _warn_of_unknown_names(
        self, frames: Sequence[Atoms], names_in_file: set[str], path: str
    ) -> None:
        """Warn if a label is missing, and a name that is not known could hold it."""
        no_labels = {"free_energy", "energies", *self.names.values()}
        for label in ("energy", "force"):
            similar = sorted(
                name for name in names_in_file - no_labels if re.search(label, name, re.IGNORECASE)
            )
            if self.names[label] is None and similar:
                log.warning(
                    "%s: no name of the %s is known; label_keys could name it, found %s",
                    path,
                    label,
                    ", ".join(similar),
                )
        # Names of atoms are left alone: ASE's `stresses` are one for each atom.
        names_of_frames = {name for atoms in frames for name in atoms.info}
        similar = sorted(name for name in names_of_frames if re.search("virial|stress", name, re.I))
        if self.names["virial"] is None and self.names["stress"] is None and similar:
            log.warning(
                "%s: no name of the virial or stress is known; label_keys could name it, found %s",
                path,
                ", ".join(similar),
            )

    def _warn_of_stress_without_cell(self, frames: Sequence[Atoms], path: str) -> None:
        """Warn if frames have a stress other than zero, and no periodic direction."""
        names = [self.names[label] for label in ("virial", "stress")]
        count = sum(
            any(np.any(values_of(atoms).get(name, 0.0)) for name in names if name is not None)
            for atoms in frames
            if not atoms.pbc.any()
        )
        if count:
            log.warning(
                "%s: the stress or virial of %d frames is ignored, because they are not periodic; "
                'if they are, write pbc="T T T"',
                path,
                count,
            )

    def read(self, atoms: Atoms, path: str, place: str, *, cell: bool) -> dict[str, np.ndarray]:
        """Return the labels that a frame has, in our units and signs.

        They are "energy" (1,), "force" (3·natoms,), "force_mag" (3·natoms,) and, with a cell,
        "virial" (9,). `path` and `place` name file and frame in messages.

        Raises
        ------
        SystemFormatError
            When a label does not hold numbers, or has another length than expected.
        """
        values = values_of(atoms)

        def value(label: str) -> Any:
            name = self.names[label]
            return None if name is None else values.get(name)

        energy = value("energy")
        if self.free:
            energy = values.get("free_energy", energy)
        magnetic = atoms.arrays.get("force_mag")
        labels = {"energy": energy, "force": value("force"), "force_mag": magnetic}
        if cell:
            labels["virial"] = _matrix(value("virial"))
            if labels["virial"] is None and value("stress") is not None:
                labels["virial"] = _virial(value("stress"), atoms, path, place)
        widths = {"energy": 1, "force": 3 * len(atoms), "force_mag": 3 * len(atoms), "virial": 9}
        return {
            label: _numbers(numbers, label, (widths[label],), path, place)
            for label, numbers in labels.items()
            if numbers is not None
        }

    def other_words(self, atoms: Atoms) -> dict[str, object]:
        """Return the words and single numbers in the header of a frame that are no labels."""
        labels = set(self.names.values())
        words = {
            name: value
            for name, value in atoms.info.items()
            if name not in labels and np.ndim(value) == 0
        }
        calculator = _calculator_of(atoms)
        return words if calculator is None else {"calculator": calculator, **words}


def is_label(name: str) -> bool:
    """Return whether a name is a usual one of a label."""
    return any(pattern.fullmatch(name) for pattern in _NAMES.values())


def _calculator_of(atoms: Atoms) -> str | None:
    """Return the name of the calculator of a frame's results, None if the file has no name."""
    name = getattr(atoms.calc, "name", None)
    return None if name == "unknown" else name


def _warn_of_calculators(frames: Sequence[Atoms], path: str) -> None:
    """Warn if several calculators made the results of a file."""
    counts = Counter(name for atoms in frames if (name := _calculator_of(atoms)) is not None)
    if len(counts) > 1:
        listed = ", ".join(f"{name} ({count} frames)" for name, count in counts.most_common())
        log.warning(
            "%s: results of several calculators: %s; a potential learns from one method, so choose, "
            "for instance: ase db %s calculator=%s -i one.db",
            path,
            listed,
            path,
            next(iter(counts)),
        )


def parameters_of(
    atoms: Atoms, path: str, place: str, names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the parameters that a frame has.

    They are `info["fparam"]` (numb_fparam,), `info["charge_spin"]` (2,), `arrays["aparam"]`
    (natoms·numb_aparam,) and `arrays["spin"]` (natoms·3,), or in place of fparam those of its
    header that `names` lists.

    Raises
    ------
    SystemFormatError
        When the frame lacks one of `names`, or a value is no number.
    """
    if names:
        return _named_parameters(atoms, path, place, names) | parameters_of(atoms, path, place)
    values = {name: atoms.info.get(name) for name in FRAME_PARAMETERS}
    values |= {name: atoms.arrays.get(name) for name in ATOM_PARAMETERS}
    return {
        name: _numbers(numbers, name, (max(1, np.size(numbers)),), path, place)
        for name, numbers in values.items()
        if numbers is not None
    }


def _named_parameters(
    atoms: Atoms, path: str, place: str, names: Sequence[str]
) -> dict[str, np.ndarray]:
    parameters = {}
    for name in names:
        if name not in atoms.info:
            listed = ", ".join(sorted(atoms.info)) or "nothing"
            raise SystemFormatError(
                path,
                place,
                f"no {name} in its header, which frame_parameters names; it has {listed}",
            )
        value = atoms.info[name]
        parameters[name] = _numbers(value, name, (max(1, np.size(value)),), path, place)
    return parameters


def values_of(atoms: Atoms) -> dict[str, Any]:
    """Return the values of a frame by name, without numbers and positions.

    ASE moves names that it knows from info and arrays to a calculator.
    """
    results = getattr(atoms.calc, "results", None) or {}
    values = {**atoms.info, **atoms.arrays, **results}
    return {
        name: value
        for name, value in values.items()
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
                "and remove the key, or let dpdata convert them: --format quip/gap/xyz",
            )


def _choose_name(label: str, key: str | None, names_in_file: set[str], path: str) -> str | None:
    """Return the name of a label in a file, None if it has none; `key` is the user's name."""
    if key is not None:
        if key not in names_in_file:
            listed = ", ".join(sorted(names_in_file)) or "nothing but positions"
            raise SystemFormatError(
                path,
                "",
                f"no frame has {key!r}, the name given for the {label}; the file has {listed}",
            )
        return key
    candidates = {name for name in names_in_file if _NAMES[label].fullmatch(name)}
    if label == "energy" and "free_energy" in names_in_file:
        candidates.add("energy")  # ASE's pair: `Labels.free` decides between them
    if len(candidates) > 1:
        names = sorted(candidates)
        raise SystemFormatError(
            path,
            "",
            f"both {' and '.join(names)} could be the {label}; name the right one: "
            f'"label_keys": {{"{label}": "{names[0]}"}} beside systems, '
            f"or --{label}-key {names[0]}",
        )
    return next(iter(candidates), None)


def _virial(stress: Any, atoms: Atoms, path: str, place: str) -> np.ndarray:
    """Return the virial (9,) [eV] from ASE's stress, (6,) or (9,) [eV/Å³]."""
    numbers = _numbers(_matrix(stress), "stress", (9,), path, place)
    return -float(atoms.cell.volume) * numbers


def _matrix(tensor: Any) -> Any:
    """Return a symmetric tensor as a matrix if it has six numbers, in ASE's order."""
    from ase.stress import voigt_6_to_full_3x3_stress

    return voigt_6_to_full_3x3_stress(tensor) if np.shape(tensor) == (6,) else tensor


def _numbers(value: Any, name: str, sizes: Sequence[int], path: str, place: str) -> np.ndarray:
    """Return numbers, flat; `sizes` are the possible ones."""
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
    return array.reshape(-1)
