"""The interface between `System` and the storage of its arrays, and helpers of both kinds of storage.

`NpyStore` is a folder, `HDF5Store` a group of a file. Nothing stays open in a pickle, and after a fork the child opens
its own handles.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.files import regular_handle

#: Most files of data that one cache keeps open, small ones as their values.
MAX_HANDLES = 4096
# Share of the process's limit on open files that one cache takes: training and validation data have one each, and
# checkpoints, libraries and sockets need the rest. The usual limit is 1,024.
_SHARE = 8
# Most memory of the values that one cache keeps, and that of an array beside its values [bytes].
_MOST_BYTES, _OF_ARRAY = 128 << 20, 512


class HandleCache:
    """The files of data that this process holds open, or their values where they are few; least recently used go first.

    A file is closed when its last user drops it, so a thread can read on when the cache has dropped the file.
    Pickled copies start empty and forked ones without files: an HDF5 handle must not be shared between processes. At
    most `maxsize` files are open, by default a share of the limit on open files (``ulimit -n``).
    """

    def __init__(self, maxsize: int | None = None) -> None:
        if maxsize is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            most = MAX_HANDLES if limit == resource.RLIM_INFINITY else limit // _SHARE
            maxsize = max(2, min(most, MAX_HANDLES))
        self.maxsize = maxsize
        self._handles: OrderedDict[str, Any] = OrderedDict()
        self._values: OrderedDict[str, np.ndarray] = OrderedDict()
        self._nbytes = 0
        self._pid = os.getpid()
        # The prefetch thread and the main thread may read different systems through one cache.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (type(self), (self.maxsize,))

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, key: str, opener: Callable[[], Any]) -> Any:
        """Return the open file called `key` or its values, opening it with `opener` when it is not open yet."""
        with self._lock:
            if self._pid != os.getpid():
                self._handles.clear()
                self._pid = os.getpid()
            for kept in (self._values, self._handles):
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            handle = opener()
            if isinstance(handle, np.ndarray):
                self.keep(key, handle)
                return handle
            self._handles[key] = handle
            while len(self._handles) > self.maxsize:
                self._handles.popitem(last=False)
            return handle

    def keep(self, key: str, values: np.ndarray) -> None:
        """Keep the values of a file that has not been opened by `get`."""
        with self._lock:
            if (old := self._values.pop(key, None)) is not None:
                self._nbytes -= old.nbytes + _OF_ARRAY
            self._values[key] = values
            self._nbytes += values.nbytes + _OF_ARRAY
            while self._nbytes > _MOST_BYTES:
                self._nbytes -= self._values.popitem(last=False)[1].nbytes + _OF_ARRAY


class OpenFile:
    """A regular file, open for reading until nobody refers to it.

    Nothing is mapped: where the disk fails or the file is cut short, reading a map ends the process with SIGBUS.
    `status` is that of the file when it was opened.
    """

    def __init__(self, path: str) -> None:
        self._handle, self.status = regular_handle(path)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it was never opened
            os.close(self._handle)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on; threads and forked processes may share the file.

        Raises
        ------
        OSError
            When the file cannot be read or ends before.
        """
        while len(buffer):
            count = os.preadv(self._handle, [buffer], offset)
            if count == 0:
                raise OSError(f"the file ends at byte {offset}, {len(buffer)} bytes too early")
            buffer, offset = buffer[count:], offset + count

    def read(self, length: int, offset: int) -> bytearray:
        """Return `length` bytes from `offset` on; errors as in `read_into`."""
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return data

    def read_bytes(self, length: int, offset: int) -> bytes:
        """Return the same as `read`, without writing zeros first; errors as in `read_into`."""
        data = os.pread(self._handle, length, offset)
        return data if len(data) == length else bytes(self.read(length, offset))


class Store(Protocol):
    """The storage of a system's arrays, as `System` reads it. `path` is relative, like ``set.000/coord.npy``."""

    @property
    def root(self) -> str:
        """Name of the system."""

    @property
    def sampled(self) -> bool:
        """Whether only some frames were examined: others may lack labels, and then their rows are NaN.

        Such a store refuses other values that are not finite itself.
        """

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
    """Size and time stamp of files at their first use.

    A file that is rewritten during a run would change the data silently.
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
            raise SystemFormatError(
                system, path, f"cannot be looked at: {error.strerror}"
            ) from error
        self.compare(system, path, status)

    def compare(self, system: str, path: str, status: os.stat_result) -> None:
        """Do the same with the status of a file that has been opened."""
        found = (status.st_size, status.st_mtime_ns)
        first = self._seen.setdefault(path, found)
        if found != first:
            change = (
                f"{first[0]} bytes, now {found[0]}"
                if found[0] != first[0]
                else f"{found[0]} bytes, written again"
            )
            raise SystemFormatError(
                system,
                path,
                f"has changed while it was in use ({change}); start again with data that stay as they are",
            )


def check_array(
    system: str, path: str, shape: tuple[int, ...] | None, dtype: np.dtype
) -> tuple[int, ...]:
    """Return the shape of an array that holds real numbers.

    Raises
    ------
    SystemFormatError
        For values of other kinds, whose conversion would drop imaginary parts or read text, and for none at all.
    """
    if dtype.kind not in "fiu":
        raise SystemFormatError(
            system, path, f"expected real numbers, found values of dtype {dtype}"
        )
    if shape is None:
        raise SystemFormatError(system, path, "expected an array, found an empty dataset")
    return shape
