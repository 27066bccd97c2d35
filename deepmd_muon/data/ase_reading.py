"""Systems from files that ASE reads: extended XYZ, trajectories, outputs of electronic-structure programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.memory import MemoryStore

if TYPE_CHECKING:
    from ase import Atoms


@dataclass(frozen=True)
class LabelKeys:
    """Names of labels in `atoms.info` and `atoms.arrays`; None takes ASE's own: the results of its calculator.

    Attributes
    ----------
    energy : str, optional
        Total energy [eV].
    force : str, optional
        Forces [eV/Å].
    virial : str, optional
        Nine numbers −dE/dε [eV].
    stress : str, optional
        Six (Voigt) or nine numbers of ASE's sign [eV/Å³]; positive under tension.
    """

    energy: str | None = None
    force: str | None = None
    virial: str | None = None
    stress: str | None = None


def read_ase(path: str, keys: LabelKeys | None = None) -> list[MemoryStore]:
    """Read all frames of a file; frames of the same atoms in the same order are one system.

    Parameters
    ----------
    path
        Any file that `ase.io` reads. A cell without volume, or no periodic direction, means no cell.
    keys
        Names of labels.

    Raises
    ------
    DataError
        When ASE is not installed.
    SystemNotFoundError
        When ASE cannot read the file.
    SystemFormatError
        When the file has no frames, or a label has a wrong shape.
    """
    try:
        from ase.io import read
    except ImportError as error:
        raise DataError(
            f"system {path} is neither a folder nor an HDF5 file; other files are read by ASE, which is not installed: "
            "pip install ase"
        ) from error
    try:
        # Elsewhere ASE takes what follows an "@" for the numbers of frames, and reads the file named by the rest.
        frames = read(path, index=":", do_not_split_by_at_sign=True)
    except Exception as error:  # ASE's readers raise whatever their parsing runs into
        raise SystemNotFoundError(
            f"system {path}: neither a folder, an HDF5 file nor a file that ASE reads "
            f"({type(error).__name__}: {str(error).strip() or 'unknown format'})"
        ) from error
    if not frames:
        raise SystemFormatError(path, "", "the file has no frames")
    return stores_of(frames, path, keys or LabelKeys())


def stores_of(frames: Iterable[Atoms], path: str, keys: LabelKeys) -> list[MemoryStore]:
    """Sort frames by their atoms and by whether they have a cell; within a system, by the labels that they have."""
    systems: dict[tuple[tuple[str, ...], bool], dict[frozenset[str], list[Mapping[str, np.ndarray]]]] = {}
    frames = list(frames)
    _check_keys(frames, path, keys)
    for number, atoms in enumerate(frames):
        arrays = _arrays(atoms, keys, path, number)
        kind = tuple(atoms.get_chemical_symbols()), "box" in arrays
        systems.setdefault(kind, {}).setdefault(frozenset(arrays), []).append(arrays)
    stores = []
    for number, ((symbols, pbc), sets) in enumerate(systems.items()):
        stacked = [{name: np.stack([frame[name] for frame in alike]) for name in alike[0]} for alike in sets.values()]
        name = path if len(systems) == 1 else f"{path}#{number}-{_formula(symbols)}"
        stores.append(MemoryStore(name, symbols, stacked, pbc=pbc))
    return stores


def _check_keys(frames: Sequence[Atoms], path: str, keys: LabelKeys) -> None:
    """Refuse a name that no frame has: the data would be without that label."""
    known: set[str] = set()
    for atoms in frames:
        known.update(getattr(atoms.calc, "results", {}) or {}, atoms.arrays, atoms.info)
    for label, key in dataclasses.asdict(keys).items():
        if key is not None and key not in known:
            has = ", ".join(sorted(known - {"numbers", "positions"})) or "nothing but positions"
            raise SystemFormatError(
                path, "", f"no frame has {key!r}, the name given for the {label}; the file has {has}"
            )


def _formula(symbols: tuple[str, ...]) -> str:
    return "".join(f"{element}{symbols.count(element)}" for element in dict.fromkeys(symbols))


def _arrays(atoms: Atoms, keys: LabelKeys, path: str, number: int) -> dict[str, np.ndarray]:
    """Return positions, cell and labels of a frame, flat and in our units and signs."""
    results: Mapping[str, Any] = getattr(atoms.calc, "results", {}) or {}
    # ASE takes names that it knows, such as "energy", out of info and arrays.
    given: Mapping[str, Any] = {**results, **atoms.arrays, **atoms.info}
    found = {"coord": atoms.get_positions()}
    if not np.isfinite(atoms.cell.array).all():
        raise SystemFormatError(path, f"frame {number}", f"the cell is not finite: {atoms.cell.array.tolist()}")
    if atoms.pbc.any() and atoms.cell.volume > 0:
        found["box"] = np.array(atoms.cell)
    labels = {
        "energy": _label(keys.energy, given, results.get("energy")),
        "force": _label(keys.force, given, results.get("forces")),
        "virial": _virial(atoms, keys, given, results) if "box" in found else None,
    }
    widths = {"energy": 1, "force": 3 * len(atoms), "virial": 9}
    for name, value in labels.items():
        if value is None:
            continue
        array = np.asarray(value, dtype=np.float64)
        if array.size != widths[name]:
            raise SystemFormatError(
                path, f"frame {number}", f"{name} has shape {array.shape}, not {widths[name]} values"
            )
        found[name] = array
    return {name: np.asarray(array, dtype=np.float64).reshape(-1) for name, array in found.items()}


def _label(key: str | None, given: Mapping[str, Any], result: Any) -> Any:
    return result if key is None else given.get(key)


def _virial(atoms: Atoms, keys: LabelKeys, given: Mapping[str, Any], results: Mapping[str, Any]) -> np.ndarray | None:
    """Return −volume·stress (3, 3), from the virial where one is given."""
    virial = given.get(keys.virial or "virial")
    if virial is not None and keys.stress is None:
        return np.asarray(virial, dtype=np.float64)
    stress = _label(keys.stress, given, results.get("stress"))
    if stress is None:
        return None
    stress = np.asarray(stress, dtype=np.float64)
    if stress.size == 6:
        xx, yy, zz, yz, xz, xy = stress.reshape(6)
        stress = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    return -float(atoms.cell.volume) * stress
