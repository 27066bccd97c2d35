"""Frames that are measured before the first step, with neighbours found on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from deepmd_muon.data import Frames, NeighborCache, NeighborStatistics, System
from deepmd_muon.data.neighbors.cache import CHUNK_ATOMS, check_density
from deepmd_muon.data.sampling.samples import read_ahead
from deepmd_muon.model import Structures
from deepmd_muon.train.batches.frame_chunks import Chunk, join, pack_frames
from deepmd_muon.train.batches.frame_store import FrameStore, Room
from deepmd_muon.train.batches.gathering import Gathering
from deepmd_muon.train.batches.resident import why_not_on_device
from deepmd_muon.train.batches.windows import READERS


def sample_on(
    device: torch.device, systems: Sequence[System], cache: NeighborCache
) -> DeviceSample | None:
    """Return the sample on a device that makes batches itself; None if the host makes them."""
    if device.type != "cuda" or why_not_on_device(systems) is not None:
        return None
    return DeviceSample(systems, cache, device)


class DeviceSample:
    """Counts neighbours in frames of some systems, and makes batches of them, on a device.

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
        From the methods, as `FrameStore.take` and `neighbor_statistics`.
    """

    def __init__(
        self, systems: Sequence[System], cache: NeighborCache, device: torch.device
    ) -> None:
        self._systems = systems
        self._cache = cache
        self._device = device

    def count(self, numbers: Sequence[np.ndarray]) -> NeighborStatistics:
        """Count the neighbours in frames `numbers` of each system."""
        ntypes = self._cache.ntypes
        statistics = NeighborStatistics(np.inf, (0,) * ntypes, 0)
        for store, _, _ in self._stored(numbers):
            max_neighbors = store.sizes.max_neighbors.max(0).tolist()
            statistics = NeighborStatistics(
                store.sizes.shortest, tuple(max_neighbors[:ntypes]), max_neighbors[ntypes]
            )
        return statistics

    def batches(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[Frames, Structures]]:
        """Yield frames `numbers` of each system: on the host, and on the device with neighbours."""
        for store, chunk, frames in self._stored(numbers):
            gathering = Gathering(store, store.sizes.shape_of(chunk.numbers))
            slots = torch.arange(len(chunk.numbers), device=self._device)
            yield frames, gathering.structures(slots, gathering.find_real(slots))

    def _stored(self, numbers: Sequence[np.ndarray]) -> Iterator[tuple[FrameStore, Chunk, Frames]]:
        """Put frames into a store, chunk after chunk; yield it, the chunk, and the frames as read.

        The store's counts are those of all chunks so far.
        """
        # The last frame of a chunk may exceed its atoms.
        atoms = CHUNK_ATOMS + max(system.natoms for system in self._systems)
        store = FrameStore(self._systems, self._cache, self._device, Room(atoms, atoms))
        numbering = store.numbering

        def read(chunk_numbers: np.ndarray) -> tuple[Chunk, Frames]:
            chunks = []
            frames = []
            for k, rows in numbering.by_system(chunk_numbers):
                system = self._systems[k]
                of_system = system.frames(rows)
                check_density(system, rows, of_system)
                frames.append(of_system)
                system_numbers = rows + numbering.first[k]
                chunks.append(pack_frames(system, of_system, system_numbers, self._cache.ntypes))
            return join(chunks), Frames.concatenate(frames)

        in_order = [np.sort(rows) + numbering.first[k] for k, rows in enumerate(numbers)]
        all_numbers = np.concatenate(in_order)
        if not len(all_numbers):
            return
        numbers_of_chunks = numbering.cut(all_numbers, CHUNK_ATOMS)
        for chunk, frames in read_ahead(read, numbers_of_chunks, READERS):
            store.take([chunk])
            store.sizes.note_cut_lists()
            yield store, chunk, frames
