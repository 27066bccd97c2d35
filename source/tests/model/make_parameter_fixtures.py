"""Let deepmd-kit 3.2.0 compute the reference values of frame and atomic parameters and of excluded types.

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/model/make_parameter_fixtures.py

It writes `parameters.pt.gz` beside itself: for every case the checkpoint state dict of a small model with the
statistics and energy bias that deepmd-kit computes of the structures, and its energies, forces, virials; gradients of
the ener loss and the loss of 20 steps of Adam for some. It loads with `weights_only=True`.
"""

from __future__ import annotations

import numpy as np
import torch
from deepmd.pt.model.model import get_model
from deepmd.utils.argcheck import model_args
from make_deepmd_kit_fixtures import HERE, save, structures, values_of
from make_dpa3_fixtures import REPFLOW

RADIAL = {"rcut": 4.0, "rcut_smth": 1.0, "neuron": [3, 6], "axis_neuron": 2, "seed": 7}
DESCRIPTORS: dict[str, dict] = {
    "se_e2_a": {"type": "se_e2_a", "sel": [40, 30], **RADIAL},
    "dpa1": {
        "type": "se_atten",
        "sel": 70,
        **RADIAL,
        "attn": 4,
        "attn_layer": 1,
        "smooth_type_embedding": True,
        "set_davg_zero": False,
    },
    "dpa3": {"type": "dpa3", "seed": 7, "repflow": {**REPFLOW, "nlayers": 2}},
}
FITTING = {"numb_fparam": 2, "numb_aparam": 1}
CASES: dict[str, dict] = {
    "fparam": {"fitting_net": {"numb_fparam": 2}},
    "aparam": {"fitting_net": {"numb_aparam": 2}},
    "vacuum": {
        "fitting_net": {**FITTING, "default_fparam": [0.4, -1.0], "atom_ener": [-1.5, None]}
    },
    "mask": {"fitting_net": {**FITTING, "use_aparam_as_mask": True}},
    "mask-vacuum": {
        "fitting_net": {"numb_aparam": 2, "use_aparam_as_mask": True, "atom_ener": [-1.5, None]}
    },
    "pairs": {"pair_exclude_types": [[0, 1]]},
    "atoms": {"atom_exclude_types": [1]},
    "everything": {
        "fitting_net": FITTING,
        "pair_exclude_types": [[0, 0]],
        "atom_exclude_types": [1],
    },
    # Excluded neighbours take slots of a list that is too short, and of those for angles.
    "truncated": {
        "pair_exclude_types": [[1, 1]],
        "se_e2_a": {"sel": [5, 9]},
        "dpa1": {"sel": 20},
        "dpa3": {"repflow": {**REPFLOW, "nlayers": 2, "e_sel": 20, "a_sel": 6}},
    },
    # Pairs that the descriptor excludes, beside one that the model excludes; DPA-1 without attention can be compressed.
    "own": {
        "pair_exclude_types": [[1, 1]],
        **{kind: {"exclude_types": [[0, 1]]} for kind in DESCRIPTORS},
    },
    "own-plain": {
        **{kind: {"exclude_types": [[0, 0]]} for kind in DESCRIPTORS},
        "dpa1": {"exclude_types": [[0, 0]], "attn_layer": 0},
    },
}
FOLLOWED = "everything"


def inputs() -> dict[str, dict]:
    """Return structures of se_e2_a with parameters and energies; of the parameters, a model takes the first."""
    rng = np.random.default_rng(31)
    made = {name: batch for name, batch in structures().items() if name != "tiny"}
    for batch in made.values():
        nframes, natoms = batch["atype"].shape
        batch["fparam"] = torch.from_numpy(rng.normal(300.0, 40.0, (nframes, 2)) * [1.0, 0.01])
        batch["aparam"] = torch.from_numpy(rng.normal(-2.0, 0.5, (nframes, natoms, 2)))
        batch["energy"] = torch.from_numpy(rng.normal(-3.0 * natoms, 1.0, (nframes, 1)))
    return made


def given_to(section: dict, batch: dict) -> dict:
    """Return the structures with the parameters that a model reads."""
    found = {key: batch[key] for key in ("coord", "atype", "box")}
    for name in ("fparam", "aparam"):
        if number := section["fitting_net"].get(f"numb_{name}", 0):
            found[name] = batch[name][..., :number].contiguous()
    return found


def model_section(name: str, kind: str) -> dict:
    """Return a section as deepmd-kit's argument check normalises it."""
    changes = CASES[name]
    section = {
        "type_map": ["O", "H"],
        **{key: value for key, value in changes.items() if key.endswith("exclude_types")},
        "descriptor": {**DESCRIPTORS[kind], **changes.get(kind, {})},
        "fitting_net": {"neuron": [6, 6], "seed": 8, **changes.get("fitting_net", {})},
    }
    return model_args().normalize_value(section, trim_pattern="_*")


def sample_of(section: dict, batch: dict) -> dict:
    """Return structures as deepmd-kit packs them for its statistics."""
    box, atype = batch["box"], batch["atype"]
    counts = torch.stack([(atype == kind).sum(1) for kind in range(2)], 1)
    total = torch.full((len(atype), 2), atype.shape[1])
    return {
        **given_to(section, batch),
        "box": None if box is None else box.reshape(-1, 9),
        "energy": batch["energy"],
        "find_energy": np.float32(1.0),
        "natoms": torch.cat([total, counts], 1),
    }


def one_case(name: str, kind: str, batches: dict[str, dict]) -> dict:
    """Build a model, give it statistics and bias, and evaluate it."""
    section = model_section(name, kind)
    model = get_model(section)
    model.atomic_model.compute_or_load_stat(
        lambda: [sample_of(section, batch) for batch in batches.values()]
    )
    asked = {key: given_to(section, batch) for key, batch in batches.items()}
    if section["fitting_net"].get("default_fparam") is not None:
        asked["default"] = {
            key: value for key, value in asked["triclinic"].items() if key != "fparam"
        }
    return values_of(model, section, asked, gradient=False, followed=name == FOLLOWED)


def main() -> None:
    batches = inputs()
    cases = {
        f"{kind}-{name}": one_case(name, kind, batches) for kind in DESCRIPTORS for name in CASES
    }
    for name, case in cases.items():
        print(
            name, *(f"{key} {out['force'].abs().max():.3g}" for key, out in case["outputs"].items())
        )
    save({"structures": batches, "cases": cases}, HERE / "parameters.pt.gz")


if __name__ == "__main__":
    main()
