"""Writing systems: npy folders, HDF5 groups, extended XYZ."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import LABELS, PARAMETERS, Frames
from deepmd_muon.data.system import System
from deepmd_muon.files import make_folder_of, named_file, whole_file, whole_folder

# Bytes of a chunk of an HDF5 file: what is read and compared with its checksum for one frame of a small system.
_CHUNK = 16384


def write_npy(systems: Sequence[System], folder: Path) -> list[str]:
    """Write systems below a folder, which must be empty or absent; return their paths."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty; remove it or give another name")
    names = _names(systems)
    with whole_folder(folder) as aside:
        for name, system in zip(names, systems, strict=True):
            for path, content in _contents(system):
                place, final = aside / name / path, folder / name / path
                make_folder_of(place, final)
                with named_file(place, final) as file:
                    if isinstance(content, np.ndarray):
                        np.save(file, content)
                    else:
                        file.write("".join(f"{word}\n" for word in content).encode())
    return [str(folder / name) for name in names]


def write_hdf5(systems: Sequence[System], path: Path) -> list[str]:
    """Write systems as groups of a new HDF5 file; return ``file#/group`` of each."""
    if path.exists():
        raise DataError(f"{path} exists; remove it or give another name")
    make_folder_of(path)
    names = []
    with _hdf5(path) as file:
        for name, system in zip(_names(systems), systems, strict=True):
            group = file.require_group(name or "/")
            for inside, content in _contents(system):
                if isinstance(content, np.ndarray):
                    _put_with_checksums(group, inside, content)
                elif inside == "type_map.raw":
                    group.create_dataset(inside, data=content, dtype=h5py.string_dtype())
                else:
                    _put_with_checksums(group, inside, np.array(content, dtype=np.int32))
            names.append(f"{path}#/{name}" if name else str(path))
    return names


def write_extxyz(systems: Sequence[System], path: Path) -> list[str]:
    """Write all frames of all systems into one extended XYZ file, with stress in ASE's sign; return its path."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.data import atomic_numbers
    from ase.io import write

    if path.exists():
        raise DataError(f"{path} exists; remove it or give another name")
    make_folder_of(path)
    images = []
    for system in systems:
        if system.type_map is None:
            raise DataError(f"system {system.name} has no type_map.raw, so its elements are unknown; give --type-map")
        if unknown := [name for name in system.type_map if name not in atomic_numbers]:
            raise DataError(f"system {system.name}: {', '.join(unknown)} is not an element, as extended XYZ needs it")
        frames = system.with_own_parameters().frames(np.arange(system.nframes))
        present = {label: frames.present(label) for label in ("energy", "force", "virial", *PARAMETERS)}
        for k in range(frames.nframes):
            real = frames.atype[k] >= 0
            symbols = [system.type_map[t] for t in frames.atype[k][real]]
            box = None if frames.box is None else frames.box[k]
            atoms = Atoms(symbols, positions=frames.coord[k][real], cell=box, pbc=box is not None)
            if present["fparam"][k] and frames.fparam is not None:
                atoms.info["fparam"] = frames.fparam[k]
            if present["aparam"][k] and frames.aparam is not None:
                atoms.arrays["aparam"] = frames.aparam[k][real]
            results: dict[str, Any] = {}
            if present["energy"][k] and frames.energy is not None:
                results["energy"] = float(frames.energy[k])
            if present["force"][k] and frames.force is not None:
                results["forces"] = frames.force[k][real]
            if present["virial"][k] and frames.virial is not None and box is not None:
                stress = -frames.virial[k].reshape(3, 3) / abs(np.linalg.det(box))
                results["stress"] = stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
            atoms.calc = SinglePointCalculator(atoms, **results)
            images.append(atoms)
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        write(text, images, format="extxyz")
        text.detach()  # flushed, and open
    return [str(path)]


def _put_with_checksums(group: h5py.Group, name: str, values: np.ndarray) -> None:
    """Store an array in chunks of whole rows, whose checksums HDF5 compares when it reads them."""
    if not values.size:
        group[name] = values
        return
    rows = max(1, _CHUNK // (values.nbytes // len(values)))
    chunks = (min(len(values), rows), *values.shape[1:])
    group.create_dataset(name, data=values, chunks=chunks, fletcher32=True)


@contextmanager
def _hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a new HDF5 file in memory, which is written when it is complete."""
    content = io.BytesIO()  # the library's own writer crashes on a full disk
    # From version 1.10 on, HDF5 keeps checksums of its metadata.
    with h5py.File(content, "w", libver="v110") as file:
        yield file
    with whole_file(path) as whole:
        whole.write(content.getbuffer())


def _names(systems: Sequence[System]) -> list[str]:
    """Name systems by their compositions, numbered where several share one; a lone system has no name."""
    if len(systems) == 1:
        return [""]
    names: list[str] = []
    used: Counter[str] = Counter()
    for formula in map(formula_of, systems):
        names.append(f"{formula}.{used[formula]}" if used[formula] else formula)
        used[formula] += 1
    return names


def formula_of(system: System) -> str:
    """Return the composition of a system's first frame, e.g. ``H64O32``; "mixed" when frames differ."""
    if system.mixed:
        return "mixed"
    (types,) = system.types(np.array([0]))
    elements = system.type_map or [f"type{t}_" for t in range(int(types.max()) + 1)]
    return "".join(f"{elements[t]}{(types == t).sum()}" for t in np.unique(types))


def _contents(system: System) -> Iterator[tuple[str, np.ndarray | list[str]]]:
    """Yield path and content of every file of a system; frames with the same labels are a set."""
    frames = system.with_own_parameters().frames(np.arange(system.nframes))
    yield "type.raw", [str(max(0, t)) for t in frames.atype[0].tolist()]
    if system.type_map is not None:
        yield "type_map.raw", list(system.type_map)
    if not system.pbc:
        yield "nopbc", []
    present = np.stack([frames.present(name) for name in (*LABELS, *PARAMETERS)], axis=1)
    for number, kind in enumerate(np.unique(present, axis=0)):
        rows = np.flatnonzero((present == kind).all(axis=1))
        yield from _set(f"set.{number:03d}", frames, rows, kind, mixed=system.mixed)


def _set(
    folder: str, frames: Frames, rows: np.ndarray, kind: np.ndarray, *, mixed: bool
) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{folder}/coord.npy", frames.coord[rows].reshape(len(rows), -1)
    if frames.box is not None:
        yield f"{folder}/box.npy", frames.box[rows].reshape(len(rows), 9)
    if mixed:
        yield f"{folder}/real_atom_types.npy", frames.atype[rows]
    for name, there in zip((*LABELS, *PARAMETERS), kind, strict=True):
        if there:
            values: np.ndarray = getattr(frames, name)
            yield f"{folder}/{name}.npy", values[rows].reshape(len(rows), -1)
