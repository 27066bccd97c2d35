"""Statistics of the data: neighbours, energy per type, and the file that keeps them between runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.loader import number_of_types
from deepmd_muon.data.neighbors import FrameNeighbors, NeighborCache
from deepmd_muon.data.system import System

#: Frames read at once while going through a system.
CHUNK = 64


@dataclass(frozen=True)
class NeighborStatistics:
    """What the neighbour lists of all frames have in common.

    Attributes
    ----------
    min_distance : float
        Shortest distance between two atoms [Å]; infinite when none are within the cutoff.
    max_neighbors : tuple of int, (ntypes,)
        Most neighbours of each type that any atom has within the cutoff.
    max_total : int
        Most neighbours of all types.
    """

    min_distance: float
    max_neighbors: tuple[int, ...]
    max_total: int


def neighbor_statistics(
    systems: Sequence[System],
    rcut: float,
    cache: NeighborCache | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> NeighborStatistics:
    """Go through every frame for the numbers that ``sel`` is chosen from.

    Parameters
    ----------
    systems : sequence of System
        The training data.
    rcut : float
        Cutoff radius [Å].
    cache : NeighborCache, optional
        Take lists from it and leave new ones in it; must have the same cutoff.
    workers : int, optional
        Threads (the search itself runs outside of Python's lock); as many as the process may use, at most 8.
    progress : callable, optional
        Called with the number of frames of each chunk that is done.

    Raises
    ------
    NeighborError
        When atoms coincide or a cell has no volume.
    DataError
        When `cache` has another cutoff.
    """
    ntypes = max(number_of_types(system) for system in systems)
    if cache is None:
        cache = NeighborCache(rcut, None, by_type=False, max_bytes=0, ntypes=ntypes)
    elif cache.rcut != rcut:
        raise DataError(
            f"the neighbour cache has a cutoff of {cache.rcut} Å, statistics are wanted for {rcut} Å"
        )
    if workers is None:
        workers = min(
            8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    kept = cache

    def chunk(job: tuple[System, int]) -> list[FrameNeighbors]:
        system, first = job
        numbers = np.arange(first, min(first + CHUNK, system.nframes))
        frames = system.frames(numbers)
        return [kept.frame(system, int(n), frames, row) for row, n in enumerate(numbers)]

    jobs = [(system, first) for system in systems for first in range(0, system.nframes, CHUNK)]
    closest = math.inf
    most = np.zeros(ntypes, dtype=np.int64)
    total = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="deepmd_muon-neighbors") as pool:
        for found in pool.map(chunk, jobs):
            closest = min(closest, *(f.min_distance for f in found))
            most = np.maximum(most, np.max([f.max_neighbors for f in found], axis=0))
            total = max(total, *(f.max_total for f in found))
            if progress is not None:
                progress(len(found))
    return NeighborStatistics(closest, tuple(int(n) for n in most), total)


def energy_bias(
    counts: np.ndarray, energies: np.ndarray, fixed: np.ndarray | None = None, rcond: float | None = None
) -> np.ndarray:
    """Energy per atom of each type that explains the total energies best, by least squares.

    Parameters
    ----------
    counts : ndarray, (nframes, ntypes)
        Atoms of each type.
    energies : ndarray, (nframes,)
        Total energies [eV].
    fixed : ndarray, (ntypes,), optional
        Energies that are given; NaN for types that are to be found.
    rcond : float, optional
        Singular values below this share of the largest count as zero, as in `numpy.linalg.lstsq`.

    Returns
    -------
    ndarray of float64, (ntypes,)
        Energies [eV]; of the solutions the one with the smallest norm, so a type that never occurs gets 0.
    """
    atoms = np.array(counts, dtype=np.float64)
    target = np.array(energies, dtype=np.float64).reshape(-1)
    if atoms.ndim != 2 or len(atoms) != len(target):
        raise DataError(f"counts of shape {atoms.shape} do not fit {len(target)} energies")
    given = np.zeros(atoms.shape[1], dtype=bool)
    if fixed is not None:
        fixed = np.asarray(fixed, dtype=np.float64)
        if fixed.shape != given.shape:
            raise DataError(f"fixed energies of shape {fixed.shape}, expected ({len(given)},)")
        given = ~np.isnan(fixed)
        target = target - atoms[:, given] @ fixed[given]
        atoms[:, given] = 0.0
    bias = np.linalg.lstsq(atoms, target, rcond=rcond)[0]
    if fixed is not None:
        bias[given] = fixed[given]
    return bias


def data_fingerprint(systems: Sequence[System]) -> str:
    """Hash of the training data, independent of where they lie; part of the key of `StatFile`."""
    return hashlib.sha256("\n".join(system.fingerprint() for system in systems).encode()).hexdigest()


class StatFile:
    """Statistics kept in an HDF5 file between runs, each entry under the hash of what it depends on.

    A changed cutoff, type map or data set makes another key, so that stale numbers are never used. What
    others have in the file (deepmd-kit keeps its own statistics there) is left alone. The file is replaced in
    one step: a run that is killed while it writes leaves the old one.

    Parameters
    ----------
    path : str or Path
        The file; created with the first entry.
    """

    GROUP = "deepmd_muon"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise DataError(f"stat_file {self.path} is a folder; give the name of a file, e.g. stat.hdf5")

    @staticmethod
    def _name(key: Mapping[str, object]) -> tuple[str, str]:
        text = json.dumps(key, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32], text

    def load(self, key: Mapping[str, object]) -> dict[str, np.ndarray] | None:
        """Return the arrays kept under `key` (plain values that JSON can write), None when there are none."""
        if not self.path.is_file():
            return None
        name, _ = self._name(key)
        with self._open(self.path, "r") as file:
            entry = file.get(f"{self.GROUP}/{name}")
            return None if entry is None else {k: np.asarray(v[()]) for k, v in entry.items()}

    def save(self, key: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        """Keep arrays under `key`, in place of what was there."""
        name, text = self._name(key)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        os.close(handle)
        try:
            if self.path.is_file():
                Path(temporary).write_bytes(self.path.read_bytes())
            # An empty file is no HDF5 file: "w" makes one.
            with self._open(Path(temporary), "r+" if self.path.is_file() else "w") as file:
                group = file.require_group(self.GROUP)
                if name in group:
                    del group[name]
                entry = group.create_group(name)
                entry.attrs["key"] = text
                for k, v in arrays.items():
                    entry[k] = np.asarray(v)
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _open(self, path: Path, mode: str) -> h5py.File:
        try:
            return h5py.File(path, mode)
        except OSError as error:
            raise DataError(
                f"stat_file {self.path} is no HDF5 file ({error}); remove it or name another"
            ) from error
