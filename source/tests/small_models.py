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
