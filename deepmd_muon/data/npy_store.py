"""Systems as folders of npy files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, SystemNotFoundError
from deepmd_muon.data.storage import FileWatch, HandleCache, check_array
from deepmd_muon.files import open_regular

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class NpyStore:
    """A system as a folder of ``type.raw``, ``set.000/coord.npy`` and so on."""

    def __init__(self, root: str, handles: HandleCache) -> None:
        self._root = root
        self._handles = handles
        self._watch = FileWatch()

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
        try:
            with open_regular(os.path.join(self.root, path)) as file:
                return file.read().decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise SystemFormatError(self.root, path, f"expected text in UTF-8: {error}") from error
        except OSError as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}") from error

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array of real numbers, read from its header."""
        full = os.path.join(self.root, path)
        self._watch.check(self.root, full)
        try:
            with open_regular(full) as file:
                version = np.lib.format.read_magic(file)
                if version not in _READ_HEADER:
                    raise ValueError(f"npy format {version}, which numpy.save uses for named fields")
                shape, _, dtype = _READ_HEADER[version](file)
                found = os.fstat(file.fileno()).st_size - file.tell()
        except OSError as error:
            raise SystemFormatError(self.root, path, f"cannot be read: {error.strerror or error}") from error
        except (ValueError, EOFError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
            problem = f"cannot be read as an npy array ({str(error).splitlines()[0]}); write it again with numpy.save"
            raise SystemFormatError(self.root, path, problem) from error
        shape = check_array(self.root, path, shape, dtype)
        expected = math.prod(shape) * dtype.itemsize
        if found < expected:
            raise SystemFormatError(
                self.root,
                path,
                f"truncated: its header says shape {shape} of {dtype} ({expected} bytes), "
                f"{found} bytes of data are there; copy or write it again",
            )
        return shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array; only their pages are read."""
        full = os.path.join(self.root, path)
        self._watch.check(self.root, full)
        array = self._handles.get(full, lambda: self._map(path))
        taken: np.ndarray = np.asarray(array[None] if single else array)[indices]
        return taken

    def _map(self, path: str) -> np.ndarray:
        self.shape(path)
        try:
            array: np.ndarray = np.load(os.path.join(self.root, path), mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise SystemFormatError(self.root, path, f"cannot be read as an npy array: {error}") from error
        return array


def npy_stores(path: str, handles: HandleCache) -> Iterator[NpyStore]:
    """Find all systems at or below a folder, sorted."""
    if not os.path.isdir(path):
        raise SystemNotFoundError(f"system {path} does not exist (relative paths start at {os.getcwd()})")
    found = [folder for folder, files in real_folders(path) if "type.raw" in files]
    if not found:
        raise SystemNotFoundError(f"no system found in {path}: neither it nor a folder below has a type.raw")
    for folder in found:
        yield NpyStore(folder, handles)


def real_folders(root: str) -> list[tuple[str, list[str]]]:
    """Return folders at or below `root` but for sets, sorted, with their files; each is met once, links or not."""
    seen: set[str] = set()
    found: list[tuple[str, list[str]]] = []
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("set."))
        found.append((folder, files))
    return sorted(found)
