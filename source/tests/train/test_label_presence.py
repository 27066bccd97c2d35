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


def test_mixed_batches_keep_every_label(tmp_path, model):
    """A periodic system with virials and a cluster without them share batches: the virials still count."""
    paths = [
        write(tmp_path / "a", [("energy", "virial")], 8),
        write(tmp_path / "b", [("energy", "force")], 5, True),
    ]
    systems = open_systems(paths, ["Cu"])
    data = loader(systems, "mixed:6")
    batch = data.next()
    while len(set(batch.frames.present("virial"))) == 1:
        batch = data.next()
    labels = to_device(batch, 1, CPU).labels
    assert torch.equal(labels["find_virial"], ~labels["find_force"])
    loss = build_loss({"start_pref_v": 1.0, "limit_pref_v": 1.0}, ["Cu"])
    _, metrics, gradient = loss_of(model, loss, batch)
    prediction = model(to_device(batch, 1, CPU).structures, force=True, virial=True)
    found, natoms = labels["find_virial"], torch.where(labels["find_virial"], 8.0, 5.0)
    error = (prediction["virial"] - labels["virial"])[found] / natoms[found].unsqueeze(1)
    torch.testing.assert_close(metrics["rmse_v"], error.square().mean().sqrt().detach())
    assert gradient.isfinite().all()


def test_whole_labels_are_handed_on_as_they_are(tmp_path):
    systems = open_systems(
        write(tmp_path / "s", [("energy", "force"), ("energy", "force")], 6), ["Cu"]
    )
    labels = to_device(loader(systems, 6).next(), 1, CPU).labels
    assert not [name for name in labels if name.startswith("find_")]
    assert labels["virial"] is None


def test_a_batch_without_any_label_has_a_gradient_of_zero(tmp_path, model):
    systems = open_systems(write(tmp_path / "s", [("virial",)], 6), ["Cu"])
    value, _, gradient = loss_of(model, build_loss({}, ["Cu"]), loader(systems, 3).next())
    assert value == 0
    assert (gradient == 0).all()
