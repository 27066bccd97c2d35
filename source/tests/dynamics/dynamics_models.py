"""Small models for tests of dynamics."""

from small_models import SE_E2_A, section_of

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
