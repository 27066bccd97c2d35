"""Atoms that nearly coincide, found in many frames at once by sorting them into small cells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.frames import Frames, nearest_images
from deepmd_muon.data.system import System

#: Atoms nearer than this are a mistake [Å]: hydrogen in a shock wave has no less than 0.5. A wider
#: search takes longer.
NEARLY_COINCIDE = 0.3
# Cells along an axis of a frame, at most.
_MOST_CELLS = 64
# Frames read at once [atoms].
_CHUNK = 1 << 16


class ClosePairs(NamedTuple):
    """The closest two atoms of each frame."""

    distance: np.ndarray  # (nframes,) [Å]; infinite if none are nearer than the limit
    i: np.ndarray  # (nframes,): numbers of the atoms
    j: np.ndarray  # (nframes,)

    def words(self, row: int) -> str:
        """Return which atoms of a frame are how far apart."""
        i, j = sorted((int(self.i[row]), int(self.j[row])))
        return f"atoms {i} and {j} are {self.distance[row]:.3g} Å apart"


def close_pairs(frames: Frames, limit: float = NEARLY_COINCIDE) -> ClosePairs:
    """Find the closest two atoms of each frame that are nearer than `limit` [Å]."""
    rows, i, j = _candidates(frames, limit)
    apart = frames.coord[rows, j] - frames.coord[rows, i]
    if frames.box is not None:
        apart = nearest_images(apart[:, None], frames.box[rows])[:, 0]
    distance = np.sqrt((apart**2).sum(axis=1))
    near = np.flatnonzero(distance < limit)
    # numpy keeps the last of several values for a row: the nearest pair of a frame comes last.
    near = near[np.argsort(-distance[near], kind="stable")]
    closest = ClosePairs(
        distance=np.full(frames.nframes, np.inf),
        i=np.zeros(frames.nframes, dtype=np.int64),
        j=np.zeros(frames.nframes, dtype=np.int64),
    )
    closest.distance[rows[near]] = distance[near]
    closest.i[rows[near]] = i[near]
    closest.j[rows[near]] = j[near]
    return closest


def shortest_distances(system: System, limit: float) -> np.ndarray:
    """Return the shortest distance in each frame (nframes,) [Å], infinite from `limit` on."""
    shortest = np.full(system.nframes, np.inf)
    for numbers in system.chunks(_CHUNK):
        shortest[numbers] = close_pairs(system.structures(numbers), limit).distance
    return shortest


def _candidates(frames: Frames, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frames and numbers of pairs of atoms: all nearer than `limit` [Å], and few others.

    Frames are cut into cells at least twice as wide as the limit. Along an axis, two near atoms are
    in the same cell, or in the same one after a shift by half a cell. So eight shifts find all
    pairs.
    """
    rows, atoms = np.nonzero(frames.atype >= 0)
    if frames.box is None:
        n_cells = np.full((frames.nframes, 3), _MOST_CELLS)
        places = frames.coord / (2.0 * limit)
    else:
        inverse = np.linalg.inv(frames.box)
        heights = 1.0 / np.linalg.norm(inverse, axis=1)  # of the box, (nframes, 3)
        n_cells = np.clip(heights // (2.0 * limit), 1, _MOST_CELLS)
        places = frames.coord @ inverse * n_cells[:, None]
    places = places[rows, atoms]  # (natoms of all frames, 3) [cells]
    # Images of a periodic frame are in the same cell. Without a box, atoms far apart may be.
    cells = [(np.floor(places + shift) % n_cells[rows]).T.astype(np.int64) for shift in (0.0, 0.5)]
    candidates = [np.zeros((2, 0), dtype=np.int64)]
    for x, y, z in itertools.product(*zip(*cells, strict=True)):
        cell = ((rows * _MOST_CELLS + x) * _MOST_CELLS + y) * _MOST_CELLS + z
        order = np.argsort(cell)
        cell = cell[order]
        for ahead in range(1, len(cell)):
            at = np.flatnonzero(cell[ahead:] == cell[:-ahead])
            if not len(at):
                break
            candidates.append(np.stack([order[at], order[at + ahead]]))
    a, b = np.concatenate(candidates, axis=1)
    return rows[a], atoms[a], atoms[b]


def distance_problem(
    systems: Sequence[System],
    numbers: Sequence[np.ndarray],
    shortest: float,
    rcut: float,
) -> str | None:
    """Say what is wrong with the shortest distance of frames of systems; None if nothing is.

    Frames are read again only to name atoms that nearly coincide.

    Parameters
    ----------
    systems
        The systems.
    numbers
        Frames of each system that were counted.
    shortest
        Shortest distance between two of their atoms [Å]; infinite without neighbours.
    rcut
        Cut-off [Å].
    """
    if shortest < NEARLY_COINCIDE:
        place = first_close_pair(systems, numbers)
        if place is None:
            return None
        return f"{place}; remove such frames, or see that positions are in Å"
    if np.isfinite(shortest):
        return None
    nframes = sum(map(len, numbers))
    return (
        f"no atom has a neighbour within the cut-off of {rcut:g} Å in the {nframes} frames that "
        "were counted: a model can learn nothing but energies of single atoms from them; see that "
        "rcut, positions and cells are in Å"
    )


def first_close_pair(systems: Sequence[System], numbers: Sequence[np.ndarray]) -> str | None:
    """Name the system, frame and atoms of the closest pair in frames `numbers` of systems.

    Return None if no atoms nearly coincide.
    """
    closest = np.inf
    words = None
    for system, numbers_of_system in zip(systems, numbers, strict=True):
        for chunk in system.chunks(_CHUNK, numbers_of_system):
            pairs = close_pairs(system.frames(chunk))
            row = int(pairs.distance.argmin())
            if pairs.distance[row] < closest:
                closest = float(pairs.distance[row])
                words = f"{system.name}: frame {int(chunk[row])}: {pairs.words(row)}"
    return words
