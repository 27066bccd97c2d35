"""Frames that are measured before the first step, with neighbours found on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import (
    FrameNeighbors,
    Frames,
    NeighborCache,
    NeighborStatistics,
    System,
    group_limits,
    neighbor_statistics,
    stack_neighbors,
    worker_count,
)
from deepmd_muon.data.neighbors.cache import CHUNK_ATOMS, DENSEST, densities
from deepmd_muon.data.neighbors.far_atoms import are_ordinary
from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.data.sampling.samples import packed, read_ahead
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Cells, Sections
from deepmd_muon.model.neighbors.search import count_neighbors, find_neighbors
from deepmd_muon.train.batches.resident import READERS, why_not_on_device

# Systems by their numbers, and the frames to take of each.
_Part = list[tuple[int, np.ndarray]]


def sample_on(
    device: torch.device, systems: Sequence[System], cache: NeighborCache
) -> DeviceSample | None:
    """Return the sample on a device that makes batches itself; None if the host makes them."""
    if device.type != "cuda" or why_not_on_device(systems) is not None:
        return None
    return DeviceSample(systems, cache, device)


class DeviceSample:
    """Counts neighbours in frames of some systems, and makes batches of them, on a device.

    Frames are read in parts. A part in which a frame is not ordinary, has atoms at the same place,
    or has too many neighbours for the device is left to the host, which names mistakes.

    Parameters
    ----------
    systems
        Where the frames are.
    cache
        Says which neighbours the model reads, and notes whether its `sel` cuts lists.
    device
        Of the search and of the batches.

    Raises
    ------
    NeighborError
        From the methods, where neighbours cannot be found; see `neighbor_statistics`.
    """

    def __init__(
        self, systems: Sequence[System], cache: NeighborCache, device: torch.device
    ) -> None:
        self._systems = systems
        self._cache = cache
        self._device = device

    def count(self, numbers: Sequence[np.ndarray]) -> NeighborStatistics:
        """Count the neighbours in frames `numbers` of each system."""
        statistics = NeighborStatistics(np.inf, (0,) * self._cache.ntypes, 0)
        for part, frames in self._read(numbers):
            _, max_neighbors = self._searched(frames)
            counted = (
                self._counted_on_host(part) if max_neighbors is None else max_neighbors.statistics
            )
            statistics = statistics.merge(counted)
        return statistics

    def batches(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[Frames, Structures]]:
        """Yield frames `numbers` of each system: on the host, and on the device with neighbours.

        The structures need not have frame and atomic parameters.
        """
        for part, frames in self._read(numbers):
            places, max_neighbors = self._searched(frames)
            if places is None or max_neighbors is None or max_neighbors.total > MOST_NEIGHBORS:
                yield frames, self._listed_on_host(part, frames)
            else:
                yield frames, places.structures(self._cache, max_neighbors)

    def _read(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[_Part, Frames]]:
        def read(part: _Part) -> tuple[_Part, Frames]:
            return part, Frames.concatenate([self._systems[k].frames(rows) for k, rows in part])

        return read_ahead(read, packed(self._systems, numbers, CHUNK_ATOMS), READERS)

    def _searched(self, frames: Frames) -> tuple[_PlacedFrames | None, _MaxNeighbors | None]:
        """Return frames on the device and their most neighbours; None if the host has to do it."""
        usual = are_ordinary(np.where(frames.atype[..., None] < 0, 0.0, frames.coord), frames.box)
        if not usual.all() or densities(frames).max() > DENSEST:
            return None, None
        places = _PlacedFrames.of(frames, self._cache.rcut, self._device)
        max_neighbors = places.count(self._cache)
        if max_neighbors is not None:
            self._cache.note_most(max_neighbors.of_types, max_neighbors.total)
        return places, max_neighbors

    def _counted_on_host(self, part: _Part) -> NeighborStatistics:
        no_frames: np.ndarray = np.zeros(0, dtype=np.int64)
        rows_of = dict(part)
        return neighbor_statistics(
            self._systems,
            self._cache.rcut,
            self._cache,
            numbers=[rows_of.get(k, no_frames) for k in range(len(self._systems))],
            listed=[no_frames] * len(self._systems),
        )

    def _listed_on_host(self, part: _Part, frames: Frames) -> Structures:
        def lists_of(k: int, numbers: np.ndarray) -> list[FrameNeighbors]:
            system = self._systems[k]
            of_system = system.frames(numbers)
            return [
                self._cache.frame(system, int(number), of_system, row)
                for row, number in enumerate(numbers)
            ]

        with ThreadPoolExecutor(worker_count(), thread_name_prefix="deepmd_muon-neighbors") as pool:
            lists = [*itertools.chain(*pool.map(lists_of, *zip(*part, strict=True)))]
        return Structures.of(frames, stack_neighbors(lists), self._cache.ntypes, self._device)


@dataclass(frozen=True)
class _MaxNeighbors:
    """Most neighbours of an atom in some frames.

    Attributes
    ----------
    of_types, total, inner
        Of each type `(ntypes,)`, of all types, and within each shorter cut-off `(ninner,)`.
    shortest
        Distance of the nearest two atoms [Å]; infinite if none are within the cut-off.
    """

    of_types: np.ndarray
    total: int
    inner: np.ndarray
    shortest: float

    @property
    def statistics(self) -> NeighborStatistics:
        return NeighborStatistics(self.shortest, tuple(self.of_types.tolist()), self.total)


@dataclass(frozen=True)
class _PlacedFrames:
    """Frames on a device, the real atoms of each before its padding.

    Attributes
    ----------
    atoms
        The frames.
    order, frame, kind
        Place, frame and type of every real atom, sorted by type `(nreal,)`.
    type_counts
        Atoms of each type up to the largest that occurs, on the host.
    """

    atoms: Atoms
    order: Tensor
    frame: Tensor
    kind: Tensor
    type_counts: np.ndarray

    @classmethod
    def of(cls, frames: Frames, rcut: float, device: torch.device) -> _PlacedFrames:
        atype = frames.atype.astype(np.int64)
        coord = frames.coord
        if (atype < 0).any():
            real_first = np.argsort(atype < 0, axis=1, kind="stable")
            atype = np.take_along_axis(atype, real_first, 1)
            coord = np.take_along_axis(coord, real_first[..., None], 1)
        flat = atype.reshape(-1)
        n_padding = np.count_nonzero(flat < 0)
        order = np.argsort(flat, kind="stable")[n_padding:]  # padding has type -1

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        cells = None
        if frames.box is not None:
            cells = Cells.of(on_device(np.asarray(frames.box, dtype=np.float64)), rcut)
        positions = on_device(np.asarray(coord, dtype=np.float64).reshape(-1, 3))
        n_real = on_device((atype >= 0).sum(1))
        return cls(
            atoms=Atoms(positions, on_device(flat), n_real, frames.natoms, cells),
            order=on_device(order),
            frame=on_device(order // frames.natoms),
            kind=on_device(flat[order]),
            type_counts=np.bincount(flat[order]),
        )

    def count(self, cache: NeighborCache) -> _MaxNeighbors | None:
        """Count the neighbours of every atom; None if two atoms are at the same place."""
        ntypes = cache.ntypes
        if not len(self.order):
            none = np.zeros(ntypes + len(cache.inner), dtype=np.int64)
            return _MaxNeighbors(none[:ntypes], 0, none[ntypes:], np.inf)
        radii = [cache.rcut, *(radius for radius, _ in cache.inner)]
        of_types, within, nearest = count_neighbors(
            self.atoms, self.order, self.frame, radii, ntypes
        )
        of_all_types = of_types.sum(1, keepdim=True)
        max_neighbors = torch.cat([of_types, of_all_types, within], 1).amax(0)
        distance = nearest.amin().sqrt()
        # One transfer from the device.
        *counts, shortest = torch.cat([max_neighbors.double(), distance.view(1)]).tolist()
        if shortest < SAME_PLACE:
            return None
        numbers = np.array(counts, dtype=np.int64)
        return _MaxNeighbors(
            of_types=numbers[:ntypes],
            total=int(numbers[ntypes]),
            inner=numbers[ntypes + 1 :],
            shortest=shortest if shortest < cache.rcut else np.inf,
        )

    def structures(self, cache: NeighborCache, max_neighbors: _MaxNeighbors) -> Structures:
        """Return the frames with the neighbours that a model reads."""
        limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        columns = max_neighbors.of_types if cache.by_type else np.array([max_neighbors.total])
        widths = np.minimum(columns, limits)
        sections = Sections(
            rcut=cache.rcut,
            widths=tuple(widths.tolist()),
            by_type=cache.by_type,
            n_nearest=int(min(limits.sum(dtype=np.float64), MOST_NEIGHBORS)),
            capacity=max(1, max_neighbors.total),
        )
        neighbor, shift = find_neighbors(self.atoms, self.order, self.frame, sections)
        bounds = np.array([bound for _, bound in cache.inner], dtype=np.int64)
        inner = np.minimum(max_neighbors.inner, bounds)
        nreal = len(self.order)
        nframes = len(self.atoms.counts)
        type_counts = np.zeros(cache.ntypes, dtype=np.int64)
        type_counts[: len(self.type_counts)] = self.type_counts
        return Structures(
            coord=self.atoms.coord.view(nframes, self.atoms.natoms, 3),
            atype=self.atoms.atype.view(nframes, self.atoms.natoms),
            box=None if self.atoms.cells is None else self.atoms.cells.box,
            order=self.order,
            sorted_type=self.kind,
            sorted_frame=self.frame,
            neighbor=neighbor,
            shift=shift,
            sections=sections.widths,
            type_counts=tuple(type_counts.tolist()),
            filled=np.repeat(widths.astype(np.int64)[:, None], nreal, axis=1),
            inner=np.repeat(inner[:, None], nreal, axis=1),
        )
