"""One step and several: against an independent float64 formula, torch's Adam, AdamW and Muon."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from polar_oracle import oracle
from torch import nn

from deepmd_muon.optim import AdamConfig, HybridMuon, HybridMuonConfig, MuonConfig
from deepmd_muon.optim import step as step_module
from deepmd_muon.optim.config import ShardedSettings
from deepmd_muon.optim.errors import InvalidSettingError
from deepmd_muon.optim.step import CompiledStep
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import Wave


def parameter(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))


def gradients(shape, count, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(count)
    ]


def magma_factor(score, m, g):
    """Advance one block's score and return it with the damping factor."""
    cosine = (m * g).sum().item() / (m.norm().item() * g.norm().item())

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    r = (sigmoid(cosine / 2) - sigmoid(-0.5)) / (sigmoid(0.5) - sigmoid(-0.5))
    score = 0.9 * score + 0.1 * r
    return score, 0.1 + 0.9 * score


@pytest.mark.parametrize("magma", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lr_adjust", [0.0, 10.0])
def test_muon_follows_its_formula(magma, nesterov, lr_adjust):
    p = parameter(24, 10)
    expected = p.detach().double()
    m = torch.zeros_like(expected)
    score = 0.5
    lr, decay, beta = 0.02, 0.1, 0.9
    optimizer = HybridMuon(
        [("w", p)],
        lr,
        momentum=beta,
        weight_decay=decay,
        lr_adjust=lr_adjust,
        magma_muon=magma,
        nesterov=nesterov,
    )
    for g in gradients((24, 10), 4):
        p.grad = g.clone()
        optimizer.step()
        g = g.double()
        m = beta * m + (1 - beta) * g
        o = oracle((beta * m + (1 - beta) * g if nesterov else m)[None])[0]
        scale = 0.18 * 24**0.5 if lr_adjust <= 0 else (24 / 10) ** 0.5
        score, factor = magma_factor(score, m, g)
        expected = expected * (1 - lr * decay) - lr * scale * (factor if magma else 1.0) * o
    assert torch.allclose(p.double(), expected, atol=1e-5)
    state = optimizer.state[p]
    assert torch.allclose(state["momentum_buffer"].double(), m, atol=1e-6)
    if magma:
        assert state["magma_score"].tolist() == pytest.approx([score], abs=1e-6)
    else:
        assert "magma_score" not in state


def test_flat_mode_folds_leading_dimensions_into_rows():
    folded = parameter(3, 8, 5)
    plain = nn.Parameter(folded.detach().reshape(24, 5).clone())
    first = HybridMuon([("w", folded)], 0.1, muon_mode="flat")
    second = HybridMuon([("w", plain)], 0.1)
    for g in gradients((3, 8, 5), 2):
        folded.grad, plain.grad = g, g.reshape(24, 5)
        first.step()
        second.step()
    assert torch.equal(folded.reshape(24, 5), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("lr_adjust", [0.0, 10.0])
def test_adam_routes_equal_torch(dtype, decay, lr_adjust):
    plain, decayed = parameter(7, dtype=dtype), parameter(7, seed=3, dtype=dtype)
    twins = [nn.Parameter(p.detach().clone()) for p in (plain, decayed)]
    lr = 1e-2
    ours = HybridMuon(
        [("bias", plain), ("adamw_x", decayed)], lr, weight_decay=decay, lr_adjust=lr_adjust
    )
    rate = lr if lr_adjust <= 0 else lr / lr_adjust
    adam = torch.optim.Adam(twins[:1], rate, (0.9, 0.95), 1e-20)
    adamw = torch.optim.AdamW(twins[1:], rate, (0.9, 0.95), 1e-20, weight_decay=decay)
    for i in range(20):
        for p, twin in zip((plain, decayed), twins, strict=True):
            p.grad = gradients((7,), 1, seed=i, dtype=dtype)[0]
            twin.grad = p.grad.clone()
        ours.step()
        adam.step()
        adamw.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for p, twin in zip((plain, decayed), twins, strict=True):
        assert torch.allclose(p, twin, rtol=0, atol=tolerance)
    assert ours.state[plain]["exp_avg"].dtype == dtype
    assert ours.state[plain]["step"].item() == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_keep_wide_moments_and_are_rounded_once(dtype):
    p = parameter(40, dtype=dtype)
    expected = p.detach().float()
    optimizer = HybridMuon([("bias", p)], 1e-2)
    m, v = torch.zeros(40), torch.zeros(40)
    for t, g in enumerate(gradients((40,), 10, dtype=dtype), start=1):
        p.grad = g.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * g.float()
        v = 0.95 * v + 0.05 * g.float() ** 2
        expected = (
            (expected - 1e-2 * (m / (1 - 0.9**t)) / (v / (1 - 0.95**t)).sqrt()).to(dtype).float()
        )
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert (p.float() - expected).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("scaling", "adjust"), [("rectangular", "original"), ("match_rms", "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_plain_settings_equal_torch_muon(scaling, adjust, nesterov, shape):
    p = parameter(*shape)
    twin = nn.Parameter(p.detach().clone())
    ours = HybridMuon(
        [("w", p)],
        0.02,
        momentum=0.9,
        weight_decay=0.1,
        muon_mode="2d",
        magma_muon=False,
        nesterov=nesterov,
        schedule="keller-jordan",
        scaling=scaling,
        lr_adjust_coeff=0.2,
    )
    peer = torch.optim.Muon([twin], 0.02, 0.1, 0.9, nesterov, adjust_lr_fn=adjust)
    for g in gradients(shape, 5):
        p.grad, twin.grad = g.clone(), g.clone()
        ours.step()
        peer.step()
    # The peer iterates in bfloat16: its update is right to about one percent.
    travelled = (p - parameter(*shape)).norm()
    assert (p - twin).norm() <= 0.02 * travelled


def test_the_adam_rate_can_be_set_apart():
    p, q = parameter(5), parameter(5)
    for which, ratio in ((p, 1.0), (q, 0.25)):
        optimizer = HybridMuon([("bias", which)], 0.1, adam_lr_ratio=ratio)
        which.grad = torch.ones(5)
        optimizer.step()
    start = parameter(5)
    assert torch.allclose(p, start - 0.1, atol=1e-6)
    assert torch.allclose(q, start - 0.025, atol=1e-6)


def test_missing_gradients_leave_parameters_and_state_alone():
    p, q = parameter(6, 6), parameter(6, 6, seed=2)
    optimizer = HybridMuon([("p", p), ("q", q)], 0.1)
    before = q.detach().clone()
    p.grad = gradients((6, 6), 1)[0]
    optimizer.step()
    assert torch.equal(q, before)
    assert q not in optimizer.state


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match=r"real parameters; 'w' is torch\.complex64"):
        HybridMuon([("w", nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)))])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-30),
        (torch.float32, 1e30),
        (torch.float64, 1e-200),
        (torch.float64, 1e200),
    ],
)
def test_the_scale_of_gradients_does_not_matter(dtype, scale):
    p, q = parameter(6, 9, dtype=dtype), parameter(6, 9, dtype=dtype)
    for which, factor in ((p, 1.0), (q, scale)):
        optimizer = HybridMuon([("w", which)], 0.1)
        for g in gradients((6, 9), 3):
            which.grad = (g.double() * factor).to(dtype)
            optimizer.step()
    assert (p - parameter(6, 9, dtype=dtype)).norm() > 0.1
    assert torch.allclose(p, q, atol=1e-5)


def test_zero_gradients_move_nothing_but_the_decay():
    p = parameter(6, 9)
    before = p.detach().clone()
    optimizer = HybridMuon([("w", p)], 0.1, weight_decay=0.01)
    p.grad = torch.zeros(6, 9)
    optimizer.step()
    assert torch.equal(p, before * (1 - 0.1 * 0.01))


@pytest.mark.parametrize("workspace", [1, 100, 10**9])
def test_the_workspace_does_not_change_results(workspace):
    params = [(f"w{i}", parameter(8, 12, seed=i)) for i in range(5)]
    optimizer = HybridMuon(params, 0.1, workspace=workspace)
    for i, (_, p) in enumerate(params):
        p.grad = gradients((8, 12), 1, seed=i)[0]
    optimizer.step()
    for i, (_, p) in enumerate(params):
        g = gradients((8, 12), 1, seed=i)[0].double()
        score, factor = magma_factor(0.5, g, g)
        assert score == pytest.approx(0.55)
        expected = (
            parameter(8, 12, seed=i).double() * (1 - 1e-4)
            - 0.1 * 0.18 * 12**0.5 * factor * oracle(g[None])[0]
        )
        assert torch.allclose(p.double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": -3}, "momentum: must be >= 0.*found -3"),
        ({"momentum": 1.0}, "momentum: must be < 1"),
        ({"muon_mode": "3d"}, "muon_mode: must be one of '2d', 'flat', 'slice'; found '3d'"),
        ({"lr": -1.0}, "lr: must be >= 0; found -1"),
        ({"lr": float("nan")}, "lr: must be a number or Tensor; found nan"),
        ({"lr": float("inf")}, "lr: must be a number or Tensor; found inf"),
        ({"lr": "a"}, "lr: must be a number or Tensor; found the string 'a'"),
        ({"lr": torch.tensor(-0.5)}, "lr: must be a number >= 0; found -0.5"),
        ({"lr": torch.tensor(float("nan"))}, "lr: must be a number >= 0; found nan"),
        (
            {"lr": torch.ones(2)},
            r"lr: a tensor must hold one real number; found torch.float32 of shape \(2,\)",
        ),
        ({"lr_adjust": float("nan")}, "lr_adjust: must be a number; found nan"),
        ({"momentum": "a"}, "momentum: must be a number; found the string 'a'"),
        ({"momentum": [0.9]}, r"momentum: must be a number; found the list \[0.9\]"),
        ({"momentum": False}, "momentum: must be a number; found false"),
        ({"weight_decay": 10**400}, "weight_decay: must be a number; found 1000"),
        ({"workspace": 0}, "workspace: must be >= 1; found 0"),
        ({"workspace": -5}, "workspace: must be >= 1; found -5"),
        ({"workspace": 1e6}, "workspace: must be a whole number; found 1000000.0"),
        (
            {"adam_betas": (0.9,)},
            r"adam_betas: must be a list of 2 numbers; found the list \(0.9,\)",
        ),
        ({"adam_betas": 0.9}, "adam_betas: must be a list of 2 numbers; found 0.9"),
        ({"adam_betas": (0.9, None)}, r"adam_betas: element 1 must be a number; found null"),
        ({"adam_lr_ratio": "b"}, "adam_lr_ratio: must be a number; found the string 'b'"),
        (
            {"scaling": 3},
            "scaling: must be one of 'none', 'match_rms', 'rectangular', 'spectral'; found 3",
        ),
        (
            {"muon_mode": ["2d"]},
            r"muon_mode: must be one of '2d', 'flat', 'slice'; found the list \['2d'\]",
        ),
        ({"enable_gram": 1}, "enable_gram: must be true or false; found 1"),
        ({"fused": True, "foreach": True}, "fused: only one of fused and foreach can be true"),
        ({"foreach": "yes"}, "foreach: must be true, false or null; found 'yes'"),
        ({"min_matrix_dim": 2.5}, "min_matrix_dim: must be a whole number; found 2.5"),
        ({"adam_patterns": 3}, "adam_patterns: must be a list of strings; found 3"),
        ({"splits": [("w", 3)]}, r"splits: element 0 must be a string; found the list"),
        ({"schedule": 5}, "schedule: must be a name or a list of triples; found 5"),
        (
            {"on_route_change": None},
            "on_route_change: must be one of 'error', 'migrate', 'reset'; found null",
        ),
        ({"adam_betas": (0.9, 1.5)}, "adam_betas: must be < 1; found 1.5"),
        ({"weight_decay": -0.1}, "weight_decay: must be >= 0"),
        ({"precision": "int8"}, "precision: must be one of"),
        ({"min_matrix_dim": 0}, "min_matrix_dim: must be >= 1"),
        ({"differentiable": True}, "not differentiable"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(InvalidSettingError, match=message):
        HybridMuon([("w", parameter(3, 3))], **settings)
    if not settings.keys() & {
        "workspace",
        "on_route_change",
        "differentiable",
    }:  # all others may stand in a group
        optimizer = HybridMuon([("w", parameter(3, 3))])
        with pytest.raises(InvalidSettingError, match=message):
            optimizer.add_param_group({"params": [("v", parameter(3, 3))], **settings})
        assert len(optimizer.param_groups) == 1
        optimizer.step()


def test_numbers_of_other_kinds_are_numbers():
    given = {
        "momentum": np.float64(0.9),
        "weight_decay": np.float32(0.5),
        "lr": 1,
        "min_matrix_dim": np.int64(2),
    }
    optimizer = HybridMuon([("w", parameter(3, 3))], adam_betas=[0, 0.5], **given)
    assert {key: optimizer.param_groups[0][key] for key in given} == given
    assert optimizer.param_groups[0]["adam_betas"] == (0, 0.5)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            AdamConfig,
            {"weight_decay": float("inf")},
            "AdamConfig: weight_decay: must be a number; found inf",
        ),
        (
            MuonConfig,
            {"schedule": [(1.0, 2.0)]},
            "schedule: element 0 must be a list of 3 numbers; found",
        ),
        (
            HybridMuonConfig,
            {"nesterov": "yes", "momentum": None},
            "momentum: must be .*; nesterov: must be true or",
        ),
        (
            HybridMuonConfig,
            {"sharded": {"slots": 1}},
            "HybridMuonConfig: sharded: must be ShardedSettings; found an object",
        ),
        (
            ShardedSettings,
            {"slots": 0.5},
            "ShardedSettings: slots: must be a whole number; found 0.5",
        ),
    ],
)
def test_configurations_check_types_too(config, settings, message):
    with pytest.raises(InvalidSettingError, match=message):
        config(**settings)


def test_large_muon_waves_take_turns_on_two_streams(monkeypatch):
    notes = []

    class Stream:
        def __init__(self, device):
            self.device, self.name = device, f"stream {len(names)}"
            names.append(self.name)

        def fork(self):
            notes.append(f"fork {self.name}")

        def __enter__(self):
            notes.append(self.name)

        def __exit__(self, *error):
            notes.append("joined")

    names = []
    monkeypatch.setattr(step_module, "SideStream", Stream)
    monkeypatch.setattr(
        CompiledStep,
        "_step_matrices",
        lambda self, wave, state, control: notes.append(wave.views[0]),
    )
    small, large = (torch.empty(n, device="meta") for n in (2**22, 2**22 + 1))

    def waves_of(*sizes, device="cuda", route="muon"):
        return [
            Wave(None, route, torch.device(device), [p], [f"wave {i}"], {}, None)
            for i, p in enumerate(sizes)
        ]

    compiled = CompiledStep()

    def streams(waves):
        compiled._choose_streams(waves, offloaded=False)
        return compiled.wave_streams

    for too_few in (
        waves_of(large),
        waves_of(small, large, small),
        waves_of(large, large, device="cpu"),
        waves_of(large, large, route="adam"),
        [*waves_of(large, device="cuda:0"), *waves_of(large, device="cuda:1")],
    ):
        assert streams(too_few) == ()
    found = waves_of(large, large, small, large)
    turns = streams(found)
    assert streams(waves_of(large)) == ()
    assert streams(found) == turns  # kept when the step is compiled anew
    compiled._step_waves(found, None, StepControl())
    assert notes == [
        *(
            "fork stream 0",
            "fork stream 1",
            "stream 0",
            "wave 0",
            "joined",
            "stream 1",
            "wave 1",
            "joined",
        ),
        *("wave 2", "stream 0", "wave 3", "joined"),
    ]
