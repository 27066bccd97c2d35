"""Writing systems: npy folders, HDF5 groups, LMDB databases in deepmd-kit's format, extended XYZ."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import ATOM_LABELS, LABELS, PARAMETERS, Frames
from deepmd_muon.data.stores.lmdb_store import METADATA
from deepmd_muon.data.system import System
from deepmd_muon.files import WriteError, make_folder_of, named_file, whole_file, whole_folder

# Bytes of a chunk of an HDF5 file: the part that one frame of a small system reads and checks.
_CHUNK = 16384
# Of an LMDB database: names other than those of npy files, the format of keys, and frames of one
# transaction.
_LMDB_NAMES = {"energy": "energies", "force": "forces", "virial": "virials"}
_KEY_FORMAT = "012d"
_FRAMES = 256


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
    _refuse(path)
    make_folder_of(path)
    names = []
    content = io.BytesIO()  # the library's own writer crashes on a full disk
    # From version 1.10 on, HDF5 keeps checksums of its metadata.
    with h5py.File(content, "w", libver="v110") as file:
        for name, system in zip(_names(systems), systems, strict=True):
            group = file.require_group(name or "/")
            for inside, values in _contents(system):
                if isinstance(values, np.ndarray):
                    _put_with_checksums(group, inside, values)
                elif inside == "type_map.raw":
                    group.create_dataset(inside, data=values, dtype=h5py.string_dtype())
                else:
                    _put_with_checksums(group, inside, np.array(values, dtype=np.int32))
            names.append(f"{path}#/{name}" if name else str(path))
    with whole_file(path, new=True) as whole:
        whole.write(content.getbuffer())
    return names


def write_extxyz(systems: Sequence[System], path: Path) -> list[str]:
    """Write all frames of all systems into one extended XYZ file, with stress in ASE's sign; return its path."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.data import atomic_numbers

    _refuse(path)
    make_folder_of(path)
    images = []
    for system in systems:
        elements = _elements(system)
        frames = system.with_own_parameters().frames(np.arange(system.nframes))
        used = [elements[kind] for kind in np.unique(frames.atype) if kind >= 0]
        if unknown := [name for name in used if name not in atomic_numbers]:
            raise DataError(
                f"system {system.name}: {', '.join(unknown)} is not an element, as extended XYZ needs it"
            )
        present = {
            label: frames.present(label) for label in ("energy", "force", "virial", *PARAMETERS)
        }
        for k in range(frames.nframes):
            real = frames.atype[k] >= 0
            symbols = [elements[t] for t in frames.atype[k][real]]
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
    write_images(images, path, new=True)
    return [str(path)]


def write_images(images: Sequence[Any], path: Path, *, new: bool = False) -> None:
    """Write `ase.Atoms` as one extended XYZ file, atomically; with `new`, fail if it exists."""
    from ase.io import write

    make_folder_of(path)
    with whole_file(path, new=new) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        write(text, list(images), format="extxyz")
        text.detach()  # flushed, and open


def write_lmdb(systems: Sequence[System], path: Path) -> list[str]:
    """Write all frames of all systems into a new LMDB database; return its path.

    Raises
    ------
    DataError
        When `path` exists, a system has no element names, or lmdb or msgpack is not installed.
    """
    try:
        import lmdb  # noqa: F401 (only whether it is there)
        import msgpack
    except ImportError as error:
        raise DataError(
            f"writing LMDB needs the package {error.name}: pip install lmdb msgpack"
        ) from error
    _refuse(path)
    # Elements in the order of the first system that has them.
    type_map = list(dict.fromkeys(element for system in systems for element in _elements(system)))
    nlocs: list[int] = []
    ids: list[int] = []
    with _database(path, systems) as environment:
        for system_id, system in enumerate(each.with_own_parameters() for each in systems):
            for first in range(0, system.nframes, _FRAMES):
                frames = system.frames(range(first, min(first + _FRAMES, system.nframes)))
                with environment.begin(write=True) as transaction:
                    for natoms, frame in _encoded(system, frames, type_map):
                        key = format(len(nlocs), _KEY_FORMAT).encode()
                        transaction.put(key, msgpack.packb(frame, use_bin_type=True))
                        nlocs.append(natoms)
                        ids.append(system_id)
        meta = {
            "nframes": len(nlocs),
            "frame_idx_fmt": _KEY_FORMAT,
            "type_map": type_map,
            "frame_nlocs": nlocs,
            "frame_system_ids": ids,
            "system_info": {"natoms": [nlocs[0]]},
        }
        with environment.begin(write=True) as transaction:
            transaction.put(METADATA, msgpack.packb(meta, use_bin_type=True))
    return [str(path)]


@contextmanager
def _database(path: Path, systems: Sequence[System]) -> Iterator[Any]:
    """Make and open a database with room for systems, in its place when it is complete."""
    import lmdb

    most = sum(
        system.nframes * (8 * (18 + system.natoms * (4 + sum(ATOM_LABELS.values()))) + 8192)
        for system in systems
    )
    try:
        # Address space only: the file grows as it is written. No lock.mdb, which no other process
        # needs: LMDB writes to it through a map, and a full disk then ends the process with SIGBUS.
        size = (1 << 30) + 4 * most
        with (
            whole_folder(path) as folder,
            lmdb.open(str(folder), map_size=size, lock=False) as environment,
        ):
            yield environment
    except lmdb.Error as error:
        number = next(
            (n for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if os.strerror(n) in str(error)),
            errno.EIO,
        )
        cut = (
            " (LMDB says so, too, if a full disk cuts a write short)" if number == errno.EIO else ""
        )
        raise WriteError(number, f"{error}{cut}", str(path)) from error


def _encoded(
    system: System, frames: Frames, type_map: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number of atoms and map of every frame, padding left out."""
    index = np.array([type_map.index(element) for element in system.type_map or ()], dtype=np.int32)
    present = {name: frames.present(name) for name in (*LABELS, *PARAMETERS)}
    for k in range(frames.nframes):
        real = frames.atype[k] >= 0
        frame = {"atom_types": index[frames.atype[k][real]], "coords": frames.coord[k][real]}
        if frames.box is not None:
            frame["cells"] = frames.box[k]
        for label in present:
            if present[label][k]:
                values = np.asarray(getattr(frames, label)[k])
                values = values[real] if label in ATOM_LABELS or label == "aparam" else values
                frame[_LMDB_NAMES.get(label, label)] = (
                    values.reshape(3, 3) if label == "virial" else values
                )
        yield (
            int(real.sum()),
            {
                name: {
                    "type": str(x.dtype),
                    "shape": list(x.shape),
                    "data": np.ascontiguousarray(x).tobytes(),
                }
                for name, x in frame.items()
            },
        )


def _refuse(path: Path) -> None:
    if path.exists():
        raise DataError(f"{path} exists; remove it or give another name")


def _elements(system: System) -> tuple[str, ...]:
    if system.type_map is None:
        raise DataError(
            f"system {system.name} has no type_map.raw, so its elements are unknown; give --type-map"
        )
    return system.type_map


def _put_with_checksums(group: h5py.Group, name: str, values: np.ndarray) -> None:
    """Store an array in chunks of whole rows, whose checksums HDF5 compares when it reads them."""
    if not values.size:
        group[name] = values
        return
    rows = max(1, _CHUNK // (values.nbytes // len(values)))
    chunks = (min(len(values), rows), *values.shape[1:])
    group.create_dataset(name, data=values, chunks=chunks, fletcher32=True)


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
        folder = f"set.{number:03d}"
        yield f"{folder}/coord.npy", frames.coord[rows].reshape(len(rows), -1)
        if frames.box is not None:
            yield f"{folder}/box.npy", frames.box[rows].reshape(len(rows), 9)
        if system.mixed:
            yield f"{folder}/real_atom_types.npy", frames.atype[rows]
        for name, there in zip((*LABELS, *PARAMETERS), kind, strict=True):
            if there:
                yield f"{folder}/{name}.npy", getattr(frames, name)[rows].reshape(len(rows), -1)
