"""Systems as folders of npy files."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from tokenize import TokenError

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.storage import FileWatch, HandleCache, OpenFile, check_array
from deepmd_muon.files import real_folders

# Files up to this size [bytes], such as energies and cells, are read whole and kept as values
# instead of open.
_FEW_BYTES = 1 << 14
# Bytes of a usual header: numpy fills the first multiple of 64 that has room for axes to grow.
_USUAL_HEADER = 128
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Errors that numpy raises for damaged headers.
_HEADER_ERRORS = (ValueError, EOFError, SyntaxError, RecursionError, MemoryError, TokenError)


def npy_stores(path: str, handles: HandleCache) -> list[NpyStore]:
    """Find all systems at or below a folder, sorted."""
    if not os.path.isdir(path):
        raise SystemNotFoundError(
            f"system {path} does not exist (relative paths start at {os.getcwd()})"
        )
    return [
        NpyStore(folder, handles, subfolders, files)
        for folder, subfolders, files in real_folders(path, refuse_unlisted)
        if "type.raw" in files
    ]


def refuse_unlisted(error: OSError) -> None:
    """Refuse a folder that cannot be listed: its systems would be missing in silence."""
    raise SystemFormatError(
        str(error.filename), "", f"cannot be listed: {error.strerror}"
    ) from error


class NpyStore:
    """A system as a folder of ``type.raw``, ``set.000/coord.npy`` and so on."""

    sampled = False

    def __init__(
        self, root: str, handles: HandleCache, folders: Sequence[str], files: Sequence[str]
    ) -> None:
        self.root = root
        self._sets = sorted(name for name in folders if name.startswith("set."))
        self._names = frozenset((*folders, *files))
        self._handles = handles
        self._watch = FileWatch()
        self._layouts: dict[str, _Layout] = {}

    def sets(self) -> list[str]:
        """Names of the ``set.*`` folders, sorted."""
        return self._sets

    def names(self, folder: str) -> frozenset[str]:
        """Names of the files in `folder`; for the system itself when it was found."""
        if not folder:
            return self._names
        try:
            return frozenset(os.listdir(f"{self.root}/{folder}"))
        except OSError as error:
            raise SystemFormatError(
                self.root, folder, f"cannot be listed: {error.strerror}"
            ) from error

    def words(self, path: str) -> list[str]:
        """Read the words of a text file."""
        try:
            file = OpenFile(f"{self.root}/{path}")
            return file.read(file.status.st_size, 0).decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise SystemFormatError(self.root, path, f"expected text in UTF-8: {error}") from error
        except OSError as error:
            raise self._unreadable(path, error) from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array of real numbers, read from its header."""
        return self._layout(path).shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array; neighbouring ones are read by one call."""
        full_path = f"{self.root}/{path}"
        self._watch.check(self.root, full_path)
        layout = self._layout(path)
        try:
            values = self._handles.get(full_path, lambda: layout.open(full_path))
            if isinstance(values, OpenFile):
                if not single and not layout.fortran:
                    return layout.read_rows(values, indices)
                values = layout.read(values)
        except OSError as error:
            raise self._unreadable(path, error) from error
        return np.asarray((values[None] if single else values)[indices])

    def _layout(self, path: str) -> _Layout:
        """Return where the values are in a file; check the file at its first use."""
        if path in self._layouts:
            return self._layouts[path]
        full_path = f"{self.root}/{path}"
        try:
            file = OpenFile(full_path)
            size = file.status.st_size
            beginning = file.read(min(size, _USUAL_HEADER) if size > _FEW_BYTES else size, 0)
            header_end = _header_end(beginning)
            if len(beginning) < min(header_end, size):
                beginning = file.read(min(header_end, size), 0)
            header = _parse_header(bytes(beginning[:header_end]))
        except OSError as error:
            raise self._unreadable(path, error) from error
        except _HEADER_ERRORS as error:
            problem = str(error).splitlines()[0]
            raise SystemFormatError(
                self.root,
                path,
                f"cannot be read as an npy array ({problem}); write it again with numpy.save",
            ) from error
        self._watch.compare(self.root, full_path, file.status)
        shape, fortran, dtype = header
        shape = check_array(self.root, path, shape, dtype)
        layout = _Layout(
            shape=shape, dtype=dtype, fortran=fortran and len(shape) > 1, offset=header_end
        )
        self._check_size(path, layout, nbytes=size - header_end)
        self._layouts[path] = layout
        if len(beginning) == size and layout.nbytes:
            self._handles.keep(full_path, layout.values(beginning))
        return layout

    def _check_size(self, path: str, layout: _Layout, nbytes: int) -> None:
        """Refuse a file in which another number of bytes follows the header than it says."""
        if nbytes == layout.nbytes:
            return
        header = f"its header says shape {layout.shape} of {layout.dtype} ({layout.nbytes} bytes)"
        if nbytes < layout.nbytes:
            problem = (
                f"truncated: {header}, {nbytes} bytes of data are there; copy or write it again"
            )
        else:
            problem = (
                f"{nbytes - layout.nbytes} bytes follow the array: {header}; a second numpy.save "
                "into one file adds an array that nobody reads, so write one array"
            )
        raise SystemFormatError(self.root, path, problem)

    def _unreadable(self, path: str, error: OSError) -> SystemFormatError:
        return SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """The place of the values in an npy file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def open(self, path: str) -> OpenFile | np.ndarray:
        """Open the file; return the values at once if they are few."""
        file = OpenFile(path)
        return self.read(file) if self.offset + self.nbytes <= _FEW_BYTES else file

    def read(self, file: OpenFile) -> np.ndarray:
        """Read the whole array."""
        return self.values(file.read(self.offset + self.nbytes, 0))

    def values(self, content: bytearray) -> np.ndarray:
        """Return the array of a file with this content."""
        values = np.frombuffer(content, self.dtype, math.prod(self.shape), self.offset)
        return values.reshape(self.shape, order="F" if self.fortran else "C")

    def read_rows(self, file: OpenFile, indices: np.ndarray) -> np.ndarray:
        """Read some rows, each stretch of neighbours by one call of the system."""
        rows = np.empty((len(indices), *self.shape[1:]), dtype=self.dtype)
        target = rows.reshape(-1).view(np.uint8).data
        width = rows.nbytes // len(indices)  # [bytes]
        numbers = indices.tolist()
        start = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                file.read_into(
                    target[start * width : end * width], self.offset + numbers[start] * width
                )
                start = end
        return rows


def _header_end(beginning: bytearray) -> int:
    """Return the number of bytes before the values; all that were read if this is no npy file."""
    if not beginning.startswith(np.lib.format.MAGIC_PREFIX):
        return len(beginning)
    # The length of the header has two bytes in version 1, four bytes later.
    end = 10 if beginning[6:7] == b"\1" else 12
    return end + int.from_bytes(beginning[8:end], "little")


@functools.lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is Fortran's, and dtype.

    Small systems of a data set have the same headers, and numpy takes 60 µs for each.
    """
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    if version not in _READ_HEADER:
        raise ValueError(f"npy format {version}, which numpy.save uses for named fields")
    shape, fortran, dtype = _READ_HEADER[version](file)
    # numpy lets negative sizes through; two of them have a positive product.
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative size")
    return shape, fortran, dtype
