"""Systems of an LMDB database in deepmd-kit's format: one msgpack map for every frame.

Key ``__metadata__`` holds ``nframes``, ``frame_idx_fmt``, ``type_map`` and ``frame_system_ids``; a frame's key is its
number in that format. A frame maps names to ``{type, shape, data}``: dtype, shape and bytes of an array. Names are
``coords``, ``cells``, ``energies``, ``forces``, ``virials``, ``atom_types``, or those of npy files.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS
from deepmd_muon.data.stores.lmdb_file import MAGIC, LmdbFile, Value
from deepmd_muon.data.stores.storage import HandleCache

METADATA = b"__metadata__"
_NAMES = {"coords": "coord", "cells": "box", "energies": "energy", "forces": "force", "virials": "virial"}
_NAMES["atom_types"] = "atype"
#: A key format such as "012d"; anything wider would be a way to fill the memory.
_KEY_FORMAT = re.compile(r"0?\d{0,2}d")
#: Frames of one request that stay decoded, so that positions, cells and labels of a batch cost one decoding.
_KEPT = 256


def is_lmdb(path: str) -> bool:
    """Return whether a path is an LMDB database: a folder with ``data.mdb``, or such a file itself."""
    file = data_file(path)
    try:
        with open(file, "rb") as opened:
            return opened.read(20)[16:] == MAGIC.to_bytes(4, "little")
    except OSError:
        return False


def data_file(path: str) -> str:
    """Return the file of a database."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


@dataclass
class _Group:
    """Frames of one system, by the labels that they have."""

    types: bytes
    mixed: bool = False
    sets: dict[frozenset[str], list[Value]] = dataclasses.field(default_factory=dict)


class LmdbStore:
    """Frames of an LMDB database that make one system; names as in a folder of npy files.

    Parameters
    ----------
    root
        Name of the system.
    file
        The database.
    types
        Types of the first frame, (natoms,).
    type_map
        Element names, if the database has them.
    sets
        Places of the frames with the same labels, by these labels.
    pbc, mixed
        Whether the frames have a cell, and whether their types differ.
    """

    def __init__(
        self,
        root: str,
        file: LmdbFile,
        types: np.ndarray,
        type_map: tuple[str, ...] | None,
        sets: Mapping[frozenset[str], list[Value]],
        *,
        pbc: bool,
        mixed: bool,
    ) -> None:
        self._root = root
        self._file = file
        self._natoms = len(types)
        self._words = {"type.raw": [str(max(0, t)) for t in types.tolist()]}
        if type_map is not None:
            self._words["type_map.raw"] = list(type_map)
        if not pbc:
            self._words["nopbc"] = []
        fixed = ("coord", *(("box",) if pbc else ()), *(("real_atom_types",) if mixed else ()))
        self._sets = {f"set.{k:03d}": values for k, values in enumerate(sets.values())}
        self._names = {
            name: frozenset(f"{n}.npy" for n in (*fixed, *labels))
            for name, labels in zip(self._sets, sets, strict=True)
        }
        self._last: tuple[str, bytes, list[dict[str, np.ndarray]]] | None = None

    @property
    def root(self) -> str:
        """Name of the system."""
        return self._root

    def sets(self) -> list[str]:
        """Names of the sets."""
        return list(self._sets)

    def names(self, folder: str) -> frozenset[str]:
        """Names in a set, or of the system itself."""
        return self._names[folder] if folder else frozenset(self._words)

    def words(self, path: str) -> list[str]:
        """Return the words of what would be a text file."""
        return self._words[path]

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array."""
        folder, _, name = path.partition("/")
        width = _width(name.removesuffix(".npy"), self._natoms)
        return (len(self._sets[folder]), width)

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array, which always has an axis of frames."""
        folder, _, name = path.partition("/")
        name = "atype" if name == "real_atom_types.npy" else name.removesuffix(".npy")
        last, key = self._last, indices.tobytes()
        if last is not None and last[:2] == (folder, key):
            return np.stack([frame[name] for frame in last[2]])
        values = self._sets[folder]
        if len(indices) > _KEPT:
            return np.stack([self._frame(values[k])[name] for k in indices.tolist()])
        frames = [self._frame(values[k]) for k in indices.tolist()]
        self._last = (folder, key, frames)
        return np.stack([frame[name] for frame in frames])

    def _frame(self, value: Value) -> dict[str, np.ndarray]:
        return decode_frame(self._root, f"byte {value.offset}", self._file.read(value))


def _width(name: str, natoms: int) -> int:
    """Values of a quantity in a frame."""
    if name in FRAME_LABELS:
        return FRAME_LABELS[name]
    if name in ATOM_LABELS:
        return ATOM_LABELS[name] * natoms
    return {"coord": 3 * natoms, "box": 9}.get(name, natoms)


def lmdb_stores(path: str, handles: HandleCache) -> Iterator[LmdbStore]:
    """Read every frame once and sort them into systems: by source system, number of atoms and whether there is a cell.

    Raises
    ------
    SystemNotFoundError
        When there is no database at `path`.
    SystemFormatError
        When it is damaged or in another format.
    DataError
        When msgpack is not installed.
    """
    if not os.path.exists(data_file(path)):
        raise SystemNotFoundError(f"system {path} does not exist (relative paths start at {os.getcwd()})")
    file = LmdbFile(path, data_file(path), handles)
    places = dict(file.items())
    meta = _Metadata.read(file, places)
    groups: dict[tuple[int, int, bool], _Group] = {}
    for number in range(meta.nframes):
        place = places.get(meta.key(number))
        if place is None:
            raise SystemFormatError(path, f"frame {number}", f"key {meta.key(number)!r} is missing")
        frame = decode_frame(path, f"frame {number}", file.read(place))
        types = np.ascontiguousarray(frame["atype"]).tobytes()
        group = groups.setdefault((meta.system(number), len(frame["atype"]), "box" in frame), _Group(types))
        group.mixed |= types != group.types or bool((frame["atype"] < 0).any())
        labels = frozenset(frame) - {"coord", "box", "atype"}
        group.sets.setdefault(labels, []).append(place)
    for k, ((_, _, pbc), group) in enumerate(groups.items()):
        name = path if len(groups) == 1 else f"{path}#{k}"
        types_of_first = np.frombuffer(group.types, dtype=np.int64)
        yield LmdbStore(name, file, types_of_first, meta.type_map, group.sets, pbc=pbc, mixed=group.mixed)


@dataclass(frozen=True)
class _Metadata:
    """What ``__metadata__`` says."""

    nframes: int
    key_format: str
    type_map: tuple[str, ...] | None
    systems: tuple[int, ...] | None

    @classmethod
    def read(cls, file: LmdbFile, places: Mapping[bytes, Value]) -> _Metadata:
        if METADATA not in places:
            raise SystemFormatError(
                file.system, "__metadata__", "missing: an LMDB database, but not in deepmd-kit's format"
            )
        meta = _unpack(file.system, "__metadata__", file.read(places[METADATA]))
        nframes: Any = meta.get("nframes")
        form: Any = meta.get("frame_idx_fmt", "012d")
        type_map: Any = meta.get("type_map")
        systems: Any = meta.get("frame_system_ids")

        def refuse(what: str, found: object) -> SystemFormatError:
            return SystemFormatError(file.system, "__metadata__", f"{what}, found {repr(found)[:60]}")

        if not _is_count(nframes) or not 0 < nframes < len(places):
            raise refuse(f"nframes must be the number of frames, 1 to {len(places) - 1}", nframes)
        if not isinstance(form, str) or not _KEY_FORMAT.fullmatch(form):
            raise refuse('frame_idx_fmt must be a format such as "012d"', form)
        if type_map is not None and not (isinstance(type_map, list) and all(isinstance(t, str) for t in type_map)):
            raise refuse("type_map must be a list of element names", type_map)
        if systems is not None and not (
            isinstance(systems, list) and len(systems) == nframes and all(map(_is_count, systems))
        ):
            raise refuse(f"frame_system_ids must be {nframes} whole numbers", systems)
        return cls(
            nframes,
            form,
            None if type_map is None else tuple(type_map),
            None if systems is None else tuple(systems),
        )

    def key(self, number: int) -> bytes:
        """Key of a frame."""
        return format(number, self.key_format).encode()

    def system(self, number: int) -> int:
        """Source system of a frame."""
        return 0 if self.systems is None else self.systems[number]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.lru_cache(maxsize=256)
def _canonical(name: str) -> str | None:
    """Return a field's name as npy files have it, "find_…" for a flag, and None for unread fields."""
    name = _NAMES.get(name, re.sub(r"^(find_)?atomic_", r"\1atom_", name))
    known = ("atype", "coord", "box", *FRAME_LABELS, *ATOM_LABELS)
    return name if name in known or name.startswith("find_") else None


@functools.lru_cache(maxsize=64)
def _dtype(kind: str) -> np.dtype:
    """Return the dtype of real numbers.

    Raises
    ------
    ValueError
        For any other one.
    """
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "fiub" or dtype.names is not None:
        raise ValueError(f"expected real numbers, found values of dtype {kind[:40]}")
    return dtype


def decode_frame(system: str, where: str, raw: bytes) -> dict[str, np.ndarray]:
    """Decode a frame.

    Returns
    -------
    dict
        Flat arrays: "atype" (int64), "coord", "box" where there is a cell, and labels, under the names of npy files.

    Raises
    ------
    SystemFormatError
        When an array is damaged, of another kind or size, or types or positions are missing.
    """
    frame: dict[str, np.ndarray] = {}
    absent: set[str] = set()
    field = ""
    try:
        for field, value in _unpack(system, where, raw).items():
            name = _canonical(field)
            if name is None:
                continue
            if name.startswith("find_"):
                if not _numbers(value).any():
                    absent.add(name.removeprefix("find_"))
            else:
                frame[name] = _numbers(value)
    except ValueError as error:
        if isinstance(error, SystemFormatError):
            raise
        raise SystemFormatError(system, f"{where}, {field}", str(error)) from error
    for name in ("atype", "coord"):
        if name not in frame:
            raise SystemFormatError(system, where, f"{'atom_types' if name == 'atype' else 'coords'}: missing")
    types = frame["atype"]
    if types.dtype.kind == "f" or not len(types):
        raise SystemFormatError(
            system, where, f"atom_types: expected whole numbers, found {types[:3]} of {types.dtype}"
        )
    frame["atype"] = types.astype(np.int64)
    if "box" in frame and not frame["box"].any():
        del frame["box"]
    for name in absent & (frame.keys() - {"atype", "coord"}):
        del frame[name]
    for name, array in frame.items():
        if array.size != (width := _width(name, len(types))):
            problem = f"{name}: expected {width} values for {len(types)} atoms, found {array.size}"
            raise SystemFormatError(system, where, problem)
    return frame


def _numbers(value: Any) -> np.ndarray:
    """Return a number or an encoded array, flat; raise ValueError with the problem."""
    if isinstance(value, (bool, int, float)):
        return np.array([value])
    if not isinstance(value, dict):
        raise ValueError(f"expected an array, found a {type(value).__name__}")
    if b"data" in value:
        value = {key.decode("utf-8", "replace"): one for key, one in value.items() if isinstance(key, bytes)}
    kind, shape, data = value.get("type"), value.get("shape"), value.get("data")
    dtype = _dtype(kind if isinstance(kind, str) else f"{type(kind).__name__}?")
    if not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"expected bytes of {dtype}, found {type(data).__name__}")
    if shape is not None:
        fits = isinstance(shape, list) and len(shape) <= 8 and all(map(_is_count, shape))
        if not fits or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"shape {repr(shape)[:40]} of {dtype} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def _unpack(system: str, where: str, raw: bytes) -> dict[str, Any]:
    """Unpack a msgpack map with text keys; lengths in it are bounded by those of `raw`, and nothing is executed."""
    try:
        import msgpack
    except ImportError as error:
        raise DataError("LMDB data need the package msgpack: pip install msgpack") from error
    try:
        found = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        problem = f"cannot be read as msgpack ({type(error).__name__}: {str(error)[:80]}); write the database again"
        raise SystemFormatError(system, where, problem) from error
    if not isinstance(found, dict):
        raise SystemFormatError(system, where, f"expected a msgpack map, found {type(found).__name__}")
    return {key if isinstance(key, str) else key.decode("utf-8", "replace"): value for key, value in found.items()}
