"""What tests of the optimizer share: random tensors, states through a file, comparisons to the bit.

A model is a module, or a dictionary of parameters by name.
"""

from __future__ import annotations

import io

import torch
from torch import nn


def random(*shape, seed=0, dtype=torch.float32):
    """Return normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lay_out(x, layout):
    """Return a tensor of equal elements in another layout, inside a larger memory where it has gaps."""
    if layout == "channels last" and x.ndim == 4:
        return x.clone(memory_format=torch.channels_last)
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout in ("columns", "every second") and x.ndim > 0:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)
        inside = wide[..., 1::2] if layout == "every second" else wide[..., : x.shape[-1]]
        return inside.copy_(x)
    return x.clone()


def through_file(content):
    """Save something and load it as plain tensors and numbers."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def named(model):
    """Return the parameters of a model by name."""
    return dict(model.named_parameters() if isinstance(model, nn.Module) else model)


def parameters(shapes, dtype=torch.float32, device="cpu"):
    """Return parameters of some shapes by name, with numbers that depend on their place alone."""
    return {
        name: nn.Parameter(random(*shape, seed=i, dtype=torch.float64).to(device, dtype))
        for i, (name, shape) in enumerate(shapes.items())
    }


def make_net(seed=0, dtype=torch.float32):
    """Return a net of two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def give_gradients(model, step, without=()):
    """Give what is trained gradients that depend on its place and the step alone."""
    for number, (name, p) in enumerate(named(model).items()):
        has_gradient = p.requires_grad and name not in without
        g = random(*p.shape, seed=1000 + 100 * step + number, dtype=torch.float64)
        p.grad = g.to(p.device, p.dtype) if has_gradient else None


def train(model, optimizer, steps=3, start=0, without=()):
    """Take steps on the gradients of `give_gradients`."""
    for step in range(start, start + steps):
        give_gradients(model, step, without)
        optimizer.step()


def assert_same_state(first, second):
    """Compare the state tensors of one parameter: keys, dtypes, strides and bits."""
    assert first.keys() == second.keys()
    for key, x in first.items():
        assert (x.dtype, x.stride()) == (second[key].dtype, second[key].stride()), key
        assert torch.equal(x, second[key]), key


def assert_same(first, second):
    """Compare models and their optimizers, (model, optimizer) each: parameters and state."""
    params, others = named(first[0]), named(second[0])
    assert params.keys() == others.keys()
    for name, p in params.items():
        assert torch.equal(p, others[name]), name
        assert_same_state(first[1].state[p], second[1].state[others[name]])
