"""Systems of an LMDB database in deepmd-kit's format: one msgpack map for every frame.

Key ``__metadata__`` holds ``nframes``, ``frame_idx_fmt``, ``type_map`` and ``frame_system_ids``; a frame's key is its
number in that format. A frame maps names to ``{type, shape, data}``: dtype, shape and bytes of an array. Names are
``coords``, ``cells``, ``energies``, ``forces``, ``virials``, ``atom_types``, or those of npy files.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.frames import PARAMETERS
from deepmd_muon.data.stores.lmdb_file import MAGIC, LmdbFile
from deepmd_muon.data.stores.lmdb_frames import (
    Block,
    FrameDecoder,
    decode_frame,
    is_count,
    unpack,
    width_of,
)
from deepmd_muon.data.stores.storage import HandleCache
from deepmd_muon.files import open_regular

log = logging.getLogger(__name__)

_Check = Callable[[np.ndarray, Mapping[str, np.ndarray]], None]

METADATA = b"__metadata__"
#: A key format such as "012d"; anything wider would be a way to fill the memory.
_KEY_FORMAT = re.compile(r"0?\d{0,2}d")
#: Atoms of one request whose frames stay decoded, so that positions, cells and labels of a batch cost one decoding.
_KEPT = 1 << 17
# Threads whose last requests stay decoded.
_THREADS = 64
#: Databases of so many frames are read as a whole when they are opened, in about half a second.
_READ_WHOLE = 8192
# Frames of one decoding while a database is opened.
_TOGETHER = 64
# Frames of larger ones that are read then; two of each system at least.
_LOOKED = 1024


def is_lmdb(path: str) -> bool:
    """Return whether a path is an LMDB database: a folder with ``data.mdb``, or such a file itself."""
    file = data_file(path)
    try:
        with open_regular(file) as opened:
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
    sets: dict[
        frozenset[str], Any
    ]  # numbers of the frames with the same labels, a list or array, by these labels
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
        fixed = (
            "coord",
            *(("box",) if group.pbc else ()),
            *(("real_atom_types",) if group.mixed else ()),
        )
        self._sets = {
            f"set.{k:03d}": np.asarray(numbers) for k, numbers in enumerate(group.sets.values())
        }
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
            return (len(numbers), width_of(name, self._natoms))
        if (
            folder,
            name,
        ) not in self._widths:  # that of the first frame of the set that has the parameter
            found = (self._database.frame(int(number)).get(name) for number in numbers)
            self._widths[folder, name] = next(
                (values.size for values in found if values is not None), 0
            )
        return (len(numbers), self._widths[folder, name])

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array, which always has an axis of frames; NaN where a frame lacks a label."""
        folder, _, name = path.partition("/")
        name = "atype" if name == "real_atom_types.npy" else name.removesuffix(".npy")
        numbers = self._sets[folder][indices]
        parts = list(self._parts(name, numbers))
        width = self._natoms if name == "atype" else self.shape(path)[1]
        wrong = [
            (rows[0], v.shape[1]) for rows, v in parts if v is not None and v.shape[1] != width
        ]
        if wrong:
            raise SystemFormatError(
                self.root, name, f"one frame has {width} values, another {min(wrong)[1]}"
            )
        kinds = [np.dtype(np.float64) if values is None else values.dtype for _, values in parts]
        found = np.empty((len(numbers), width), np.result_type(*kinds))
        for rows, values in parts:
            if values is None and not self.sampled:
                raise KeyError(name)
            found[rows] = np.nan if values is None else values
        return found

    def _parts(
        self, name: str, numbers: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield places in a request and values of the frames there, None where they have none.

        A large request is read in parts, of which nothing else stays in memory.
        """
        most = max(1, _KEPT // self._natoms)
        if len(numbers) <= most:
            for rows, columns in self._database.last(numbers, self._check):
                yield rows, columns.get(name)
            return
        for first in range(0, len(numbers), most):
            for rows, columns in self._database.blocks(numbers[first : first + most], self._check):
                values = columns.get(name)
                # A copy: columns are views of whole frames.
                yield rows + first, None if values is None else values.copy()

    def _check(self, numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Refuse frames that contradict the metadata or other frames of their system."""
        problem = ""
        if columns["atype"].shape[1] != self._natoms:
            problem = f"has {columns['atype'].shape[1]} atoms, but __metadata__ says {self._natoms}"
        elif ("box" in columns) != self._pbc:
            here, there = ("a cell", "none") if "box" in columns else ("no cell", "one")
            problem = f"has {here}, but other frames of the same source and size have {there}"
        if problem:
            advice = "in __metadata__, frame_nlocs must be right and frame_system_ids must tell them apart"
            raise SystemFormatError(self.root, f"frame {numbers[0]}", f"{problem}; {advice}")
        if not self.sampled:
            return
        # The frames were not looked at before: `System` leaves their values to the store.
        for name, values in columns.items():
            finite = np.isfinite(values).all(axis=1)
            if not finite.all():
                raise SystemFormatError(
                    self.root, f"frame {numbers[~finite][0]}", f"{name}: value that is not finite"
                )
        unseen = columns.keys() - self._known
        if unseen and not self._warned:
            self._warned = True
            log.warning(
                "%s: frame %d has %s, which none of the frames has that were looked at when the database was opened: "
                "left out",
                self.root,
                numbers[0],
                ", ".join(sorted(unseen)),
            )


def _accept(numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Check nothing."""


class _Database:
    """A database whose frames are found and decoded when asked for."""

    def __init__(self, path: str, handles: HandleCache) -> None:
        self.path = path
        self._file = LmdbFile(path, data_file(path), handles)
        self.meta = _Metadata.read(self._file)
        self._decoder = FrameDecoder(path)
        self._last: dict[int, tuple[bytes, list[Block]]] = {}

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

    def blocks(self, numbers: np.ndarray, check: _Check = _accept) -> list[Block]:
        """Return frames, in any order.

        Errors are those of `frame` and of `check`, for the first frame that has one.
        """
        found: list[Block] = []
        try:
            keys = [format(number, self.meta.key_format).encode() for number in numbers.tolist()]
            values = self._file.values(keys)
            there = [value for value in values if value is not None]
            if len(there) == len(values):
                for block in self._decoder.blocks(numbers.tolist(), there):
                    check(numbers[block.rows], block.columns)
                    found.append(block)
                return found
        except SystemFormatError:
            pass  # raised again below, for the first frame that has an error
        found = []
        for row, number in enumerate(numbers.tolist()):
            found.append(Block.of_one(row, self.frame(number)))
            check(numbers[row : row + 1], found[-1].columns)
        return found

    def last(self, numbers: np.ndarray, check: _Check) -> list[Block]:
        """Return frames, which stay decoded until the thread's next request: for positions, cells and labels."""
        key, thread = numbers.tobytes(), threading.get_ident()
        last = self._last.get(thread)
        if last is not None and last[0] == key:
            return last[1]
        if len(self._last) >= _THREADS:  # those of threads that have ended
            self._last.clear()
        found = self.blocks(numbers, check)
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
        members = sorted(
            np.split(order, np.flatnonzero(changes) + 1), key=lambda part: int(part[0])
        )
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
            yield replace(found[0], mixed=True, sets={labels: numbers}, sampled=True)

    def _read_groups(self, numbers: np.ndarray) -> Iterator[_Group]:
        """Sort frames by reading them all."""
        groups: dict[tuple[int, int, bool], _Group] = {}
        for number, types, names in self._contents(numbers):
            pbc = "box" in names
            source = 0 if self.meta.systems is None else int(self.meta.systems[number])
            group = groups.setdefault((source, len(types), pbc), _Group(types, pbc, False, {}))
            group.mixed |= bool((types != group.types).any() or (types < 0).any())
            group.sets.setdefault(names - {"coord", "box", "atype"}, []).append(number)
        yield from groups.values()

    def _contents(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, frozenset[str]]]:
        """Yield number, types and names of frames, in their order."""
        for first in range(0, len(numbers), _TOGETHER):
            part = numbers[first : first + _TOGETHER]
            found: dict[int, tuple[int, np.ndarray, frozenset[str]]] = {}
            for block in self.blocks(part):
                names = frozenset(block.columns)
                for row, types in zip(block.rows.tolist(), block.columns["atype"], strict=True):
                    found[row] = int(part[row]), types, names
            yield from (found[row] for row in range(len(part)))


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
        raise SystemNotFoundError(
            f"system {path} does not exist (relative paths start at {os.getcwd()})"
        )
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
                file.system,
                "__metadata__",
                "missing: an LMDB database, but not in deepmd-kit's format",
            )
        meta = unpack(file.system, "__metadata__", file.read(place))
        nframes: Any = meta.get("nframes")
        form: Any = meta.get("frame_idx_fmt", "012d")
        type_map: Any = meta.get("type_map")

        def refuse(what: str, found: object) -> SystemFormatError:
            return SystemFormatError(
                file.system, "__metadata__", f"{what}, found {repr(found)[:60]}"
            )

        if not is_count(nframes) or not 0 < nframes < file.entries:
            raise refuse(f"nframes must be the number of frames, 1 to {file.entries - 1}", nframes)
        if not isinstance(form, str) or not _KEY_FORMAT.fullmatch(form):
            raise refuse('frame_idx_fmt must be a format such as "012d"', form)
        if type_map is not None and not (
            isinstance(type_map, list) and all(isinstance(t, str) for t in type_map)
        ):
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
            return found.astype(np.int64, copy=False)

        systems, nlocs = numbers("frame_system_ids", 0), numbers("frame_nlocs", 1)
        return cls(nframes, form, None if type_map is None else tuple(type_map), systems, nlocs)
