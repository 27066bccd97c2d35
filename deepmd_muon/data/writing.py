"""Write systems: npy folders, HDF5 groups, LMDB databases in deepmd-kit's format, extended XYZ."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import h5py
import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import (
    ATOM_LABELS,
    ATOM_PARAMETERS,
    FRAME_PARAMETERS,
    LABELS,
    PARAMETERS,
    Frames,
)
from deepmd_muon.data.stores.lmdb_store import METADATA
from deepmd_muon.data.stores.memory import CONFIG_TYPES, NO_CONFIG_TYPE
from deepmd_muon.data.system import System
from deepmd_muon.files import WriteError, make_folder_of, named_file, whole_file, whole_folder

if TYPE_CHECKING:
    from ase import Atoms

# Bytes of a chunk of an HDF5 file: the part that one frame of a small system reads and checks.
_CHUNK = 16384
# Names in an LMDB database that differ from those of npy files.
_LMDB_NAMES = {"energy": "energies", "force": "forces", "virial": "virials"}
_KEY_FORMAT = "012d"  # of an LMDB database
_FRAMES_PER_TRANSACTION = 256
# Room for a frame of an LMDB database: pages, names and lengths [bytes].
_FRAME_OVERHEAD = 8192


def write_npy(systems: Sequence[System], folder: Path) -> list[str]:
    """Write systems below a folder, which must be empty or absent; return their paths."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty; remove it or give another name")
    names = _names(systems)
    with whole_folder(folder) as temporary_folder:
        for name, system in zip(names, systems, strict=True):
            for file in _files_of(system):
                place = temporary_folder / name / file.path
                final_place = folder / name / file.path
                make_folder_of(place, final_place)
                with named_file(place, final_place) as output:
                    if isinstance(file.content, np.ndarray):
                        np.save(output, file.content)
                    else:
                        output.write("".join(f"{word}\n" for word in file.content).encode())
    return [str(folder / name) for name in names]


def write_hdf5(systems: Sequence[System], path: Path) -> list[str]:
    """Write systems as groups of a new HDF5 file; return ``file#/group`` of each."""
    _refuse_existing(path)
    make_folder_of(path)
    paths = []
    content = io.BytesIO()  # the library's own writer crashes on a full disk
    # From version 1.10 on, HDF5 keeps checksums of its metadata.
    with h5py.File(content, "w", libver="v110") as output:
        for name, system in zip(_names(systems), systems, strict=True):
            group = output.require_group(name or "/")
            for file in _files_of(system):
                if file.path in ("type_map.raw", CONFIG_TYPES):
                    group.create_dataset(file.path, data=file.content, dtype=h5py.string_dtype())
                elif isinstance(file.content, np.ndarray):
                    _put_with_checksums(group, file.path, file.content)
                else:
                    _put_with_checksums(group, file.path, np.array(file.content, dtype=np.int32))
            paths.append(f"{path}#/{name}" if name else str(path))
    with whole_file(path, new=True) as target:
        target.write(content.getbuffer())
    return paths


def write_extxyz(systems: Sequence[System], path: Path) -> list[str]:
    """Write all frames of all systems into one extended XYZ file; return its path.

    Stress has ASE's sign.
    """
    from ase.data import atomic_numbers

    _refuse_existing(path)
    make_folder_of(path)
    images: list[Atoms] = []
    for system in systems:
        elements = _elements(system)
        frames = system.with_all_parameters().frames(np.arange(system.nframes))
        used = [elements[kind] for kind in np.unique(frames.atype) if kind >= 0]
        unknown = [name for name in used if name not in atomic_numbers]
        if unknown:
            raise DataError(
                f"system {system.name}: {', '.join(unknown)} is not an element, as extended XYZ "
                "needs it"
            )
        images += [_labelled_image(frames, k, elements) for k in range(frames.nframes)]
    write_images(images, path, new=True)
    return [str(path)]


def image_of(frames: Frames, k: int, elements: Sequence[str]) -> Atoms:
    """Return the atoms and the cell of a frame as ASE has them, without labels and padding."""
    from ase import Atoms

    real = frames.atype[k] >= 0
    box = frames.cell(k)
    return Atoms(
        [elements[kind] for kind in frames.atype[k][real]],
        positions=frames.coord[k][real],
        cell=box,
        pbc=box is not None,
    )


def _labelled_image(frames: Frames, k: int, elements: Sequence[str]) -> Atoms:
    """Return a frame with its labels as ASE has it."""
    from ase.calculators.singlepoint import SinglePointCalculator

    atoms = image_of(frames, k, elements)
    frame = frames.rows(slice(k, k + 1))  # labels that it lacks are None
    real = frame.atype[0] >= 0
    box = frame.cell(0)
    for name in FRAME_PARAMETERS:
        if frame.present(name).all():
            atoms.info[name] = getattr(frame, name)[0]
    for name in (*ATOM_PARAMETERS, "force_mag"):
        values = getattr(frame, name)
        if values is not None and not np.isnan(values).any():
            atoms.arrays[name] = values[0][real]
    if frame.weight is not None:
        atoms.info["weight"] = float(frame.weight[0])
    results: dict[str, Any] = {}
    if frame.energy is not None:
        results["energy"] = float(frame.energy[0])
    if frame.force is not None:
        results["forces"] = frame.force[0][real]
    if frame.virial is not None and box is not None:
        stress = -frame.virial[0].reshape(3, 3) / abs(np.linalg.det(box))
        results["stress"] = stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]  # Voigt's order
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def write_images(images: Sequence[Atoms], path: Path, *, new: bool = False) -> None:
    """Write frames of ASE as one extended XYZ file, atomically; with `new`, fail if it exists."""
    from ase.io import write

    make_folder_of(path)
    with whole_file(path, new=new) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        write(text, list(images), format="extxyz")
        text.detach()  # flushes, and leaves the file open


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
    _refuse_existing(path)
    # Elements in the order of the first system that has them.
    type_map = list(dict.fromkeys(element for system in systems for element in _elements(system)))
    natoms_of_frames: list[int] = []
    system_ids: list[int] = []
    with _new_database(path, systems) as environment:
        for system_id, system in enumerate(systems):
            with_parameters = system.with_all_parameters()
            for start in range(0, system.nframes, _FRAMES_PER_TRANSACTION):
                end = min(start + _FRAMES_PER_TRANSACTION, system.nframes)
                frames = with_parameters.frames(range(start, end))
                with environment.begin(write=True) as transaction:
                    for frame in _encoded(system, frames, type_map):
                        key = format(len(natoms_of_frames), _KEY_FORMAT).encode()
                        transaction.put(key, msgpack.packb(frame.fields, use_bin_type=True))
                        natoms_of_frames.append(frame.natoms)
                        system_ids.append(system_id)
        metadata = {
            "nframes": len(natoms_of_frames),
            "frame_idx_fmt": _KEY_FORMAT,
            "type_map": type_map,
            "frame_nlocs": natoms_of_frames,
            "frame_system_ids": system_ids,
            "system_info": {"natoms": [natoms_of_frames[0]]},
        }
        with environment.begin(write=True) as transaction:
            transaction.put(METADATA, msgpack.packb(metadata, use_bin_type=True))
    return [str(path)]


@contextmanager
def _new_database(path: Path, systems: Sequence[System]) -> Iterator[Any]:
    """Make and open a database with room for systems; move it to its place when it is complete."""
    import lmdb

    nbytes = 0
    for system in systems:
        # Cell and virial; type, position and labels of each atom.
        n_values = 18 + system.natoms * (4 + sum(ATOM_LABELS.values()))
        nbytes += system.nframes * (8 * n_values + _FRAME_OVERHEAD)
    try:
        # Address space only: the file grows as it is written. No lock.mdb, which no other process
        # needs: LMDB writes to it through a map, and a full disk then ends the process with SIGBUS.
        size = (1 << 30) + 4 * nbytes
        with (
            whole_folder(path) as folder,
            lmdb.open(str(folder), map_size=size, lock=False) as environment,
        ):
            yield environment
    except lmdb.Error as error:
        raise _write_error(error, path) from error


def _write_error(error: Exception, path: Path) -> WriteError:
    """Return the error of the disk that an error of LMDB names."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if os.strerror(number) in str(error):
            return WriteError(number, str(error), str(path))
    return WriteError(
        errno.EIO,
        f"{error} (LMDB says so, too, if a full disk cuts a write short)",
        str(path),
    )


class _EncodedFrame(NamedTuple):
    natoms: int
    fields: dict[str, Any]  # what msgpack writes


def _encoded(system: System, frames: Frames, type_map: list[str]) -> Iterator[_EncodedFrame]:
    """Yield every frame as deepmd-kit encodes it, without padding."""
    index = np.array([type_map.index(element) for element in system.type_map or ()], dtype=np.int32)
    present = {name: frames.present(name) for name in (*LABELS, *PARAMETERS)}
    for k in range(frames.nframes):
        real = frames.atype[k] >= 0
        arrays = {"atom_types": index[frames.atype[k][real]], "coords": frames.coord[k][real]}
        if frames.box is not None:
            arrays["cells"] = frames.box[k]
        for name, has_name in present.items():
            if not has_name[k]:
                continue
            values = np.asarray(getattr(frames, name)[k])
            if name in ATOM_LABELS or name in ATOM_PARAMETERS:
                values = values[real]
            elif name == "virial":
                values = values.reshape(3, 3)
            arrays[_LMDB_NAMES.get(name, name)] = values
        fields = {
            name: {
                "type": str(array.dtype),
                "shape": list(array.shape),
                "data": np.ascontiguousarray(array).tobytes(),
            }
            for name, array in arrays.items()
        }
        yield _EncodedFrame(int(real.sum()), fields)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise DataError(f"{path} exists; remove it or give another name")


def _elements(system: System) -> tuple[str, ...]:
    if system.type_map is None:
        raise DataError(
            f"system {system.name} has no type_map.raw, so its elements are unknown; "
            "give --type-map"
        )
    return system.type_map


def _put_with_checksums(group: h5py.Group, name: str, values: np.ndarray) -> None:
    """Store an array in chunks of whole rows; HDF5 compares their checksums when it reads them."""
    if not values.size:
        group[name] = values
        return
    rows = max(1, _CHUNK // (values.nbytes // len(values)))
    chunks = (min(len(values), rows), *values.shape[1:])
    group.create_dataset(name, data=values, chunks=chunks, fletcher32=True)


def _names(systems: Sequence[System]) -> list[str]:
    """Name systems by their compositions, with numbers if several share one.

    A lone system has no name.
    """
    if len(systems) == 1:
        return [""]
    names: list[str] = []
    n_used: Counter[str] = Counter()
    for system in systems:
        formula = formula_of(system)
        names.append(f"{formula}.{n_used[formula]}" if n_used[formula] else formula)
        n_used[formula] += 1
    return names


def formula_of(system: System) -> str:
    """Return the composition of the first frame, e.g. ``H64O32``; "mixed" when frames differ."""
    if system.mixed:
        return "mixed"
    (types,) = system.types(np.array([0]))
    elements = system.type_map or [f"type{kind}_" for kind in range(int(types.max()) + 1)]
    return "".join(f"{elements[kind]}{(types == kind).sum()}" for kind in np.unique(types))


class _File(NamedTuple):
    """A file of a system."""

    path: str  # in the folder or group of the system
    content: np.ndarray | list[str]


def _files_of(system: System) -> Iterator[_File]:
    """Yield every file of a system; frames with the same labels are a set."""
    frames = system.with_all_parameters().frames(np.arange(system.nframes))
    yield _File("type.raw", [str(max(0, kind)) for kind in frames.atype[0].tolist()])
    if system.type_map is not None:
        yield _File("type_map.raw", list(system.type_map))
    if not system.pbc:
        yield _File("nopbc", [])
    names = (*LABELS, *PARAMETERS)
    present = np.stack([frames.present(name) for name in names], axis=1)  # (nframes, names)
    config_types: list[str] = []
    for number, kind in enumerate(np.unique(present, axis=0)):
        rows = np.flatnonzero((present == kind).all(axis=1))
        arrays = {"coord": frames.coord[rows].reshape(len(rows), -1)}
        if frames.box is not None:
            arrays["box"] = frames.box[rows].reshape(len(rows), 9)
        if system.mixed:
            arrays["real_atom_types"] = frames.atype[rows]
        for name, has_name in zip(names, kind, strict=True):
            if has_name:
                arrays[name] = getattr(frames, name)[rows].reshape(len(rows), -1)
        for name, array in arrays.items():
            yield _File(f"set.{number:03d}/{name}.npy", array)
        config_types += [system.origin(row).config_type for row in rows.tolist()]
    if any(config_types):
        yield _File(CONFIG_TYPES, [quote(word) or NO_CONFIG_TYPE for word in config_types])
