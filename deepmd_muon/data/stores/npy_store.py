"""Systems as folders of npy files."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from tokenize import TokenError

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.stores.storage import FileWatch, HandleCache, OpenFile, check_array
from deepmd_muon.files import open_regular, real_folders

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Values up to this size [bytes], such as energies and cells, are kept instead of an open file.
_FEW_BYTES = 1 << 14
# Bytes of a header's length.
_LENGTH = {(1, 0): 2, (2, 0): 4}


@functools.lru_cache(maxsize=256)
def _parsed(version: tuple[int, int], header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Parse a header: small systems of a data set have the same ones, and numpy takes 60 µs for each."""
    parsed: tuple[tuple[int, ...], bool, np.dtype] = _READ_HEADER[version](io.BytesIO(header))
    return parsed


@dataclass(frozen=True)
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
        return self.read(file) if self.nbytes <= _FEW_BYTES else file

    def read(self, file: OpenFile) -> np.ndarray:
        """Read the whole array."""
        values = np.frombuffer(file.read(self.nbytes, self.offset), dtype=self.dtype)
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
                file.read_into(target[first * width : last * width], self.offset + numbers[first] * width)
                first = last
        return rows


class NpyStore:
    """A system as a folder of ``type.raw``, ``set.000/coord.npy`` and so on."""

    sampled = False

    def __init__(self, root: str, handles: HandleCache) -> None:
        self.root = root
        self._handles = handles
        self._watch = FileWatch()
        self._layouts: dict[str, _Layout] = {}

    def sets(self) -> list[str]:
        """Names of the ``set.*`` folders, sorted."""
        named = (name for name in self.names("") if name.startswith("set."))
        return sorted(name for name in named if os.path.isdir(os.path.join(self.root, name)))

    def names(self, folder: str) -> frozenset[str]:
        """Names of the files in `folder`."""
        try:
            return frozenset(os.listdir(os.path.join(self.root, folder)))
        except OSError as error:
            raise SystemFormatError(self.root, folder, f"cannot be listed: {error.strerror}") from error

    def words(self, path: str) -> list[str]:
        """Read the words of a text file."""
        try:
            with open_regular(os.path.join(self.root, path)) as file:
                return file.read().decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise SystemFormatError(self.root, path, f"expected text in UTF-8: {error}") from error
        except OSError as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}") from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array of real numbers, read from its header."""
        return self._layout(path, os.path.join(self.root, path)).shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array; neighbouring ones are read by one call."""
        full = os.path.join(self.root, path)
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
            raise SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}") from error

    def _layout(self, path: str, full: str) -> _Layout:
        if path in self._layouts:
            return self._layouts[path]
        self._watch.check(self.root, full)
        try:
            with open_regular(full) as file:
                version = np.lib.format.read_magic(file)
                if version not in _LENGTH:
                    raise ValueError(f"npy format {version}, which numpy.save uses for named fields")
                prefix = file.read(_LENGTH[version])
                header = file.read(int.from_bytes(prefix, "little"))
                shape, fortran, dtype = _parsed(version, prefix + header)
                offset = file.tell()
                found = os.fstat(file.fileno()).st_size - offset
        except OSError as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}") from error
        except (ValueError, EOFError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
            problem = f"cannot be read as an npy array ({str(error).splitlines()[0]}); write it again with numpy.save"
            raise SystemFormatError(self.root, path, problem) from error
        shape = check_array(self.root, path, shape, dtype)
        layout = _Layout(shape, dtype, fortran and len(shape) > 1, offset)
        if found < layout.nbytes:
            told = f"its header says shape {shape} of {dtype} ({layout.nbytes} bytes)"
            problem = f"truncated: {told}, {found} bytes of data are there; copy or write it again"
            raise SystemFormatError(self.root, path, problem)
        self._layouts[path] = layout
        return layout


def npy_stores(path: str, handles: HandleCache) -> Iterator[NpyStore]:
    """Find all systems at or below a folder, sorted."""
    if not os.path.isdir(path):
        raise SystemNotFoundError(f"system {path} does not exist (relative paths start at {os.getcwd()})")
    found = [folder for folder, files in real_folders(path, refuse_unlisted) if "type.raw" in files]
    if not found:
        raise SystemNotFoundError(f"no system found in {path}: neither it nor a folder below has a type.raw")
    for folder in found:
        yield NpyStore(folder, handles)


def refuse_unlisted(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed: systems below it would be missing in silence."""
    raise SystemFormatError(str(error.filename), "", f"cannot be listed: {error.strerror}") from error
