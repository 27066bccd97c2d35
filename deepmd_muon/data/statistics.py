"""Energy per type by least squares, and the file that keeps statistics between runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepmd_muon.data.checks.digest import frames_digest
from deepmd_muon.data.errors import DataError
from deepmd_muon.data.system import System
from deepmd_muon.files import make_folder_of, whole_file

if TYPE_CHECKING:
    import h5py

# Errors of h5py for damaged files.
_H5PY_ERRORS = (
    OSError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    MemoryError,
)


def energy_bias(
    counts: np.ndarray,
    energies: np.ndarray,
    fixed: np.ndarray | None = None,
    rcond: float | None = None,
) -> np.ndarray:
    """Energy per atom of each type that explains the total energies best, by least squares.

    Parameters
    ----------
    counts : ndarray, (nframes, ntypes)
        Atoms of each type.
    energies : ndarray, (nframes,)
        Total energies [eV]; frames with NaN, which have no energy, are left out.
    fixed : ndarray, (ntypes,), optional
        Known energies; NaN for the types to fit.
    rcond : float, optional
        Singular values below this share of the largest count as zero, as in `numpy.linalg.lstsq`.

    Returns
    -------
    ndarray of float64, (ntypes,)
        Energies [eV]; of the solutions the one with the smallest norm, so a type that never occurs
        gets 0.
    """
    atoms = np.array(counts, dtype=np.float64)
    target = np.array(energies, dtype=np.float64).reshape(-1)
    if atoms.ndim != 2 or len(atoms) != len(target):
        raise DataError(f"counts of shape {atoms.shape} do not fit {len(target)} energies")
    labelled = ~np.isnan(target)
    atoms = atoms[labelled]
    target = target[labelled]
    if fixed is None:
        bias: np.ndarray = np.linalg.lstsq(atoms, target, rcond=rcond)[0]
        return bias

    fixed = np.asarray(fixed, dtype=np.float64)
    if fixed.shape != atoms.shape[1:]:
        raise DataError(f"fixed energies of shape {fixed.shape}, expected ({atoms.shape[1]},)")
    is_fixed = ~np.isnan(fixed)
    target = target - atoms[:, is_fixed] @ fixed[is_fixed]
    atoms[:, is_fixed] = 0.0
    bias = np.linalg.lstsq(atoms, target, rcond=rcond)[0]
    bias[is_fixed] = fixed[is_fixed]
    return bias


def data_fingerprint(systems: Sequence[System], numbers: Sequence[np.ndarray] | None = None) -> str:
    """Hash types, positions, cells, labels and parameters of frames, wherever the files are.

    It is a part of the key of `StatFile`. `numbers` are the frames of each system, all by default.
    """
    if numbers is None:
        numbers = [np.arange(system.nframes) for system in systems]
    digests = [
        frames_digest(system, numbers_of_system)
        for system, numbers_of_system in zip(systems, numbers, strict=True)
    ]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


class StatFile:
    """Statistics kept in an HDF5 file between runs, each entry under the hash of its dependencies.

    A changed cutoff, type map or data set makes another key, so that stale numbers are never used.
    Entries of other programs, such as deepmd-kit's statistics, stay. The file is created with the
    first entry and replaced atomically: a run that is killed while it writes leaves the old one.
    """

    GROUP = "deepmd_muon"

    def __init__(self, path: str | os.PathLike[str], mode: str = "update") -> None:
        self.path = Path(path)
        self._mode = mode
        if self.path.is_dir():
            raise DataError(
                f"stat_file {self.path} is a folder; give the name of a file, e.g. stat.hdf5"
            )

    def load(self, key: Mapping[str, object]) -> dict[str, np.ndarray] | None:
        """Return the arrays kept under `key` (plain values that JSON can write), None without them.

        Raises
        ------
        DataError
            If the file is damaged, or has no entry and its mode is "read".
        """
        arrays = self._stored(key)
        if arrays is None and self._mode == "read":
            raise DataError(
                f"stat_file {self.path} has no statistics of this model and these data: set "
                'stat_file_mode to "update" to compute and add them'
            )
        return arrays

    def _stored(self, key: Mapping[str, object]) -> dict[str, np.ndarray] | None:
        if not self.path.is_file():
            return None
        name = _name_of(_text_of(key))
        with self._h5py_errors(), self._open(self.path, "r") as file:
            entry = file.get(f"{self.GROUP}/{name}")
            if entry is None:
                return None
            for array_name, dataset in entry.items():
                if dataset.dtype != np.float64:
                    raise DataError(
                        f"stat_file {self.path}: {array_name} of entry {name} is not a number; "
                        "remove the file"
                    )
            arrays = {array_name: np.asarray(dataset[()]) for array_name, dataset in entry.items()}
            if bytes(entry.attrs["sha256"]) != _checksum(arrays).encode():
                raise DataError(
                    f"stat_file {self.path}: the checksum of entry {name} is another; "
                    "remove the file"
                )
            return arrays

    def save(self, key: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays of numbers under `key`; replace those that are there."""
        text = _text_of(key)
        name = _name_of(text)
        arrays = {
            array_name: np.asarray(array, dtype=np.float64) for array_name, array in arrays.items()
        }
        make_folder_of(self.path)
        exists = self.path.is_file()
        content = io.BytesIO(self.path.read_bytes() if exists else b"")
        with self._h5py_errors(), self._open(content, "r+" if exists else "w") as file:
            group = file.require_group(self.GROUP)
            if name in group:
                del group[name]
            entry = group.create_group(name)
            # Strings of variable length would lie in a heap without checksums. If it were damaged,
            # HDF5 could search it for ever.
            entry.attrs["key"] = np.bytes_(text)
            entry.attrs["sha256"] = np.bytes_(_checksum(arrays))
            for array_name, array in arrays.items():
                entry[array_name] = array
        with whole_file(self.path) as output:
            output.write(content.getbuffer())

    @contextmanager
    def _h5py_errors(self) -> Iterator[None]:
        """Report errors of h5py about a damaged file."""
        try:
            yield
        except DataError:
            raise
        except _H5PY_ERRORS as error:
            raise DataError(
                f"stat_file {self.path} is damaged ({error}); remove the file"
            ) from error

    def _open(self, path: Path | io.BytesIO, mode: str) -> h5py.File:
        import h5py

        try:
            # From 1.10 on, HDF5 keeps checksums of its metadata. Damaged older metadata can make it
            # run for ever.
            return h5py.File(path, mode, libver="v110")
        except OSError as error:
            raise DataError(
                f"stat_file {self.path} is not an HDF5 file ({error}); remove it or set another "
                "stat_file"
            ) from error


def _text_of(key: Mapping[str, object]) -> str:
    return json.dumps(key, sort_keys=True)


def _name_of(text: str) -> str:
    """Return the name of the entry of a key."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Hash names, dtypes, shapes and values of arrays: HDF5 keeps no checksums by default."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {np.shape(arrays[name])}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
