"""One step and several: against an independent float64 formula, torch's Adam, AdamW and Muon."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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


OUT_OF_RANGE = [
    ("momentum", -3, "must be >= 0.*found -3"),
    ("momentum", 1.0, "must be < 1"),
    ("momentum", "a", "must be a number; found the string 'a'"),
    ("momentum", [0.9], r"must be a number; found the list \[0.9\]"),
    ("momentum", False, "must be a number; found false"),
    ("lr", -1.0, "must be >= 0; found -1"),
    ("lr", float("nan"), "must be a number or Tensor; found nan"),
    ("lr", "a", "must be a number or Tensor; found the string 'a'"),
    ("lr", torch.tensor(-0.5), "must be a number >= 0; found -0.5"),
    ("lr", torch.tensor(float("nan")), "must be a number >= 0; found nan"),
    ("lr", torch.ones(2), r"must hold one real number; found torch.float32 of shape \(2,\)"),
    ("lr_adjust", float("nan"), "must be a number; found nan"),
    ("weight_decay", 10**400, "must be a number; found 1000"),
    ("workspace", 0, "must be >= 1; found 0"),
    ("workspace", 1e6, "must be a whole number; found 1000000.0"),
    ("adam_betas", (0.9,), r"must be a list of 2 numbers; found the list \(0.9,\)"),
    ("adam_betas", 0.9, "must be a list of 2 numbers; found 0.9"),
    ("adam_betas", (0.9, None), "element 1 must be a number; found null"),
    ("adam_betas", (0.9, 1.5), "must be < 1; found 1.5"),
    ("muon_mode", "3d", "must be one of '2d', 'flat', 'slice'; found '3d'"),
    ("muon_mode", ["2d"], r"must be one of '2d', 'flat', 'slice'; found the list \['2d'\]"),
    ("scaling", 3, "must be one of 'none', 'match_rms', 'rectangular', 'spectral'; found 3"),
    ("enable_gram", 1, "must be true or false; found 1"),
    ("foreach", "yes", "must be true, false or null; found 'yes'"),
    ("adam_patterns", 3, "must be a list of strings; found 3"),
    ("splits", [("w", 3)], "element 0 must be a string; found the list"),
    ("schedule", 5, "must be a name or a list of triples; found 5"),
    ("schedule", [], "triple"),
    ("schedule", [(1.0, 2.0, float("nan"))], "triple"),
    ("on_route_change", None, "must be one of 'error', 'migrate', 'reset'; found null"),
    ("differentiable", True, "not differentiable"),
]


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_settings_out_of_range_are_named(name, value, message):
    settings = {name: value}
    with pytest.raises(InvalidSettingError, match=f"{name}.*{message}"):
        HybridMuon([("w", parameter(3, 3))], **settings)
    if name not in ("workspace", "on_route_change", "differentiable"):  # others stand in groups
        optimizer = HybridMuon([("w", parameter(3, 3))])
        with pytest.raises(InvalidSettingError, match=f"{name}.*{message}"):
            optimizer.add_param_group({"params": [("v", parameter(3, 3))], **settings})
        assert len(optimizer.param_groups) == 1
        optimizer.step()


def test_two_implementations_of_adam_at_once_are_refused():
    with pytest.raises(InvalidSettingError, match="only one of fused and foreach can be true"):
        HybridMuon([("w", parameter(3, 3))], fused=True, foreach=True)


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
        "fork stream 0",
        "fork stream 1",
        "stream 0",
        "wave 0",
        "joined",
        "stream 1",
        "wave 1",
        "joined",
        "wave 2",
        "stream 0",
        "wave 3",
        "joined",
    ]
