"""Inputs of deepmd-kit's four model families, small enough for seconds on a CPU: copper of the example."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "train"
# The periodic ones: `--pt-expt` of deepmd-kit 3.2.0 fails on a system without a cell.
SYSTEMS = [str(DATA / name) for name in ("fcc32", "triclinic8")]

_DESCRIPTORS: dict[str, dict[str, Any]] = {
    "se_e2_a": {
        "type": "se_e2_a",
        "sel": [60],
        "rcut": 4.5,
        "rcut_smth": 2.0,
        "neuron": [4, 8],
        "axis_neuron": 3,
    },
    "dpa1": {
        "type": "se_atten",
        "sel": 30,
        "rcut": 4.0,
        "rcut_smth": 2.0,
        "neuron": [4, 8],
        "axis_neuron": 3,
        "attn": 8,
        "attn_layer": 1,
        "attn_mask": False,
        "attn_dotr": True,
    },
    "dpa3": {
        "type": "dpa3",
        "repflow": {
            "n_dim": 8,
            "e_dim": 6,
            "a_dim": 4,
            "nlayers": 2,
            "e_rcut": 4.0,
            "e_rcut_smth": 3.5,
            "e_sel": 30,
            "a_rcut": 3.0,
            "a_rcut_smth": 2.5,
            "a_sel": 14,
            "axis_neuron": 2,
            "a_compress_rate": 0,
            "update_angle": True,
        },
        "concat_output_tebd": False,
    },
    "dpa4": {
        "rcut": 4.0,
        "channels": 8,
        "n_radial": 4,
        "lmax": 1,
        "mmax": 1,
        "n_blocks": 1,
        "use_amp": False,
    },
}


def small_input(
    family: str,
    *,
    optimizer: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    precision: str = "float32",
) -> dict[str, Any]:
    """Return an input of one model family; `optimizer` and `training` change keys of these sections."""
    model: dict[str, Any] = {
        "type_map": ["Cu"],
        "descriptor": {**copy.deepcopy(_DESCRIPTORS[family]), "precision": precision, "seed": 1},
        "fitting_net": {"neuron": [6, 6], "precision": precision, "seed": 2},
    }
    if family == "dpa4":
        model["type"] = "dpa4"
        model["fitting_net"]["neuron"] = [0]
    return {
        "model": model,
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1.0,
            "start_pref_f": 1000.0,
            "limit_pref_f": 1.0,
        },
        "optimizer": {"type": "HybridMuon", **(optimizer or {})},
        "training": {
            "training_data": {"systems": SYSTEMS, "batch_size": 1},
            "numb_steps": 3,
            "seed": 3,
            "disp_freq": 1,
            "save_freq": 3,
            **(training or {}),
        },
    }
