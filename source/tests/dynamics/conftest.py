import numpy as np
import pytest
import torch
from small_models import SE_E2_A, jittered_water, section_of

from deepmd_muon.data import Frames

DESCRIPTORS = {
    "se_e2_a": {**SE_E2_A, "sel": [9, 14]},
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
    **{
        key: DESCRIPTORS["se_e2_a"][key]
        for key in ("rcut", "rcut_smth", "neuron", "axis_neuron", "seed")
    },
    "sel": 120,
    "attn": 8,
    "attn_layer": 1,
}

# Room for all neighbours: its energy does not jump where those beyond sel would be left out.
DESCRIPTORS["smooth"] = {**DESCRIPTORS["se_e2_a"], "sel": [40, 80]}


def build(name, type_map=("O", "H")):
    from deepmd_muon.model import build_model

    return build_model(section_of(DESCRIPTORS[name], type_map=type_map))


@pytest.fixture
def frames():
    """A periodic frame of 24 atoms, one without cell, and one of 12 atoms with padding."""
    coord, box, atype = jittered_water(3, scale=0.05)
    atype = np.tile(atype, (3, 1)).astype(np.int32)
    atype[2, 12:] = -1
    return Frames(atype=atype, coord=coord, box=np.stack([box, np.zeros((3, 3)), box]))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)
