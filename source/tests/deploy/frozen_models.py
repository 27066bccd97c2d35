"""Small models for the tests of frozen files."""

import numpy as np
from small_models import section_of

from deepmd_muon.model import build_model


def build(descriptor, fitting_net=None, type_map=("O", "H"), **section):
    """A small model with uneven statistics and energy bias; `section` are further keys of the model."""
    model = build_model(section_of(descriptor, fitting_net, type_map, **section))
    ntypes = len(type_map)
    random = np.random.default_rng(11)
    as_tensor = model.atomic_model.out_bias.new_tensor
    mean = np.zeros((ntypes, 4))
    mean[:, 0] = random.uniform(0.05, 0.1, size=ntypes)
    # Data give x, y and z of a row one deviation; deepmd-kit's DPA-1 takes directions from scaled rows.
    deviation = random.uniform(0.1, 0.3, size=(ntypes, 2))[:, [0, 1, 1, 1]]
    model.set_statistics(as_tensor(mean), as_tensor(deviation))
    model.set_energy_bias(random.normal(size=ntypes))
    return model


# Of a size that makes neighbours, angles and attention count; by descriptor.
EMBEDDING = {"rcut": 4.5, "rcut_smth": 1.0, "neuron": [8, 16], "axis_neuron": 4}
REPFLOW = {
    "e_rcut": 4.5,
    "e_rcut_smth": 3.5,
    "e_sel": 60,
    "a_rcut": 3.0,
    "a_rcut_smth": 2.0,
    "a_sel": 20,
    "n_dim": 12,
    "e_dim": 8,
    "a_dim": 6,
    "nlayers": 3,
    "axis_neuron": 4,
    "smooth_edge_update": True,
    "update_residual_init": "norm",
}
LARGER = {
    "se_e2_a": {"type": "se_e2_a", "sel": [40, 80], **EMBEDDING},
    "se_atten": {
        "type": "se_atten",
        "sel": 60,
        **EMBEDDING,
        "attn": 8,
        "attn_layer": 2,
        "smooth_type_embedding": True,  # else the energy jumps where neighbours come and go
    },
    "dpa3": {"type": "dpa3", "repflow": REPFLOW},
}

# Those that `dp compress` takes.
TABULATED = {
    "se_e2_a": LARGER["se_e2_a"],
    "se_atten": LARGER["se_atten"] | {"attn_layer": 0},
    "strip": LARGER["se_atten"] | {"attn_layer": 0, "tebd_input_mode": "strip"},
}
