"""Where the arrays of a system lie: a folder of npy files or a group of an HDF5 file.

Both kinds answer the same few questions, so that `System` does not know which one it reads. Nothing stays
open in a pickle, and after a fork the child opens its own handles.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from deepmd_muon.data.errors import SystemFormatError

#: Open maps and datasets kept by one process; Linux allows 65530 maps, and every npy file in use is one.
MAX_HANDLES = 4096


class HandleCache:
    """The arrays that this process holds open, least recently used first out.

    Pickled and forked copies start empty: an HDF5 handle must not be shared between processes.
    """

    def __init__(self, maxsize: int = MAX_HANDLES) -> None:
        self.maxsize = maxsize
        self._handles: OrderedDict[str, Any] = OrderedDict()
        self._pid = os.getpid()
        # The prefetch thread and the main thread may read different systems through one cache.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (type(self), (self.maxsize,))

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, key: str, opener: Callable[[], Any]) -> Any:
        """Return the open array called `key`, opening it with `opener` when it is not open yet."""
        with self._lock:
            if self._pid != os.getpid():
                self._handles.clear()
                self._pid = os.getpid()
            if key in self._handles:
                self._handles.move_to_end(key)
                return self._handles[key]
            handle = opener()
            self._handles[key] = handle
            while len(self._handles) > self.maxsize:
                self._handles.popitem(last=False)
            return handle


class Store(Protocol):
    """What `System` asks of the place its arrays lie in. `path` is relative, like ``set.000/coord.npy``."""

    @property
    def root(self) -> str:
        """Name of the system."""

    def sets(self) -> list[str]:
        """Names of the ``set.*`` folders, sorted."""

    def names(self, folder: str) -> frozenset[str]:
        """Names of the files in `folder`; ``""`` is the system itself."""

    def words(self, path: str) -> list[str]:
        """Read the words of a text file, e.g. ``type.raw``."""

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array, read from its header; raises when the file is shorter than its header says."""

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows `indices` (any order) of an array; `single`: the file has no frame axis and is row 0."""


class NpyStore:
    """A system as a folder of ``type.raw``, ``set.000/coord.npy`` and so on."""

    def __init__(self, root: str, handles: HandleCache) -> None:
        self._root = root
        self._handles = handles

    @property
    def root(self) -> str:
        """Name of the system, its folder."""
        return self._root

    def sets(self) -> list[str]:
        """Names of the ``set.*`` folders, sorted."""
        return sorted(p.name for p in Path(self.root).glob("set.*") if p.is_dir())

    def names(self, folder: str) -> frozenset[str]:
        """Names of the files in `folder`."""
        return frozenset(os.listdir(os.path.join(self.root, folder)))

    def words(self, path: str) -> list[str]:
        """Read the words of a text file."""
        return Path(self.root, path).read_text(encoding="utf-8").split()

    def _map(self, path: str) -> np.ndarray:
        full = os.path.join(self.root, path)
        try:
            array: np.ndarray = np.load(full, mmap_mode="r", allow_pickle=False)
            return array
        except (ValueError, EOFError, OSError) as error:
            raise SystemFormatError(self.root, path, self._diagnose(full, error)) from error

    @staticmethod
    def _diagnose(full: str, error: Exception) -> str:
        """Say what a file that cannot be mapped should have held, from its header."""
        try:
            with open(full, "rb") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                expected = int(np.prod(shape)) * dtype.itemsize
                found = os.path.getsize(full) - file.tell()
        except (ValueError, EOFError, OSError):
            return f"cannot be read as an npy array ({error}); write it again with numpy.save"
        if found < expected:
            return (
                f"truncated: its header says shape {shape} of {dtype} ({expected} bytes), "
                f"{found} bytes of data are there; copy or write it again"
            )
        return f"cannot be read as an npy array: {error}"

    def _open(self, path: str) -> np.ndarray:
        array: np.ndarray = self._handles.get(os.path.join(self.root, path), lambda: self._map(path))
        return array

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array; mapping it fails when the file is shorter than its header says."""
        return self._map(path).shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array; only their pages are read."""
        array = self._open(path)
        taken: np.ndarray = np.asarray(array[None] if single else array)[indices]
        return taken


class HDF5Store:
    """A system as a group of an HDF5 file: the same names as datasets."""

    def __init__(self, file: str, group: str, handles: HandleCache) -> None:
        self.file = file
        self.group = group.strip("/")
        self._handles = handles

    @property
    def root(self) -> str:
        """Name of the system, ``file.hdf5#/group``."""
        return f"{self.file}#/{self.group}"

    def _node(self, path: str) -> Any:
        name = "/".join(part for part in (self.group, path) if part) or "/"

        def open_node() -> Any:
            file = self._handles.get(self.file, lambda: h5py.File(self.file, "r"))
            return file[name]

        return self._handles.get(f"{self.file}#/{name}", open_node)

    def sets(self) -> list[str]:
        """Names of the ``set.*`` groups, sorted."""
        group = self._node("")
        return sorted(name for name in group if name.startswith("set.") and isinstance(group[name], h5py.Group))

    def names(self, folder: str) -> frozenset[str]:
        """Names of the datasets in `folder`."""
        return frozenset(self._node(folder))

    def words(self, path: str) -> list[str]:
        """Read the entries of a dataset that stands for a text file: numbers, strings, or one text."""
        values = np.atleast_1d(self._node(path)[()]).ravel().tolist()
        return [word for v in values for word in (v.decode() if isinstance(v, bytes) else str(v)).split()]

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of a dataset."""
        node = self._node(path)
        if not isinstance(node, h5py.Dataset):
            raise SystemFormatError(self.root, path, f"is a {type(node).__name__.lower()}, not a dataset")
        return tuple(node.shape)

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of a dataset: one slice where they are neighbours, else row by row."""
        dataset = self._node(path)
        if single:
            return np.asarray(np.asarray(dataset[()])[None][indices])
        first, last = int(indices.min()), int(indices.max())
        # Read the span when at least half of it is wanted: one call of HDF5 costs as much as many rows.
        if last - first + 1 <= 2 * len(indices):
            return np.asarray(dataset[first : last + 1][indices - first])
        return np.stack([dataset[int(k)] for k in indices])
