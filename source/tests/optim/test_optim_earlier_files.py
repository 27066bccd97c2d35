"""Files of an earlier revision load bitwise, and training goes on from them as before.

deepmd_muon 0.1.0 wrote earlier_state.pt and earlier_checkpoint.pt before its optimizer was cut into
layers (commit 5090226, torch 2.13, one thread, 2026-11-22). The first has parameters and state after
three steps of `set_gradients`, parameters after a fourth, and the state of the training after eight
steps. The second is the checkpoint of its fourth step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepmd_muon.optim import HybridMuon, RoutingMismatchError
from deepmd_muon.optim.groups.group_settings import unfolded
from deepmd_muon.optim.routing.routes import RouteTable

HERE = Path(__file__).parent
TRAINING_DATA = Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "train"
SETTINGS = {
    "muon_mode": "slice",
    "adam_patterns": ["*.table"],
    "adamw_patterns": ["*.head.weight"],
    "expert_patterns": ["*.experts"],
    "splits": ["*.qkv.weight: rows 3"],
    "weight_decay": 0.01,
}
pytestmark = pytest.mark.usefixtures("as_alone")


def make_parameters() -> dict[str, Tensor]:
    """Return named parameters of every route, with gradients that `set_gradients` fills."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    return {
        "net.first.weight": normal(6, 9),
        "net.first.bias": normal(6),
        "net.adam_scale": normal(4, 4),
        "net.adamw_gain": normal(3, 5),
        "net.stack": normal(3, 4, 6),
        "net.qkv.weight": normal(12, 5),
        "net.experts": normal(2, 4, 3, 2),
        "net.table": normal(7, 3),
        "net.head.weight": normal(5, 6),
        "net.half.weight": normal(4, 8, dtype=torch.bfloat16),
        "net.half.bias": normal(4, dtype=torch.bfloat16),
        "net.double.weight": normal(5, 5, dtype=torch.float64),
        "net.scalar": normal(),
        "net.frozen_later.weight": normal(3, 4),
    }


def set_gradients(parameters: dict[str, Tensor], step: int) -> None:
    """Give every trainable parameter a gradient that depends on the step alone."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters.values():
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = gradient.to(p.dtype) if p.requires_grad else None


def make_groups(parameters: dict[str, Tensor]) -> list[dict[str, object]]:
    """Return two parameter groups, the second with settings of its own."""
    other = {"net.stack", "net.head.weight"}
    return [
        {"params": [(name, p) for name, p in parameters.items() if name not in other]},
        {
            "params": [(name, parameters[name]) for name in sorted(other)],
            "lr": 0.004,
            "momentum": 0.9,
            "nesterov": False,
        },
    ]


def training_input() -> dict[str, object]:
    """Return the input of the small training run; its data are TRAINING_DATA, copied to the folder `train`."""
    descriptor = {
        "type": "se_e2_a",
        "sel": [48],
        "rcut": 4.5,
        "rcut_smth": 2.0,
        "neuron": [4, 8],
        "axis_neuron": 3,
    }
    return {
        "model": {
            "type_map": ["Cu"],
            "descriptor": {**descriptor, "seed": 1},
            "fitting_net": {"neuron": [6, 6], "seed": 2},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": ["train"], "batch_size": 2},
            "numb_steps": 8,
            "seed": 3,
            "disp_freq": 4,
            "save_freq": 4,
        },
    }


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
