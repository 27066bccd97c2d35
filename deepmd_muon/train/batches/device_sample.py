"""Frames that are measured before the first step, with neighbours found on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, NeighborCache, NeighborStatistics, System, neighbor_statistics, stack_neighbors
from deepmd_muon.data.neighbors.cache import CHUNK_ATOMS, DENSEST, densities
from deepmd_muon.data.neighbors.lists import SAME_PLACE, group_limits
from deepmd_muon.data.neighbors.together import ordinary
from deepmd_muon.data.sampling.samples import packed, read_ahead
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Cells, Sections
from deepmd_muon.model.neighbors.search import count_neighbors, find_neighbors
from deepmd_muon.train.batches.resident import why_not_on_device

# Threads that read: most of their work holds Python's lock.
_READERS = 2

_Plan = list[tuple[int, np.ndarray]]


class DeviceSample:
    """Counts neighbours in frames of some systems, and makes batches of them, on a device.

    Frames that are not ordinary, with atoms at the same place, or with too many neighbours for the device are left to
    the host, which names mistakes. So are the frames that are read together with them.

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

    def __init__(self, systems: Sequence[System], cache: NeighborCache, device: torch.device) -> None:
        self._systems, self._cache, self._device = systems, cache, device

    def count(self, numbers: Sequence[np.ndarray]) -> NeighborStatistics:
        """Count the neighbours in frames `numbers` of each system."""
        cache = self._cache
        found = NeighborStatistics(np.inf, (0,) * cache.ntypes, 0)
        for plan, frames in self._read(numbers):
            packing = self._packed(frames)
            counted = None if packing is None else packing.count(cache)
            found = found.merge(self._counted_on_host(plan) if counted is None else counted.statistics(cache.ntypes))
        cache.note_most(np.array(found.max_neighbors), found.max_total)
        return found

    def batches(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[Frames, Structures]]:
        """Yield frames `numbers` of each system, small ones together: on the host, and on the device with neighbours.

        The structures come without frame and atomic parameters.
        """
        for plan, frames in self._read(numbers):
            packing = self._packed(frames)
            counted = None if packing is None else packing.count(self._cache)
            if packing is None or counted is None or counted.total > MOST_NEIGHBORS:
                yield frames, self._listed_on_host(plan, frames)
            else:
                yield frames, packing.structures(self._cache, counted)

    def _read(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[_Plan, Frames]]:
        def read(plan: _Plan) -> tuple[_Plan, Frames]:
            return plan, Frames.concatenate([self._systems[k].frames(mine) for k, mine in plan])

        return read_ahead(read, packed(self._systems, numbers, CHUNK_ATOMS), _READERS)

    def _packed(self, frames: Frames) -> _Packed | None:
        """Return frames on the device; None where one is not ordinary."""
        sound, _ = ordinary(np.where(frames.atype[..., None] < 0, 0.0, frames.coord), frames.box)
        if not sound.all() or densities(frames).max() > DENSEST:
            return None
        return _Packed.of(frames, self._cache.rcut, self._device)

    def _counted_on_host(self, plan: _Plan) -> NeighborStatistics:
        systems, numbers = zip(*((self._systems[k], mine) for k, mine in plan), strict=True)
        listed = [np.zeros(0, dtype=np.int64)] * len(systems)
        return neighbor_statistics(systems, self._cache.rcut, self._cache, numbers=numbers, listed=listed)

    def _listed_on_host(self, plan: _Plan, frames: Frames) -> Structures:
        lists = []
        for k, mine in plan:
            part = self._systems[k].frames(mine)
            lists += [self._cache.frame(self._systems[k], int(n), part, row) for row, n in enumerate(mine)]
        return Structures.of(frames, stack_neighbors(lists), self._cache.ntypes, self._device)


def sample_on(device: torch.device, systems: Sequence[System], cache: NeighborCache) -> DeviceSample | None:
    """Return the sample of a device that makes the batches of systems itself; None where the host makes them."""
    if device.type != "cuda" or why_not_on_device(systems) is not None:
        return None
    return DeviceSample(systems, cache, device)


@dataclass(frozen=True)
class _Counted:
    """Neighbours of some frames.

    Attributes
    ----------
    of_types, total, inner
        Most neighbours of an atom: of each type, of all, and within each shorter cut-off.
    shortest
        Distance of the nearest two atoms [Å].
    """

    of_types: np.ndarray
    total: int
    inner: np.ndarray
    shortest: float

    def statistics(self, ntypes: int) -> NeighborStatistics:
        return NeighborStatistics(self.shortest, tuple(self.of_types[:ntypes].tolist()), self.total)


@dataclass(frozen=True)
class _Packed:
    """Frames on a device, the real atoms of each first.

    Attributes
    ----------
    atoms
        The frames.
    order, frame
        Place and frame of each real atom, sorted by type `(nreal,)`.
    kind
        Its type `(nreal,)`.
    type_counts
        Atoms of each type up to the largest that occurs, on the host.
    """

    atoms: Atoms
    order: Tensor
    frame: Tensor
    kind: Tensor
    type_counts: np.ndarray

    @classmethod
    def of(cls, frames: Frames, rcut: float, device: torch.device) -> _Packed:
        atype, coord = frames.atype.astype(np.int64), frames.coord
        if (atype < 0).any():
            real_first = np.argsort(atype < 0, axis=1, kind="stable")
            atype = np.take_along_axis(atype, real_first, 1)
            coord = np.take_along_axis(coord, real_first[..., None], 1)
        flat = atype.reshape(-1)
        order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]

        def moved(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        cells = None if frames.box is None else Cells.of(moved(np.asarray(frames.box, dtype=np.float64)), rcut)
        natoms = frames.natoms
        positions = moved(np.asarray(coord, dtype=np.float64).reshape(-1, 3))
        atoms = Atoms(positions, moved(flat), moved((atype >= 0).sum(1)), natoms, cells)
        return cls(atoms, moved(order), moved(order // natoms), moved(flat[order]), np.bincount(flat[order]))

    def count(self, cache: NeighborCache) -> _Counted | None:
        """Count neighbours; None where two atoms lie at the same place."""
        ntypes = cache.ntypes
        radii = [cache.rcut, *(radius for radius, _ in cache.inner)]
        of_types, within, nearest = count_neighbors(self.atoms, self.order, self.frame, radii, ntypes)
        if not len(self.order):
            return _Counted(np.zeros(ntypes, dtype=np.int64), 0, np.zeros(len(cache.inner), dtype=np.int64), np.inf)
        most = torch.cat([of_types, of_types.sum(1, keepdim=True), within], 1).amax(0).long()
        *numbers, shortest = torch.cat([most.double(), nearest.amin().sqrt().view(1)]).tolist()
        if shortest < SAME_PLACE:
            return None
        whole = np.array(numbers, dtype=np.int64)
        shortest = shortest if shortest < cache.rcut else np.inf
        return _Counted(whole[:ntypes], int(whole[ntypes]), whole[ntypes + 1 :], shortest)

    def structures(self, cache: NeighborCache, counted: _Counted) -> Structures:
        """Return the frames with the neighbours that a model reads."""
        limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        columns = counted.of_types if cache.by_type else np.array([counted.total])
        widths = tuple(np.minimum(columns, limits).tolist())
        nearest = int(min(limits.sum(dtype=np.float64), MOST_NEIGHBORS))
        sections = Sections(cache.rcut, widths, cache.by_type, nearest, max(1, counted.total))
        neighbor, shift = find_neighbors(self.atoms, self.order, self.frame, sections)
        bounds = np.minimum(counted.inner, np.array([bound for _, bound in cache.inner], dtype=np.int64))
        nreal, (nframes,) = len(self.order), self.atoms.counts.shape
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
            sections=widths,
            type_counts=tuple(type_counts.tolist()),
            filled=np.repeat(np.array(widths, dtype=np.int64)[:, None], nreal, axis=1),
            inner=np.repeat(bounds[:, None], nreal, axis=1),
        )
