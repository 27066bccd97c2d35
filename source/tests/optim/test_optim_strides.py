"""Strides of parameters, gradients and state do not matter: each layout gives what contiguous tensors give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepmd_muon.optim import HybridMuon, InvalidParameterError
from deepmd_muon.optim.update.adam import correct_rounded_lr

SHAPE = (4, 6, 3, 2)


def lay_out(x, layout):
    """Return a tensor of equal elements in another layout, inside a larger memory where it has gaps."""
    if layout == "contiguous":
        return x.clone()
    if layout == "channels_last":
        return x.clone(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)
    inside = wide[..., 1::2] if layout == "every second" else wide[..., : x.shape[-1]]
    inside.copy_(x)
    return inside


LAYOUTS = ("contiguous", "channels_last", "transposed", "columns", "every second")
ROUTES = {"adam": {"adam_patterns": ["*"]}, "adamw": {"adamw_patterns": ["*"]}, "muon": {}}


def gradients(steps):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=random, dtype=torch.float64) for _ in range(steps)]


def stepped(route, dtype, layout, grad_layout, state_layout=None, **settings):
    """Take three steps; before the last, parameter and state may get another layout."""
    start = torch.linspace(-1.0, 1.0, 144, dtype=torch.float64).view(SHAPE).to(dtype)
    p = nn.Parameter(lay_out(start, layout))
    optimizer = HybridMuon([("w", p)], 0.1, weight_decay=0.1, **ROUTES[route], **settings)
    for step, g in enumerate(gradients(3)):
        if step == 2 and state_layout is not None:
            for key, value in optimizer.state[p].items():
                if value.shape == SHAPE:
                    optimizer.state[p][key] = lay_out(value, state_layout)
        p.grad = lay_out(g.to(dtype), grad_layout)
        optimizer.step()
    return p, optimizer.state[p]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", list(ROUTES))
def test_layouts_do_not_matter(route, dtype):
    expected, state = stepped(route, dtype, "contiguous", "contiguous")
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    )
    for layout in LAYOUTS:
        for grad_layout, state_layout in [
            *((g, None) for g in LAYOUTS),
            ("contiguous", "columns"),
            (layout, layout),
        ]:
            p, found = stepped(route, dtype, layout, grad_layout, state_layout)
            case = (layout, grad_layout, state_layout)
            assert torch.allclose(p, expected, **tolerance), case
            for key, value in state.items():
                assert torch.allclose(found[key], value, **tolerance), (*case, key)


@pytest.mark.parametrize("route", list(ROUTES))
def test_neighbours_in_memory_and_expanded_gradients_are_left_alone(route):
    table = torch.arange(12.0).view(3, 4)
    before = table.clone()
    p, twin = nn.Parameter(table[:, 1:3]), nn.Parameter(table[:, 1:3].clone())
    for q, grad in ((p, torch.ones(1, 1).expand(3, 2)), (twin, torch.ones(3, 2))):
        optimizer = HybridMuon([("w", q)], 0.1, **ROUTES[route])
        q.grad = grad
        optimizer.step()
    assert torch.equal(p, twin)
    assert not torch.equal(p, before[:, 1:3])
    assert torch.equal(table[:, [0, 3]], before[:, [0, 3]])


@pytest.mark.parametrize("settings", [{}, {"offload": True}])
@pytest.mark.parametrize("route", list(ROUTES))
def test_a_contiguous_checkpoint_goes_on_in_channels_last(route, settings):
    results = []
    for layout in ("contiguous", "channels_last"):
        p = nn.Parameter(torch.ones(SHAPE))
        first = HybridMuon([("w", p)], 0.1, **ROUTES[route], **settings)
        *grads, last = (g.float() for g in gradients(3))
        for p.grad in grads:
            first.step()
        q = nn.Parameter(lay_out(p.detach(), layout))
        second = HybridMuon([("w", q)], 0.1, **ROUTES[route], **settings)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for key, value in second.state[q].items():
            assert torch.equal(value, first.state[p][key])
            assert value.shape != SHAPE or value.stride() == q.stride()
        q.grad = lay_out(last, layout)
        second.step()
        results.append(q.detach())
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)


def test_parameters_that_overlap_themselves_are_refused():
    p = nn.Parameter(torch.zeros(1).expand(5))
    with pytest.raises(InvalidParameterError, match=r"'w' of shape \(5,\) .* share memory"):
        HybridMuon([("w", p)])


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_with_one_element_is_a_learning_rate(route, shape):
    found = []
    for lr in (0.1, torch.full(shape, 0.1, dtype=torch.float64)):
        p = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        optimizer = HybridMuon([("w", p)], lr, adam_lr_ratio=0.5, **ROUTES[route])
        for step in range(2):
            p.grad = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
            optimizer.step()
            if step == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append(p.detach())
    assert torch.allclose(*found, rtol=1e-14, atol=0)


def test_a_step_with_a_rounded_rate_becomes_one_with_the_exact_rate():
    lr = torch.tensor(0.1, dtype=torch.float64)
    before, update = (
        torch.linspace(1, 2, 9, dtype=torch.float64),
        torch.linspace(-3, 5, 9, dtype=torch.float64),
    )
    p = before - lr.float().double() * update
    assert not torch.allclose(p, before - lr * update, rtol=1e-10, atol=0)
    correct_rounded_lr([p], [before], lr)
    assert torch.allclose(p, before - lr * update, rtol=1e-15, atol=1e-16)
    still = before.clone()
    correct_rounded_lr([still], [before], torch.zeros((), dtype=torch.float64))
    assert torch.equal(still, before)
