"""The interface between `System` and the storage of its arrays, and helpers of its implementations.

Nothing stays open in a pickle, and after a fork the child opens its own handles.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.files import regular_handle

MAX_HANDLES = 4096
"""One cache keeps at most so many files of data open."""
# Share of the process's limit on open files that one cache takes: training and validation data have
# one each, and checkpoints, libraries and sockets need the rest. The usual limit is 1,024.
_SHARE = 8
_MAX_VALUE_BYTES = 128 << 20  # of the values that one cache keeps
_ARRAY_OVERHEAD = 512  # memory of an array besides its values [bytes]


class Store(Protocol):
    """The storage of a system's arrays. A `path` is relative, like ``set.000/coord.npy``."""

    @property
    def root(self) -> str:
        """Name of the system."""

    @property
    def sampled(self) -> bool:
        """Whether only some frames were examined: others may lack labels, and their rows are NaN.

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
        """Rows `indices` (any order) of an array; `single`: it has no frame axis and is row 0."""


class HandleCache:
    """The files of data that this process holds open, or the values of small ones.

    The least recently used go first. A file is closed when its last user drops it, so a thread can
    read on when the cache has dropped the file. Pickled copies start empty and forked ones without
    files: an HDF5 handle must not be shared between processes. At most `maxsize` files are open, by
    default a share of the limit on open files (``ulimit -n``).
    """

    def __init__(self, maxsize: int | None = None) -> None:
        if maxsize is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            share = MAX_HANDLES if limit == resource.RLIM_INFINITY else limit // _SHARE
            maxsize = max(2, min(share, MAX_HANDLES))
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
        """Return the open file called `key` or its values; call `opener` if neither is there."""
        with self._lock:
            if self._pid != os.getpid():
                self._handles.clear()
                self._pid = os.getpid()
            for cache in (self._values, self._handles):
                if key in cache:
                    cache.move_to_end(key)
                    return cache[key]
            handle = opener()
            if isinstance(handle, np.ndarray):
                self.keep(key, handle)
                return handle
            self._handles[key] = handle
            while len(self._handles) > self.maxsize:
                self._handles.popitem(last=False)
            return handle

    def keep(self, key: str, values: np.ndarray) -> None:
        """Keep the values of a file that `get` has not opened."""
        with self._lock:
            old_values = self._values.pop(key, None)
            if old_values is not None:
                self._nbytes -= old_values.nbytes + _ARRAY_OVERHEAD
            self._values[key] = values
            self._nbytes += values.nbytes + _ARRAY_OVERHEAD
            while self._nbytes > _MAX_VALUE_BYTES:
                _, oldest_values = self._values.popitem(last=False)
                self._nbytes -= oldest_values.nbytes + _ARRAY_OVERHEAD


class OpenFile:
    """A regular file, open for reading until nobody refers to it.

    Nothing is mapped: reading a map ends the process with SIGBUS if the disk fails or the file is
    cut short. `status` is the status of the file when it was opened.
    """

    def __init__(self, path: str) -> None:
        self._handle, self.status = regular_handle(path)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it was never opened
            os.close(self._handle)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Threads and forked processes may share the file.

        Raises
        ------
        OSError
            When the file cannot be read or is too short.
        """
        while len(buffer):
            count = os.preadv(self._handle, [buffer], offset)
            if count == 0:
                raise OSError(f"the file ends at byte {offset}, {len(buffer)} bytes too early")
            buffer = buffer[count:]
            offset += count

    def read(self, length: int, offset: int) -> bytearray:
        """Return `length` bytes from `offset` on; errors as in `read_into`."""
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return data

    def read_bytes(self, length: int, offset: int) -> bytes:
        """Return the same as `read`, without writing zeros first; errors as in `read_into`."""
        data = os.pread(self._handle, length, offset)
        return data if len(data) == length else bytes(self.read(length, offset))


class _FileState(NamedTuple):
    nbytes: int
    mtime_ns: int


class FileWatch:
    """Size and time stamp of files at their first use.

    A file that is rewritten during a run would change the data silently.
    """

    def __init__(self) -> None:
        self._first_states: dict[str, _FileState] = {}

    def check(self, system: str, path: str) -> None:
        """Compare a file with its first state.

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
        state = _FileState(status.st_size, status.st_mtime_ns)
        first_state = self._first_states.setdefault(path, state)
        if state == first_state:
            return
        if state.nbytes != first_state.nbytes:
            change = f"{first_state.nbytes} bytes, now {state.nbytes}"
        else:
            change = f"{state.nbytes} bytes, written again"
        raise SystemFormatError(
            system,
            path,
            f"has changed while it was in use ({change}); start again with data that stay as they "
            "are",
        )


def check_array(
    system: str, path: str, shape: tuple[int, ...] | None, dtype: np.dtype
) -> tuple[int, ...]:
    """Return the shape of an array that holds real numbers.

    Raises
    ------
    SystemFormatError
        For values of other kinds, whose conversion would drop imaginary parts or read text, and for
        none at all.
    """
    if dtype.kind not in "fiu":
        raise SystemFormatError(
            system, path, f"expected real numbers, found values of dtype {dtype}"
        )
    if shape is None:
        raise SystemFormatError(system, path, "expected an array, found an empty dataset")
    return shape
