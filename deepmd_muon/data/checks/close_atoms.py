"""Atoms that nearly coincide, found in many frames at once: they are sorted along one direction of the cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

#: Atoms nearer than this are a mistake [Å]: hydrogen in a shock wave has no less than 0.5. A wider search takes longer.
NEARLY_COINCIDE = 0.3
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
    """Return frames and numbers of the pairs of atoms that are nearer than `limit` [Å] along each direction."""
    natoms = frames.natoms
    first_places, *other_places = sorted(_places(frames), key=lambda places: places.crowd(limit))
    order = np.argsort(first_places.along, axis=1)
    along = np.take_along_axis(first_places.along, order, axis=1)
    # Behind the last atom comes the first one again; padding has no place in this row.
    count = (frames.atype >= 0).sum(axis=1, keepdims=True).clip(1)
    turn, place = np.divmod(np.arange(2 * natoms), count)
    turned = np.take_along_axis(along, place, axis=1) + turn * first_places.period[:, None]
    none = np.zeros(0, dtype=np.int64)
    parts = [(none, none, none)]
    for ahead in range(1, natoms):
        at = np.flatnonzero(turned[:, ahead : ahead + natoms] - along < limit)
        if not len(at):
            break
        # Atoms of a plane are near along its normal: the other directions leave few of the pairs.
        rows = at // natoms
        i, j = order.ravel()[at], order[rows, place[rows, at % natoms + ahead]]
        other = i != j  # a cell may be flatter than the limit
        rows, i, j = rows[other], i[other], j[other]
        for places in other_places:
            near = places.near(rows, i, j, limit)
            rows, i, j = rows[near], i[near], j[near]
        parts.append((rows, i, j))
    rows, i, j = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, i, j


class _Places(NamedTuple):
    """Places of atoms along a direction."""

    along: np.ndarray  # (nframes, natoms) [Å]; NaN for padding
    period: np.ndarray  # (nframes,) [Å]; infinite without a cell

    def crowd(self, limit: float) -> int:
        """Return the largest number of atoms of the first frame that `limit` [Å] of the direction hold."""
        along = np.sort(self.along[0])
        return int((np.searchsorted(along, along + limit) - np.arange(len(along))).max(initial=0))

    def near(self, rows: np.ndarray, i: np.ndarray, j: np.ndarray, limit: float) -> np.ndarray:
        """Return which pairs of atoms, by their frames and numbers, are nearer than `limit` [Å] along the direction."""
        step = np.abs(self.along[rows, j] - self.along[rows, i])
        return np.asarray(np.minimum(step, self.period[rows] - step) < limit)


def _places(frames: Frames) -> list[_Places]:
    """Return the places of atoms along three directions."""
    if frames.box is None:
        period = np.full(frames.nframes, 1e300)
        found = [_Places(frames.coord[..., axis].copy(), period) for axis in range(3)]
    else:
        inverse = np.linalg.inv(frames.box)
        heights = 1.0 / np.sqrt((inverse**2).sum(axis=1))  # (nframes, 3)
        fractions = frames.coord @ inverse
        fractions -= np.floor(fractions)
        places = fractions * heights[:, None]
        found = [_Places(places[..., axis].copy(), heights[:, axis]) for axis in range(3)]
    for each in found:
        each.along[frames.atype < 0] = np.nan
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
