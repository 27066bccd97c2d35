"""Samples of data: bounded, the same in every process, with every type; batches read ahead keep their order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.data import DataLoader, NeighborCache, neighbor_statistics, open_systems
from deepmd_muon.data.sampling.samples import (
    FRAME_COST,
    frame_costs,
    packed,
    read_ahead,
    sample_frames,
    sample_with,
)


@pytest.fixture
def systems(tmp_path):
    """Forty systems of 4 to 7 atoms and 1 to 20 frames; one has the third element, and a few have no cell."""
    for k in range(40):
        natoms = 4 + k % 4
        types = [2 if k == 17 else n % 2 for n in range(natoms)]
        write_npy(
            tmp_path / f"{k:02d}",
            types,
            [make_arrays(1 + k % 20, natoms, k)],
            ("A", "B", "C"),
            nopbc=k % 10 == 3,
        )
    return open_systems(str(tmp_path), ["A", "B", "C"])


def cost(systems, numbers, rcut=None):
    return float(frame_costs(systems, rcut) @ [len(n) for n in numbers])


def test_what_fits_is_taken_whole(systems):
    every = sample_frames(systems, 1e9)
    assert [n.tolist() for n in every] == [list(range(s.nframes)) for s in systems]


@pytest.mark.parametrize("rcut", [None, 4.0, 9.0])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_samples_are_bounded_reproducible_and_have_every_type(systems, share, rcut):
    total = cost(systems, sample_frames(systems, 1e9), rcut)
    numbers = sample_frames(systems, share * total, rcut)
    again = sample_frames(systems, share * total, rcut)
    for mine, other, system in zip(numbers, again, systems, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert len(np.unique(mine)) == len(mine)
        assert not len(mine) or 0 <= mine.min() <= mine.max() < system.nframes
    # Rounding by chance, and the frames of rare types.
    extra = 3 * 16 * frame_costs(systems, rcut).max()
    assert cost(systems, numbers, rcut) <= 1.25 * share * total + extra
    counts = np.zeros(3, dtype=int)
    for system, mine in zip(systems, numbers, strict=True):
        counts[np.unique(system.types(np.zeros(1, dtype=int)))] += len(mine)
    assert counts.min() >= min(16, systems[17].nframes)
    if share > 0.5:
        assert all(len(mine) for mine in numbers)


def test_larger_systems_of_a_sample_give_more_frames(tmp_path):
    for name, nframes in (("a", 300), ("b", 30)):
        write_npy(tmp_path / name, [0, 1], [make_arrays(nframes, 2, nframes)])
    systems = open_systems(str(tmp_path))
    first, second = sample_frames(systems, 60 * (2 + FRAME_COST))
    assert 45 <= len(first) <= 60
    assert 3 <= len(second) <= 10
    odd = [np.arange(1, 300, 2), np.arange(1, 30, 2)]
    drawn = sample_frames(systems, 60 * (2 + FRAME_COST), candidates=odd)
    assert all((mine % 2 == 1).all() for mine in drawn)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_sample_with_given_frames_has_them_at_the_same_cost(systems, share):
    most = share * cost(systems, sample_frames(systems, 1e9), 6.0)
    first = sample_frames(
        systems, most / 2, 6.0, [np.arange(s.nframes)[::-2][::-1] for s in systems]
    )
    numbers = sample_with(systems, first, most, 6.0)
    for mine, given, system in zip(numbers, first, systems, strict=True):
        assert np.isin(given, mine).all()
        assert mine.tolist() == sorted(set(mine.tolist()))
        assert not len(mine) or 0 <= mine.min() <= mine.max() < system.nframes
    assert cost(systems, numbers, 6.0) <= 1.25 * most + 3 * 16 * frame_costs(systems, 6.0).max()
    assert sum(map(len, numbers)) > sum(map(len, first))


def test_a_sample_with_given_frames_is_whole_where_that_fits(systems):
    first = [np.arange(s.nframes)[::2] for s in systems]
    whole = cost(systems, sample_frames(systems, 1e9))
    for mine, system in zip(sample_with(systems, first, whole), systems, strict=True):
        assert mine.tolist() == list(range(system.nframes))


def test_packed_parts_hold_every_frame_once_with_or_without_a_cell(systems):
    numbers = [np.arange(system.nframes) for system in systems]
    seen = [[] for _ in systems]
    parts = list(packed(systems, numbers, 40))
    for part in parts:
        assert len({systems[k].pbc for k, _ in part}) == 1
        frames = sum(len(n) for _, n in part)
        assert frames * max(systems[k].natoms for k, _ in part) <= 40
        for k, mine in part:
            seen[k] += mine.tolist()
    assert [sorted(mine) for mine in seen] == [n.tolist() for n in numbers]
    assert len(parts) < 80  # 375 frames
    assert list(packed(systems, [np.zeros(0, dtype=int)] * 40, 40)) == []


def test_bounded_batches_hold_the_frames_of_the_samples(systems):
    data = DataLoader(systems, 3, seed=1, cache=NeighborCache(4.0, (30, 30, 30), True))

    def energies(batches):
        return sorted(np.concatenate([batch.frames.energy for batch in batches]).tolist())

    few = list(data.bounded_batches(2, 1e9))
    assert energies(few) == energies(data.sample_batches(2))
    assert len(few) < 5
    assert energies(data.bounded_batches(2, 500)) == energies(data.bounded_batches(2, 500))
    assert len(energies(data.bounded_batches(2, 500))) < 60


def test_neighbours_are_counted_in_the_frames_of_a_sample(systems):
    numbers = sample_frames(systems, 2000)
    counted = neighbor_statistics(systems, 4.0, numbers=numbers)
    every = neighbor_statistics(systems, 4.0)
    assert counted.min_distance >= every.min_distance
    assert all(0 < a <= b for a, b in zip(counted.max_neighbors, every.max_neighbors, strict=True))
    assert counted.min_distance > every.min_distance


def test_reading_ahead_keeps_the_order_and_stays_within_its_bound():
    made, lock = [], threading.Lock()

    def build(k):
        with lock:
            made.append(k)
        return k * k

    found = []
    for value in read_ahead(build, iter(range(50)), 3):
        found.append(value)
        assert len(made) <= len(found) + 4
    assert found == [k * k for k in range(50)]

    def broken(k):
        if k == 5:
            raise ValueError(k)
        return k

    with pytest.raises(ValueError, match="5"):
        list(read_ahead(broken, range(50), 3))
