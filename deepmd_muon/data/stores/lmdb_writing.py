"""Writing systems as an LMDB database in deepmd-kit's format."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.frames import ATOM_LABELS, LABELS, PARAMETERS, Frames
from deepmd_muon.data.stores.lmdb_store import METADATA
from deepmd_muon.data.system import System
from deepmd_muon.files import WriteError, whole_folder

_NAMES = {"energy": "energies", "force": "forces", "virial": "virials"}
_KEY_FORMAT = "012d"
#: Frames written in one transaction.
_CHUNK = 256


def write_lmdb(systems: Sequence[System], path: Path) -> list[str]:
    """Write all frames of all systems into a new database; return its path.

    Raises
    ------
    DataError
        When `path` exists, a system has no element names, or lmdb or msgpack is not installed.
    """
    try:
        import lmdb  # noqa: F401 (only whether it is there)
        import msgpack
    except ImportError as error:
        raise DataError(f"writing LMDB needs the package {error.name}: pip install lmdb msgpack") from error
    if path.exists():
        raise DataError(f"{path} exists; remove it or give another name")
    type_map = _elements(systems)
    number = 0
    nlocs: list[int] = []
    ids: list[int] = []
    with _database(path, systems) as environment:
        for system_id, system in enumerate(each.with_own_parameters() for each in systems):
            for first in range(0, system.nframes, _CHUNK):
                frames = system.frames(range(first, min(first + _CHUNK, system.nframes)))
                with environment.begin(write=True) as transaction:
                    for natoms, frame in _encoded(system, frames, type_map):
                        key = format(number, _KEY_FORMAT).encode()
                        transaction.put(key, msgpack.packb(frame, use_bin_type=True))
                        number += 1
                        nlocs.append(natoms)
                        ids.append(system_id)
        meta = {
            "nframes": number,
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

    try:
        # Address space only: the file grows as it is written. Without lock.mdb, which nobody else has a use for: LMDB
        # writes to it through a map, and a full disk then ends the process with SIGBUS.
        size = (1 << 30) + 4 * sum(map(_nbytes, systems))
        with whole_folder(path) as folder, lmdb.open(str(folder), map_size=size, lock=False) as environment:
            yield environment
    except lmdb.Error as error:
        number = next((n for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if os.strerror(n) in str(error)), errno.EIO)
        cut = " (LMDB says so, too, if a full disk cuts a write short)" if number == errno.EIO else ""
        raise WriteError(number, f"{error}{cut}", str(path)) from error


def _elements(systems: Sequence[System]) -> list[str]:
    """Return the elements of all systems, in the order of the first system that has them."""
    elements: dict[str, None] = {}
    for system in systems:
        if system.type_map is None:
            raise DataError(f"system {system.name} has no type_map.raw, so its elements are unknown; give --type-map")
        elements.update(dict.fromkeys(system.type_map))
    return list(elements)


def _nbytes(system: System) -> int:
    """Bytes of a system's frames, at most."""
    values = 18 + system.natoms * (4 + sum(ATOM_LABELS.values()))
    return system.nframes * (8 * values + 8192)


def _encoded(system: System, frames: Frames, type_map: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
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
                frame[_NAMES.get(label, label)] = values.reshape(3, 3) if label == "virial" else values
        yield int(real.sum()), {name: _array(values) for name, values in frame.items()}


def _array(values: np.ndarray) -> dict[str, Any]:
    return {"type": str(values.dtype), "shape": list(values.shape), "data": np.ascontiguousarray(values).tobytes()}
