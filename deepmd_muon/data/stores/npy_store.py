"""Systems as folders of npy files."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tokenize import TokenError

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.storage import FileWatch, HandleCache, OpenFile, check_array
from deepmd_muon.files import real_folders

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Files up to this size [bytes], such as energies and cells, are read whole and kept as values instead of open.
_FEW_BYTES = 1 << 14
# Bytes of a usual header: numpy fills the first multiple of 64 that has room for axes to grow.
_USUAL_HEADER = 128


@functools.lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Parse a header: small systems of a data set have the same ones, and numpy takes 60 µs for each."""
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    if version not in _READ_HEADER:
        raise ValueError(f"npy format {version}, which numpy.save uses for named fields")
    parsed: tuple[tuple[int, ...], bool, np.dtype] = _READ_HEADER[version](file)
    if any(
        size < 0 for size in parsed[0]
    ):  # numpy lets them through; two of them have a positive product
        raise ValueError(f"shape {parsed[0]} has a negative size")
    return parsed


def _header_end(begin: bytearray) -> int:
    """Return the number of bytes before the values; of a file that is not in npy format, all that were read."""
    if not begin.startswith(np.lib.format.MAGIC_PREFIX):
        return len(begin)
    end = 10 if begin[6:7] == b"\1" else 12  # of the length, two or four bytes
    return end + int.from_bytes(begin[8:end], "little")


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
        """Open the file; return the values at once where they are few."""
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
        width = rows.nbytes // len(indices)
        numbers = indices.tolist()
        first = 0
        for last in range(1, len(numbers) + 1):
            if last == len(numbers) or numbers[last] != numbers[last - 1] + 1:
                file.read_into(
                    target[first * width : last * width], self.offset + numbers[first] * width
                )
                first = last
        return rows


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
        """Names of the files in `folder`; those of the system itself as they were found."""
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
            raise SystemFormatError(
                self.root, path, f"cannot be read: {error.strerror or error}"
            ) from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array of real numbers, read from its header."""
        return self._layout(path, f"{self.root}/{path}").shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array; neighbouring ones are read by one call."""
        full = f"{self.root}/{path}"
        self._watch.check(self.root, full)
        layout = self._layout(path, full)
        try:
            kept = self._handles.get(full, lambda: layout.open(full))
            if isinstance(kept, np.ndarray):
                return np.asarray((kept[None] if single else kept)[indices])
            if single or layout.fortran:
                whole = layout.read(kept)
                return np.asarray((whole[None] if single else whole)[indices])
            return layout.read_rows(kept, indices)
        except OSError as error:
            raise SystemFormatError(
                self.root, path, f"cannot be read: {error.strerror or error}"
            ) from error

    def _layout(self, path: str, full: str) -> _Layout:
        if path in self._layouts:
            return self._layouts[path]
        try:
            file = OpenFile(full)
            size = file.status.st_size
            begin = file.read(min(size, _USUAL_HEADER) if size > _FEW_BYTES else size, 0)
            end = _header_end(begin)
            if len(begin) < min(end, size):
                begin = file.read(min(end, size), 0)
            shape, fortran, dtype = _parsed(bytes(begin[:end]))
        except OSError as error:
            raise SystemFormatError(
                self.root, path, f"cannot be read: {error.strerror or error}"
            ) from error
        except (
            ValueError,
            EOFError,
            SyntaxError,
            RecursionError,
            MemoryError,
            TokenError,
        ) as error:
            problem = f"cannot be read as an npy array ({str(error).splitlines()[0]}); write it again with numpy.save"
            raise SystemFormatError(self.root, path, problem) from error
        self._watch.compare(self.root, full, file.status)
        shape = check_array(self.root, path, shape, dtype)
        layout = _Layout(shape, dtype, fortran and len(shape) > 1, end)
        if size - end < layout.nbytes:
            told = f"its header says shape {shape} of {dtype} ({layout.nbytes} bytes)"
            problem = (
                f"truncated: {told}, {size - end} bytes of data are there; copy or write it again"
            )
            raise SystemFormatError(self.root, path, problem)
        if size - end > layout.nbytes:
            told = f"its header says shape {shape} of {dtype} ({layout.nbytes} bytes)"
            problem = (
                f"{size - end - layout.nbytes} bytes follow the array: {told}; a second numpy.save "
                "into one file adds an array that nobody reads, so write one array"
            )
            raise SystemFormatError(self.root, path, problem)
        self._layouts[path] = layout
        if len(begin) == size and layout.nbytes:
            self._handles.keep(full, layout.values(begin))
        return layout


def npy_stores(path: str, handles: HandleCache) -> Iterator[NpyStore]:
    """Find all systems at or below a folder, sorted."""
    if not os.path.isdir(path):
        raise SystemNotFoundError(
            f"system {path} does not exist (relative paths start at {os.getcwd()})"
        )
    found = [listed for listed in real_folders(path, refuse_unlisted) if "type.raw" in listed[2]]
    if not found:
        raise SystemNotFoundError(
            f"no system found in {path}: neither it nor a folder below has a type.raw"
        )
    for folder, below, files in found:
        yield NpyStore(folder, handles, below, files)


def refuse_unlisted(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed: systems below it would be missing in silence."""
    raise SystemFormatError(
        str(error.filename), "", f"cannot be listed: {error.strerror}"
    ) from error
