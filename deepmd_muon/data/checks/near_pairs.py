"""All pairs of near atoms in some frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.far_atoms import heights
from deepmd_muon.data.neighbors.lists import find_pairs

#: Cut-off [Å]: a few shells of neighbours.
RCUT = 4.5
#: Pairs of atoms times images times frames that one system may cost.
MOST_PAIRS = 3_000_000


@dataclass(frozen=True)
class NearPairs:
    """Pairs of atoms of some frames within `RCUT`, each once, images included."""

    frame: np.ndarray  # (npairs,)
    i: np.ndarray  # (npairs,)
    j: np.ndarray  # (npairs,)
    vector: np.ndarray  # (npairs, 3) [Å], from i to j
    distance: np.ndarray  # (npairs,) [Å]

    @classmethod
    def of(cls, frames: Frames) -> NearPairs:
        """Find the pairs; a frame in which none can be found, because of a mistake, has none."""
        pairs_of_frames = [_pairs_of_frame(frames, k) for k in range(frames.nframes)]
        i, j, vector, distance = (
            np.concatenate(arrays) for arrays in zip(*pairs_of_frames, strict=True)
        )
        npairs = [len(i_of_frame) for i_of_frame, *_ in pairs_of_frames]
        frame = np.repeat(np.arange(frames.nframes), npairs)
        return cls(frame, i, j, vector, distance)


def pairs_to_try(natoms: int, box: np.ndarray | None) -> float:
    """Return how many pairs of atoms and images are near enough to be compared, at most."""
    if box is None:
        return float(natoms**2)
    images = [
        (2.0 * np.floor(RCUT / heights(inverse) + 0.5) + 1.0).prod()
        for inverse in np.linalg.inv(box)
    ]
    return float(natoms**2 * max(images))


def _pairs_of_frame(
    frames: Frames, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return i, j, vectors and distances [Å] of the pairs of frame `k`, each once."""
    box = None if frames.box is None else frames.box[k]
    try:
        pairs = find_pairs(frames.coord[k], box, frames.atype[k], RCUT)
    except NeighborError:
        none = np.zeros(0, dtype=np.int64)
        return none, none, np.zeros((0, 3)), np.zeros(0)
    # The search returns each pair both ways. An atom and its own image are at opposite
    # translations: the first number that is not 0 decides.
    x, y, z = pairs.shift.T
    first = np.where(x != 0, x, np.where(y != 0, y, z))
    once = np.flatnonzero((pairs.i < pairs.j) | ((pairs.i == pairs.j) & (first > 0)))
    i = pairs.real[pairs.i[once]]
    j = pairs.real[pairs.j[once]]
    vector = frames.coord[k][j] - frames.coord[k][i]
    if box is not None:
        vector += pairs.shift[once] @ box
    return i, j, vector, pairs.distance[once]
