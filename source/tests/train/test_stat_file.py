"""Statistics from `stat_file` are those that the run would compute."""

import logging

import numpy as np
import pytest
import torch
from write_systems import make_arrays, write_npy

LONE_ENERGIES = np.array([-31.0, -62.0])  # of the two types [eV]


@pytest.fixture
def small_run(small_input, train, load, monkeypatch, tmp_path):
    """A function that takes one step from a mixed-type system and returns the statistics."""
    monkeypatch.chdir(tmp_path)

    def run(types, arrays, stat_file, model):
        arrays = {**arrays, "real_atom_types": types}
        write_npy(tmp_path / "sys", [0] * types.shape[1], [arrays])
        content = small_input(training={"numb_steps": 1, "disp_freq": 1})
        del content["training"]["validation_data"]
        content["training"]["training_data"]["systems"] = [str(tmp_path / "sys")]
        if stat_file:
            content["training"]["stat_file"] = "stat.hdf5"
        sections = {name: model.get(name, {}) for name in ("descriptor", "fitting_net")}
        content["model"] |= {"type_map": ["A", "B"], "data_stat_nbatch": 10, **model}
        content["model"]["descriptor"] = {
            **small_input()["model"]["descriptor"],
            "sel": [20, 20],
            **sections["descriptor"],
        }
        content["model"]["fitting_net"] = {"neuron": [4], "seed": 1, **sections["fitting_net"]}
        content["learning_rate"] = {"start_lr": 1e-14, "stop_lr": 1e-14, "decay_steps": 1}
        assert train(content, log_level="INFO") == 0
        names = ("out_bias", "davg", "dstd", ".mean", ".stddev", "fparam_avg", "fparam_inv_std")
        return {
            name: value.double()
            for name, value in load()["model"].items()
            if torch.is_tensor(value) and name.endswith(names)
        }

    return run


CHANGES = {
    "none": {},
    "inner positions": {"positions": True},
    "elements exchanged": {"types": True},
    "rcut_smth": {"descriptor": {"rcut_smth": 2.5}},
    "exclude_types": {"descriptor": {"exclude_types": [[0, 1]]}},
    "type_one_side": {"descriptor": {"type_one_side": True}},
    "set_davg_zero": {"descriptor": {"set_davg_zero": True}},
    "env_protection": {"descriptor": {"env_protection": 0.1}},
    "sel": {"descriptor": {"sel": [10, 30]}},
    "data_stat_protect": {"data_stat_protect": 5.0},
    "data_stat_nbatch": {"data_stat_nbatch": 1},
    "pair_exclude_types": {"pair_exclude_types": [[0, 0]]},
    "atom_exclude_types": {"atom_exclude_types": [0]},
    "atom_ener": {"fitting_net": {"atom_ener": [-20.0, None]}},
    "numb_fparam": {"fitting_net": {"numb_fparam": 2}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_kept_statistics_are_those_of_the_run(small_run, caplog, change):
    model = dict(CHANGES[change])
    rng = np.random.default_rng(0)
    types = rng.integers(0, 2, (6, 8))
    arrays = make_arrays(6, 8, labels=("force",)) | {"fparam": rng.standard_normal((6, 2))}
    arrays["energy"] = LONE_ENERGIES[types].sum(axis=1)
    small_run(types, arrays, stat_file=True, model={})
    if model.pop("positions", False):
        arrays["coord"][1:-1] += rng.uniform(-0.1, 0.1, arrays["coord"][1:-1].shape)
    if model.pop("types", False):
        types = 1 - types
    caplog.clear()
    with caplog.at_level(logging.INFO, "deepmd_muon"):
        kept = small_run(types, arrays, stat_file=True, model=model)
    assert ("statistics come from" in caplog.text) == (change == "none")
    computed = small_run(types, arrays, stat_file=False, model=model)
    assert len(kept) >= 3
    assert kept.keys() == computed.keys()
    for name, value in computed.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-12, atol=1e-12)
