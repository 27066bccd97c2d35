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
from deepmd_muon.train.batches import resident
from deepmd_muon.train.batches.device_sample import DeviceSample, sample_on

sys.path.append(str(Path(__file__).parents[1] / "model"))

from corners import DESCRIPTORS, corner_model
from write_systems import make_arrays, write_npy

CPU = torch.device("cpu")
#: Changes of arrays, and what is said of them.
MISTAKES = {
    lambda arrays: arrays["coord"].__setitem__(
        (2, slice(0, 3)), arrays["coord"][2, 3:6]
    ): "lie at the same place",
    lambda arrays: arrays["box"].__imul__(0.05): "atoms per Å",
}
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
    numbers = [
        np.array([0, 1, 4]),
        np.arange(5),
        np.array([2]),
        np.arange(5),
        np.arange(5),
        np.zeros(0, dtype=int),
    ]
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
    assert descriptor_length(model, searched) == pytest.approx(
        descriptor_length(model, host), rel=1e-12
    )


def test_frames_of_a_batch_give_the_energies_and_forces_of_the_host(systems):
    model = corner_model("dpa3", "float64")
    for frames, structures in DeviceSample(systems, cache_of(model), CPU).batches(
        [np.arange(5)] * 6
    ):
        found = model(structures)
        for row in range(frames.nframes):
            lone = frames.rows([row])
            real = lone.atype[0] >= 0
            natoms = int(real.sum())
            whole = model(Structures.of(*listed(lone, model), 3))
            torch.testing.assert_close(found["energy"][row], whole["energy"][0])
            by_type = np.argsort(np.where(real, lone.atype[0], 3), kind="stable")[:natoms]
            torch.testing.assert_close(
                found["force"][row, :natoms], whole["force"][0][torch.from_numpy(by_type)]
            )


def listed(frames, model):
    """Return a frame and its neighbours on the host."""
    request = model.neighbors
    frame = (frames.coord[0], frames.cell(0), frames.atype[0])
    wanted = (request.rcut, request.sel, request.by_type)
    found = build_neighbors(*frame, *wanted, 3, request.inner)
    return frames, stack_neighbors([found])


def test_a_device_is_asked_where_it_makes_the_batches(systems, monkeypatch):
    cache = NeighborCache(4.0, [9, 9, 9], by_type=True)
    assert sample_on(CPU, systems, cache) is None
    assert isinstance(sample_on(torch.device("cuda"), systems, cache), DeviceSample)
    monkeypatch.setattr(resident, "MOST_ATOMS", 13)
    assert sample_on(torch.device("cuda"), systems, cache) is None


def test_batches_note_that_sel_cuts(systems):
    cache = NeighborCache(4.0, [1, 1, 1], by_type=True)
    assert len(list(DeviceSample(systems, cache, CPU).batches([np.arange(2)] * 6))) == 1
    assert cache.dropped > 0


def test_mistakes_are_named(tmp_path):
    """Of the systems, the second one has one type more, and no frame in the sample."""
    for k, (change, message) in enumerate(MISTAKES.items()):
        arrays = make_arrays(4, 5, 1)
        change(arrays)
        paths = [write_npy(tmp_path / f"broken{k}", [0] * 5, [arrays], NAMES)]
        paths.append(
            write_npy(tmp_path / f"other{k}", [3] * 5, [make_arrays(4, 5, 1)], [*NAMES, "Cu"])
        )
        systems = [open_systems([path])[0] for path in paths]
        sample = DeviceSample(systems, NeighborCache(4.0, [9] * 4, by_type=True), CPU)
        numbers = [np.arange(4), np.zeros(0, dtype=int)]
        with pytest.raises(NeighborError, match=message):
            sample.count(numbers)
        if "same place" in message:
            with pytest.raises(NeighborError, match=message):
                list(sample.batches(numbers))
