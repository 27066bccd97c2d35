"""Systems of an LMDB database in deepmd-kit's format: one msgpack map for every frame.

Key ``__metadata__`` holds ``nframes``, ``frame_idx_fmt``, ``type_map`` and ``frame_system_ids``; a frame's key is its
number in that format. A frame maps names to ``{type, shape, data}``: dtype, shape and bytes of an array. Names are
``coords``, ``cells``, ``energies``, ``forces``, ``virials``, ``atom_types``, or those of npy files.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError, SystemNotFoundError
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS, PARAMETERS
from deepmd_muon.data.stores.lmdb_file import MAGIC, LmdbFile
from deepmd_muon.data.stores.storage import HandleCache

log = logging.getLogger(__name__)

METADATA = b"__metadata__"
_NAMES = {"coords": "coord", "cells": "box", "energies": "energy", "forces": "force", "virials": "virial"}
_NAMES["atom_types"] = "atype"
#: A key format such as "012d"; anything wider would be a way to fill the memory.
_KEY_FORMAT = re.compile(r"0?\d{0,2}d")
#: Atoms of one request whose frames stay decoded, so that positions, cells and labels of a batch cost one decoding.
_KEPT = 1 << 17
# Threads whose last requests stay decoded.
_THREADS = 64
#: Databases of so many frames are read as a whole when they are opened, in about half a second.
_READ_WHOLE = 8192
# Frames of larger ones that are read then; two of each system at least.
_LOOKED = 1024


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
    """Frames of one source system and number of atoms, with or without a cell."""

    types: np.ndarray  # of the first frame `(natoms,)`
    pbc: bool  # whether they have a cell
    mixed: bool  # whether types differ, or could
    sets: dict[frozenset[str], list[int]]  # numbers of the frames with the same labels, by these labels
    sampled: bool = False  # whether only some frames were looked at, so that others may lack labels


class LmdbStore:
    """Frames of an LMDB database that make one system; names as in a folder of npy files."""

    def __init__(self, root: str, database: _Database, group: _Group) -> None:
        self.root = root
        self._database = database
        self._natoms = len(group.types)
        self._pbc = group.pbc
        self.sampled = group.sampled
        self._words = {"type.raw": [str(max(0, t)) for t in group.types.tolist()]}
        if database.meta.type_map is not None:
            self._words["type_map.raw"] = list(database.meta.type_map)
        if not group.pbc:
            self._words["nopbc"] = []
        self._known = frozenset(("atype", "coord", "box")).union(*group.sets)
        self._widths: dict[tuple[str, str], int] = {}
        self._warned = False
        fixed = ("coord", *(("box",) if group.pbc else ()), *(("real_atom_types",) if group.mixed else ()))
        self._sets = {f"set.{k:03d}": np.asarray(numbers) for k, numbers in enumerate(group.sets.values())}
        self._names = {
            name: frozenset(f"{n}.npy" for n in (*fixed, *labels))
            for name, labels in zip(self._sets, group.sets, strict=True)
        }

    def sets(self) -> list[str]:
        """Names of the sets."""
        return list(self._sets)

    def names(self, folder: str) -> frozenset[str]:
        """Names in a set, or of the system itself."""
        return self._names[folder] if folder else frozenset(self._words)

    def words(self, path: str) -> list[str]:
        """Return the words that a text file would hold."""
        return self._words[path]

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array."""
        folder, _, file = path.partition("/")
        name = file.removesuffix(".npy")
        numbers = self._sets[folder]
        if name not in PARAMETERS:
            return (len(numbers), _width(name, self._natoms))
        if (folder, name) not in self._widths:  # that of the first frame of the set that has the parameter
            found = (self._database.frame(int(number)).get(name) for number in numbers)
            self._widths[folder, name] = next((values.size for values in found if values is not None), 0)
        return (len(numbers), self._widths[folder, name])

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array, which always has an axis of frames; NaN where a frame lacks a label."""
        folder, _, name = path.partition("/")
        name = "atype" if name == "real_atom_types.npy" else name.removesuffix(".npy")
        numbers = self._sets[folder][indices]
        frames = self._database.frames(numbers, self._check, keep=len(numbers) * self._natoms <= _KEPT)
        if name not in LABELS and name not in PARAMETERS:
            return np.stack([frame[name] for frame in frames])
        width = self.shape(path)[1]
        absent = {name: np.full(width, np.nan)} if self.sampled else {}
        found = [{**absent, **frame}[name] for frame in frames]
        if wrong := next((values.size for values in found if values.size != width), None):
            raise SystemFormatError(self.root, name, f"one frame has {width} values, another {wrong}")
        return np.stack(found)

    def _check(self, number: int, frame: Mapping[str, np.ndarray]) -> None:
        """Refuse a frame that contradicts the metadata or other frames of its system."""
        problem = ""
        if len(frame["atype"]) != self._natoms:
            problem = f"has {len(frame['atype'])} atoms, but __metadata__ says {self._natoms}"
        elif ("box" in frame) != self._pbc:
            here, there = ("a cell", "none") if "box" in frame else ("no cell", "one")
            problem = f"has {here}, but other frames of the same source and size have {there}"
        if problem:
            advice = "in __metadata__, frame_nlocs must be right and frame_system_ids must tell them apart"
            raise SystemFormatError(self.root, f"frame {number}", f"{problem}; {advice}")
        if not self.sampled:
            return
        # The frame was not looked at before: `System` leaves its values to the store.
        for name, values in frame.items():
            if not np.isfinite(values).all():
                raise SystemFormatError(self.root, f"frame {number}", f"{name}: value that is not finite")
        unseen = frame.keys() - self._known
        if unseen and not self._warned:
            self._warned = True
            log.warning(
                "%s: frame %d has %s, which none of the frames has that were looked at when the database was opened: "
                "left out",
                self.root,
                number,
                ", ".join(sorted(unseen)),
            )


def _width(name: str, natoms: int) -> int:
    """Values of a quantity in a frame."""
    if name in FRAME_LABELS:
        return FRAME_LABELS[name]
    if name in ATOM_LABELS:
        return ATOM_LABELS[name] * natoms
    return {"coord": 3 * natoms, "box": 9}.get(name, natoms)


class _Database:
    """A database whose frames are found and decoded when asked for."""

    def __init__(self, path: str, handles: HandleCache) -> None:
        self.path = path
        self._file = LmdbFile(path, data_file(path), handles)
        self.meta = _Metadata.read(self._file)
        self._last: dict[int, tuple[bytes, list[dict[str, np.ndarray]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave decoded frames out."""
        return {**self.__dict__, "_last": {}}

    def frame(self, number: int) -> dict[str, np.ndarray]:
        """Return a frame as `decode_frame` does."""
        key = format(number, self.meta.key_format).encode()
        place = self._file.get(key)
        if place is None:
            raise SystemFormatError(self.path, f"frame {number}", f"key {key!r} is missing")
        return decode_frame(self.path, f"frame {number}", self._file.read(place))

    def frames(
        self, numbers: np.ndarray, check: Callable[[int, Mapping[str, np.ndarray]], None], *, keep: bool
    ) -> Iterable[dict[str, np.ndarray]]:
        """Return frames; those of a thread's last request may stay decoded, for its positions, cells and labels."""
        key, thread = numbers.tobytes(), threading.get_ident()
        last = self._last.get(thread)
        if last is not None and last[0] == key:
            return last[1]

        def checked() -> Iterator[dict[str, np.ndarray]]:
            for number in numbers.tolist():
                frame = self.frame(number)
                check(number, frame)
                yield frame

        if not keep:
            return checked()
        if len(self._last) >= _THREADS:  # those of threads that have ended
            self._last.clear()
        found = list(checked())
        self._last[thread] = (key, found)
        return found

    def groups(self) -> Iterator[_Group]:
        """Sort frames by source system, number of atoms and whether they have a cell, in the order of the first."""
        meta = self.meta
        if meta.nlocs is None or meta.nframes <= _READ_WHOLE:
            yield from self._read_groups(np.arange(meta.nframes))
            return
        # Positions of equal entries, in the order of the first ones; each ascending: the sort is stable.
        keys = [meta.nlocs] if meta.systems is None else [meta.systems, meta.nlocs]
        order = np.lexsort(keys[::-1])
        changes = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
        members = sorted(np.split(order, np.flatnonzero(changes) + 1), key=lambda part: int(part[0]))
        looked = max(2, _LOOKED // len(members))
        for numbers in members:
            if len(numbers) <= looked:
                yield from self._read_groups(numbers)
                continue
            some = numbers[np.linspace(0, len(numbers) - 1, looked).astype(int)]
            found = list(self._read_groups(some))
            if len(found) > 1:  # with and without a cell
                yield from self._read_groups(numbers)
                continue
            labels = frozenset[str]().union(*found[0].sets)
            yield replace(found[0], mixed=True, sets={labels: numbers.tolist()}, sampled=True)

    def _read_groups(self, numbers: np.ndarray) -> Iterator[_Group]:
        """Sort frames by reading them all."""
        groups: dict[tuple[int, int, bool], _Group] = {}
        for number in numbers.tolist():
            frame = self.frame(number)
            types, pbc = frame["atype"], "box" in frame
            source = 0 if self.meta.systems is None else int(self.meta.systems[number])
            group = groups.setdefault((source, len(types), pbc), _Group(types, pbc, False, {}))
            group.mixed |= bool((types != group.types).any() or (types < 0).any())
            group.sets.setdefault(frozenset(frame) - {"coord", "box", "atype"}, []).append(number)
        yield from groups.values()


def lmdb_stores(path: str, handles: HandleCache) -> Iterator[LmdbStore]:
    """Sort the frames of a database into systems: by source system, number of atoms and whether there is a cell.

    Of large databases the metadata say which frames belong together, and some frames of each system are read.

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
    database = _Database(path, handles)
    groups = list(database.groups())
    for k, group in enumerate(groups):
        yield LmdbStore(path if len(groups) == 1 else f"{path}#{k}", database, group)


@dataclass(frozen=True)
class _Metadata:
    """The content of ``__metadata__``."""

    nframes: int
    key_format: str
    type_map: tuple[str, ...] | None
    systems: np.ndarray | None  # (nframes,)
    nlocs: np.ndarray | None  # (nframes,)

    @classmethod
    def read(cls, file: LmdbFile) -> _Metadata:
        place = file.get(METADATA)
        if place is None:
            raise SystemFormatError(
                file.system, "__metadata__", "missing: an LMDB database, but not in deepmd-kit's format"
            )
        meta = _unpack(file.system, "__metadata__", file.read(place))
        nframes: Any = meta.get("nframes")
        form: Any = meta.get("frame_idx_fmt", "012d")
        type_map: Any = meta.get("type_map")

        def refuse(what: str, found: object) -> SystemFormatError:
            return SystemFormatError(file.system, "__metadata__", f"{what}, found {repr(found)[:60]}")

        if not _is_count(nframes) or not 0 < nframes < file.entries:
            raise refuse(f"nframes must be the number of frames, 1 to {file.entries - 1}", nframes)
        if not isinstance(form, str) or not _KEY_FORMAT.fullmatch(form):
            raise refuse('frame_idx_fmt must be a format such as "012d"', form)
        if type_map is not None and not (isinstance(type_map, list) and all(isinstance(t, str) for t in type_map)):
            raise refuse("type_map must be a list of element names", type_map)

        def numbers(name: str, least: int) -> np.ndarray | None:
            values = meta.get(name)
            if values is None:
                return None
            try:
                found = np.asarray(values)
            except ValueError:  # lists of several lengths
                found = np.zeros(0)
            if found.shape != (nframes,) or found.dtype.kind not in "iu" or found.min() < least:
                raise refuse(f"{name} must be {nframes} whole numbers of at least {least}", values)
            return found.astype(np.int64)

        systems, nlocs = numbers("frame_system_ids", 0), numbers("frame_nlocs", 1)
        return cls(nframes, form, None if type_map is None else tuple(type_map), systems, nlocs)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.lru_cache(maxsize=256)
def _canonical(name: str) -> str | None:
    """Return a field's name as npy files have it, "find_…" for a flag, and None for unread fields."""
    name = _NAMES.get(name, re.sub(r"^(find_)?atomic_", r"\1atom_", name))
    known = ("atype", "coord", "box", *FRAME_LABELS, *ATOM_LABELS, *PARAMETERS)
    return name if name in known or name.startswith("find_") else None


@functools.lru_cache(maxsize=64)
def _dtype(kind: str) -> np.dtype:
    """Return the dtype of real numbers; ValueError for any other one."""
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
        width = _width(name, len(types))
        if name in PARAMETERS:
            width = array.size if name == "fparam" else max(1, array.size // len(types)) * len(types)
        if array.size != width:
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
