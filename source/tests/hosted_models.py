"""Small models that deepmd-kit's modules compute here, and inputs for them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
from write_systems import write_npy

TYPES = [0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
TYPE_MAP = ["O", "H"]
_NET = {"neuron": [6, 6], "seed": 2}
_SMOOTH = {"rcut": 4.0, "rcut_smth": 1.0}
_SE_E2_R = {"type": "se_e2_r", "sel": [20, 30], **_SMOOTH, "neuron": [4, 8], "seed": 1}
_ATTEN = {"type": "se_atten_v2", "sel": 40, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8]}
_ATTEN |= {"axis_neuron": 2, "attn_layer": 0, "seed": 1}

MODELS = {
    "dpa4": {
        "type": "dpa4",
        "descriptor": {
            "rcut": 4.0,
            "sel": 60,
            "channels": 8,
            "n_radial": 4,
            "lmax": 1,
            "mmax": 1,
            "n_blocks": 1,
            "random_gamma": False,
            "use_amp": False,
            "precision": "float64",
            "seed": 1,
        },
        "fitting_net": {"neuron": [0], "precision": "float64", "seed": 2},
    },
    "dpa2": {
        "descriptor": {
            "type": "dpa2",
            "repinit": {"tebd_dim": 4, **_SMOOTH, "nsel": 40, "neuron": [4, 8], "axis_neuron": 2},
            "repformer": {
                "rcut": 3.0,
                "rcut_smth": 1.0,
                "nsel": 20,
                "nlayers": 2,
                "g1_dim": 8,
                "g2_dim": 4,
                "attn2_hidden": 4,
                "attn2_nhead": 2,
                "attn1_hidden": 4,
                "attn1_nhead": 2,
                "axis_neuron": 2,
                "update_g1_has_attn": False,
                "update_g2_has_attn": False,
            },
            "seed": 1,
        },
        "fitting_net": _NET,
    },
    "hybrid": {
        "descriptor": {
            "type": "hybrid",
            "list": [
                {**_SE_E2_R, "type": "se_e2_a", "axis_neuron": 2, "type_one_side": True},
                _SE_E2_R,
            ],
        },
        "fitting_net": _NET,
    },
    "se_e2_r": {"descriptor": _SE_E2_R, "fitting_net": _NET},
    "se_e3": {
        "descriptor": {"type": "se_e3", "sel": [6, 8], **_SMOOTH, "neuron": [2, 4], "seed": 1},
        "fitting_net": _NET,
    },
    "linear": {
        "type": "linear_ener",
        "weights": "mean",
        "models": [
            {"type_map": TYPE_MAP, "descriptor": _ATTEN, "fitting_net": _NET},
            {"type_map": TYPE_MAP, "descriptor": {**_ATTEN, "seed": 5}, "fitting_net": _NET},
        ],
    },
}

# Further models whose steps a GPU captures.
CAPTURED_MODELS = {
    "se_e3_tebd": {
        "descriptor": {
            "type": "se_e3_tebd",
            "sel": 14,
            **_SMOOTH,
            "neuron": [2, 4],
            "tebd_dim": 4,
            "seed": 1,
        },
        "fitting_net": _NET,
    },
    "se_atten strip": {
        "descriptor": {
            **_ATTEN,
            "type": "se_atten",
            "attn": 8,
            "attn_layer": 1,
            "tebd_input_mode": "strip",
            "smooth_type_embedding": True,
        },
        "fitting_net": _NET,
    },
    "dpa4 zbl": {
        **MODELS["dpa4"],
        "bridging_method": "zbl",
        "bridging_r_inner": 0.8,
        "bridging_r_outer": 1.2,
    },
}

_SPINS = {"use_spin": [True, False], "virtual_scale": [0.3]}
# Models that read spins. The virtual atoms of all neighbours have room in `sel`.
SPIN_MODELS = {
    "se_e2_a": {
        "descriptor": {
            **_SE_E2_R,
            "type": "se_e2_a",
            "sel": [30, 40],
            "axis_neuron": 2,
            "type_one_side": True,
        },
        "fitting_net": _NET,
        "spin": _SPINS,
    },
    "dpa1": {"descriptor": {**_ATTEN, "sel": 120}, "fitting_net": _NET, "spin": _SPINS},
    "dpa4_native": {**MODELS["dpa4"], "spin": {"scheme": "native", "use_spin": ["O"]}},
    "dpa4_virtual": {**MODELS["dpa4"], "spin": {"scheme": "deepspin", **_SPINS}},
}


def write_spin_data(folder: Path, nframes: int = 1, name: str = "sys") -> str:
    """Write the frames of `write_data` with spins of oxygen, magnetic forces and virials."""
    system = write_data(folder, nframes, name)
    rng = np.random.default_rng(1)
    is_oxygen = np.array(TYPES)[:, None] == 0
    for quantity in ("spin", "force_mag"):
        vectors = rng.standard_normal((nframes, len(TYPES), 3)) * is_oxygen
        np.save(Path(system) / "set.000" / f"{quantity}.npy", vectors.reshape(nframes, -1))
    np.save(Path(system) / "set.000" / "virial.npy", rng.standard_normal((nframes, 9)))
    return system


def spin_input(kind: str, system: str, steps: int, **training: object) -> dict[str, object]:
    """Return an input of one of `SPIN_MODELS` with Adam and the loss of magnetic forces."""
    model = {"type_map": TYPE_MAP, **copy.deepcopy(SPIN_MODELS[kind])}
    loss = {"type": "ener_spin", "start_pref_v": 0.1, "limit_pref_v": 1.0}
    return {**hosted_input("dpa4", system, steps, **training), "model": model, "loss": loss}


def write_data(folder: Path, nframes: int = 1, name: str = "sys") -> str:
    """Write water-like frames of 12 atoms; return the system's folder."""
    rng = np.random.default_rng(0)
    box = np.eye(3) * 7.0 + rng.uniform(-0.2, 0.2, (nframes, 3, 3))
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3)[: len(TYPES)] / 3
    coord = (grid + rng.uniform(-0.05, 0.05, (nframes, len(TYPES), 3))) @ box
    force = rng.standard_normal((nframes, len(TYPES), 3))
    arrays = {
        "coord": coord.reshape(nframes, -1),
        "box": box.reshape(nframes, 9),
        "energy": rng.standard_normal(nframes) - 20.0,
        "force": (force - force.mean(1, keepdims=True)).reshape(nframes, -1),
    }
    return write_npy(folder / name, TYPES, [arrays], TYPE_MAP)


def hosted_input(kind: str, system: str, steps: int, **training: object) -> dict[str, object]:
    """Return an input of one of `MODELS` or `CAPTURED_MODELS` with Adam."""
    model = (MODELS | CAPTURED_MODELS)[kind]
    return {
        "model": {"type_map": TYPE_MAP, **copy.deepcopy(model)},
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 2},
        "loss": {"type": "ener"},
        "optimizer": {"type": "Adam"},
        "training": {
            "training_data": {"systems": [system], "batch_size": 1},
            "numb_steps": steps,
            "seed": 3,
            "disp_freq": 1,
            **training,
        },
    }
