"""The same gradients through deepmd-kit 3.2.0's HybridMuon, in its own environment, and through ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepmd_kit_program import MARKS, python
from torch import nn

from deepmd_muon.optim import HybridMuon

pytestmark = MARKS

SHAPES = {
    "descriptor.0.matrix": (1, 25),
    "descriptor.1.matrix": (25, 50),
    "descriptor.1.bias": (50,),
    "fitting.0.matrix": (60, 60),
    "fitting.1.matrix": (60, 24),
    "fitting.1.adamw_gate": (24,),
    "experts.matrix": (3, 20, 30),
    "square.experts": (2, 16, 16),
}
STEPS = 4
CASES = [
    {"lr": 0.01},
    {"lr": 0.01, "enable_gram": False, "magma_muon": False, "weight_decay": 0.1},
    {"lr": 0.01, "lr_adjust": 10.0, "muon_mode": "flat"},
    {
        "lr": 0.01,
        "muon_mode": "2d",
        "lr_adjust_coeff": 0.2,
        "momentum": 0.9,
        "adam_betas": (0.8, 0.9),
    },
]


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    job = {
        "weights": {name: random(shape, i) for i, (name, shape) in enumerate(SHAPES.items())},
        "gradients": [
            {
                name: random(shape, 100 * (step + 1) + i)
                for i, (name, shape) in enumerate(SHAPES.items())
            }
            for step in range(STEPS)
        ],
        "cases": CASES,
    }
    torch.save(job, folder / "job.pt")
    python(
        Path(__file__).with_name("run_deepmd_kit_steps.py"), "job.pt", "result.pt", folder=folder
    )
    return job, torch.load(folder / "result.pt")


def make(job, case, **settings):
    params = {name: nn.Parameter(w.clone()) for name, w in job["weights"].items()}
    return params, HybridMuon(params.items(), **case, **settings)


def run(params, optimizer, gradients):
    for name, p in params.items():
        p.grad = gradients[name].clone()
    optimizer.step()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_compatible_arithmetic_reproduces_its_update(results, number):
    job, peers = results
    params, optimizer = make(job, CASES[number], deepmd_kit_arithmetic=True)
    previous = job["weights"]
    for gradients, after in zip(job["gradients"], peers[number]["weights"], strict=True):
        before = {name: p.detach().clone() for name, p in params.items()}
        run(params, optimizer, gradients)
        for (name, p), entry in zip(params.items(), optimizer.routing, strict=True):
            update, peer = p - before[name], after[name] - previous[name]
            tolerance = 2e-2 if entry.route == "muon" else 1e-4
            assert (update - peer).norm() <= tolerance * peer.norm(), (name, entry.route)
        previous = after


@pytest.mark.parametrize("number", range(len(CASES)))
def test_its_state_loads_and_holds_the_same_values(results, number):
    job, peers = results
    params, optimizer = make(job, CASES[number])
    for gradients in job["gradients"]:
        run(params, optimizer, gradients)
    loaded_params, loaded = make(job, CASES[number])
    loaded.load_state_dict(peers[number]["optimizer"])
    for (name, p), q in zip(params.items(), loaded_params.values(), strict=True):
        ours, theirs = optimizer.state[p], loaded.state[q]
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            assert torch.allclose(value, theirs[key], rtol=1e-4, atol=1e-6), (name, key)


def test_the_precise_update_differs_only_by_the_quality_of_the_polar_factor(results):
    job, peers = results
    params, optimizer = make(job, CASES[1])
    run(params, optimizer, job["gradients"][0])
    for name, p in params.items():
        ours, peer = p - job["weights"][name], peers[1]["weights"][0][name] - job["weights"][name]
        assert (ours - peer).norm() <= 0.02 * peer.norm(), name
