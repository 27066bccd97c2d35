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


def through_file(content):
    """Save something and load it as plain tensors and numbers."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def named(model):
    """Return the parameters of a model by name."""
    return dict(model.named_parameters() if isinstance(model, nn.Module) else model)


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
