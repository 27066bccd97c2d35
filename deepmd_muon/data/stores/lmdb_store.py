"""Systems of an LMDB database in deepmd-kit's format: one msgpack map for every frame.

Key ``__metadata__`` holds ``nframes``, ``frame_idx_fmt``, ``type_map`` and ``frame_system_ids``; a
frame's key is its number in that format. A frame maps names to ``{type, shape, data}``: dtype,
shape and bytes of an array. Names are ``coords``, ``cells``, ``energies``, ``forces``, ``virials``,
``atom_types``, or those of npy files.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.frames import PARAMETERS, evenly_spread
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

Check = Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
"""Raises SystemFormatError for frames by their numbers and arrays; see `Block`."""

METADATA = b"__metadata__"
# A key format such as "012d"; anything wider would be a way to fill the memory.
_KEY_FORMAT = re.compile(r"0?\d{0,2}d")
# A request of up to so many atoms stays decoded, so that positions, cells and labels of a batch
# cost one decoding.
_MAX_DECODED_ATOMS = 1 << 17
_MAX_THREADS = 64  # threads whose last requests stay decoded
# Databases of up to so many frames are read as a whole when they are opened, in about half a
# second.
_MAX_READ_WHOLE = 8192
_SAMPLE = 1024  # frames of a larger database that are read then, two of each system at least
_DECODED_TOGETHER = 64  # frames, while a database is opened


def is_lmdb(path: str) -> bool:
    """Return whether a path is a folder with ``data.mdb``, or such a file itself."""
    try:
        with open_regular(_data_file(path)) as file:
            return file.read(20)[16:] == MAGIC.to_bytes(4, "little")
    except OSError:
        return False


def lmdb_stores(path: str, handles: HandleCache) -> Iterator[LmdbStore]:
    """Sort the frames of a database into systems.

    Frames of a system have the same source and number of atoms, and all or none have a cell.

    The metadata of a large database say which frames belong together, and some frames of each
    system are read.

    Raises
    ------
    SystemNotFoundError
        When there is no database at `path`.
    SystemFormatError
        When it is damaged or in another format.
    DataError
        When msgpack is not installed.
    """
    if not os.path.exists(_data_file(path)):
        raise SystemNotFoundError(
            f"system {path} does not exist (relative paths start at {os.getcwd()})"
        )
    database = _Database(path, handles)
    groups = list(database.groups())
    for number, group in enumerate(groups):
        yield LmdbStore(path if len(groups) == 1 else f"{path}#{number}", database, group)


def _data_file(path: str) -> str:
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


@dataclass
class _Group:
    """Frames of one source system and number of atoms, all with or all without a cell."""

    types: np.ndarray  # (natoms,) of the first frame
    pbc: bool  # whether they have a cell
    mixed: bool = False  # whether types differ, or could
    # Numbers of the frames with the same labels, a list or an array, by these labels.
    sets: dict[frozenset[str], Any] = field(default_factory=dict)
    sampled: bool = False  # whether only some frames were read, so that others may lack labels


class LmdbStore:
    """Frames of an LMDB database that make one system; names as in a folder of npy files."""

    def __init__(self, root: str, database: _Database, group: _Group) -> None:
        self.root = root
        self.sampled = group.sampled
        self._database = database
        self._natoms = len(group.types)
        self._pbc = group.pbc
        self._words = {"type.raw": [str(max(0, t)) for t in group.types.tolist()]}
        if database.meta.type_map is not None:
            self._words["type_map.raw"] = list(database.meta.type_map)
        if not group.pbc:
            self._words["nopbc"] = []

        arrays_of_all = ["coord"]
        if group.pbc:
            arrays_of_all.append("box")
        if group.mixed:
            arrays_of_all.append("real_atom_types")
        self._numbers: dict[str, np.ndarray] = {}  # of the frames, by set
        self._names: dict[str, frozenset[str]] = {}
        for k, (labels, numbers) in enumerate(group.sets.items()):
            self._numbers[f"set.{k:03d}"] = np.asarray(numbers)
            self._names[f"set.{k:03d}"] = frozenset(
                f"{name}.npy" for name in (*arrays_of_all, *labels)
            )

        self._known_names = frozenset(("atype", "coord", "box")).union(*group.sets)
        self._parameter_widths: dict[str, int] = {}
        self._warned = False

    def sets(self) -> list[str]:
        """Names of the sets."""
        return list(self._numbers)

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
        numbers = self._numbers[folder]
        if name not in PARAMETERS:
            return (len(numbers), width_of(name, self._natoms))
        if path not in self._parameter_widths:
            self._parameter_widths[path] = self._first_width(name, numbers)
        return (len(numbers), self._parameter_widths[path])

    def _first_width(self, name: str, numbers: np.ndarray) -> int:
        """Return the width of a parameter in the first frame that has it."""
        for number in numbers:
            values = self._database.frame(int(number)).get(name)
            if values is not None:
                return values.size
        return 0

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array, which always has an axis of frames; NaN for a frame without a label."""
        folder, _, file = path.partition("/")
        name = "atype" if file == "real_atom_types.npy" else file.removesuffix(".npy")
        numbers = self._numbers[folder][indices]
        columns = list(self._columns(name, numbers))
        width = self._natoms if name == "atype" else self.shape(path)[1]
        other_widths = [
            (column.rows[0], column.values.shape[1])
            for column in columns
            if column.values is not None and column.values.shape[1] != width
        ]
        if other_widths:
            _, other_width = min(other_widths)  # of the first frame
            raise SystemFormatError(
                self.root, name, f"one frame has {width} values, another {other_width}"
            )
        dtypes = [
            np.dtype(float) if column.values is None else column.values.dtype for column in columns
        ]
        result = np.empty((len(numbers), width), np.result_type(*dtypes))
        for column in columns:
            if column.values is None and not self.sampled:
                raise KeyError(name)
            result[column.rows] = np.nan if column.values is None else column.values
        return result

    def _columns(self, name: str, numbers: np.ndarray) -> Iterator[_Column]:
        """Yield the values of a name in some frames."""
        limit = max(1, _MAX_DECODED_ATOMS // self._natoms)
        if len(numbers) <= limit:
            for block in self._database.last_blocks(numbers, self._check):
                yield _Column(block.rows, block.columns.get(name))
            return
        # A large request is read in parts, of which only these values stay in memory: columns are
        # views of whole frames, so that they are copied.
        for start in range(0, len(numbers), limit):
            for block in self._database.blocks(numbers[start : start + limit], self._check):
                values = block.columns.get(name)
                yield _Column(block.rows + start, None if values is None else values.copy())

    def _check(self, numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Refuse frames that contradict the metadata or other frames of their system."""
        natoms = columns["atype"].shape[1]
        has_cell = "box" in columns
        problem = ""
        if natoms != self._natoms:
            problem = f"has {natoms} atoms, but __metadata__ says {self._natoms}"
        elif has_cell and not self._pbc:
            problem = "has a cell, but other frames of the same source and size have none"
        elif self._pbc and not has_cell:
            problem = "has no cell, but other frames of the same source and size have one"
        if problem:
            raise SystemFormatError(
                self.root,
                f"frame {numbers[0]}",
                f"{problem}; in __metadata__, frame_nlocs must be right and frame_system_ids must "
                "tell them apart",
            )
        if self.sampled:
            self._check_unread(numbers, columns)

    def _check_unread(self, numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Check frames that were not read at opening.

        `System` leaves the values of a sampled store to the store.
        """
        for name, values in columns.items():
            finite = np.isfinite(values).all(axis=1)
            if not finite.all():
                raise SystemFormatError(
                    self.root, f"frame {numbers[~finite][0]}", f"{name}: value that is not finite"
                )
        unknown_names = columns.keys() - self._known_names
        if unknown_names and not self._warned:
            self._warned = True
            log.warning(
                "%s: frame %d has %s, which none of the frames has that were looked at when the "
                "database was opened: left out",
                self.root,
                numbers[0],
                ", ".join(sorted(unknown_names)),
            )


class _Column(NamedTuple):
    """The values of one name in some frames of a request."""

    rows: np.ndarray  # (nframes,) places in the request
    values: np.ndarray | None  # (nframes, width), None if these frames lack the name


def _accept(numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Check nothing."""


class _Database:
    """A database whose frames are found and decoded when asked for."""

    def __init__(self, path: str, handles: HandleCache) -> None:
        self.path = path
        self._file = LmdbFile(path, _data_file(path), handles)
        self.meta = _read_metadata(self._file)
        self._decoder = FrameDecoder(path)
        self._last: dict[int, _Request] = {}  # by thread

    def __getstate__(self) -> dict[str, Any]:
        """Leave decoded frames out."""
        return {**self.__dict__, "_last": {}}

    def frame(self, number: int) -> dict[str, np.ndarray]:
        """Return a frame as `decode_frame` does."""
        key = format(number, self.meta.key_format).encode()
        (value,) = self._file.values([key])
        if value is None:
            raise SystemFormatError(self.path, f"frame {number}", f"key {key!r} is missing")
        return decode_frame(self.path, f"frame {number}", value)

    def blocks(self, numbers: np.ndarray, check: Check = _accept) -> list[Block]:
        """Return frames, in any order.

        Errors are those of `frame` and of `check`, for the first frame that has one.
        """
        with suppress(SystemFormatError):
            return self._blocks_together(numbers, check)
        # Errors did not come in the order of the frames: go through these one by one.
        blocks = []
        for row, number in enumerate(numbers.tolist()):
            block = Block.of_one(row, self.frame(number))
            check(numbers[row : row + 1], block.columns)
            blocks.append(block)
        return blocks

    def _blocks_together(self, numbers: np.ndarray, check: Check) -> list[Block]:
        key_format = self.meta.key_format
        keys = [format(number, key_format).encode() for number in numbers.tolist()]
        values = [value for value in self._file.values(keys) if value is not None]
        if len(values) < len(keys):
            raise SystemFormatError(self.path, "", "a key is missing")  # `frame` names it
        blocks = []
        for block in self._decoder.blocks(numbers.tolist(), values):
            check(numbers[block.rows], block.columns)
            blocks.append(block)
        return blocks

    def last_blocks(self, numbers: np.ndarray, check: Check) -> list[Block]:
        """Return `blocks`, which stay decoded until the thread's next request.

        `System` asks for positions, cells and labels of a batch one after the other.
        """
        thread = threading.get_ident()
        numbers_as_bytes = numbers.tobytes()
        last = self._last.get(thread)
        if last is not None and last.numbers == numbers_as_bytes:
            return last.blocks
        if len(self._last) >= _MAX_THREADS:  # most of them have ended
            self._last.clear()
        blocks = self.blocks(numbers, check)
        self._last[thread] = _Request(numbers_as_bytes, blocks)
        return blocks

    # ----- opening -------------------------------------------------------------------------------

    def groups(self) -> Iterator[_Group]:
        """Sort frames by source, number of atoms and whether they have a cell."""
        meta = self.meta
        if meta.nlocs is None or meta.nframes <= _MAX_READ_WHOLE:
            yield from self._read_groups(np.arange(meta.nframes))
            return
        groups = _equal_entries(
            [meta.nlocs] if meta.systems is None else [meta.systems, meta.nlocs]
        )
        sample_size = max(2, _SAMPLE // len(groups))
        for numbers in groups:
            if len(numbers) <= sample_size:
                yield from self._read_groups(numbers)
                continue
            sample = numbers[evenly_spread(len(numbers), sample_size)]
            sample_groups = list(self._read_groups(sample))
            if len(sample_groups) > 1:  # with and without a cell
                yield from self._read_groups(numbers)
                continue
            (group,) = sample_groups
            labels = frozenset[str]().union(*group.sets)
            yield replace(group, mixed=True, sets={labels: numbers}, sampled=True)

    def _read_groups(self, numbers: np.ndarray) -> Iterator[_Group]:
        """Sort frames by reading them all."""
        groups: dict[tuple[int, int, bool], _Group] = {}
        for frame in self._contents(numbers):
            pbc = "box" in frame.names
            source = 0 if self.meta.systems is None else int(self.meta.systems[frame.number])
            kind = (source, len(frame.types), pbc)
            group = groups.setdefault(kind, _Group(frame.types, pbc))
            group.mixed |= bool((frame.types != group.types).any() or (frame.types < 0).any())
            labels = frame.names - {"coord", "box", "atype"}
            group.sets.setdefault(labels, []).append(frame.number)
        yield from groups.values()

    def _contents(self, numbers: np.ndarray) -> Iterator[_Content]:
        """Yield what frames contain, in their order."""
        for start in range(0, len(numbers), _DECODED_TOGETHER):
            request = numbers[start : start + _DECODED_TOGETHER]
            contents: dict[int, _Content] = {}
            for block in self.blocks(request):
                names = frozenset(block.columns)
                for row, types in zip(block.rows.tolist(), block.columns["atype"], strict=True):
                    contents[row] = _Content(int(request[row]), types, names)
            for row in range(len(request)):
                yield contents[row]


class _Request(NamedTuple):
    """The last request of a thread."""

    numbers: bytes
    blocks: list[Block]


class _Content(NamedTuple):
    """What a frame contains."""

    number: int
    types: np.ndarray  # (natoms,)
    names: frozenset[str]


def _equal_entries(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the numbers of rows with the same entries in all columns, as one rising array each.

    The arrays are sorted by their first rows.
    """
    order = np.lexsort(columns[::-1])  # stable, so that rows rise
    changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    groups = np.split(order, np.flatnonzero(changes) + 1)
    return sorted(groups, key=lambda rows: int(rows[0]))


# ----- metadata ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Metadata:
    """The content of ``__metadata__``."""

    nframes: int
    key_format: str
    type_map: tuple[str, ...] | None
    systems: np.ndarray | None  # (nframes,) source system of each frame
    nlocs: np.ndarray | None  # (nframes,) atoms of each frame


def _read_metadata(file: LmdbFile) -> _Metadata:
    """Return the metadata; SystemFormatError when an entry makes no sense."""
    (value,) = file.values([METADATA])
    if value is None:
        raise SystemFormatError(
            file.system,
            "__metadata__",
            "missing: an LMDB database, but not in deepmd-kit's format",
        )
    meta = unpack(file.system, "__metadata__", value)

    def refuse(problem: str, found: object) -> SystemFormatError:
        return SystemFormatError(
            file.system, "__metadata__", f"{problem}, found {repr(found)[:60]}"
        )

    def numbers(name: str, minimum: int) -> np.ndarray | None:
        """Return an entry that has a number for each frame."""
        values = meta.get(name)
        if values is None:
            return None
        try:
            array = np.asarray(values)
        except ValueError:  # lists of several lengths
            array = np.zeros(0)
        if array.shape != (nframes,) or array.dtype.kind not in "iu" or array.min() < minimum:
            raise refuse(f"{name} must be {nframes} whole numbers of at least {minimum}", values)
        return array.astype(np.int64, copy=False)

    nframes: Any = meta.get("nframes")
    if not is_count(nframes) or not 0 < nframes < file.entries:
        raise refuse(f"nframes must be the number of frames, 1 to {file.entries - 1}", nframes)
    key_format: Any = meta.get("frame_idx_fmt", "012d")
    if not isinstance(key_format, str) or not _KEY_FORMAT.fullmatch(key_format):
        raise refuse('frame_idx_fmt must be a format such as "012d"', key_format)
    type_map: Any = meta.get("type_map")
    if type_map is not None:
        if not isinstance(type_map, list) or not all(isinstance(name, str) for name in type_map):
            raise refuse("type_map must be a list of element names", type_map)
        type_map = tuple(type_map)
    return _Metadata(
        nframes=nframes,
        key_format=key_format,
        type_map=type_map,
        systems=numbers("frame_system_ids", 0),
        nlocs=numbers("frame_nlocs", 1),
    )
