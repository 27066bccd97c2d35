"""TorchSim's own validation of a model; needs the package torch-sim-atomistic: `pytest -m torch_sim`."""

import numpy as np
import pytest
import torch
from dynamics_models import build

from deepmd_muon.infer import Predictor

pytestmark = pytest.mark.torch_sim


def test_model_passes_torch_sims_validation():
    from torch_sim.models.interface import validate_model_outputs

    from deepmd_muon.dynamics.torch_sim import DeepPotTorchSim

    model = DeepPotTorchSim(Predictor(build("dpa3", ("Si", "Fe")), device="cpu"))
    validate_model_outputs(model, torch.device("cpu"), torch.float64)


def test_stress_is_the_calculators():
    import torch_sim
    from ase.build import bulk

    from deepmd_muon.dynamics.torch_sim import DeepPotTorchSim
    from deepmd_muon.infer import DeepPotCalculator

    predictor = Predictor(build("dpa3", ("Si", "Fe")), device="cpu")
    atoms = bulk("Si", "diamond", a=5.3).repeat((2, 1, 1))
    atoms.rattle(0.1, seed=1)
    state = torch_sim.io.atoms_to_state([atoms], torch.device("cpu"), torch.float64)
    found = DeepPotTorchSim(predictor)(state)
    atoms.calc = DeepPotCalculator(predictor)
    np.testing.assert_allclose(found["forces"], atoms.get_forces(), atol=1e-10)
    np.testing.assert_allclose(found["stress"][0], atoms.get_stress(voigt=False), atol=1e-12)
