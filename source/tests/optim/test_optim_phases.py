"""What a profiler and the log show of a step."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from deepmd_muon.optim import HybridMuon, torch_hooks


def make(**settings):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in {"a.weight": (6, 8), "b.bias": (3,)}.items()
    }
    for p in params.values():
        p.grad = torch.ones_like(p)
    return HybridMuon(params.items(), 0.01, **settings)


def test_a_profiler_sees_the_phases_of_a_step():
    optimizer = make()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        optimizer.step()
    names = [event.name for event in record.events() if event.name.startswith("HybridMuon.")]
    assert set(names) == {
        "HybridMuon.momentum",
        "HybridMuon.orthogonalize",
        "HybridMuon.update",
        "HybridMuon.adam",
    }


def test_without_a_profiler_no_range_is_made(monkeypatch):
    def fail(name):
        raise AssertionError(name)

    monkeypatch.setattr(torch_hooks, "record_function", fail)
    make().step()
    with (
        pytest.raises(AssertionError, match="HybridMuon"),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        make().step()


def test_debug_lines_name_route_reason_shape_and_place(caplog):
    with caplog.at_level(logging.DEBUG, "deepmd_muon.optim"):
        optimizer = make()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert lines == [
        "a.weight: muon 1x6x8, because matrix in mode 'slice'; shape 6x8, on cpu",
        "b.bias: adam, because leaf 'bias' is a bias; shape 3, on cpu",
        "one process: 1 parameters, 1 matrices\n  1 of 6x8: 1.584e+04 FLOPs\na step: 1.584e+04 FLOPs",
    ]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "deepmd_muon.optim"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert not caplog.records


def test_switching_offload_is_logged(caplog):
    optimizer = make()
    optimizer.step()
    with caplog.at_level(logging.INFO, "deepmd_muon.optim"):
        for on in (True, True, False, False):
            optimizer.offload(on)
    assert [("host memory" in record.getMessage()) for record in caplog.records] == [True, False]
