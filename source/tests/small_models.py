"""Small models and structures for the tests of several folders."""

import numpy as np

from deepmd_muon.argcheck import normalize

SE_E2_A = {
    "type": "se_e2_a",
    "sel": [24, 48],
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8],
    "axis_neuron": 2,
    "seed": 1,
}
_CUTS = {"e_rcut": 4.0, "e_rcut_smth": 3.5, "e_sel": 20, "a_rcut": 3.0, "a_rcut_smth": 2.5}
_WIDTHS = {"n_dim": 6, "e_dim": 5, "a_dim": 4, "nlayers": 1, "a_sel": 10}
_ATTENTION = {"attn": 6, "attn_layer": 1, "rcut": 4.0, "axis_neuron": 2}
_NET = {"rcut_smth": 2.0, "neuron": [4, 8], "seed": 1}
#: A small descriptor of each kind for crystals and clusters of copper.
COPPER_DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": [44], "rcut": 4.5, "axis_neuron": 3, **_NET},
    "dpa1": {"type": "dpa1", "sel": 30, **_ATTENTION, **_NET},
    "dpa3": {"type": "dpa3", "repflow": {**_CUTS, **_WIDTHS}, "seed": 1},
}


def section_of(descriptor, fitting_net=None, type_map=("O", "H"), **section):
    """A model section with every default filled in; `section` are further keys of it."""
    checked = normalize(
        {
            "model": {
                "type_map": list(type_map),
                "descriptor": descriptor,
                "fitting_net": {"neuron": [12, 12], "seed": 2, **(fitting_net or {})},
                **section,
            },
            "learning_rate": {"start_lr": 1e-3},
            "loss": {},
            "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
        }
    )
    return checked.normalized["model"]


def jittered_water(nframes, scale=0.08):
    """Eight jittered molecules in a triclinic cell: coord (nframes, 24, 3), box (3, 3), atype (24,)."""
    random = np.random.default_rng(7)
    box = np.array([[6.2, 0.0, 0.0], [0.5, 6.4, 0.0], [-0.3, 0.4, 6.0]])
    corners = np.stack(np.meshgrid(*[[0.1, 0.6]] * 3, indexing="ij"), axis=-1).reshape(-1, 3) @ box
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = (corners[:, None] + molecule).reshape(-1, 3) + random.normal(
        scale=scale, size=(nframes, 24, 3)
    )
    return coord, box, np.tile([0, 1, 1], 8)
