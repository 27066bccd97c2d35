"""Every setting of a descriptor has an effect beside each switch of it, or an answer."""

import dataclasses
import functools

import numpy as np
import pytest
from effects import values_of, wrong_answers
from small_models import jittered_water

from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.dpa1.settings import DPA1Settings, SeAttenV2Settings
from deepmd_muon.model.descriptor.dpa3.settings import RepflowSettings
from deepmd_muon.model.descriptor.se_e2_a.settings import SeE2ASettings
from deepmd_muon.model.settings import ModelSettings
from deepmd_muon.section import freeze
from deepmd_muon.setting import idle_settings

pytestmark = pytest.mark.slow  # hundreds of models

EMBEDDING = {"rcut": 4.0, "rcut_smth": 1.0, "neuron": (4, 8), "axis_neuron": 2, "seed": 1}
ATTENTION = {**EMBEDDING, "sel": 60, "tebd_dim": 4, "attn": 6}
CUTS = {"e_rcut": 4.0, "e_rcut_smth": 1.0, "e_sel": 40, "a_rcut": 3.0, "a_rcut_smth": 0.5}
SIZES = {"a_sel": 20, "n_dim": 8, "e_dim": 6, "a_dim": 4, "nlayers": 2, "axis_neuron": 2}
BASES = {
    SeE2ASettings: {**EMBEDDING, "sel": (24, 48)},
    DPA1Settings: ATTENTION,
    SeAttenV2Settings: ATTENTION,
    RepflowSettings: {**CUTS, **SIZES},
}
VALUES = {
    "rcut": [3.5],
    "rcut_smth": [2.0],
    "neuron": [(4, 8, 8)],
    "axis_neuron": [1],
    "seed": [5],
    "activation_function": ["gelu"],
    "precision": ["float32"],
    "env_protection": [0.3],
    "exclude_types": [((0, 1),)],
    "tebd_dim": [3],
    "attn": [5],
    "attn_layer": [0, 1],
    "scaling_factor": [2.0],
    "temperature": [0.4],
    "ln_eps": [1e-2],
    "e_rcut": [3.8],
    "e_rcut_smth": [2.0],
    "e_sel": [30],
    "a_rcut": [2.5],
    "a_sel": [12],
    "a_rcut_smth": [1.0],
    "n_dim": [9],
    "e_dim": [7],
    "a_dim": [8],
    "nlayers": [3],
    "a_compress_rate": [1],
    "a_compress_e_rate": [2],
    "n_multi_edge_message": [2],
    "fix_stat_std": [0.5],
    "update_residual": [0.3],
    "sel_reduce_factor": [3.0],
}
# These act on training or its statistics, not on a model with given numbers; `skip_stat` is an older spelling.
OF_TRAINING = {"trainable", "trainable_ln", "set_davg_zero", "skip_stat"}
# Keys that an input must give, so that an answer would always come; and weights that vanish within both cut-offs.
REQUIRED_BY_ANGLES = {"a_rcut", "a_rcut_smth", "a_sel"}
SWITCHES = ("attn_layer", "a_compress_rate", "tebd_input_mode", "update_style", "temperature")
CASES = [
    (section, field.name)
    for section in BASES
    for field in dataclasses.fields(section)
    if field.name not in OF_TRAINING | REQUIRED_BY_ANGLES
]


def values(section, name):
    if name == "sel":
        return [(24, 40)] if section is SeE2ASettings else [48]
    return values_of(section, name, VALUES)


@functools.cache
def outcome(section, settings):
    """Return energy and forces of a model with these settings, and those that have no effect."""
    keys = {**BASES[section], **dict(settings)}
    if section is RepflowSettings:
        descriptor = {"type": "dpa3", "repflow": keys, "seed": 1}
    else:
        descriptor = {"type": section.type, **keys}
    fitting_net = {"type": "ener", "neuron": [6, 6], "seed": 2}
    plain = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting_net}
    part = freeze(ModelSettings, plain).descriptor
    prediction = Predictor(build_model(plain)).predict(*jittered_water(1))
    numbers = [np.asarray(x).round(12) for x in (prediction.energy, prediction.force)]
    idle = idle_settings(part.repflow if section is RepflowSettings else part)
    return b"".join(x.tobytes() for x in numbers), frozenset(idle)


@pytest.mark.parametrize(("section", "name"), CASES)
def test_a_setting_has_an_effect_or_an_answer_beside_every_switch(section, name):
    switches = [
        (field.name, value)
        for field in dataclasses.fields(section)
        if field.name in SWITCHES or isinstance(field.default, bool)
        if field.name not in OF_TRAINING | {name, "use_exp_switch"}
        for value in values(section, field.name)
    ]
    contexts = [frozenset(), *(frozenset({switch}) for switch in switches)]
    tried = values(section, name)
    wrong = wrong_answers(
        name, tried, contexts, functools.partial(outcome, section), lambda *_: False
    )
    assert not wrong, "\n".join(wrong)
