"""Systems as groups of HDF5 files."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.storage import MAX_HANDLES, FileWatch, HandleCache, check_array

# Errors of h5py for damaged files and broken links.
_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)
_MAX_SHOWN = 20  # groups that a message lists


def hdf5_stores(path: str, handles: HandleCache) -> Iterator[HDF5Store]:
    """Find all systems of ``file`` or ``file#/group``."""
    file, _, group = path.partition("#")
    start = group.strip("/")
    if not os.path.isfile(file):
        raise SystemNotFoundError(f"system {path}: the file {file} does not exist")
    if not h5py.is_hdf5(file):
        raise SystemNotFoundError(
            f"system {path}: {Path(file).name} is neither a folder nor an HDF5 file"
        )
    systems: list[str] = []  # groups below `start`

    def visit(name: str, node: object) -> None:
        parent, _, dataset = name.rpartition("/")
        if dataset == "type.raw" and isinstance(node, h5py.Dataset):
            systems.append(parent)

    with open_hdf5(path, file) as root:
        try:
            has_group = not start or root.get(start, getclass=True) is h5py.Group
            if has_group:
                (root[start] if start else root).visititems(visit)  # follows no links
        except _ERRORS as error:
            raise SystemFormatError(
                path, file, f"cannot be searched for systems: {_reason(error)}"
            ) from error
        if not has_group:
            raise SystemNotFoundError(
                f"system {path}: {file} has no group {group}; it has {sorted(root)[:_MAX_SHOWN]}"
            )
    if not systems:
        raise SystemNotFoundError(
            f"system {path}: no group of {file} has a type.raw; examples/write_system.py writes arrays "
            "of other layouts as systems, in eV and Å"
        )
    for name in sorted(systems):
        yield HDF5Store(file, f"{start}/{name}", handles)


def open_hdf5(system: str, file: str) -> h5py.File:
    """Open an HDF5 file for reading.

    Raises
    ------
    SystemFormatError
        When another process writes it, or it is damaged.
    """
    try:
        return h5py.File(file, "r")
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) and "lock" in str(error):
            advice = "another process has it open for writing; wait until that ends"
        elif error.errno is not None:
            advice = os.strerror(error.errno)
        else:
            advice = f"{_reason(error)}; copy it again"
        raise SystemFormatError(system, file, f"cannot be opened as HDF5: {advice}") from error


class HDF5Store:
    """A system as a group of an HDF5 file: the same names as datasets."""

    sampled = False

    def __init__(self, file: str, group: str, handles: HandleCache) -> None:
        self.file = file
        self.group = group.strip("/")
        self._handles = handles
        self._watch = FileWatch()

    @property
    def root(self) -> str:
        """Name of the system, ``file.hdf5#/group``."""
        return f"{self.file}#/{self.group}"

    def sets(self) -> list[str]:
        """Names of the ``set.*`` groups, sorted."""
        group = self._node("", h5py.Group)
        return sorted(
            name
            for name in group
            if name.startswith("set.") and group.get(name, getclass=True) is h5py.Group
        )

    def names(self, folder: str) -> frozenset[str]:
        """Names of the datasets in `folder`."""
        return frozenset(self._node(folder, h5py.Group))

    def words(self, path: str) -> list[str]:
        """Read the entries of a dataset in place of a text file: numbers, strings, or one text."""
        dataset = self._node(path, h5py.Dataset)
        try:
            if dataset.dtype.hasobject:
                problem = _strings_problem(dataset, self.file)
                if problem is not None:
                    raise SystemFormatError(self.root, path, f"cannot be read: {problem}")
            if dataset.shape is None:
                return []
            words: list[str] = []
            for entry in np.atleast_1d(dataset[()]).ravel().tolist():
                text = entry.decode() if isinstance(entry, bytes) else str(entry)
                words += text.split()
            return words
        except SystemFormatError:
            raise
        except UnicodeDecodeError as error:
            raise SystemFormatError(self.root, path, f"expected text in UTF-8: {error}") from error
        except _ERRORS as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {_reason(error)}") from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of a dataset of real numbers."""
        dataset = self._node(path, h5py.Dataset)
        return check_array(self.root, path, dataset.shape, dataset.dtype)

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of a dataset: one slice if they are neighbours, else row by row."""
        dataset = self._node(path, h5py.Dataset)
        try:
            if single:
                return np.asarray(np.asarray(dataset[()])[None][indices])
            start = int(indices.min())
            end = int(indices.max()) + 1
            # Read the span when at least half of it is wanted: one call of HDF5 costs as much as
            # many rows.
            if end - start <= 2 * len(indices):
                return np.asarray(dataset[start:end][indices - start])
            return np.stack([dataset[int(k)] for k in indices])
        except _ERRORS as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {_reason(error)}") from error

    def _node(self, path: str, kind: type) -> Any:
        """Return a group or dataset."""
        self._watch.check(self.root, self.file)
        name = f"{self.group}/{path}".strip("/") or "/"
        try:
            file = self._handles.get(self.file, lambda: _OpenHDF5(self.root, self.file))
            node = file.node(name)
        except SystemFormatError:
            raise
        except _ERRORS as error:
            raise SystemFormatError(
                self.root, path, f"cannot be opened: {_reason(error)}"
            ) from error
        if not isinstance(node, kind):
            problem = f"is a {type(node).__name__.lower()}, not a {kind.__name__.lower()}"
            raise SystemFormatError(self.root, path, problem)
        return node


class _OpenHDF5:
    """An open file with its groups and datasets in use; the library closes it with the last."""

    def __init__(self, system: str, file: str) -> None:
        self._file = open_hdf5(system, file)
        self._nodes: dict[str, Any] = {}

    def node(self, name: str) -> Any:
        """Return a group or dataset."""
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= MAX_HANDLES:
                self._nodes.clear()
            node = self._file[name]
            self._nodes[name] = node
        return node


# ----- damaged strings ---------------------------------------------------------------------------


def _strings_problem(dataset: h5py.Dataset, file: str) -> str | None:
    """Describe the damage of a dataset of strings of variable length; None if it can be read.

    The strings are in heaps. HDF5 2.0 and earlier never end at free space of length 0, or when
    header and length of an object overflow, and heaps carry no checksum. The heaps of compact or
    filtered datasets are not checked: their addresses cannot be known.
    """
    if h5py.check_string_dtype(dataset.dtype) is None:
        return "expected numbers or text"
    count = math.prod(dataset.chunks or dataset.shape or (0,))
    with open(file, "rb") as content:
        size = os.fstat(content.fileno()).st_size
        addresses = set()
        for offset in _data_offsets(dataset):
            content.seek(offset)
            # A reference has 16 bytes: the length of the string, the address of its heap, a number.
            references = content.read(min(16 * count, size))
            addresses |= {references[k + 4 : k + 12] for k in range(0, len(references) - 15, 16)}
        for address in addresses:
            start = int.from_bytes(address, "little")
            in_file = start + dataset.file.userblock_size
            if 0 < start < size and not _heap_ends(content, in_file, size):
                return "the heap of its strings is damaged; copy the file again"
    return None


def _data_offsets(dataset: h5py.Dataset) -> list[int]:
    """Return where the data of a dataset begin in the file, as far as it can be known."""
    if not dataset.chunks:
        offset = dataset.id.get_offset()
        return [] if offset is None else [offset]
    if dataset.id.get_create_plist().get_nfilters():
        return []
    chunks = [dataset.id.get_chunk_info(k) for k in range(dataset.id.get_num_chunks())]
    return [chunk.byte_offset for chunk in chunks if chunk.byte_offset is not None]


def _heap_ends(content: BinaryIO, start: int, size: int) -> bool:
    """Go through a global heap (HDF5 file format, III.E) as the library does.

    Return False if an object leaves the heap.
    """
    content.seek(start)
    if content.read(4) != b"GCOL":
        return False
    content.seek(start + 8)
    heap_size = int.from_bytes(content.read(8), "little")
    heap = content.read(max(0, min(heap_size, size) - 16))
    position = 0
    while position + 16 <= len(heap):
        # Index, references and padding of 8 bytes, then the size.
        length = int.from_bytes(heap[position + 8 : position + 16], "little")
        is_free_space = not any(heap[position : position + 2])
        if is_free_space:  # its length counts its header
            if length < 16:
                return False
            position += length
        else:
            position += 16 + (length + 7) // 8 * 8  # padded to multiples of 8 bytes
    return position <= len(heap)


def _reason(error: Exception) -> str:
    return str(error.args[0] if error.args else error).splitlines()[0]
