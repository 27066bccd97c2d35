"""Sizes, neighbour counts and labels of frames that only a device holds, as the host knows them.

From them follows the shape that a batch needs. The host chooses it before a step, which reads the
frames themselves on the device.

Frames with the same number of atoms of each type and the same periodicity have one *composition*.
Of neighbours, only the largest numbers in any frame of a composition are kept. Therefore two
batches of one composition need the same shape if they have the same number of frames, all with the
same labels. The shape grows when a frame with more neighbours is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data import NeighborCache, group_limits
from deepmd_muon.train.batches.frame_chunks import Chunk
from deepmd_muon.train.batches.shapes import Shape
from deepmd_muon.train.batches.streamed import INNER_STEP, SECTION_STEP

# Room for the neighbours of all atoms together is a multiple of this.
_EDGE_STEP = 256
# The search has room for at least two to this power neighbours of an atom.
_LEAST_CAPACITY_EXPONENT = 4


class NeighborCounts(NamedTuple):
    """Neighbours of some frames."""

    # Largest number of neighbours of an atom: of each type, of all types, and within each shorter
    # cut-off (nframes, ntypes + 1 + ninner).
    max_neighbors: np.ndarray
    n_edges: np.ndarray  # neighbours of all atoms together (nframes,)
    # Squared distance of the nearest two atoms [Å²] (nframes,); some number beyond the squared
    # cut-off, or infinite, if no atoms are within it.
    nearest_squared: np.ndarray


class FrameSizes:
    """Sizes and labels of frames; `FrameStore.take` records each when it writes it to the device.

    Parameters
    ----------
    nframes
        Frames of all systems.
    label_names
        Labels that any system has.
    cache
        Says which neighbours the model reads.

    Attributes
    ----------
    composition, natoms
        Composition and real atoms of every frame `(nframes,)`; −1 and 0 until it is recorded.
    present
        By label: which of the recorded frames have it `(nframes,)`.
    type_counts, periodic
        Atoms of each type `(ncompositions, ntypes)`, and which compositions have cells
        `(ncompositions,)`.
    max_neighbors, max_edges
        The largest `NeighborCounts` so far in a frame of each composition `(ncompositions, ntypes +
        1 + ninner)` and `(ncompositions,)`.
    shortest
        Distance of the nearest two atoms so far [Å]; infinite if none are within the cut-off.
    """

    def __init__(self, nframes: int, label_names: Iterable[str], cache: NeighborCache) -> None:
        self._cache = cache
        self.composition = np.full(nframes, -1, dtype=np.int32)
        self.natoms = np.zeros(nframes, dtype=np.int32)
        self.present = {name: np.zeros(nframes, dtype=bool) for name in label_names}
        self.type_counts = np.zeros((0, cache.ntypes), dtype=np.int64)
        self.periodic = np.zeros(0, dtype=bool)
        self.max_neighbors = np.zeros((0, cache.ntypes + 1 + len(cache.inner)), dtype=np.int64)
        self.max_edges = np.zeros(0, dtype=np.int64)
        self.shortest = np.inf
        self._compositions: dict[bytes, int] = {}  # by type counts and periodicity

    def record(self, chunk: Chunk, counts: NeighborCounts) -> None:
        """Record the frames of a chunk."""
        composition = self._compositions_of(chunk)
        self.composition[chunk.numbers] = composition
        self.natoms[chunk.numbers] = chunk.natoms
        for name, present in self.present.items():
            present[chunk.numbers] = chunk.values.get(f"has_{name}", False)
        np.maximum.at(self.max_neighbors, composition, counts.max_neighbors)
        np.maximum.at(self.max_edges, composition, counts.n_edges)
        shortest = float(np.sqrt(counts.nearest_squared.min(initial=np.inf)))
        if shortest < self._cache.rcut:
            self.shortest = min(self.shortest, shortest)

    def _compositions_of(self, chunk: Chunk) -> np.ndarray:
        """Return the composition of each frame `(nframes,)`; new ones are appended."""
        # (nframes, ntypes + 1): atoms of each type, and 1 with a cell.
        keys = np.column_stack([chunk.values["type_counts"], chunk.values["periodic"]])
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        n_known = len(self._compositions)
        composition_of_key = np.array(
            [
                self._compositions.setdefault(key.tobytes(), len(self._compositions))
                for key in unique
            ]
        )
        new = unique[composition_of_key >= n_known]
        self.type_counts = np.concatenate([self.type_counts, new[:, :-1]])
        self.periodic = np.concatenate([self.periodic, new[:, -1] > 0])
        uncounted = np.zeros((len(new), self.max_neighbors.shape[1]), dtype=np.int64)
        self.max_neighbors = np.concatenate([self.max_neighbors, uncounted])
        self.max_edges = np.concatenate([self.max_edges, uncounted[:, 0]])
        composition: np.ndarray = composition_of_key[inverse.reshape(-1)]
        return composition

    def note_cut_lists(self) -> None:
        """Record in the cache that its `sel` cuts neighbour lists, if it does."""
        ntypes = self._cache.ntypes
        max_neighbors = self.max_neighbors.max(0)
        self._cache.note_most(max_neighbors[:ntypes], int(max_neighbors[ntypes]))

    # ----- shapes of batches ---------------------------------------------------------------------

    def shapes_of(self, batches: Sequence[np.ndarray]) -> list[Shape]:
        """Return the shape that each batch needs, as `shape_of`."""
        # Batches of as many frames, all of one kind, have one shape.
        sizes = [len(numbers) for numbers in batches]
        kinds = self._kinds_of(np.concatenate(batches))
        starts = np.cumsum([0, *sizes[:-1]])
        lowest_kinds = np.minimum.reduceat(kinds, starts).tolist()
        highest_kinds = np.maximum.reduceat(kinds, starts).tolist()
        shape_of_kind: dict[tuple[int, int], Shape] = {}
        shapes = []
        for numbers, lowest, highest in zip(batches, lowest_kinds, highest_kinds, strict=True):
            if lowest != highest:
                shapes.append(self.shape_of(numbers))
                continue
            key = (len(numbers), lowest)
            if key not in shape_of_kind:
                shape_of_kind[key] = self.shape_of(numbers)
            shapes.append(shape_of_kind[key])
        return shapes

    def _kinds_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the kind of each frame: equal numbers for equal composition and labels."""
        kinds: np.ndarray = self.composition[numbers].astype(np.int64)
        # Append one binary digit for each label.
        for present in self.present.values():
            kinds = 2 * kinds + present[numbers]
        return kinds

    def shape_of(self, numbers: np.ndarray) -> Shape:
        """Return the least shape that holds the frames `numbers` as a batch.

        Room for neighbours is rounded up, so that few shapes occur.
        """
        cache = self._cache
        ntypes = cache.ntypes
        limits = group_limits(cache.sel, cache.by_type, ntypes)
        compositions, n_frames = np.unique(self.composition[numbers], return_counts=True)
        max_neighbors = self.max_neighbors[compositions].max(0)
        widths = max_neighbors[:ntypes] if cache.by_type else max_neighbors[ntypes : ntypes + 1]
        bounds = np.array([count for _, count in cache.inner], dtype=np.int64)
        inner = np.minimum(max_neighbors[ntypes + 1 :], bounds)
        present = {name: flags[numbers] for name, flags in self.present.items()}
        labels = frozenset(name for name, flags in present.items() if flags.any())
        edges = int((self.max_edges[compositions] * n_frames).sum()) if cache.bound_edges else 0
        return Shape(
            frames=len(numbers),
            natoms=int(self.natoms[numbers].max()),
            counts=tuple((self.type_counts[compositions] * n_frames[:, None]).sum(0).tolist()),
            widths=tuple(np.minimum(_round_up(widths, SECTION_STEP), limits).tolist()),
            inner=tuple(_round_up(inner, INNER_STEP).tolist()),
            periodic=bool(self.periodic[compositions].any()),
            labels=labels,
            partial=frozenset(name for name in labels if not present[name].all()),
            composition=int(compositions[0]) if len(compositions) == 1 else None,
            # The least power of two that holds the neighbours of all types.
            capacity=1
            << max(_LEAST_CAPACITY_EXPONENT, int(max_neighbors[ntypes] - 1).bit_length()),
            edges=-(-edges // _EDGE_STEP) * _EDGE_STEP,
        )


def _round_up(numbers: np.ndarray, step: int) -> np.ndarray:
    rounded: np.ndarray = -(-numbers // step) * step
    return rounded
