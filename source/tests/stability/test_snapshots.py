"""Snapshots compared with data at once equal frames compared one by one, wherever pairs are searched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import jittered_water
from write_systems import write_npy

from deepmd_muon.data import Frames, open_systems
from deepmd_muon.dynamics.systems import Systems
from deepmd_muon.stability.angles import angles_of
from deepmd_muon.stability.coverage import coverage_of, pairs_of
from deepmd_muon.stability.snapshots import Snapshots

TYPES, RCUT = ("O", "H", "Na"), 4.0


@pytest.fixture
def data(tmp_path):
    """Coverage and angles of two frames of water; there is no Na."""
    coord, box, atype = jittered_water(2, scale=0.02)
    arrays = {"coord": coord.reshape(2, -1), "box": np.tile(box.reshape(-1), (2, 1))}
    systems = open_systems(write_npy(tmp_path / "water", atype, [arrays], "OH"), TYPES)
    coverage = coverage_of(systems, TYPES, RCUT)
    return coverage, angles_of(systems, coverage)


@pytest.fixture
def frames():
    """A frame of the data, one whose atoms moved, one without a cell, one with padding and Na, one not asked for."""
    coord, box, atype = jittered_water(5, scale=0.02)
    coord[1] += np.random.default_rng(0).normal(0.0, 0.15, coord[1].shape)
    atype = np.tile(atype, (5, 1)).astype(np.int32)
    atype[3, 12:] = -1
    atype[3, :2] = 2
    return Frames(
        atype=atype, coord=coord, box=np.stack([box, box, np.zeros((3, 3)), 1.02 * box, box])
    )


def found_by(device, data, systems, chosen):
    snapshots = Snapshots(*data, systems.coord.device)
    snapshots._on_device = device is not None
    return snapshots, snapshots.compare(systems, chosen)


@pytest.mark.parametrize("on_device", [False, True])
def test_snapshots_are_compared_as_frames_are(device, data, frames, on_device):
    coverage, angles = data
    chosen = np.array([True, True, True, True, False])
    snapshots, compared = found_by(
        device if on_device else None, data, Systems.from_frames(frames, TYPES, device), chosen
    )
    reached, extremes = np.full_like(coverage.shortest, np.inf), angles.empty()
    for k in range(4):
        pairs = pairs_of(frames, k, RCUT)
        closest, worst = coverage.compare(pairs)
        assert compared.closest[k] == pytest.approx(closest, rel=1e-12)
        assert compared.departs[k] == (worst is not None)
        own = angles.empty()
        own.add(frames, k, pairs)
        excess = angles.excess(own)
        assert compared.bends[k] == pytest.approx(excess[0] if excess else 0.0, abs=1e-6)
        extremes.add(frames, k, pairs)
        np.minimum.at(reached, (pairs.types[pairs.i], pairs.types[pairs.j]), pairs.distance)
    assert compared.departs.tolist() == [False, True, False, True, False]
    assert compared.bends[1] > 1.0
    assert np.isnan(compared.closest[4])
    np.testing.assert_allclose(snapshots.reached, reached, rtol=1e-12)
    np.testing.assert_allclose(snapshots.angles.smallest, extremes.smallest, atol=1e-6)
    np.testing.assert_allclose(snapshots.angles.largest, extremes.largest, atol=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_atoms_at_the_same_place_are_left_out(device, data, frames, on_device):
    frames.coord[1, 4] = frames.coord[1, 7]
    systems, every = Systems.from_frames(frames, TYPES, device), np.ones(5, dtype=bool)
    snapshots, compared = found_by(device if on_device else None, data, systems, every)
    assert np.isnan(compared.closest).tolist() == [False, True, False, False, False]
    assert not compared.departs[1]
    assert snapshots.reached.min() > 0.5


@pytest.mark.parametrize("most", [48, 16384])
def test_lists_follow_atoms_cells_and_lost_structures(device, data, frames, most, monkeypatch):
    """A search that keeps its lists finds what a new one does, in groups of structures or in one."""
    monkeypatch.setattr("deepmd_muon.stability.snapshots._MAX_ATOMS", most)
    systems, random = Systems.from_frames(frames, TYPES, device), torch.Generator().manual_seed(1)
    kept = Snapshots(*data, systems.coord.device)
    kept._on_device = True
    for step in range(6):
        moved = 0.2 * torch.randn(systems.coord.shape, generator=random, dtype=torch.float64).to(
            systems.coord.device
        )
        systems = replace(
            systems, coord=systems.coord + torch.where(systems.real[..., None], moved, 0.0)
        )
        if step == 2:
            systems = replace(systems, box=0.9 * systems.box, coord=0.9 * systems.coord)
        if step == 4:
            systems = systems.rows(torch.tensor([0, 2, 3], device=systems.coord.device))
        chosen = np.ones(len(systems), dtype=bool)
        _, expected = found_by(None, data, systems, chosen)
        found = kept.compare(systems, chosen)
        np.testing.assert_allclose(found.closest, expected.closest, rtol=1e-12)
        np.testing.assert_array_equal(found.departs, expected.departs)
        np.testing.assert_allclose(found.bends, expected.bends, atol=1e-6)
