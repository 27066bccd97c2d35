"""Neighbour counts of several frames at once, compared with those of each frame alone."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from deepmd_muon.data.neighbors.lists import NeighborStatistics, frame_statistics
from deepmd_muon.data.neighbors.together import count_together

NTYPES = 3


def alone(coord, box, atype, rcut):
    """The statistics of all frames, one by one."""
    cells = [None] * len(coord) if box is None else box
    found = [
        frame_statistics(*frame, rcut, NTYPES) for frame in zip(coord, cells, atype, strict=True)
    ]
    return reduce(NeighborStatistics.merge, found)


def completed(coord, box, atype, rcut, shortest=np.inf):
    """The statistics of `count_together` and of the frames it leaves, and how many it counted."""
    found, counted = count_together(coord, box, atype, rcut, NTYPES, shortest)
    rest = ~counted
    if rest.any():
        found = found.merge(
            alone(coord[rest], None if box is None else box[rest], atype[rest], rcut)
        )
    return found, int(counted.sum())


def liquid(nframes, natoms, *, skew=0.0, seed=0):
    """Frames of one random type each atom, in cells of about 10 Å³ an atom, with atoms outside the cell."""
    rng = np.random.default_rng(seed)
    box = np.eye(3) * (10.0 * natoms) ** (1 / 3) * rng.uniform(0.9, 1.2, (nframes, 1, 3))
    box = box + skew * rng.uniform(-1.0, 1.0, (nframes, 3, 3))
    coord = rng.uniform(-1.0, 2.0, (nframes, natoms, 3)) @ box
    return coord, box, rng.integers(0, NTYPES, (nframes, natoms))


@pytest.mark.parametrize("natoms", [1, 2, 6, 24, 60, 100, 180])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_counts_are_those_of_each_frame(natoms, skew):
    coord, box, atype = liquid(12, natoms, skew=skew)
    found, counted = completed(coord, box, atype, 6.0)
    assert found == alone(coord, box, atype, 6.0)
    assert counted == 11  # all but the one with the shortest distance


@pytest.mark.parametrize("natoms", [1, 5, 40, 400])
def test_frames_without_a_cell(natoms):
    coord, _, atype = liquid(8, natoms)
    found, counted = completed(coord, None, atype, 4.0)
    assert found == alone(coord, None, atype, 4.0)
    assert counted == {1: 8, 5: 7, 40: 7, 400: 0}[natoms]  # many atoms are searched by cells


def test_no_distance_is_needed_where_another_frame_has_a_shorter_one():
    coord, box, atype = liquid(12, 24)
    every = alone(coord, box, atype, 6.0)
    found, counted = count_together(coord, box, atype, 6.0, NTYPES, every.min_distance / 2)
    assert counted.all()
    assert found == NeighborStatistics(np.inf, every.max_neighbors, every.max_total)


def test_frames_with_mistakes_are_left():
    coord, box, atype = liquid(10, 24)
    coord[1, 0, 0] = np.nan
    coord[2, 5] = coord[2, 4] + box[2, 0]  # at the same place
    coord[3, 0] = 1e8
    atype[4, 23] = -1  # padding
    box[5, 2] = box[5, 1]
    box[6] *= 1e-3
    _, counted = count_together(coord, box, atype, 6.0, NTYPES)
    assert np.flatnonzero(~counted).tolist()[:6] == [1, 2, 3, 4, 5, 6]
    for cells in (None, box[3:5]):
        found, counted = count_together(coord[3:5], cells, atype[3:5], 6.0, NTYPES)
        assert not counted.any()
        assert found == NeighborStatistics(np.inf, (0,) * NTYPES, 0)


@pytest.mark.parametrize("length", [1e-60, 1e-102, 1e-160])
def test_tiny_cells_are_left(length):
    """They have more images than any number counts."""
    _, counted = count_together(
        np.zeros((1, 1, 3)), length * np.eye(3)[None], np.zeros((1, 1), dtype=int), 6.0, 1
    )
    assert not counted.any()


def test_no_atoms():
    found, counted = count_together(
        np.zeros((2, 0, 3)), None, np.zeros((2, 0), dtype=int), 6.0, NTYPES
    )
    assert found == NeighborStatistics(np.inf, (0,) * NTYPES, 0)
    assert counted.tolist() == [False, False]


@pytest.mark.parametrize("rcut", [2.7, 2.7 * 2**0.5, 5.4])
def test_frames_in_which_rounding_decides_are_left(rcut):
    cell = 2.7 * np.eye(3)
    inside = 2.7 * np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    coord = inside + np.arange(6)[:, None, None] * 0.1
    box, atype = np.repeat(cell[None], 6, axis=0), np.tile([0, 1, 2, 0], (6, 1))
    found, counted = completed(coord, box, atype, rcut)
    assert counted == 0
    assert found == alone(coord, box, atype, rcut)
