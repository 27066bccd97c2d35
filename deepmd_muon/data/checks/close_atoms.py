"""Atoms that nearly coincide, found in many frames at once: they are sorted along one direction of the cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

#: Atoms nearer than this are a mistake [Å]: hydrogen in a shock wave has no less than 0.5. A wider search takes longer.
NEARLY_COINCIDE = 0.3
# Columns of a frame in which atoms are compared.
_MOST_COLUMNS = 64
# Frames read at once [atoms].
_CHUNK = 1 << 16


class ClosePairs(NamedTuple):
    """The closest two atoms of each frame."""

    distance: np.ndarray  # (nframes,) [Å]; infinite where none are nearer than the limit
    first: np.ndarray  # (nframes,): number of an atom
    second: np.ndarray  # (nframes,)

    def words(self, row: int) -> str:
        """Return which atoms of a frame are how far apart."""
        atoms = sorted((int(self.first[row]), int(self.second[row])))
        return f"atoms {atoms[0]} and {atoms[1]} are {self.distance[row]:.3g} Å apart"


def close_pairs(frames: Frames, limit: float = NEARLY_COINCIDE) -> ClosePairs:
    """Find the closest two atoms of each frame that are nearer than `limit` [Å]."""
    rows, i, j = _candidates(frames, limit)
    apart = frames.coord[rows, j] - frames.coord[rows, i]
    if frames.box is not None:
        box = frames.box[rows]
        fractions = np.linalg.solve(box.transpose(0, 2, 1), apart[..., None])[..., 0]
        apart -= (np.round(fractions)[:, None] @ box)[:, 0]
    distance = np.sqrt((apart**2).sum(axis=1))
    closest = np.full(frames.nframes, np.inf)
    pair = np.zeros((2, frames.nframes), dtype=np.int64)
    near = np.flatnonzero(distance < limit)
    near = near[np.argsort(-distance[near], kind="stable")]  # the nearest of a frame comes last
    closest[rows[near]] = distance[near]
    pair[:, rows[near]] = i[near], j[near]
    return ClosePairs(closest, *pair)


def _candidates(frames: Frames, limit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frames and numbers of pairs of atoms: all that are nearer than `limit` [Å], and few others.

    Atoms are sorted along one direction within columns across another one. Two sets of columns overlap by halves, so
    that near atoms share a column of one of them.
    """
    rows, atoms = np.nonzero(frames.atype >= 0)
    first, second, third = sorted(_places(frames, limit), key=lambda place: place.crowd(limit))
    along = first.along[rows, atoms]
    # Columns are at least 2·limit wide.
    columns = np.clip(second.period // (2.0 * limit), 1, _MOST_COLUMNS)[rows]
    across = second.along[rows, atoms] / second.period[rows] * columns
    # Behind the last atoms of a column come its first ones again.
    again = np.flatnonzero(along < limit)
    who = np.concatenate([np.arange(len(rows)), again])
    place = np.concatenate([along, along[again] + first.period[rows[again]]])
    span = place.max(initial=0.0) + 2.0 * limit  # more than between atoms of a column
    parts = []
    for offset in (0.0, 0.5):
        column = rows * _MOST_COLUMNS + np.floor(across + offset) % columns
        keys = column[who] * span + place
        order = np.argsort(keys)
        keys = keys[order]
        near = limit + np.spacing(keys[-1:])
        for ahead in range(1, len(keys)):
            at = np.flatnonzero(keys[ahead:] - keys[:-ahead] < near)
            if not len(at):
                break
            parts.append(np.stack([who[order[at]], who[order[at + ahead]]]))
    i, j = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), dtype=np.int64)
    other = i != j  # a cell may be flatter than the limit
    frame, i, j = rows[i[other]], atoms[i[other]], atoms[j[other]]
    for places in (second, third):
        kept = places.near(frame, i, j, limit)
        frame, i, j = frame[kept], i[kept], j[kept]
    return frame, i, j


class _Places(NamedTuple):
    """Places of atoms along a direction."""

    along: np.ndarray  # (nframes, natoms) [Å]; NaN for padding
    period: np.ndarray  # (nframes,) [Å]

    def crowd(self, limit: float) -> int:
        """Return the largest number of atoms of the first frame that `limit` [Å] of the direction hold."""
        along = np.sort(self.along[0])
        return int((np.searchsorted(along, along + limit) - np.arange(len(along))).max(initial=0))

    def near(self, rows: np.ndarray, i: np.ndarray, j: np.ndarray, limit: float) -> np.ndarray:
        """Return which pairs of atoms, by their frames and numbers, are nearer than `limit` [Å] along the direction."""
        step = np.abs(self.along[rows, j] - self.along[rows, i])
        return np.asarray(np.minimum(step, self.period[rows] - step) < limit)


def _places(frames: Frames, limit: float) -> list[_Places]:
    """Return the places of atoms along three directions; without a cell, with a period that keeps all apart."""
    real = frames.atype >= 0
    if frames.box is None:
        low = np.where(real[..., None], frames.coord, np.inf).min(axis=1, keepdims=True)
        places = frames.coord - low
        heights = np.where(real[..., None], places, 0.0).max(axis=1) + 2.0 * limit
    else:
        inverse = np.linalg.inv(frames.box)
        heights = 1.0 / np.sqrt((inverse**2).sum(axis=1))  # (nframes, 3)
        fractions = frames.coord @ inverse
        fractions -= np.floor(fractions)
        places = fractions * heights[:, None]
    found = [_Places(places[..., axis].copy(), heights[:, axis]) for axis in range(3)]
    for each in found:
        each.along[~real] = np.nan
    return found


def distance_problem(
    systems: Sequence[System],
    numbers: Sequence[np.ndarray],
    shortest: float,
    rcut: float,
) -> str | None:
    """Say what is wrong with the shortest distance of frames `numbers` of each system [Å]; None where nothing is.

    Frames are read again only to name atoms that nearly coincide.
    """
    if shortest < NEARLY_COINCIDE:
        place = first_close_pair(systems, numbers)
        return (
            None
            if place is None
            else f"{place}; remove such frames, or see that positions are in Å"
        )
    if np.isfinite(shortest):
        return None
    return (
        f"no atom has a neighbour within the cut-off of {rcut:g} Å in the {sum(map(len, numbers))} frames that were "
        "counted: a model can learn nothing but energies of single atoms from them; see that rcut, positions and "
        "cells are in Å"
    )


def first_close_pair(systems: Sequence[System], numbers: Sequence[np.ndarray]) -> str | None:
    """Name the closest atoms of frames `numbers` of systems: system, frame and atoms; None where none nearly coincide."""
    closest, words = np.inf, None
    for system, chosen in zip(systems, numbers, strict=True):
        step = max(1, _CHUNK // system.natoms)
        for begin in range(0, len(chosen), step):
            some = chosen[begin : begin + step]
            pairs = close_pairs(system.frames(some))
            row = int(pairs.distance.argmin())
            if pairs.distance[row] < closest:
                closest = float(pairs.distance[row])
                words = f"{system.name}: frame {int(some[row])}: {pairs.words(row)}"
    return words
