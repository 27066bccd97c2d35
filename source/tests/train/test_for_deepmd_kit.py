"""The optimizer's state in a file: deepmd-kit's parameters in its order, and nothing of it in our way."""

import pytest
import torch

from deepmd_muon.cli.main import main
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.train.checkpoint.optimizer_state import in_deepmd_kits_order


@pytest.mark.parametrize("optimizer", ["HybridMuon", "AdamW"])
def test_a_file_lists_deepmd_kits_parameters(optimizer, small_input, train, load, capsys):
    content = small_input(optimizer={"type": optimizer}, training={"numb_steps": 3, "save_freq": 3})
    content["model"]["descriptor"]["sel"] = [60]
    assert train(content) == 0
    saved = load()
    (group,), state = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
    names = deepmd_kit_parameter_names(build_model(_section(content)))
    assert group["param_names"] == names
    assert group["params"] == list(range(len(names)))
    empty = [name for name in names if "compress" in name]
    assert len(empty) == 2
    for key, name in enumerate(names):
        if name in empty:
            assert key not in state
            continue
        weight = saved["model"][f"model.Default.{name}"]
        moments = [
            x for x in state[key].values() if torch.is_tensor(x) and x.dim() == weight.dim() > 0
        ]
        assert moments
        assert all(x.shape == weight.shape for x in moments)
        if optimizer == "HybridMuon" and "exp_avg" in state[key]:
            betas = group["adam_betas"]
            assert [state[key][f"beta{i}_pow"] for i in (1, 2)] == [beta**3 for beta in betas]
    content["training"]["numb_steps"] = 4
    assert train(content, restart="model.ckpt-3.pt") == 0
    if optimizer == "HybridMuon":
        routes = dict(zip(names, group["routes"], strict=True))
        assert {routes[name] for name in empty} == {"frozen 0"}
        capsys.readouterr()
        assert main(["show", "routing", "model.ckpt.pt"]) == 0
        assert "compress" not in capsys.readouterr().out


def as_deepmd_kits(load, source, target):
    """Write a checkpoint without what only this package stores: data order, random numbers, names in the state."""
    content = load(source)
    del content["deepmd_muon"]
    for group in content["optimizer"]["param_groups"]:
        del group["param_names"]
    torch.save(content, target)


def test_another_optimizer_than_deepmd_kits_run_had_is_said(small_input, train, load, caplog):
    content = small_input(optimizer={"type": "Adam"}, training={"numb_steps": 3, "save_freq": 3})
    content["model"]["descriptor"]["sel"] = [60]
    assert train(content) == 0
    as_deepmd_kits(load, "model.ckpt-3.pt", "theirs.pt")
    content["training"] |= {"numb_steps": 4, "save_ckpt": "more"}
    changed = {"type": "AdamW", "weight_decay": 0.01, "adam_beta2": 0.99}
    for optimizer, words in ({"type": "Adam"}, ()), (changed, ("AdamW", "0.01", "0.99")):
        caplog.clear()
        assert train({**content, "optimizer": optimizer}, restart="theirs.pt") == 0
        told = [m for m in caplog.messages if "the optimizer has changed" in m]
        assert len(told) == bool(words)
        assert all(word in told[0] for word in words)


def test_deepmd_kits_default_scale_is_said_to_be_small_once(small_input, train, caplog):
    """Its out.json holds all its defaults; a run that it began goes on with its scale."""
    defaults = {"momentum": 0.95, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.001}
    defaults |= {"lr_adjust": 0.0, "lr_adjust_coeff": 0.18, "muon_mode": "slice"}
    defaults |= {"enable_gram": True, "flash_muon": True, "magma_muon": True}
    content = small_input(training={"numb_steps": 2, "save_freq": 2})
    content["optimizer"] |= defaults
    assert train(content) == 0
    assert [m for m in caplog.messages if "times smaller" in m and "0.18" in m]
    assert sum("times smaller" in m for m in caplog.messages) == 1
    caplog.clear()
    content["training"]["numb_steps"] = 3
    assert train(content, restart="model.ckpt-2.pt") == 0
    assert not [m for m in caplog.messages if "times smaller" in m]


def _section(content):
    from deepmd_muon.argcheck import normalize

    return normalize(content).normalized["model"]


def test_states_of_other_parameters_stay_as_they_are():
    state = {"state": {}, "param_groups": [{"params": [0], "param_names": ["mine"]}]}
    assert in_deepmd_kits_order(state, ["theirs"]) == state
    assert in_deepmd_kits_order(state, ()) == state
    two = {
        "state": {},
        "param_groups": [
            {"params": [0], "param_names": ["a"]},
            {"params": [1], "param_names": ["b"]},
        ],
    }
    assert in_deepmd_kits_order(two, ["a", "b"]) == two
