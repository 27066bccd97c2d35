"""The interface between `System` and the storage of its arrays, and helpers of both kinds of storage.

`NpyStore` is a folder, `HDF5Store` a group of a file. Nothing stays open in a pickle, and after a fork the child opens
its own handles.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

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
        """Shape of an array of real numbers, read from its header; anything else is an error."""

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows `indices` (any order) of an array; `single`: the file has no frame axis and is row 0."""


class FileWatch:
    """Size and time stamp of files when they were first looked at.

    A file that is rewritten during a run would change the data without a word, one that is cut short would end the
    process: its pages are mapped.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def check(self, system: str, path: str) -> None:
        """Compare a file with its first content.

        Raises
        ------
        SystemFormatError
            When it has changed or is gone.
        """
        try:
            status = os.stat(path)
        except OSError as error:
            raise SystemFormatError(system, path, f"cannot be looked at: {error.strerror}") from error
        found = (status.st_size, status.st_mtime_ns)
        first = self._seen.setdefault(path, found)
        if found != first:
            change = f"{first[0]} bytes, now {found[0]}" if found[0] != first[0] else f"{found[0]} bytes, written again"
            raise SystemFormatError(
                system, path, f"has changed while it was in use ({change}); start again with data that stay as they are"
            )


def check_array(system: str, path: str, shape: tuple[int, ...] | None, dtype: np.dtype) -> tuple[int, ...]:
    """Return the shape of an array that holds real numbers.

    Raises
    ------
    SystemFormatError
        For values of other kinds, whose conversion would drop imaginary parts or read text, and for none at all.
    """
    if dtype.kind not in "fiu":
        raise SystemFormatError(system, path, f"expected real numbers, found values of dtype {dtype}")
    if shape is None:
        raise SystemFormatError(system, path, "expected an array, found an empty dataset")
    return shape
