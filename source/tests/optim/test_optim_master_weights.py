"""Master weights of 16-bit parameters: as float32 training, rounded; on every route, offloaded, in checkpoints."""

from __future__ import annotations

import warnings

import pytest
import torch
from optim_builders import parameters
from torch import nn

from deepmd_muon.optim import HybridMuon

SHAPES = {"w": (6, 10), "experts": (3, 4, 5), "b": (10,), "adamw_g": (7,), "embed": (5, 4)}
SETTINGS = {"lr": 1e-4, "adam_patterns": ["embed"], "precision": "float32", "weight_decay": 0.1}


def make(dtype, **settings):
    params = parameters(SHAPES, dtype)
    return params, HybridMuon(params.items(), **{**SETTINGS, "master_weights": True, **settings})


def step(params, optimizer, number, narrow=torch.bfloat16):
    for i, p in enumerate(params.values()):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
        p.grad = (1.0 + 0.1 * g).to(narrow).to(p.dtype)
    optimizer.step()


def test_states_with_and_without_masters_load_into_each_other(caplog):
    params, optimizer = make(torch.bfloat16)
    step(params, optimizer, 0)
    _, without = make(torch.bfloat16, master_weights=False)
    without.load_state_dict(optimizer.state_dict())
    assert not any("master_weight" in values for values in without.state.values())
    assert (
        "master_weights is off now: the saved master_weight of 5 parameters is dropped"
        in caplog.text
    )
    step(params, HybridMuon(params.items(), **SETTINGS), 1)
    plain, late = make(torch.bfloat16, master_weights=False)
    step(plain, late, 0)
    late.param_groups[0]["master_weights"] = True
    step(plain, late, 1)
    for p in plain.values():
        assert torch.equal(late.state[p]["master_weight"].bfloat16(), p)
    wide, wider = make(torch.float32)
    wider.load_state_dict(optimizer.state_dict())
    assert not any("master_weight" in values for values in wider.state.values())
    step(wide, wider, 1)


def test_weights_that_something_else_changes_start_anew():
    params, optimizer = make(torch.bfloat16)
    for number in range(3):
        step(params, optimizer, number)
    w = params["w"]
    kept = optimizer.state[w]["master_weight"].clone()
    with torch.no_grad():
        w[0] = 3.0
    for p in params.values():
        p.grad = None
    w.grad = torch.zeros_like(w)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    master = optimizer.state[w]["master_weight"]
    assert torch.equal(master[0], torch.full((10,), 3.0))
    assert torch.equal(master[1:], kept[1:])


@pytest.mark.parametrize("route", ["adam", "adamw"])
def test_masters_stay_when_the_route_changes(route):
    params, optimizer = make(torch.bfloat16)
    step(params, optimizer, 0)
    _, other = make(
        torch.bfloat16, on_route_change="migrate", **{f"{route}_patterns": ["w", "embed"]}
    )
    other.load_state_dict(optimizer.state_dict())
    found = {entry.name: other.state[p] for group in other._groups() for p, entry in group.routed}
    for name, p in params.items():
        assert torch.equal(found[name]["master_weight"], optimizer.state[p]["master_weight"])


def test_master_weights_of_wide_parameters_are_said_to_have_no_effect():
    with pytest.warns(UserWarning, match=r"master_weights have no effect.*float32"):
        HybridMuon([("a", nn.Parameter(torch.ones(3, 3)))], master_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed = [torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bfloat16)]
        named = [(f"p{i}", nn.Parameter(x)) for i, x in enumerate(mixed)]
        HybridMuon(named, master_weights=True)
