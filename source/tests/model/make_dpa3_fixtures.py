"""Let deepmd-kit 3.2.0 compute the reference values of DPA-3.

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/model/make_dpa3_fixtures.py

It writes `dpa3.pt.gz` beside itself: for every case the checkpoint state dict of a small model as its seed starts it,
and its energies, forces, virials; gradients of the ener loss for some; the loss of 20 steps of Adam for one. It loads
with `weights_only=True`.
"""

from __future__ import annotations

import torch
from deepmd.pt.model.model import get_model
from deepmd.utils.argcheck import model_args
from make_deepmd_kit_fixtures import HERE, sample_of, save, structures, values_of

REPFLOW = {
    "n_dim": 6,
    "e_dim": 4,
    "a_dim": 4,
    "nlayers": 3,
    "e_rcut": 4.0,
    "e_rcut_smth": 1.0,
    "e_sel": 90,
    "a_rcut": 3.0,
    "a_rcut_smth": 1.0,
    "a_sel": 40,
    "axis_neuron": 2,
    "update_residual": 1.0,
}
LINEAR = {"a_compress_rate": 1, "a_compress_e_rate": 2, "a_compress_use_split": False}
SPLIT = {"a_compress_rate": 1, "a_compress_e_rate": 2, "a_compress_use_split": True}
CASES: dict[str, dict] = {
    "plain": {},
    "distance": {"repflow": {"edge_init_use_dist": True}},
    "exponential": {"repflow": {"use_exp_switch": True, "e_rcut_smth": 3.5, "a_rcut_smth": 2.5}},
    "split": {"repflow": {**SPLIT, "smooth_edge_update": True, "edge_init_use_dist": True}},
    "split_more": {"repflow": {**SPLIT, "a_compress_rate": 2}},
    "linear": {"repflow": LINEAR},
    "heads": {"repflow": {"n_multi_edge_message": 3}},
    "heads_averaged": {"repflow": {"n_multi_edge_message": 2, "update_style": "res_avg"}},
    "sequential": {"repflow": {"sequential_update": True}},
    "sequential_smooth": {
        "repflow": {
            **LINEAR,
            "sequential_update": True,
            "n_multi_edge_message": 2,
            "use_dynamic_sel": True,
            "smooth_edge_update": True,
            "e_sel": 300,
            "a_sel": 200,
        }
    },
    "sequential_truncated": {"repflow": {"sequential_update": True, "e_sel": 20, "a_sel": 6}},
    "protected": {"descriptor": {"env_protection": 0.5}, "repflow": {"fix_stat_std": 0.0}},
    "dynamic": {
        "repflow": {"use_dynamic_sel": True, "smooth_edge_update": True, "e_sel": 300, "a_sel": 200}
    },
    "no_angles": {"repflow": {"update_angle": False}},
    "average": {"repflow": {"update_style": "res_avg"}},
    "increment": {"repflow": {"update_style": "res_incr"}},
    "random_residual": {"repflow": {"update_residual_init": "norm"}},
    "truncated": {"repflow": {"e_sel": 20, "a_sel": 6}},
    "truncated_smooth": {"repflow": {"e_sel": 20, "a_sel": 6, "smooth_edge_update": True}},
    "one_layer": {"repflow": {"nlayers": 1}},
    "statistics": {"repflow": {"fix_stat_std": 0.0, "use_exp_switch": True, "e_rcut_smth": 3.5}},
    "silut": {
        "descriptor": {"activation_function": "silut:0.5"},
        "fitting_net": {"activation_function": "silut:0.2"},
    },
    "tanh": {
        "descriptor": {
            "activation_function": "tanh",
            "concat_output_tebd": True,
            "use_tebd_bias": True,
        }
    },
    "float32": {"descriptor": {"precision": "float32"}, "fitting_net": {"precision": "float32"}},
    "case_embedding": {"fitting_net": {"dim_case_embd": 3}},
    "three_types": {"type_map": ["H", "C", "O"]},
    # a width of the type vectors that equals, or doubles, the number of types adds an identity
    "wide_types": {"type_map": ["A", "B", "C", "D", "E", "F"], "repflow": {"nlayers": 1}},
    "double_types": {"type_map": ["A", "B", "C"], "repflow": {"nlayers": 1}},
}
WITH_GRADIENT = (
    *("plain", "split", "dynamic", "average", "truncated", "silut"),
    *("linear", "heads", "sequential", "sequential_smooth", "sequential_truncated"),
)
FOLLOWED = "split"


def inputs() -> dict[str, dict]:
    """Return the structures of se_e2_a, one atom alone, and atoms with one far away from the others."""
    made = structures()
    made["atom"] = {
        "coord": torch.zeros(1, 1, 3, dtype=torch.float64),
        "atype": torch.zeros(1, 1, dtype=torch.int64),
        "box": None,
    }
    far = torch.full((1, 1, 3), 40.0, dtype=torch.float64)
    made["far"] = {
        "coord": torch.cat([made["open"]["coord"], far], 1),
        "atype": torch.cat([made["open"]["atype"], torch.ones(1, 1, dtype=torch.int64)], 1),
        "box": None,
    }
    return made


def model_section(changes: dict) -> dict:
    """Return a section as deepmd-kit's argument check normalises it."""
    repflow = {**REPFLOW, **changes.get("repflow", {})}
    section = {
        "type_map": changes.get("type_map", ["O", "H"]),
        "descriptor": {
            "type": "dpa3",
            "seed": 7,
            "repflow": repflow,
            **changes.get("descriptor", {}),
        },
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
    bias = [-3.5, 1.25, 0.5, 0.25, -1.0, 2.0][: len(section["type_map"])]
    model.set_out_bias(torch.tensor(bias, dtype=torch.float64).reshape(1, -1, 1))
    return values_of(
        model, section, batches, gradient=name in WITH_GRADIENT, followed=name == FOLLOWED
    )


def main() -> None:
    batches = inputs()
    cases = {name: one_case(name, changes, batches) for name, changes in CASES.items()}
    for name, case in cases.items():
        print(
            name,
            *(f"{kind} {out['force'].abs().max():.3g}" for kind, out in case["outputs"].items()),
        )
    save({"structures": batches, "cases": cases}, HERE / "dpa3.pt.gz")


if __name__ == "__main__":
    main()
