import numpy as np
import pytest

from deepmd_muon.argcheck import normalize


@pytest.fixture(scope="session")
def model_section():
    """A small water model with every default filled in."""
    checked = normalize(
        {
            "model": {
                "type_map": ["O", "H"],
                "descriptor": {
                    "type": "se_e2_a",
                    "sel": [24, 48],
                    "rcut": 4.0,
                    "rcut_smth": 1.0,
                    "neuron": [4, 8],
                    "axis_neuron": 2,
                    "seed": 1,
                },
                "fitting_net": {"neuron": [12, 12], "seed": 2},
            },
            "learning_rate": {"start_lr": 1e-3},
            "loss": {},
            "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
        }
    )
    return checked.normalized["model"]


@pytest.fixture
def model(model_section):
    from deepmd_muon.model import build_model

    return build_model(model_section)


@pytest.fixture
def predictor(model):
    from deepmd_muon.infer import Predictor

    return Predictor(model, device="cpu")


@pytest.fixture
def committee(model_section):
    """Three models that differ in the seed of their fitting nets."""
    from deepmd_muon.infer import Predictor
    from deepmd_muon.model import build_model

    sections = [{**model_section, "fitting_net": {**model_section["fitting_net"], "seed": seed}} for seed in (2, 3, 4)]
    return [Predictor(build_model(section), device="cpu") for section in sections]


@pytest.fixture(scope="session")
def water_atoms():
    """Eight jittered molecules in a triclinic cell: coord (24, 3), box (3, 3), atype (24,)."""
    random = np.random.default_rng(7)
    box = np.array([[6.2, 0.0, 0.0], [0.5, 6.4, 0.0], [-0.3, 0.4, 6.0]])
    corners = np.stack(np.meshgrid(*[[0.1, 0.6]] * 3, indexing="ij"), axis=-1).reshape(-1, 3) @ box
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = (corners[:, None] + molecule).reshape(-1, 3) + random.normal(scale=0.08, size=(24, 3))
    return coord, box, np.tile([0, 1, 1], 8)
