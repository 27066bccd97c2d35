import numpy as np
import pytest
import torch

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import Frames

DESCRIPTORS = {
    "se_e2_a": {
        "type": "se_e2_a",
        "sel": [9, 14],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    },
    "dpa3": {
        "type": "dpa3",
        "repflow": {
            "n_dim": 8,
            "e_dim": 6,
            "a_dim": 4,
            "nlayers": 2,
            "e_rcut": 4.0,
            "e_rcut_smth": 3.0,
            "e_sel": 60,
            "a_rcut": 3.0,
            "a_rcut_smth": 2.0,
            "a_sel": 20,
            "axis_neuron": 2,
        },
        "seed": 1,
    },
}

DESCRIPTORS["dpa1"] = {
    "type": "dpa1",
    **{key: DESCRIPTORS["se_e2_a"][key] for key in ("rcut", "rcut_smth", "neuron", "axis_neuron", "seed")},
    "sel": 120,
    "attn": 8,
    "attn_layer": 1,
}

# Room for all neighbours: its energy does not jump where those beyond sel would be left out.
DESCRIPTORS["smooth"] = {**DESCRIPTORS["se_e2_a"], "sel": [40, 80]}


def build(name, type_map=("O", "H")):
    from deepmd_muon.model import build_model

    checked = normalize(
        {
            "model": {
                "type_map": list(type_map),
                "descriptor": DESCRIPTORS[name],
                "fitting_net": {"neuron": [12, 12], "seed": 2},
            },
            "learning_rate": {"start_lr": 1e-3},
            "loss": {},
            "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
        }
    )
    return build_model(checked.normalized["model"])


@pytest.fixture
def frames():
    """A periodic frame of 24 atoms, one without cell, and one of 12 atoms with padding."""
    random = np.random.default_rng(7)
    box = np.array([[6.2, 0.0, 0.0], [0.5, 6.4, 0.0], [-0.3, 0.4, 6.0]])
    corners = np.stack(np.meshgrid(*[[0.1, 0.6]] * 3, indexing="ij"), axis=-1).reshape(-1, 3) @ box
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = (corners[:, None] + molecule).reshape(-1, 3) + random.normal(scale=0.05, size=(3, 24, 3))
    atype = np.tile([0, 1, 1], (3, 8)).astype(np.int32)
    atype[2, 12:] = -1
    return Frames(atype=atype, coord=coord, box=np.stack([box, np.zeros((3, 3)), box]))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)
