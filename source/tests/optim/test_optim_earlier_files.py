"""Files written before the optimizer was cut into layers load bitwise, and training goes on from them as before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from earlier_files import (
    SETTINGS,
    TRAINING_DATA,
    make_groups,
    make_parameters,
    set_gradients,
    training_input,
)

from deepmd_muon.optim import HybridMuon, RoutingMismatchError
from deepmd_muon.optim.groups.group_settings import unfolded
from deepmd_muon.optim.routing.routes import RouteTable

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("as_alone")


def named_state(state_dict):
    """Return the state tensors of a state dict by (parameter name, key)."""
    groups = state_dict["param_groups"]
    names = {
        i: name
        for group in groups
        for i, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        (names[i], key): x for i, values in state_dict["state"].items() for key, x in values.items()
    }


def assert_bitwise(found, expected):
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert found[key].dtype == x.dtype, key
        assert torch.equal(found[key], x), key


def in_former_spelling(group, **former):
    """Return a group as it was saved when `lr_adjust` was a setting, and rules of examples were in the package."""
    rules = {"soap_muon": False, "soap_beta": 0.9, "norm_control": "none", "norm_brake": 0.5}
    former = {"scaling": None, "adam_lr_ratio": None, "lr_adjust": 0.0, **former}
    constructed = {**json.loads(group["constructed"]), **former}
    del constructed["scaling"]
    return {
        **group,
        **rules,
        **former,
        "foreach": None,
        "deepmd_kit_arithmetic": False,
        "constructed": json.dumps(constructed),
    }


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({}, {}),
        ({"lr_adjust": 10.0}, {"scaling": "rectangular", "adam_lr_ratio": 0.1}),
        ({"lr_adjust": 10.0, "scaling": "none"}, {"scaling": "none", "adam_lr_ratio": 0.1}),
    ],
)
def test_groups_of_former_settings_load_without_a_word(former, now, caplog):
    def make():
        params = make_parameters()
        return params, HybridMuon(params.items(), lr=0.01, **now)

    params, first = make()
    set_gradients(params, 1)
    first.step()
    first.param_groups[0]["weight_decay"] = 0.5  # as a scheduler does
    saved = first.state_dict()
    saved["param_groups"] = [
        in_former_spelling(unfolded(group), **former) for group in saved["param_groups"]
    ]
    _, second = make()
    with caplog.at_level("INFO", logger="deepmd_muon"):
        second.load_state_dict(saved)
    assert second.param_groups[0].keys() == first.param_groups[0].keys()
    for key, value in first.param_groups[0].items():
        assert key == "params" or second.param_groups[0][key] == value, key
    assert [text.split(":")[0] for text in caplog.messages] == ["param_groups[0] weight_decay"]


def test_an_earlier_state_loads_bitwise_and_steps_on():
    saved = torch.load(HERE / "earlier_state.pt", weights_only=True)
    parameters = make_parameters()
    parameters["net.frozen_later.weight"].requires_grad_(False)
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(saved["parameters"][name])
    optimizer = HybridMuon(make_groups(parameters), lr=0.01, **SETTINGS)
    optimizer.load_state_dict(saved["optimizer"])
    assert_bitwise(named_state(optimizer.state_dict()), named_state(saved["optimizer"]))
    for here, there in zip(
        optimizer.state_dict()["param_groups"], saved["optimizer"]["param_groups"], strict=True
    ):
        names = there["param_names"]
        rows = zip(names, there["routes"], there["shapes"], there["views"], strict=True)
        for entry, (name, route, shape, view) in zip(
            RouteTable.from_groups([here]), rows, strict=True
        ):
            assert (entry.name, entry.route, str(entry.view or "")) == (name, route, view)
            assert "x".join(map(str, entry.shape)) == shape
        kept = {"params", "param_names", "lr", "momentum", "weight_decay", "adam_betas"}
        kept |= {"maximize", "capturable", "adam_lr_ratio", "lr_adjust_coeff", "routes"}
        assert here.keys() & there.keys() == kept
        settings = unfolded(here)
        assert all(there[key] == settings[key] for key in ("nesterov", "splits", "schedule"))
    set_gradients(parameters, 3)
    optimizer.step()
    for name, p in parameters.items():
        torch.testing.assert_close(
            p.detach(), saved["after_one_more_step"][name], rtol=2e-6, atol=1e-7
        )


def test_states_of_which_torch_loads_only_todays_keys_go_on():
    """torch.distributed.checkpoint leaves out keys of earlier versions, such as views and settings."""
    params = make_parameters()
    first = HybridMuon(params.items(), lr=0.01, normuon=True, magma_muon=False)
    set_gradients(params, 1)
    first.step()
    saved = first.state_dict()
    (group,) = saved["param_groups"]
    constructed = json.loads(group["constructed"])
    del constructed["settings"]
    saved["param_groups"] = [
        {
            **group,
            "constructed": json.dumps(constructed),
            "routes": [entry.route for entry in first.routing],
        }
    ]
    second = HybridMuon(make_parameters().items(), lr=0.01, normuon=True, magma_muon=False)
    second.load_state_dict(saved)
    assert_bitwise(named_state(second.state_dict()), named_state(first.state_dict()))
    changed = HybridMuon(make_parameters().items(), lr=0.01, adam_patterns=["*"])
    with pytest.raises(RoutingMismatchError, match="saved: route muon"):
        changed.load_state_dict(saved)


def test_training_goes_on_from_an_earlier_checkpoint(tmp_path, monkeypatch):
    from deepmd_muon import argcheck
    from deepmd_muon.train import run

    monkeypatch.chdir(tmp_path)
    loaded = []
    load = HybridMuon.load_state_dict

    def recording(self, state_dict):
        load(self, state_dict)
        loaded.append({key: x.clone() for key, x in named_state(self.state_dict()).items()})

    monkeypatch.setattr(HybridMuon, "load_state_dict", recording)
    shutil.copytree(TRAINING_DATA, "train")
    Path("input.json").write_text(json.dumps(training_input()))
    assert (
        run(
            argcheck.load("input.json"),
            log_level="WARNING",
            restart=str(HERE / "earlier_checkpoint.pt"),
        )
        == 0
    )
    checkpoint = torch.load(HERE / "earlier_checkpoint.pt", weights_only=True)
    assert_bitwise(loaded[0], named_state(checkpoint["optimizer"]))
    expected = torch.load(HERE / "earlier_state.pt", weights_only=True)[
        "training_state_after_8_steps"
    ]
    then = named_state({**checkpoint["optimizer"], "state": expected})
    # By name: models now have parameters without elements, and checkpoints the powers of the decays for deepmd-kit.
    last = named_state(torch.load("model.ckpt-8.pt", weights_only=True)["optimizer"])
    assert {key for _, key in last.keys() - then.keys()} <= {"beta1_pow", "beta2_pow"}
    for key, x in then.items():
        torch.testing.assert_close(last[key], x, rtol=1e-7, atol=1e-9)
