"""Models in which one setting differs from a small model's, for every setting of a model and its parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from settings_changes import changes_of
from small_models import section_of

from deepmd_muon.model import build_model
from deepmd_muon.model.settings import model_settings

_RADIAL = {"rcut": 3.5, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 4, "seed": 1}
_REPFLOW = {
    "n_dim": 8,
    "e_dim": 8,
    "a_dim": 8,
    "nlayers": 2,
    "axis_neuron": 2,
    "e_rcut": 3.5,
    "e_rcut_smth": 2.0,
    "e_sel": 12,
    "a_rcut": 3.0,
    "a_rcut_smth": 1.5,
    "a_sel": 8,
    "smooth_edge_update": True,
}
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": [6, 10], **_RADIAL},
    "DPA-1": {"type": "se_atten", "sel": 12, "attn": 6, "attn_layer": 1, **_RADIAL},
    "DPA-1 v2": {"type": "se_atten_v2", "sel": 12, "attn_layer": 0, **_RADIAL},
    "DPA-3": {"type": "dpa3", "seed": 1, "repflow": _REPFLOW},
}

# Changes for which no other value follows from the declaration, or which act together with others only.
_SHARED = {
    "activation_function": [{"activation_function": name} for name in ("gelu", "silut:0.5")],
    "exclude_types": [{"exclude_types": ((0, 1),)}],
    "precision": [{"precision": "float32"}],
}
_EMBEDDING = {**_SHARED, "neuron": [{"neuron": (4, 4, 8)}, {"neuron": (5, 10)}]}
_STRIP = {"tebd_input_mode": "strip", "attn_layer": 0}
EXAMPLES = {
    "se_e2_a": {**_EMBEDDING, "sel": [{"sel": (4, 3)}]},
    "DPA-1": {
        **_EMBEDDING,
        "sel": [{"sel": 5}],
        "attn_layer": [{"attn_layer": 0}, {"attn_layer": 2}],
        "scaling_factor": [{"scaling_factor": 0.5, "normalize": False}],
        "tebd_input_mode": [_STRIP, {**_STRIP, "smooth_type_embedding": True}],
        "smooth_type_embedding": [
            {"smooth_type_embedding": True},
            {"smooth_type_embedding": True, "attn_layer": 0},
        ],
    },
    "DPA-1 v2": {
        **_EMBEDDING,
        "sel": [{"sel": 5}],
        "attn_layer": [{"attn_layer": 1}],
        # These settings are those of attention.
        **{
            name: [{name: value, "attn_layer": 1}]
            for name, value in (
                *(("attn", 6), ("attn_dotr", False), ("normalize", False), ("ln_eps", 0.1)),
                *(("scaling_factor", 0.5), ("temperature", 0.7)),
            )
        },
    },
    "DPA-3": {
        **_SHARED,
        "repflow": [],
    },
}
REPFLOW = {
    "e_sel": [{"e_sel": 8}, {"e_sel": 5, "a_sel": 4}],
    "a_sel": [{"a_sel": 3}],
    "e_rcut": [{"e_rcut": 3.2}],
    "a_compress_rate": [
        {"a_compress_rate": 1, "a_compress_use_split": True},
        {"a_compress_rate": 2},
        {"a_compress_rate": 2, "sequential_update": True, "n_multi_edge_message": 2},
    ],
    "a_compress_e_rate": [
        {"a_compress_e_rate": 2, "a_compress_rate": 2, "a_compress_use_split": True}
    ],
    "skip_stat": [{"skip_stat": True}],
    "use_dynamic_sel": [{"use_dynamic_sel": True, "e_sel": 40, "a_sel": 30}],
    "sel_reduce_factor": [
        {"sel_reduce_factor": 3.0, "use_dynamic_sel": True, "e_sel": 30, "a_sel": 20}
    ],
}
FITTING = {
    **{key: _SHARED[key] for key in ("activation_function", "precision")},
    "neuron": [{"neuron": (8, 8, 8)}, {"neuron": (5,)}],
    "atom_ener": [{"atom_ener": (-1.0, None)}],
    "numb_fparam": [{"numb_fparam": 2}],
    "numb_aparam": [{"numb_aparam": 2}],
    "use_aparam_as_mask": [{"use_aparam_as_mask": True, "numb_aparam": 1}],
    "default_fparam": [{"default_fparam": (0.3,), "numb_fparam": 1}],
    "dim_case_embd": [{"dim_case_embd": 2}],
}
_TABLE = {
    "use_srtab": str(Path(__file__).parent / "model" / "short_range.txt"),
    "sw_rmin": 0.6,
    "sw_rmax": 1.6,
}
MODEL = {
    "type_map": [{"type_map": ("Na", "Cl")}],
    "descriptor": [],  # `settings_of` changes the settings of the parts themselves
    "fitting_net": [],
    "pair_exclude_types": [{"pair_exclude_types": ((0, 1),)}],
    "atom_exclude_types": [{"atom_exclude_types": (1,)}],
    "use_srtab": [_TABLE],
    "smin_alpha": [{**_TABLE, "smin_alpha": 0.2}],
    "sw_rmin": [{**_TABLE, "sw_rmin": 0.4}],
    "sw_rmax": [{**_TABLE, "sw_rmax": 2.0}],
}


def settings_of(kind):
    """Return the settings of a small model with a kind of descriptor, and of those that differ, by what differs."""
    base = model_settings(section_of(DESCRIPTORS[kind], {"neuron": [8, 8]}))
    cases = {"nothing": base}
    for name, changes in changes_of(base.descriptor, EXAMPLES[kind]).items():
        changed = dataclasses.replace(base.descriptor, **changes)
        cases[f"descriptor: {name}"] = dataclasses.replace(base, descriptor=changed)
    if kind == "DPA-3":
        for name, changes in changes_of(base.descriptor.repflow, REPFLOW).items():
            repflow = dataclasses.replace(base.descriptor.repflow, **changes)
            changed = dataclasses.replace(base.descriptor, repflow=repflow)
            cases[f"repflow: {name}"] = dataclasses.replace(base, descriptor=changed)
    for name, changes in changes_of(base.fitting_net, FITTING).items():
        changed = dataclasses.replace(base.fitting_net, **changes)
        cases[f"fitting_net: {name}"] = dataclasses.replace(base, fitting_net=changed)
    for name, changes in changes_of(base, MODEL).items():
        if "use_srtab" in changes and not base.descriptor.one_fitting_net:
            continue  # refused: the table needs one list for all types
        cases[f"model: {name}"] = dataclasses.replace(base, **changes)
    return cases


def model_with(settings):
    """Build a model with random weights and uneven statistics."""
    model = build_model(settings, seed=5)
    random = np.random.default_rng(11)
    as_tensor = model.atomic_model.out_bias.new_tensor
    mean = np.zeros((2, 4))
    mean[:, 0] = random.uniform(0.05, 0.1, size=2)
    deviation = random.uniform(0.1, 0.3, size=(2, 2))[:, [0, 1, 1, 1]]
    model.set_statistics(as_tensor(mean), as_tensor(deviation))
    model.set_energy_bias(random.normal(size=2))
    net = model.atomic_model.fitting_net
    if getattr(net, "case_embd", None) is not None:
        with torch.no_grad():
            net.case_embd.copy_(torch.tensor([0.0, 1.0]))
    return model


def is_single(settings):
    """Return whether a part of the model computes in single precision."""
    parts = settings.descriptor, settings.fitting_net
    return "float32" in {part.precision for part in parts}
