"""Let deepmd-kit 3.2.0 compute the reference values of models with a short-range table (`use_srtab`).

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/model/make_short_range_fixtures.py

It writes `short_range.txt`, a table, and `short_range.pt.gz` beside itself: for DPA-1 and DPA-3 the checkpoint state
dict of a small model, and its energies, forces and virials of structures in which the weights of the table lie in
all three ranges. It loads with `weights_only=True`.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from deepmd.pt.model.model import get_model
from deepmd.pt.train.wrapper import ModelWrapper
from deepmd.utils.argcheck import model_args
from make_deepmd_kit_fixtures import HERE, run, save

TABLE = "short_range.txt"
DESCRIPTORS = {
    "dpa1": {"type": "se_atten", "sel": 30, "rcut": 5.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 2,
             "attn": 8, "attn_layer": 1, "tebd_dim": 4, "seed": 1},
    "dpa3": {"type": "dpa3", "seed": 1, "repflow": {
        "n_dim": 8, "e_dim": 6, "a_dim": 4, "nlayers": 2, "e_rcut": 5.0, "e_rcut_smth": 1.0, "e_sel": 30,
        "a_rcut": 3.0, "a_rcut_smth": 1.0, "a_sel": 12, "axis_neuron": 2}},
}  # fmt: skip


def table() -> np.ndarray:
    """Return distances and the energies of three pairs, zero from 3 Å on."""
    r = 0.02 * np.arange(1, 176)
    columns = [14.4 * a * np.exp(-b * r) / r * np.clip(1.0 - r / 3.0, 0.0, None) ** 2 for a, b in
               ((3.0, 2.0), (1.5, 2.2), (1.0, 2.5))]  # fmt: skip
    return np.stack([r, *columns], axis=1)


def main() -> None:
    """Write both files."""
    os.chdir(HERE)
    np.savetxt(TABLE, table(), fmt="%.12g")
    random, cases = np.random.default_rng(3), {}
    for name, descriptor in DESCRIPTORS.items():
        section = model_args().normalize_value(
            {
                "type_map": ["O", "H"],
                "descriptor": descriptor,
                "fitting_net": {"neuron": [8, 8], "seed": 2},
                "use_srtab": TABLE,
                "smin_alpha": 0.1,
                "sw_rmin": 0.8,
                "sw_rmax": 1.3,
            },
            trim_pattern="_*",
        )
        model = get_model(section)
        model.set_out_bias(torch.tensor([[[-3.5], [1.25]]], dtype=torch.float64))
        state = ModelWrapper(model, model_params=section).state_dict()
        batches = {
            "periodic": {
                "coord": torch.tensor(random.uniform(0.0, 5.0, (2, 12, 3))),
                "atype": torch.tensor([[0, 1, 1] * 4] * 2),
                "box": torch.tensor([5.2 * np.eye(3) + 0.3 * np.eye(3, k=1)] * 2),
            },
            "open": {
                "coord": torch.tensor(random.uniform(0.0, 2.5, (1, 9, 3))),
                "atype": torch.tensor([[0, 1, 1] * 3]),
                "box": None,
            },
        }
        outputs = {}
        for kind, batch in batches.items():
            found = run(model.eval(), batch)
            weight = model.atomic_model.zbl_weight
            print(
                name,
                kind,
                [
                    int(((weight > a) & (weight < b)).sum())
                    for a, b in ((-1, 1e-9), (1e-9, 1), (0.999, 2))
                ],
            )
            outputs[kind] = {
                key: found[key].detach() for key in ("energy", "atom_energy", "force", "virial")
            }
        for key in state:
            if "._networks." in key:
                state[key] = state[key.replace("._networks.", ".networks.")]
        cases[name] = {"state": state, "structures": batches, "outputs": outputs}
    save(cases, HERE / "short_range.pt.gz")


if __name__ == "__main__":
    main()
