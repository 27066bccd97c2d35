"""The cache of neighbour lists that training reads, and the neighbour statistics of a data set."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np

from deepmd_muon.data.errors import NeighborError, naming_frame
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.lists import (
    FrameNeighbors,
    NeighborList,
    NeighborStatistics,
    build_neighbors,
    frame_statistics,
    group_limits,
    stack_neighbors,
)
from deepmd_muon.data.system import System

log = logging.getLogger(__name__)

#: Most frames read at once while going through a system, and most atoms in them.
CHUNK = 64
CHUNK_ATOMS = 8192
# Atoms of a cell [1/Å³]: diamond has 0.18, hydrogen in a shock wave 1; positions in nm are a
# thousand times too dense.
_DENSEST = 10.0
# Seconds between two lines on how far the counting is.
_LOG_INTERVAL = 10.0


class NeighborRequest(Protocol):
    """The neighbour lists that a descriptor reads; attributes are parameters of `NeighborCache`."""

    @property
    def rcut(self) -> float:
        """Cut-off radius [Å]."""

    @property
    def sel(self) -> Sequence[int]:
        """Most neighbours kept per type."""

    @property
    def by_type(self) -> bool:
        """Whether the columns are grouped by the neighbour's type."""

    @property
    def inner(self) -> Sequence[tuple[float, int]]:
        """Shorter cut-offs [Å] and the most neighbours within each."""

    @property
    def bound_edges(self) -> bool:
        """Whether batches have a bound of the neighbours of all atoms together."""


class NeighborCache:
    """Neighbour lists of frames, each built once and kept while the memory budget lasts.

    Frames are kept in the layout of a batch, so that a batch of one frame is a view. When the
    budget is spent, the cache builds further frames at every call and drops none: training visits
    each frame once an epoch, so it needs the least recently used frame next.

    Parameters
    ----------
    rcut : float
        Cut-off radius [Å].
    sel : sequence of int, optional
        Most neighbours kept per type; None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    max_bytes : int
        Memory budget.
    ntypes : int, optional
        Number of types of the model; ``len(sel)`` when left out.
    inner : sequence of (float, int)
        Shorter cut-offs, see `build_neighbors`.
    bound_edges : bool
        Whether batches on a device have a bound of the neighbours of all atoms together.

    Attributes
    ----------
    nbytes : int
        Memory in use.
    dropped : int
        Neighbours beyond `sel` left out so far, over all frames that were built.
    """

    def __init__(
        self,
        rcut: float,
        sel: Sequence[int] | None,
        by_type: bool,
        max_bytes: int = 2 << 30,
        ntypes: int | None = None,
        inner: Sequence[tuple[float, int]] = (),
        bound_edges: bool = False,
    ) -> None:
        if not rcut > 0:
            raise NeighborError(f"rcut must be positive, found {rcut}")
        if ntypes is None:
            if sel is None or not by_type:
                raise NeighborError(
                    "give ntypes: it cannot be inferred without a sel for each type"
                )
            ntypes = len(sel)
        self.rcut = rcut
        self.sel = None if sel is None else tuple(sel)
        self.by_type = by_type
        self.max_bytes = max_bytes
        self.ntypes = ntypes
        self.inner = tuple(inner)
        self.bound_edges = bound_edges
        self.nbytes = 0
        self.dropped = 0
        self._limits = group_limits(sel, by_type, ntypes)
        self._frames: dict[tuple[str, int], FrameNeighbors] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, request: NeighborRequest, ntypes: int, max_bytes: int = 2 << 30) -> NeighborCache:
        """Return the cache of the lists that a descriptor reads."""
        return cls(
            rcut=request.rcut,
            sel=request.sel,
            by_type=request.by_type,
            max_bytes=max_bytes,
            ntypes=ntypes,
            inner=request.inner,
            bound_edges=request.bound_edges,
        )

    def __len__(self) -> int:
        return len(self._frames)

    def frame(self, system: System, number: int, frames: Frames, row: int) -> FrameNeighbors:
        """Return the neighbours of frame `number` of a system, which is row `row` of `frames`.

        Raises
        ------
        NeighborError
            When they cannot be built; names system and frame.
        """
        key = (system.name, number)
        cached = self._frames.get(key)
        if cached is not None:
            return cached
        with naming_frame(number, system.name):
            built = build_neighbors(
                coord=frames.coord[row],
                box=_cell(system, frames, row),
                atype=frames.atype[row],
                rcut=self.rcut,
                sel=self.sel,
                by_type=self.by_type,
                ntypes=self.ntypes,
                inner=self.inner,
            )
        with self._lock:
            self.dropped += built.dropped
            # Another thread may have built the same frame meanwhile.
            if key not in self._frames and self.nbytes + built.nbytes <= self.max_bytes:
                self._frames[key] = built
                self.nbytes += built.nbytes
        return built

    def statistics(
        self, system: System, number: int, frames: Frames, row: int
    ) -> NeighborStatistics:
        """Count the neighbours of a frame without building its list; arguments as in `frame`."""
        cached = self._frames.get((system.name, number))
        if cached is not None:
            return cached.statistics
        counted = _count(system, number, frames, row, rcut=self.rcut, ntypes=self.ntypes)
        self.note_most(np.array(counted.max_neighbors), counted.max_total)
        return counted

    def note_most(self, of_types: np.ndarray, total: int) -> None:
        """Note in `dropped` whether `sel` cuts lists of atoms with so many neighbours.

        `of_types` counts the neighbours of each type `(ntypes,)`, `total` the
        neighbours of all types.
        """
        columns = of_types if self.by_type else np.array([total])
        # float64: the sum of limits that are not set exceeds int64.
        if (columns > self._limits).any() or total > self._limits.sum(dtype=np.float64):
            self.dropped = max(1, self.dropped)

    def batch(
        self, system: System, indices: Sequence[int] | np.ndarray, frames: Frames
    ) -> NeighborList:
        """Return the neighbours of a batch of frames of one system; `frames` are those frames.

        A batch of one frame is a view of the cache: do not write into it.
        """
        return stack_neighbors(
            [self.frame(system, int(number), frames, row) for row, number in enumerate(indices)]
        )


def _cell(system: System, frames: Frames, row: int) -> np.ndarray | None:
    return frames.box[row] if system.pbc and frames.box is not None else None


def _count(
    system: System, number: int, frames: Frames, row: int, *, rcut: float, ntypes: int
) -> NeighborStatistics:
    """Count the neighbours of frame `number` of a system, which is row `row` of `frames`."""
    with naming_frame(number, system.name):
        return frame_statistics(
            coord=frames.coord[row],
            box=_cell(system, frames, row),
            atype=frames.atype[row],
            rcut=rcut,
            ntypes=ntypes,
        )


# ----- statistics of a data set ------------------------------------------------------------------


def worker_count() -> int:
    """Return the number of threads that search for neighbours: one a core, at most 8."""
    if not hasattr(os, "sched_getaffinity"):
        return min(8, os.cpu_count() or 1)
    return min(8, len(os.sched_getaffinity(0)))


class _Chunk(NamedTuple):
    """Frames of a system that one thread reads and counts."""

    system: System
    numbers: np.ndarray
    listed: np.ndarray | None  # frames of the system that the cache keeps lists of; None for all


def neighbor_statistics(
    systems: Sequence[System],
    rcut: float,
    cache: NeighborCache | None = None,
    workers: int | None = None,
    numbers: Sequence[np.ndarray] | None = None,
    listed: Sequence[np.ndarray] | None = None,
) -> NeighborStatistics:
    """Go through frames for the numbers that ``sel`` is chosen from.

    Parameters
    ----------
    systems : sequence of System
        The training data.
    rcut : float
        Cut-off radius [Å].
    cache : NeighborCache, optional
        Take lists from it and leave new ones in it; must have the same cut-off.
    workers : int, optional
        Threads (the search itself runs outside of Python's lock); see `worker_count`.
    numbers : sequence of ndarray, optional
        Frames of each system; all of them when left out.
    listed : sequence of ndarray, optional
        Frames of each system that the cache builds lists of; all that are counted when left out.
        Counting is faster.

    Raises
    ------
    NeighborError
        When atoms coincide, a cell has no volume or is denser than any matter, or `cache` has
        another cut-off.

    Notes
    -----
    Atoms outside of their cell are counted like all others. deepmd-kit 3.2.0's ``neighbor-stat``
    does not move them back before it adds images, so for unwrapped trajectories it may report fewer
    neighbours.
    """
    ntypes = max(number_of_types(system) for system in systems)
    if cache is not None and (cache.rcut != rcut or cache.ntypes != ntypes):
        raise NeighborError(
            f"the cache is for rcut {cache.rcut} Å and {cache.ntypes} types, "
            f"statistics are wanted for {rcut} Å and {ntypes} types"
        )

    chunks = []
    for k, system in enumerate(systems):
        numbers_of_system = np.arange(system.nframes) if numbers is None else numbers[k]
        step = max(1, min(CHUNK, CHUNK_ATOMS // system.natoms))
        for begin in range(0, len(numbers_of_system), step):
            chunk_numbers = numbers_of_system[begin : begin + step]
            chunks.append(_Chunk(system, chunk_numbers, None if listed is None else listed[k]))

    nothing = NeighborStatistics(np.inf, (0,) * ntypes, 0)

    def count(chunk: _Chunk) -> NeighborStatistics:
        system = chunk.system
        frames = system.frames(chunk.numbers)
        check_density(system, chunk.numbers, frames)
        is_listed = np.ones(len(chunk.numbers), dtype=bool)
        if chunk.listed is not None:
            is_listed = np.isin(chunk.numbers, chunk.listed)
        total = nothing
        for row, number in enumerate(chunk.numbers.tolist()):
            if cache is None:
                of_frame = _count(system, number, frames, row, rcut=rcut, ntypes=ntypes)
            elif is_listed[row]:
                of_frame = cache.frame(system, number, frames, row).statistics
            else:
                of_frame = cache.statistics(system, number, frames, row)
            total = total.merge(of_frame)
        return total

    threads = workers or worker_count()
    with ThreadPoolExecutor(threads, thread_name_prefix="deepmd_muon-neighbors") as pool:
        results = _log_progress(pool.map(count, chunks), len(chunks))
        return reduce(NeighborStatistics.merge, results, nothing)


def _log_progress(
    results: Iterable[NeighborStatistics], total: int
) -> Iterator[NeighborStatistics]:
    """Yield results; log the progress at intervals."""
    started = time.monotonic()
    last_line = started
    for done, result in enumerate(results, 1):
        now = time.monotonic()
        if now - last_line > _LOG_INTERVAL and done < total:
            last_line = now
            remaining = (now - started) * (total - done) / done
            percent = 100 * done / total
            log.info("counting neighbours: %.0f %% done, about %.0f s left", percent, remaining)
        yield result


def check_density(system: System, numbers: np.ndarray, frames: Frames) -> None:
    """Reject cells denser than any matter, a mistake in units that would take minutes to count."""
    if frames.box is None:
        return
    volume = np.abs(np.linalg.det(frames.box))
    density = (frames.atype >= 0).sum(axis=1) / np.where(volume > 1e-300, volume, np.inf)
    densest = int(density.argmax())
    if density[densest] > _DENSEST:
        raise NeighborError(
            f"system {system.name}, frame {numbers[densest]}: {density[densest]:.3g} atoms per Å³ "
            "(diamond has 0.18); box and coord must be in Å (nm would look like this)"
        )


def number_of_types(system: System) -> int:
    """Return the number of types: of the type map, else the largest type that occurs plus one."""
    if system.type_map is not None:
        return len(system.type_map)
    return int(system.types(np.arange(1)).max()) + 1
