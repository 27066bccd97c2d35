"""torch's flattened state dicts, which hand a state dict only the state that the present routes have."""

from __future__ import annotations

import pytest
import torch
from example_rules import SOAP
from optim_builders import assert_same, assert_same_state, random, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from deepmd_muon.optim import HybridMuon, RoutingMismatchError
from deepmd_muon.optim.errors import ForeignStateError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(random(3, 4, 5))
        self.linear = nn.Linear(4, 4)


def made(**settings):
    model = Net()
    return model, HybridMuon(model.named_parameters(), 0.02, **settings)


def trained(**settings):
    model, optimizer = made(**settings)
    train(model, optimizer, 2)
    return model, optimizer


def test_state_of_the_same_routes_comes_back():
    model, optimizer = trained()
    other, loaded = made()
    set_optimizer_state_dict(
        other, loaded, get_optimizer_state_dict(model, optimizer, options=FLAT), options=FLAT
    )
    other.load_state_dict(model.state_dict())
    assert_same((model, optimizer), (other, loaded))


@pytest.mark.parametrize("policy", ["error", "migrate"])
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"muon_mode": "2d"}), ({"muon_mode": "2d"}, {})],
    ids=["to adamw", "to muon"],
)
def test_a_changed_route_is_named_with_the_way_that_keeps_its_state(policy, before, after):
    flat = get_optimizer_state_dict(*trained(**before), options=FLAT)
    model, optimizer = made(on_route_change=policy, **after)
    with pytest.raises(RoutingMismatchError, match="flatten_optimizer_state_dict") as error:
        set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    (line,) = error.value.differences
    assert line.startswith("experts: saved: route")


def test_a_changed_route_may_start_without_state():
    saved, by = trained()
    flat = get_optimizer_state_dict(saved, by, options=FLAT)
    model, optimizer = made(on_route_change="reset", muon_mode="2d")
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    assert model.experts not in optimizer.state
    momentum = optimizer.state[model.linear.weight]["momentum_buffer"]
    assert torch.equal(momentum, by.state[saved.linear.weight]["momentum_buffer"])


@pytest.mark.parametrize("policy", ["error", "migrate"])
def test_adam_to_adamw_keeps_its_state(policy):
    saved, by = trained(muon_mode="2d")
    flat = get_optimizer_state_dict(saved, by, options=FLAT)
    model, optimizer = made(on_route_change=policy, adam_patterns=["experts"])
    if policy == "error":
        with pytest.raises(RoutingMismatchError, match="experts: saved: route adamw"):
            set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
        return
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    assert_same_state(by.state[saved.experts], optimizer.state[model.experts])


@pytest.mark.parametrize(
    ("on", "off"),
    [
        ({"magma_muon": True}, {"magma_muon": False}),
        ({"normuon": True}, {"normuon": False}),
        (SOAP, {}),
    ],
)
def test_a_rule_may_be_switched_off(on, off):
    """torch passes only the tensors that the present optimizer has."""
    saved, by = trained(**on)
    flat = get_optimizer_state_dict(saved, by, options=FLAT)
    model, optimizer = made(**off)
    set_optimizer_state_dict(model, optimizer, flat, options=FLAT)
    momentum = optimizer.state[model.linear.weight]["momentum_buffer"]
    assert torch.equal(momentum, by.state[saved.linear.weight]["momentum_buffer"])


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"muon_mode": "2d"}), ({"muon_mode": "2d"}, {})],
    ids=["to adamw", "to muon"],
)
def test_a_part_of_a_former_route_is_no_damage(before, after):
    """Both routes have master weights, so torch passes these and leaves out the rest."""

    def narrow(policy="error", **settings):
        model = Net().bfloat16()
        named = model.named_parameters()
        return model, HybridMuon(
            named, 0.02, master_weights=True, on_route_change=policy, **settings
        )

    model, optimizer = narrow(**before)
    for p in model.parameters():
        p.grad = random(*p.shape).to(p)
    optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    for policy in ("error", "migrate"):
        with pytest.raises(RoutingMismatchError, match="flatten_optimizer_state_dict") as error:
            set_optimizer_state_dict(*narrow(policy, **after), flat, options=FLAT)
        (line,) = error.value.differences
        assert line.startswith("experts: saved: route")
    other, loaded = narrow("reset", **after)
    set_optimizer_state_dict(other, loaded, flat, options=FLAT)
    assert other.experts not in loaded.state


def test_a_flattened_state_dict_itself_is_named():
    flat = get_optimizer_state_dict(*trained(), options=FLAT)
    with pytest.raises(ForeignStateError, match="flatten_optimizer_state_dict"):
        made()[1].load_state_dict(flat)
