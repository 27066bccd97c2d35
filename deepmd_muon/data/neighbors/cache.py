"""Neighbour lists that are built once: the cache that training reads, and the statistics of a data set."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Protocol

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
from deepmd_muon.data.neighbors.together import count_together
from deepmd_muon.data.system import System

log = logging.getLogger(__name__)

#: Most frames read at once while going through a system, and most atoms in them.
CHUNK = 64
CHUNK_ATOMS = 8192
#: Seconds between two lines on how far the counting is.
_LOG_INTERVAL = 10.0
#: Atoms of a cell [1/Å³]: diamond has 0.18, hydrogen in a shock wave 1; positions in nm are a thousand times too dense.
DENSEST = 10.0


class NeighborRequest(Protocol):
    """The neighbour lists that a descriptor reads; attributes as the parameters of `NeighborCache`."""

    @property
    def rcut(self) -> float:
        """Cutoff radius [Å]."""

    @property
    def sel(self) -> Sequence[int]:
        """Most neighbours kept per type."""

    @property
    def by_type(self) -> bool:
        """Whether the columns are grouped by the neighbour's type."""

    @property
    def inner(self) -> Sequence[tuple[float, int]]:
        """Shorter cutoffs [Å] and the most neighbours within each."""


class NeighborCache:
    """Neighbour lists of frames, each built once and kept while the memory budget lasts.

    Frames are kept in the layout of a batch, so that a batch of one frame is a view. When the budget is spent,
    further frames are built anew each time and nothing is thrown out: training visits each frame once an epoch,
    so the least recently used one is among those needed next.

    Parameters
    ----------
    rcut : float
        Cutoff radius [Å].
    sel : sequence of int, optional
        Most neighbours kept per type; None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    max_bytes : int
        Memory budget.
    ntypes : int, optional
        Number of types of the model; ``len(sel)`` when left out.
    inner : sequence of (float, int)
        Shorter cutoffs, see `build_neighbors`.

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
        self.nbytes = 0
        self.dropped = 0
        self._limits = group_limits(sel, by_type, ntypes)
        self._frames: dict[tuple[str, int], FrameNeighbors] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, request: NeighborRequest, ntypes: int, max_bytes: int = 2 << 30) -> NeighborCache:
        """Return the cache of the lists that a descriptor reads."""
        return cls(
            request.rcut, request.sel, request.by_type, max_bytes, ntypes, inner=request.inner
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
        found = self._frames.get(key)
        if found is not None:
            return found
        box = frames.box[row] if system.pbc and frames.box is not None else None
        with naming_frame(number, system.name):
            built = build_neighbors(
                frames.coord[row],
                box,
                frames.atype[row],
                self.rcut,
                self.sel,
                self.by_type,
                self.ntypes,
                self.inner,
            )
        with self._lock:
            self.dropped += built.dropped
            if key not in self._frames and self.nbytes + built.nbytes <= self.max_bytes:
                self._frames[key] = built
                self.nbytes += built.nbytes
        return built

    def statistics(
        self, system: System, number: int, frames: Frames, row: int
    ) -> NeighborStatistics:
        """Return the statistics of a frame whose list is not wanted; arguments and errors as in `frame`."""
        found = self._frames.get((system.name, number))
        if found is not None:
            return found.statistics
        counted = _counted(system, number, frames, row, self.rcut, self.ntypes)
        self.note_most(np.array(counted.max_neighbors), counted.max_total)
        return counted

    def note_most(self, of_types: np.ndarray, total: int) -> None:
        """Note in `dropped` whether `sel` cuts lists of atoms with so many neighbours of each type, and of all."""
        columns = of_types if self.by_type else np.array([total])
        # As float64: the sum of limits that are not set exceeds int64.
        if (columns > self._limits).any() or total > self._limits.sum(dtype=np.float64):
            self.dropped = max(1, self.dropped)

    def batch(
        self, system: System, indices: Sequence[int] | np.ndarray, frames: Frames
    ) -> NeighborList:
        """Return the neighbours of a batch of frames of one system; `frames` are those frames.

        A batch of one frame is a view of the cache: do not write into it.
        """
        return stack_neighbors(
            [self.frame(system, int(n), frames, row) for row, n in enumerate(indices)]
        )


def worker_count() -> int:
    """Return how many threads search for neighbours beside each other: as many as the process may use, at most 8."""
    return min(
        8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


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
        Cutoff radius [Å].
    cache : NeighborCache, optional
        Take lists from it and leave new ones in it; must have the same cutoff.
    workers : int, optional
        Threads (the search itself runs outside of Python's lock); see `worker_count`.
    numbers : sequence of ndarray, optional
        Frames of each system; all of them when left out.
    listed : sequence of ndarray, optional
        Frames of each system whose lists the cache shall hold; all that are counted when left out. Counting is faster.

    Raises
    ------
    NeighborError
        When atoms coincide, a cell has no volume or is denser than any matter, or `cache` has another cutoff.

    Notes
    -----
    Atoms outside of their cell are counted like all others. deepmd-kit 3.2.0's ``neighbor-stat`` does not move
    them back before it adds images, so for unwrapped trajectories it may report fewer neighbours.
    """
    ntypes = max(number_of_types(system) for system in systems)
    if cache is not None and (cache.rcut != rcut or cache.ntypes != ntypes):
        raise NeighborError(
            f"the cache is for rcut {cache.rcut} Å and {cache.ntypes} types, "
            f"statistics are wanted for {rcut} Å and {ntypes} types"
        )

    nothing = NeighborStatistics(np.inf, (0,) * ntypes, 0)
    shortest = np.inf  # of the chunks that are done

    def chunk(job: tuple[System, np.ndarray, np.ndarray | None]) -> NeighborStatistics:
        nonlocal shortest
        system, chosen, wanted = job
        frames = system.frames(chosen)
        _check_density(system, chosen, frames)
        kept = np.zeros(len(chosen), dtype=bool)
        if cache is not None:
            kept = ~kept if wanted is None else np.isin(chosen, wanted)
        found, rest = _count_others(frames, kept, rcut, ntypes, shortest)
        if cache is not None:
            cache.note_most(np.array(found.max_neighbors), found.max_total)
        for row in np.flatnonzero(rest).tolist():
            number = int(chosen[row])
            if cache is None:
                own = _counted(system, number, frames, row, rcut, ntypes)
            elif kept[row]:
                own = cache.frame(system, number, frames, row).statistics
            else:
                own = cache.statistics(system, number, frames, row)
            found = found.merge(own)
        shortest = min(shortest, found.min_distance)
        return found

    every = [np.arange(system.nframes) for system in systems] if numbers is None else numbers
    lists: Sequence[np.ndarray | None] = [None] * len(systems) if listed is None else listed
    jobs = [
        (system, mine[first : first + _chunk(system)], wanted)
        for system, mine, wanted in zip(systems, every, lists, strict=True)
        for first in range(0, len(mine), _chunk(system))
    ]
    with ThreadPoolExecutor(
        workers or worker_count(), thread_name_prefix="deepmd_muon-neighbors"
    ) as pool:
        return reduce(NeighborStatistics.merge, _logged(pool.map(chunk, jobs), len(jobs)), nothing)


def _counted(
    system: System, number: int, frames: Frames, row: int, rcut: float, ntypes: int
) -> NeighborStatistics:
    """Count the neighbours of frame `number` of a system, which is row `row` of `frames`."""
    box = frames.box[row] if system.pbc and frames.box is not None else None
    with naming_frame(number, system.name):
        return frame_statistics(frames.coord[row], box, frames.atype[row], rcut, ntypes)


def _count_others(
    frames: Frames, kept: np.ndarray, rcut: float, ntypes: int, shortest: float
) -> tuple[NeighborStatistics, np.ndarray]:
    """Count neighbours in frames that are not `kept` by `count_together`; return which frames are left `(nframes,)`."""
    others = np.flatnonzero(~kept)
    if not len(others):
        return NeighborStatistics(np.inf, (0,) * ntypes, 0), kept
    box = None if frames.box is None else frames.box[others]
    found, counted = count_together(
        frames.coord[others], box, frames.atype[others], rcut, ntypes, shortest
    )
    rest = kept.copy()
    rest[others] = ~counted
    return found, rest


def _chunk(system: System) -> int:
    """Frames of a system read at once."""
    return max(1, min(CHUNK, CHUNK_ATOMS // system.natoms))


def _logged(results: Iterable[NeighborStatistics], total: int) -> Iterator[NeighborStatistics]:
    """Yield results; log the progress now and then."""
    started = logged = time.monotonic()
    for done, result in enumerate(results, 1):
        now = time.monotonic()
        if now - logged > _LOG_INTERVAL and done < total:
            logged = now
            left = (now - started) * (total - done) / done
            log.info(
                "counting neighbours: %.0f %% done, about %.0f s left", 100 * done / total, left
            )
        yield result


def _check_density(system: System, numbers: np.ndarray, frames: Frames) -> None:
    """Refuse cells denser than any matter: counting would take minutes and much memory for a mistake in the units."""
    if frames.box is None:
        return
    density = densities(frames)
    densest = int(density.argmax())
    if density[densest] > DENSEST:
        raise NeighborError(
            f"system {system.name}, frame {numbers[densest]}: {density[densest]:.3g} atoms per Å³ (diamond has 0.18); "
            "box and coord must be in Å (nm would look like this)"
        )


def densities(frames: Frames) -> np.ndarray:
    """Return the atoms of each cell over its volume `(nframes,)` [1/Å³]; 0 without a cell or a volume."""
    number = (frames.atype >= 0).sum(axis=1)
    if frames.box is None:
        return np.zeros(len(number))
    volume = np.abs(np.linalg.det(frames.box))
    return np.asarray(np.divide(number, volume, out=np.zeros(len(volume)), where=volume > 1e-300))


def number_of_types(system: System) -> int:
    """Return the number of types: of the type map, else the largest type that occurs plus one."""
    if system.type_map is not None:
        return len(system.type_map)
    return int(system.types(np.arange(1)).max()) + 1
