"""Count the neighbours of a chunk of frames on a device."""

from __future__ import annotations

import numpy as np
import torch

from deepmd_muon.data import NeighborCache
from deepmd_muon.model.neighbors.atoms import Atoms
from deepmd_muon.model.neighbors.search import count_neighbors
from deepmd_muon.train.batches.batch import upload
from deepmd_muon.train.batches.frame_chunks import starts_of, within_frames
from deepmd_muon.train.batches.frame_sizes import NeighborCounts


def count_in_chunk(natoms: np.ndarray, packed: Atoms, cache: NeighborCache) -> NeighborCounts:
    """Count the neighbours of frames on the current stream, and wait for the result.

    Parameters
    ----------
    natoms
        Atoms of each frame `(nframes,)`.
    packed
        The same frames on the device, one after the other without padding.
    cache
        Says which neighbours the model reads.
    """
    nframes = len(natoms)
    counts = NeighborCounts(
        max_neighbors=np.zeros((nframes, cache.ntypes + 1 + len(cache.inner)), dtype=np.int64),
        n_edges=np.zeros(nframes, dtype=np.int64),
        nearest_squared=np.full(nframes, np.inf),
    )
    # Frames with sizes between the same two powers of two are counted together: each is padded to
    # the largest of them.
    size_class = np.frexp(natoms)[1]
    for one_class in np.unique(size_class[natoms > 0]):
        rows = np.flatnonzero(size_class == one_class)
        of_rows = _count_padded(natoms, packed, rows, cache)
        for all_frames, some_frames in zip(counts, of_rows, strict=True):
            all_frames[rows] = some_frames
    return counts


def _count_padded(
    all_natoms: np.ndarray, packed: Atoms, rows: np.ndarray, cache: NeighborCache
) -> NeighborCounts:
    """Count the neighbours of the frames `rows`, padded to the largest of them."""
    device = packed.coord.device
    starts = starts_of(all_natoms)[rows]
    natoms = all_natoms[rows]
    width = int(natoms.max())
    # Of every atom of these frames (natoms.sum(),): its frame among them, its row in `packed`, and
    # its place among the padded frames.
    frame_of_atom = np.repeat(np.arange(len(rows)), natoms)
    within_frame = within_frames(natoms)
    frame = upload(frame_of_atom, device)
    source = upload(np.repeat(starts, natoms) + within_frame, device)
    place = upload(frame_of_atom * width + within_frame, device)

    n_places = len(rows) * width
    frame_rows = upload(rows, device)
    padded = Atoms(
        coord=packed.coord.new_zeros(n_places, 3).index_copy_(0, place, packed.coord[source]),
        atype=packed.atype.new_full((n_places,), -1).index_copy_(0, place, packed.atype[source]),
        counts=packed.counts[frame_rows],
        natoms=width,
        cells=None if packed.cells is None else packed.cells.select(frame_rows),
    )
    radii = [cache.rcut, *(radius for radius, _ in cache.inner)]
    of_types, shorter, squared = count_neighbors(
        padded, order=place, frame=frame, radii=radii, ntypes=cache.ntypes
    )

    # From atoms to frames. Columns are those of `NeighborCounts.max_neighbors`.
    of_atoms = torch.cat([of_types, of_types.sum(1, keepdim=True), shorter], 1).long()
    index = frame.unsqueeze(1).expand_as(of_atoms)
    max_neighbors = of_atoms.new_zeros(len(rows), of_atoms.shape[1])
    max_neighbors = max_neighbors.scatter_reduce(0, index, of_atoms, "amax")
    n_edges = of_atoms.new_zeros(len(rows)).index_add(0, frame, of_atoms[:, cache.ntypes])
    nearest_squared = squared.new_full((len(rows),), torch.inf)
    nearest_squared = nearest_squared.scatter_reduce(0, frame, squared, "amin")
    return NeighborCounts(
        max_neighbors=max_neighbors.cpu().numpy(),
        n_edges=n_edges.cpu().numpy(),
        nearest_squared=nearest_squared.cpu().numpy(),
    )
