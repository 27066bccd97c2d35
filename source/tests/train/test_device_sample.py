"""Frames measured on a device give the counts, statistics and neighbours of the host."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    NeighborError,
    Plan,
    build_neighbors,
    neighbor_statistics,
    open_systems,
    stack_neighbors,
)
from deepmd_muon.model import Structures, environment_statistics
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.train.batches import device_sample
from deepmd_muon.train.batches.device_sample import DeviceSample

sys.path.append(str(Path(__file__).parents[1] / "model"))

from corners import DESCRIPTORS, corner_model
from write_systems import make_arrays, write_npy

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("Ni", "Pd", "Al")


def written(folder, sizes, *, scale=7.0, nopbc=(), mixed=()):
    """Write and open systems of five frames with types in random order."""
    rng = np.random.default_rng(4)
    paths = []
    for k, natoms in enumerate(sizes):
        arrays = make_arrays(5, natoms, k, ("energy", "force"), scale=scale)
        types = rng.integers(0, 3, natoms)
        if k in mixed:
            arrays["real_atom_types"] = rng.integers(-1, 3, (5, natoms))
            arrays["real_atom_types"][:, 0] = 1
            types = np.zeros(natoms, dtype=int)
        paths.append(write_npy(folder / f"system{k}", types, [arrays], NAMES, nopbc=k in nopbc))
    return open_systems(paths, NAMES)


@pytest.fixture
def systems(tmp_path):
    """Compositions of 1 to 14 atoms, one without a cell, one with padding between its atoms."""
    return written(tmp_path, [14, 9, 1, 5, 9, 12], nopbc=[3], mixed=[4])


def cache_of(model):
    return NeighborCache.of(model.neighbors, model.ntypes)


def host_batches(systems, numbers, cache):
    loader = DataLoader(systems, 1, seed=1, cache=cache)
    return [loader.build(Plan(((k, mine),))) for k, mine in enumerate(numbers) if len(mine)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rcut", [2.5, 6.0])
def test_counts_are_those_of_the_host(systems, rcut, device):
    numbers = [np.array([0, 1, 4]), np.arange(5), np.array([2]), np.arange(5), np.arange(5), np.zeros(0, dtype=int)]
    cache = NeighborCache(rcut, [3, 3, 3], by_type=True)
    found = DeviceSample(systems, cache, torch.device(device)).count(numbers)
    expected = neighbor_statistics(systems, rcut, numbers=numbers)
    assert found.max_neighbors == expected.max_neighbors
    assert found.max_total == expected.max_total > 3
    assert found.min_distance == pytest.approx(expected.min_distance, rel=1e-13)
    assert cache.dropped > 0
    assert len(cache) == 0


def test_nothing_is_counted_in_no_frames(systems):
    sample = DeviceSample(systems, NeighborCache(4.0, [9, 9, 9], by_type=True), CPU)
    none = [np.zeros(0, dtype=int)] * 6
    assert sample.count(none) == neighbor_statistics(systems, 4.0, numbers=none)
    assert list(sample.batches(none)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_statistics_and_lengths_are_those_of_the_host(systems, kind, device):
    model = corner_model(kind, "float64").to(device)
    numbers = [np.arange(5)] * 6
    host = [
        Structures.of(batch.frames, batch.neighbors, 3, device)
        for batch in host_batches(systems, numbers, cache_of(model))
    ]
    made = list(DeviceSample(systems, cache_of(model), torch.device(device)).batches(numbers))
    assert sum(frames.nframes for frames, _ in made) == 30
    assert len(made) < 6
    searched = [structures for _, structures in made]
    found, expected = environment_statistics(model, searched), environment_statistics(model, host)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    again = environment_statistics(model, searched)
    assert all(map(torch.equal, found, again))
    assert descriptor_length(model, searched) == pytest.approx(descriptor_length(model, host), rel=1e-12)


def test_frames_of_a_batch_give_the_energies_and_forces_of_the_host(systems):
    model = corner_model("dpa3", "float64")
    for frames, structures in DeviceSample(systems, cache_of(model), CPU).batches([np.arange(5)] * 6):
        found = model(structures)
        for row in range(frames.nframes):
            lone = frames.rows([row])
            real = lone.atype[0] >= 0
            natoms = int(real.sum())
            whole = model(Structures.of(*listed(lone, model), 3))
            torch.testing.assert_close(found["energy"][row], whole["energy"][0])
            torch.testing.assert_close(found["force"][row, :natoms], whole["force"][0][torch.from_numpy(real)])


def listed(frames, model):
    """Return a frame and its neighbours on the host."""
    request = model.neighbors
    box = None if frames.box is None else frames.box[0]
    found = build_neighbors(
        frames.coord[0], box, frames.atype[0], request.rcut, request.sel, request.by_type, 3, request.inner
    )
    return frames, stack_neighbors([found])


def test_frames_that_are_not_ordinary_are_left_to_the_host(tmp_path, monkeypatch):
    systems = written(tmp_path, [5, 4])
    calls = []
    monkeypatch.setattr(device_sample, "ordinary", lambda coord, box: (np.zeros(len(coord), dtype=bool), None))
    monkeypatch.setattr(device_sample, "find_neighbors", lambda *given: calls.append(given))
    model = corner_model("se_e2_a", "float64")
    sample = DeviceSample(systems, cache_of(model), CPU)
    numbers = [np.arange(5)] * 2
    expected = neighbor_statistics(systems, model.rcut)
    assert sample.count(numbers) == expected
    assert sum(structures.nframes for _, structures in sample.batches(numbers)) == 10
    assert not calls


def test_atoms_at_the_same_place_and_dense_cells_are_named(tmp_path):
    near, dense = make_arrays(4, 5, 1), make_arrays(4, 5, 1)
    near["coord"][2, :3] = near["coord"][2, 3:6]
    dense["box"] *= 0.05
    for arrays, message in ((near, "frame 2.*lie at the same place"), (dense, "atoms per Å")):
        systems = open_systems([write_npy(tmp_path / message[:5], [0] * 5, [arrays], NAMES)], NAMES)
        sample = DeviceSample(systems, NeighborCache(4.0, [9, 9, 9], by_type=True), CPU)
        with pytest.raises(NeighborError, match=rf"(?s){message}"):
            sample.count([np.arange(4)])
    with pytest.raises(NeighborError, match="lie at the same place"):
        list(DeviceSample(open_systems([str(tmp_path / "frame")], NAMES), sample._cache, CPU).batches([np.arange(4)]))
