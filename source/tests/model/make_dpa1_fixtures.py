"""Let deepmd-kit 3.2.0 compute the reference values of DPA-1 (`se_atten`, `se_atten_v2`).

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/model/make_dpa1_fixtures.py

It writes `dpa1.pt.gz` beside itself: for every case the checkpoint state dict of a small model as its seed starts it,
and its energies, forces and virials; gradients of the ener loss for some; the loss of 20 steps of Adam for one. It
loads with `weights_only=True`. `dpa1_routes.json` holds the routes of deepmd-kit's HybridMuon.
"""

from __future__ import annotations

import json

import torch
from deepmd.pt.model.model import get_model
from deepmd.pt.optimizer import HybridMuonOptimizer
from deepmd.utils.argcheck import model_args
from make_deepmd_kit_fixtures import HERE, sample_of, save, structures, values_of

DESCRIPTOR = {
    "type": "se_atten",
    "sel": 70,
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8, 16],
    "axis_neuron": 4,
    "tebd_dim": 5,
    "attn": 6,
    "attn_layer": 2,
    "seed": 7,
}
MEAN = {"set_davg_zero": False}
STRIP = {"tebd_input_mode": "strip"}
SMOOTH = {"smooth_type_embedding": True}
RIM = 5e-5  # [Å] within the cut-off: there rows are shorter than 1e-12
CASES: dict[str, dict] = {
    "two_sides": {},
    "one_side": {"descriptor": {"type_one_side": True, "temperature": 1.0}},
    "mean": {"descriptor": MEAN},
    "smooth": {"descriptor": SMOOTH},
    "smooth_mean": {"descriptor": {**SMOOTH, **MEAN, "temperature": 0.5}},
    "strip": {"descriptor": STRIP},
    "strip_one_side": {"descriptor": {**STRIP, **MEAN, "type_one_side": True}},
    "strip_smooth": {"descriptor": {**STRIP, **SMOOTH, "resnet_dt": True}},
    "v2": {"descriptor": {"type": "se_atten_v2"}},
    "v2_without_attention": {"descriptor": {"type": "se_atten_v2", "attn_layer": 0}},
    "without_attention": {"descriptor": {"attn_layer": 0, **MEAN}},
    "not_normalised": {"descriptor": {"normalize": False, "scaling_factor": 2.0, "attn_layer": 1}},
    "without_angles": {"descriptor": {"attn_dotr": False, "attn_layer": 3}},
    "without_types_behind": {"descriptor": {"concat_output_tebd": False, "use_tebd_bias": True}},
    "time_steps": {
        "descriptor": {"resnet_dt": True, "neuron": [4, 8, 8]},
        "fitting_net": {"neuron": [8, 8, 16]},
    },
    # first layers as wide as their input, and twice as wide, have a residual
    "first_residual": {"descriptor": {"neuron": [11, 22], "resnet_dt": True}},
    "first_residual_twice": {"descriptor": {"neuron": [12], "type_one_side": True}},
    "gelu": {"descriptor": {"activation_function": "gelu", "env_protection": 0.05, "ln_eps": 1e-3}},
    "truncated": {"descriptor": {"sel": [5, 9], **MEAN}},
    "truncated_smooth": {"descriptor": {"sel": 14, **SMOOTH}},
    "float32": {"descriptor": {"precision": "float32"}, "fitting_net": {"precision": "float32"}},
    "vacuum": {"fitting_net": {"atom_ener": [-1.5, None], "dim_case_embd": 3}},
    "three_types": {"type_map": ["H", "C", "O"]},
    # as many numbers in the vector of a type as there are types, and twice as many, add the identity
    "wide_types": {"type_map": ["A", "B", "C", "D", "E"], "descriptor": {"attn_layer": 1}},
    "double_types": {"descriptor": {"tebd_dim": 4, "attn_layer": 1}},
}
WITH_GRADIENT = ("two_sides", "one_side", "smooth_mean", "strip_one_side", "v2", "time_steps")
FOLLOWED = "one_side"


def inputs() -> dict[str, dict]:
    """Return the structures of se_e2_a, atoms with one far away from the others, and three with two at the cut-off."""
    made = structures()
    far = torch.full((1, 1, 3), 40.0, dtype=torch.float64)
    made["far"] = {
        "coord": torch.cat([made["open"]["coord"], far], 1),
        "atype": torch.cat([made["open"]["atype"], torch.ones(1, 1, dtype=torch.int64)], 1),
        "box": None,
    }
    made["rim"] = {
        "coord": torch.tensor(
            [[[0.0, 0.0, 0.0], [1.1, 0.2, 0.1], [0.0, 0.0, DESCRIPTOR["rcut"] - RIM]]]
        ).double(),
        "atype": torch.tensor([[0, 1, 1]]),
        "box": None,
    }
    return made


def model_section(changes: dict) -> dict:
    """Return a section as deepmd-kit's argument check normalises it."""
    section = {
        "type_map": changes.get("type_map", ["O", "H"]),
        "descriptor": {**DESCRIPTOR, **changes.get("descriptor", {})},
        "fitting_net": {"neuron": [8, 8], "seed": 8, **changes.get("fitting_net", {})},
    }
    return model_args().normalize_value(section, trim_pattern="_*")


def one_case(name: str, changes: dict, batches: dict[str, dict]) -> dict:
    """Build a model, give it statistics and bias, and evaluate it."""
    section = model_section(changes)
    model = get_model(section)
    model.get_descriptor().compute_input_stats(sample_of(structures()))
    if "dim_case_embd" in changes.get("fitting_net", {}):
        model.set_case_embd(1)
    bias = torch.tensor(
        [-3.5, 1.25, 0.5, 0.25, -1.0][: len(section["type_map"])], dtype=torch.float64
    )
    model.set_out_bias(bias.reshape(1, -1, 1))
    return values_of(
        model, section, batches, gradient=name in WITH_GRADIENT, followed=name == FOLLOWED
    )


ROUTED = ("one_side", "strip_smooth")


def routes(name: str) -> dict[str, dict[str, int]]:
    """Return, for every mode, the matrices that HybridMuon orthogonalizes of each parameter; 0 on the Adam routes."""
    found = {}
    for mode in ("2d", "flat", "slice"):
        model = get_model(model_section(CASES[name]))
        named = [(key, p) for key, p in model.named_parameters() if p.numel()]
        optimizer = HybridMuonOptimizer(
            [p for _, p in named], named_parameters=named, lr=1e-3, muon_mode=mode
        )
        for _, p in named:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found[mode] = {
            key: optimizer.state[p].get("magma_score", torch.zeros(0)).numel() for key, p in named
        }
    return found


def main() -> None:
    table = {name: routes(name) for name in ROUTED}
    (HERE / "dpa1_routes.json").write_text(json.dumps(table, indent=1) + "\n")
    batches = inputs()
    cases = {name: one_case(name, changes, batches) for name, changes in CASES.items()}
    for name, case in cases.items():
        print(
            name,
            *(f"{kind} {out['force'].abs().max():.3g}" for kind, out in case["outputs"].items()),
        )
    save({"structures": batches, "cases": cases}, HERE / "dpa1.pt.gz")


if __name__ == "__main__":
    main()
