"""Atoms that nearly coincide, found in many frames at once by sorting along one direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

#: Atoms nearer than this are a mistake [Å]: hydrogen in a shock wave has no less than 0.5. A wider
#: search takes longer.
NEARLY_COINCIDE = 0.3
# Columns of a frame in which atoms are compared.
_MOST_COLUMNS = 64
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
        box = frames.box[rows]
        fractions = np.linalg.solve(box.transpose(0, 2, 1), apart[..., None])[..., 0]
        apart -= (np.round(fractions)[:, None] @ box)[:, 0]
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
    step = max(1, _CHUNK // system.natoms)
    for start in range(0, system.nframes, step):
        numbers = np.arange(start, min(start + step, system.nframes))
        shortest[numbers] = close_pairs(system.structures(numbers), limit).distance
    return shortest


def _candidates(frames: Frames, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frames and numbers of pairs of atoms: all nearer than `limit` [Å], and few others.

    Atoms are sorted along one direction within columns across another one. Two sets of columns
    overlap by halves, so that near atoms share a column of one of them.
    """
    rows, atoms = np.nonzero(frames.atype >= 0)
    # Sort along the direction with the fewest atoms within the limit.
    directions = sorted(_directions(frames, limit), key=lambda direction: direction.crowd(limit))
    sorting, columns, remaining = directions
    along = sorting.along[rows, atoms]
    # Columns are at least 2·limit wide.
    n_columns = np.clip(columns.period // (2.0 * limit), 1, _MOST_COLUMNS)[rows]
    across = columns.along[rows, atoms] / columns.period[rows] * n_columns
    # The first atoms of a column follow its last ones, a period later.
    repeated = np.flatnonzero(along < limit)
    entry_atom = np.concatenate([np.arange(len(rows)), repeated])
    entry_along = np.concatenate([along, along[repeated] + sorting.period[rows[repeated]]])
    span = entry_along.max(initial=0.0) + 2.0 * limit  # longer than any column
    candidates = []
    for offset in (0.0, 0.5):
        column = rows * _MOST_COLUMNS + np.floor(across + offset) % n_columns
        keys = column[entry_atom] * span + entry_along
        order = np.argsort(keys)
        keys = keys[order]
        near = limit + np.spacing(keys[-1:])
        for ahead in range(1, len(keys)):
            at = np.flatnonzero(keys[ahead:] - keys[:-ahead] < near)
            if not len(at):
                break
            candidates.append(np.stack([entry_atom[order[at]], entry_atom[order[at + ahead]]]))
    if not candidates:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    a, b = np.concatenate(candidates, axis=1)  # entries of `rows` and `atoms`
    distinct = a != b  # a cell may be flatter than the limit
    frame = rows[a[distinct]]
    i = atoms[a[distinct]]
    j = atoms[b[distinct]]
    # Atoms of a plane are near along its normal: the other directions leave few of the pairs.
    for direction in (columns, remaining):
        near_pairs = direction.near(frame, i, j, limit)
        frame = frame[near_pairs]
        i = i[near_pairs]
        j = j[near_pairs]
    return frame, i, j


class _Direction(NamedTuple):
    """Positions of atoms along a direction."""

    along: np.ndarray  # (nframes, natoms) [Å]; NaN for padding
    period: np.ndarray  # (nframes,) [Å]

    def crowd(self, limit: float) -> int:
        """Return the largest number of atoms of frame 0 within `limit` [Å] of each other."""
        along = np.sort(self.along[0])
        end = np.searchsorted(along, along + limit)
        return int((end - np.arange(len(along))).max(initial=0))

    def near(self, rows: np.ndarray, i: np.ndarray, j: np.ndarray, limit: float) -> np.ndarray:
        """Return which atoms i and j of frames `rows` are nearer than `limit` [Å]."""
        step = np.abs(self.along[rows, j] - self.along[rows, i])
        return np.asarray(np.minimum(step, self.period[rows] - step) < limit)


def _directions(frames: Frames, limit: float) -> list[_Direction]:
    """Return the normals of the cell's faces, or the axes without a cell."""
    real = frames.atype >= 0
    if frames.box is None:
        lowest = np.where(real[..., None], frames.coord, np.inf).min(axis=1, keepdims=True)
        positions = frames.coord - lowest
        # A period that keeps the first and the last atoms apart.
        periods = np.where(real[..., None], positions, 0.0).max(axis=1) + 2.0 * limit
    else:
        inverse = np.linalg.inv(frames.box)
        periods = 1.0 / np.sqrt((inverse**2).sum(axis=1))  # heights of the cell, (nframes, 3)
        fractions = frames.coord @ inverse
        fractions -= np.floor(fractions)
        positions = fractions * periods[:, None]
    directions = []
    for axis in range(3):
        along = positions[..., axis].copy()
        along[~real] = np.nan  # sorts to the end
        directions.append(_Direction(along, periods[:, axis]))
    return directions


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
        step = max(1, _CHUNK // system.natoms)
        for begin in range(0, len(numbers_of_system), step):
            chunk = numbers_of_system[begin : begin + step]
            pairs = close_pairs(system.frames(chunk))
            row = int(pairs.distance.argmin())
            if pairs.distance[row] < closest:
                closest = float(pairs.distance[row])
                words = f"{system.name}: frame {int(chunk[row])}: {pairs.words(row)}"
    return words
