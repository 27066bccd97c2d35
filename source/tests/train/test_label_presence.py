"""Labels that only some frames have: from the files to the step."""

from __future__ import annotations

import numpy as np
import torch
from write_systems import write_npy

from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.loss import build_loss
from deepmd_muon.train.batches.batch import to_device

CPU = torch.device("cpu")


def write(folder, sets, natoms, nopbc=False):
    """Random frames of `natoms` atoms; `sets` name the labels of each set of three frames."""
    random = np.random.default_rng(natoms)
    widths = {"energy": 1, "force": 3 * natoms, "virial": 9}
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3)[:natoms] * 2.5
    arrays = []
    for labels in sets:
        coord = (grid + random.uniform(-0.2, 0.2, (3, natoms, 3))).reshape(3, -1)
        drawn = {label: random.standard_normal((3, widths[label])) for label in labels}
        arrays.append({"coord": coord, "box": np.tile(7.5 * np.eye(3).ravel(), (3, 1)), **drawn})
    return write_npy(folder, [0] * natoms, arrays, ["Cu"], nopbc=nopbc)


def loss_of(model, loss, batch):
    """Loss, metrics and gradient of a batch."""
    batch = to_device(batch, 1, CPU)
    model.zero_grad()
    prediction = model(batch.structures, force=True, virial=True)
    value, metrics = loss(prediction, batch.labels, 0.5, batch.compared_atoms(None))
    value.backward()
    gradient = torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])
    return value.detach(), metrics, gradient


def loader(systems, batch_size):
    return DataLoader(systems, batch_size, seed=3, cache=NeighborCache(3.5, (20,), True))


def test_sets_with_and_without_forces_in_one_batch(tmp_path, model):
    """Forces weigh in the frames that have them; energies in all."""
    systems = open_systems(write(tmp_path / "s", [("energy", "force"), ("energy",)], 6), ["Cu"])
    data = loader(systems, 6)
    batch = data.next()
    labels = to_device(batch, 1, CPU).labels
    assert labels["find_force"].sum() == 3
    assert "find_energy" not in labels
    assert labels["force"][~labels["find_force"]].eq(0).all()
    value, metrics, gradient = loss_of(model, build_loss({}, ["Cu"]), batch)
    (force_system,) = open_systems(write(tmp_path / "f", [("energy", "force")], 6), ["Cu"])
    energy = loss_of(model, build_loss({"start_pref_f": 0.0}, ["Cu"]), batch)
    force = loss_of(
        model, build_loss({"start_pref_e": 0.0}, ["Cu"]), loader([force_system], 3).next()
    )
    torch.testing.assert_close(value, energy[0] + force[0])
    torch.testing.assert_close(gradient, energy[2] + force[2])
    torch.testing.assert_close(metrics["rmse_f"], force[1]["rmse_f"])
