"""Parameters that are replaced in `param_groups`: the state moves by name, and what cannot be moved is refused."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from optim_builders import make_net, train
from torch import nn

from deepmd_muon.optim import HybridMuon, RoutingMismatchError
from deepmd_muon.optim.errors import InvalidParameterError


def exchange(optimizer, model):
    """Put the parameters of another model with the same names into the optimizer's groups."""
    present = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [present[name] for name in group["param_names"]]


def test_one_replaced_parameter_leaves_the_others_alone():
    model = make_net()
    optimizer = HybridMuon(model.named_parameters(), 0.02)
    train(model, optimizer, 2)
    kept = optimizer.state[model[2].weight]["momentum_buffer"]
    model[0].weight = nn.Parameter(model[0].weight.detach().double())
    exchange(optimizer, model)
    optimizer.state_dict()
    assert optimizer.state[model[2].weight]["momentum_buffer"] is kept
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float64


def test_a_group_added_after_a_replacement_finds_the_state_moved():
    model = make_net()
    optimizer = HybridMuon(model.named_parameters(), 0.02)
    train(model, optimizer, 1)
    moved = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    other = copy.deepcopy(model)
    exchange(optimizer, other)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3, 3)))]})
    assert torch.equal(optimizer.state[other[0].weight]["momentum_buffer"], moved)


def test_a_new_shape_is_a_change_of_route(caplog):
    def made(**settings):
        model = make_net()
        optimizer = HybridMuon(model.named_parameters(), 0.02, **settings)
        train(model, optimizer, 1)
        old = dict(optimizer.state)
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(7, 6))
        return optimizer, old

    optimizer, old = made()
    with pytest.raises(RoutingMismatchError) as error:
        optimizer.state_dict()
    assert [line.split(":")[0] for line in error.value.differences] == ["0.weight"]
    assert dict(optimizer.state) == old
    optimizer, _ = made(on_route_change="reset")
    optimizer.state_dict()
    assert "0.weight" in caplog.text
    assert optimizer.routing[0].shape == (7, 6)
    assert optimizer.param_groups[0]["params"][0] not in optimizer.state


def test_names_must_follow_their_parameters(caplog):
    model = make_net()
    optimizer = HybridMuon(model.named_parameters(), 0.02)
    train(model, optimizer, 1)
    (group,) = optimizer.param_groups
    names, params = list(group["param_names"]), list(group["params"])
    group["params"] = params[::-1]
    with pytest.raises(InvalidParameterError, match=r"0\.weight.*2\.bias"):
        optimizer.step()
    group["params"] = params[:2]
    with pytest.raises(InvalidParameterError, match="2 parameters and 4 names"):
        optimizer.step()
    group["param_names"] = names[:2]
    optimizer.step()
    assert list(optimizer.state) == params[:2]
    assert "2.weight: no longer in param_groups" in caplog.text
    group["params"], group["param_names"] = params[1::-1], names[1::-1]
    optimizer.step()
    assert [entry.name for entry in optimizer.routing] == names[1::-1]
    assert optimizer.state[params[0]].keys() >= {"momentum_buffer"}


def test_torch_may_swap_the_memory_of_parameters():
    model, twin = make_net(), make_net()
    optimizer, other = (HybridMuon(each.named_parameters(), 0.02) for each in (model, twin))
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach().clone()))
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert torch.equal(model[0].weight, twin[0].weight)


def test_parameters_replaced_before_the_first_step_do_not_live_on():
    model = make_net()
    optimizer = HybridMuon(model.named_parameters(), 0.02)
    old = weakref.ref(model[0].weight)
    model = make_net()
    exchange(optimizer, model)
    assert old() is None
