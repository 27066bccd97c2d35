"""What a step allocates: state per parameter, and a workspace that does not grow with the model."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.rules import magma


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Let Magma convert pieces that are small next to the workspace, as they are next to the usual one."""
    monkeypatch.setattr(magma, "_AT_A_TIME_CPU", 2**12)


class Allocations(TorchDispatchMode):
    """Follow the bytes of every storage made inside, and their peak."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.living = {x.untyped_storage()._cdata: None for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.follow(x.untyped_storage())
        return result

    def follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.living:
            self.living[key] = weakref.ref(storage, lambda _: self.freed(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def freed(self, key, size):
        self.living.pop(key, None)
        self.now -= size


def peak_bytes(shapes, **settings):
    params = [(f"w{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
    optimizer = HybridMuon(params, **settings)
    for _, p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    with Allocations([p for _, p in params] + [p.grad for _, p in params] + state) as allocations:
        optimizer.step()
    assert allocations.now == 0
    return allocations.peak


SHAPES = [(64, 64), (32, 128), (128, 32), (4, 32, 32)]
SETTINGS = [{}, {"on_nonfinite": "skip"}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_workspace_bounds_a_step(shape, settings):
    workspace = 4 * 64 * 64
    peaks = [peak_bytes([shape] * count, workspace=workspace, **settings) for count in (8, 32)]
    assert max(peaks) <= 25 * workspace
    assert peaks[1] <= 1.05 * peaks[0]
    assert peak_bytes([shape] * 32) > 2 * peaks[1]


def test_the_workspace_bounds_a_step_of_many_shapes():
    shapes = [
        (64, 64),
        (16, 100),
        (100, 16),
        (1, 90),
        (3, 8, 24),
        (40, 41),
        (7, 64, 9),
        (128, 130),
    ] * 6
    workspace = max(math.prod(shape) for shape in shapes)
    assert peak_bytes(shapes, workspace=workspace) <= 25 * workspace


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("shape", [(8, 40, 100), (8, 100, 40), (8, 60, 60)])
def test_orthogonalizing_keeps_nothing_but_its_results(shape, gram):
    xs = [torch.randn(shape) for _ in range(3)]
    with Allocations(xs) as allocations:
        results = orthogonalize_matrices(xs, "8+2", gram=gram)
        given = sum(x.nbytes for x in xs)
        assert allocations.now == given  # the results, of which none is larger than it must be
        assert allocations.peak <= 5 * given
        del results
    assert allocations.now == 0


def test_docstring_and_page_say_the_bytes_that_are_measured():
    workspace = 4 * 64 * 64
    peaks = [
        peak_bytes([shape] * 8, workspace=workspace, **settings) / workspace
        for shape in SHAPES
        for settings in SETTINGS
    ]
    said = f"{min(peaks):.0f} to {max(peaks):.0f} bytes"
    page = Path(__file__).parents[3] / "doc" / "optimizer-state.md"
    assert said in page.read_text(encoding="utf-8")
    assert said in str(HybridMuon.__doc__)
