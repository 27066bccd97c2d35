"""Atoms far apart, which ended the process in the neighbour library: computed, or refused by system, frame and atom."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepmd_muon.data import Frames, NeighborError, System
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.deploy.images import with_images
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.infer.model_deviation import DeviationSettings, system_deviation

WATER = np.array([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
TYPES = np.array([0, 1, 1])


@pytest.fixture(params=["checkpoint", "frozen"])
def potential(request, model, tmp_path):
    if request.param == "checkpoint":
        return Predictor(model, device="cpu")
    path = tmp_path / "model.pth"
    freeze(model, path)
    return Predictor(path, device="cpu")


def test_molecules_far_apart_have_the_energy_of_molecules(potential):
    alone = potential.predict(WATER, None, TYPES)
    places = np.array([[0.0, 0, 0], [1e6, 0, 0], [0, 3e5, 0], [2e3, -2e3, 0]])
    coord = (WATER + places[:, None]).reshape(-1, 3)
    for box in (None, np.diag([4e6, 4e6, 30.0])):
        found = potential.predict(coord, box, np.tile(TYPES, 4))
        assert found.energy[0] == pytest.approx(4 * alone.energy[0], abs=1e-6)
        np.testing.assert_allclose(
            found.force[0].reshape(4, 3, 3), np.tile(alone.force, (4, 1, 1)), atol=1e-6
        )


def test_atoms_far_outside_of_their_cell_have_its_energy(potential):
    box = np.diag([12.0, 12.0, 12.0])
    expected = potential.predict(WATER, box, TYPES)
    moved = WATER + np.array([[0, 0, 0], [1e4, 5e3, 0], [0, 0, -7e4]]) @ box
    found = potential.predict(moved, box, TYPES)
    assert found.energy[0] == pytest.approx(expected.energy[0], abs=1e-6)
    np.testing.assert_allclose(found.force, expected.force, atol=1e-6)


class Two:
    """A system of frames, the last of which has an atom at the end of the world."""

    name, nframes, natoms = "water/far", 5, 3
    chunks = System.chunks

    def with_parameters(self, _):
        return self

    def frames(self, numbers):
        coord = np.tile(WATER, (len(numbers), 1, 1))
        coord[np.asarray(numbers) == 3, 2] = 2e7
        return Frames(atype=np.tile(TYPES.astype(np.int32), (len(coord), 1)), coord=coord, box=None)


RUNS = {
    "test": lambda potential, system: list(evaluate_system(potential, system)),
    "model-devi": lambda potential, system: list(
        system_deviation([potential] * 2, system, DeviationSettings())
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_error_names_system_frame_and_atom(potential, run):
    potential.batch_atoms = 6
    with pytest.raises(NeighborError, match="atom 2") as caught:
        RUNS[run](potential, Two())
    assert (caught.value.system, caught.value.frame) == ("water/far", 3)


class OneWithoutCell(Two):
    """A periodic system, one frame of which has a cell of zeros."""

    def frames(self, numbers):
        box = (
            np.tile(10.0 * np.eye(3), (len(numbers), 1, 1))
            * (np.asarray(numbers) != 3)[:, None, None]
        )
        return replace(super().frames(numbers), coord=np.tile(WATER, (len(numbers), 1, 1)), box=box)


@pytest.mark.parametrize("run", RUNS)
def test_a_cell_of_zeros_in_data_is_an_error(potential, run):
    with pytest.raises(NeighborError, match="nopbc") as caught:
        RUNS[run](potential, OneWithoutCell())
    assert (caught.value.system, caught.value.frame) == ("water/far", 3)


def test_a_frozen_file_refuses_a_flat_cell():
    """Of its own images; the message must not come from a process out of memory."""
    box = torch.diag(torch.tensor([10.0, 10.0, 1e-7], dtype=torch.float64))
    with pytest.raises(ValueError, match="flat"):
        with_images(
            torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), box, 6.0
        )
