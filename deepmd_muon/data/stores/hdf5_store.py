"""Systems as groups of HDF5 files."""

from __future__ import annotations

import errno
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


class _OpenHDF5:
    """An open file and its groups and datasets in use; the library closes it with the last of these."""

    def __init__(self, system: str, file: str) -> None:
        self._file = open_hdf5(system, file)
        self._nodes: dict[str, Any] = {}

    def node(self, name: str) -> Any:
        """Return a group or dataset."""
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= MAX_HANDLES:
                self._nodes.clear()
            node = self._nodes[name] = self._file[name]
        return node


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
        """Read the entries of a dataset that stands for a text file: numbers, strings, or one text."""
        dataset = self._node(path, h5py.Dataset)
        try:
            if dataset.dtype.hasobject and (problem := _strings_problem(dataset, self.file)):
                raise SystemFormatError(self.root, path, f"cannot be read: {problem}")
            values = [] if dataset.shape is None else np.atleast_1d(dataset[()]).ravel().tolist()
            return [
                word
                for v in values
                for word in (v.decode() if isinstance(v, bytes) else str(v)).split()
            ]
        except UnicodeDecodeError as error:
            raise SystemFormatError(self.root, path, f"expected text in UTF-8: {error}") from error
        except _ERRORS as error:
            if isinstance(error, SystemFormatError):
                raise
            raise SystemFormatError(self.root, path, f"cannot be read: {_reason(error)}") from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of a dataset of real numbers."""
        dataset = self._node(path, h5py.Dataset)
        return check_array(self.root, path, dataset.shape, dataset.dtype)

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of a dataset: one slice where they are neighbours, else row by row."""
        dataset = self._node(path, h5py.Dataset)
        try:
            if single:
                return np.asarray(np.asarray(dataset[()])[None][indices])
            first, last = int(indices.min()), int(indices.max())
            # Read the span when at least half of it is wanted: one call of HDF5 costs as much as many rows.
            if last - first + 1 <= 2 * len(indices):
                return np.asarray(dataset[first : last + 1][indices - first])
            return np.stack([dataset[int(k)] for k in indices])
        except _ERRORS as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {_reason(error)}") from error

    def _node(self, path: str, kind: type) -> Any:
        """Return a group or dataset."""
        self._watch.check(self.root, self.file)
        name = "/".join(part for part in (self.group, path) if part) or "/"
        try:
            node = self._handles.get(self.file, lambda: _OpenHDF5(self.root, self.file)).node(name)
        except _ERRORS as error:
            if isinstance(error, SystemFormatError):
                raise
            raise SystemFormatError(
                self.root, path, f"cannot be opened: {_reason(error)}"
            ) from error
        if not isinstance(node, kind):
            problem = f"is a {type(node).__name__.lower()}, not a {kind.__name__.lower()}"
            raise SystemFormatError(self.root, path, problem)
        return node


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


def hdf5_stores(path: str, handles: HandleCache) -> Iterator[HDF5Store]:
    """Find all systems of ``file`` or ``file#/group``."""
    file, _, group = path.partition("#")
    if not os.path.isfile(file):
        raise SystemNotFoundError(f"system {path}: the file {file} does not exist")
    start = group.strip("/")
    if not h5py.is_hdf5(file):
        raise SystemNotFoundError(
            f"system {path}: {Path(file).name} is neither a folder nor an HDF5 file"
        )
    groups: list[str] = []

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset) and name.rpartition("/")[2] == "type.raw":
            groups.append(name.rpartition("/")[0])

    with open_hdf5(path, file) as root:
        try:
            there = not start or root.get(start, getclass=True) is h5py.Group
            if there:
                (root[start] if start else root).visititems(visit)  # follows no links
        except _ERRORS as error:
            raise SystemFormatError(
                path, file, f"cannot be searched for systems: {_reason(error)}"
            ) from error
        if not there:
            raise SystemNotFoundError(
                f"system {path}: {file} has no group {group}; it has {sorted(root)[:20]}"
            )
    if not groups:
        raise SystemNotFoundError(f"system {path}: no group of {file} has a type.raw")
    for name in sorted(groups):
        yield HDF5Store(file, "/".join(part for part in (start, name) if part), handles)


def _strings_problem(dataset: h5py.Dataset, file: str) -> str | None:
    """Describe the damage of the heaps that hold a dataset's strings of variable length; None if they can be read.

    HDF5 2.0 and earlier never end at free space of length 0, or when header and length of an object overflow. Heaps
    carry no checksum. Those of compact or filtered datasets are not looked at: their addresses cannot be known.
    """
    if h5py.check_string_dtype(dataset.dtype) is None:
        return "expected numbers or text"
    offsets = [dataset.id.get_offset()]
    if dataset.chunks:
        chunks = [dataset.id.get_chunk_info(k) for k in range(dataset.id.get_num_chunks())]
        offsets = (
            []
            if dataset.id.get_create_plist().get_nfilters()
            else [chunk.byte_offset for chunk in chunks]
        )
    count = int(np.prod(dataset.chunks or dataset.shape or (0,)))
    with open(file, "rb") as content:
        size = os.fstat(content.fileno()).st_size
        heaps = set()
        for offset in offsets:
            if offset is not None:
                content.seek(offset)
                references = content.read(min(16 * count, size))
                heaps |= {references[k + 4 : k + 12] for k in range(0, len(references) - 15, 16)}
        for address in heaps:
            place = int.from_bytes(address, "little")
            if 0 < place < size and not _heap_ends(
                content, place + dataset.file.userblock_size, size
            ):
                return "the heap of its strings is damaged; copy the file again"
    return None


def _heap_ends(content: BinaryIO, place: int, size: int) -> bool:
    """Go through a global heap (HDF5 file format, III.E) as the library does; False if an object leaves it."""
    content.seek(place)
    if content.read(4) != b"GCOL":
        return False
    content.seek(place + 8)
    heap = content.read(max(0, min(int.from_bytes(content.read(8), "little"), size) - 16))
    at = 0
    while at + 16 <= len(heap):
        # Index, references and padding of 8 bytes, then the size; objects are padded to multiples of 8 bytes.
        length = int.from_bytes(heap[at + 8 : at + 16], "little")
        if not any(heap[at : at + 2]):  # free space, whose length counts its header
            if length < 16:
                return False
            at += length
        else:
            at += 16 + -(-length // 8) * 8
    return at <= len(heap)


def _reason(error: Exception) -> str:
    return str(error.args[0] if error.args else error).splitlines()[0]
