"""Parameters converted in place, by `Module.to` or `.data`: the state follows to the new dtype and device."""

from __future__ import annotations

import copy

import pytest
import torch
from example_rules import SOAP
from optim_builders import make_net, train
from torch import nn

from deepmd_muon.optim import HybridMuon, RoutingMismatchError

ROUTES = {"muon": {}, "adam": {"adam_patterns": ["*"]}, "offloaded": {"offload": True}}


def make(**settings):
    model = make_net()
    return model, HybridMuon(model.named_parameters(), 0.02, weight_decay=0.1, **settings)


@pytest.fixture(params=[False, True], ids=["data", "swapped"])
def _conversion(request):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("settings", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("part", ["all", "last"])
def test_a_converted_model_goes_on_with_its_state(settings, part):
    model, optimizer = make(**settings)
    train(model, optimizer, 3)
    straight, other = copy.deepcopy((model, optimizer))
    (model if part == "all" else model[2]).double()
    train(model, optimizer, 3, start=3)
    train(straight, other, 3, start=3)
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, atol=1e-5, rtol=0)
    for p in model[2].parameters():
        moments = {
            key: x.dtype
            for key, x in optimizer.state[p].items()
            if key in ("momentum_buffer", "exp_avg")
        }
        assert set(moments.values()) == {torch.float64}


@pytest.fixture(params=["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def elsewhere(request):
    """Another device. Only a swap moves parameters to device meta in place."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param == "meta")
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize(
    "settings",
    [{}, {"adam_patterns": ["*"]}, {"normuon": True, **SOAP}],
    ids=["muon", "adam", "rules"],
)
def test_the_state_follows_a_model_to_another_device(settings, elsewhere):
    model, optimizer = make(**settings)
    train(model, optimizer, 3)
    straight, other = copy.deepcopy((model, optimizer))
    optimizer.zero_grad()
    model.to(elsewhere)
    with torch.device(elsewhere):
        model(torch.ones(5, 6)).square().mean().backward()
    optimizer.step()
    assert {x.device.type for own in optimizer.state.values() for x in own.values()} == {elsewhere}
    if elsewhere == "meta":
        return
    other.zero_grad()
    straight(torch.ones(5, 6)).square().mean().backward()
    other.step()
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, atol=1e-4, rtol=0)


def test_state_in_16_bits_is_that_of_a_restart():
    model, optimizer = make()
    train(model, optimizer, 3)
    model.bfloat16()
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, other = copy.deepcopy(model), None
    other = HybridMuon(resumed.named_parameters(), 0.02, weight_decay=0.1)
    other.load_state_dict(saved)
    train(model, optimizer, 2, start=3)
    train(resumed, other, 2, start=3)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, other.state[q][key]) for key, x in optimizer.state[p].items())


@pytest.mark.parametrize("shape", [(1, 9), (3, 9)])
def test_a_new_shape_is_a_change_of_route(shape):
    model, optimizer = make()
    train(model, optimizer, 1)
    model[2].weight.data, model[2].bias.data = torch.ones(shape), torch.ones(shape[0])
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(RoutingMismatchError) as error:
        train(model, optimizer, 1)
    assert [line.split(":")[0] for line in error.value.differences] == ["2.weight", "2.bias"]
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.on_route_change = "reset"
    train(model, optimizer, 1)
    assert optimizer.state[model[2].bias]["exp_avg"].shape == shape[:1]


def replace(model, optimizer):
    for module in (model[0], model[2]):
        module.weight, module.bias = (
            nn.Parameter(p.detach().double(), p.requires_grad) for p in module.parameters()
        )
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize(
    "convert", [lambda model, _: model.double(), replace], ids=["in place", "replaced"]
)
@pytest.mark.parametrize("seen", [True, False])
def test_frozen_parameters_keep_their_state_when_they_are_converted(convert, seen):
    model, optimizer = make()
    train(model, optimizer, 2)
    straight, other = copy.deepcopy((model, optimizer))
    model[0].requires_grad_(False)
    if seen:  # else they are frozen and converted between the same two steps
        optimizer.state_dict()
    convert(model, optimizer)
    optimizer.state_dict()
    if seen:
        convert(model, optimizer)
    model[0].requires_grad_(True)
    train(model, optimizer, 2, start=2)
    train(straight, other, 2, start=2)
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, atol=1e-5, rtol=0)
