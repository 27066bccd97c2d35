"""Convolution kernels as matrices (out, in times kernel): routes, steps, states of before, restart."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from optim_builders import train
from torch import nn

from deepmd_muon.optim import HybridMuon, HybridMuonConfig, MuonConfig
from deepmd_muon.optim.groups.group_settings import unfolded


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 6, 1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.line = nn.Conv1d(4, 5, 3)
        self.volume = nn.Conv3d(2, 4, 2)
        self.fc = nn.Linear(5, 2)


def make(seed=0):
    torch.manual_seed(seed)
    return ConvNet()


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig])
def test_build_finds_the_convolutions_of_a_model(config):
    routing = config().build(make()).routing
    weights = {
        entry.name.split(".")[0]: entry.placement
        for entry in routing
        if entry.name.endswith("weight")
    }
    # With fewer channels than anything before, `stem` and `volume` read the model's input.
    reads_input = config is MuonConfig
    assert weights == {
        "stem": "adamw" if reads_input else "muon 1x8x27",
        "grouped": "muon 1x8x36 rows 4+4",
        "depthwise": "adam",
        "pointwise": "muon 1x6x8",
        "up": "muon 1x6x16",
        "line": "muon 1x5x12",
        "volume": "adamw" if reads_input else "muon 1x4x16",
        "fc": "muon 1x2x5",
    }


def test_the_view_can_be_declined_or_chosen_by_name():
    model = make()
    found = {e.name: e.placement for e in HybridMuonConfig(conv_patterns=[]).build(model).routing}
    assert (found["stem.weight"], found["line.weight"]) == ("muon 24x3x3", "muon 5x4x3")
    declined = {e.name: e.route for e in MuonConfig(conv_patterns=[]).build(model).routing}
    assert (declined["stem.weight"], declined["line.weight"]) == ("adamw", "adamw")
    named = HybridMuon(model.named_parameters(), conv_patterns=["*"]).routing
    assert {e.name: str(e.view) for e in named if e.name in ("stem.weight", "fc.weight")} == {
        "stem.weight": "1x8x27",
        "fc.weight": "1x2x5",
    }


def test_kernels_that_become_many_small_matrices_are_warned_about():
    model = nn.Conv2d(16, 16, 3)
    with pytest.warns(
        UserWarning, match=r"'weight' of shape \(16, 16, 3, 3\) is seen as 256 matrices of 3x3"
    ):
        HybridMuon(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HybridMuon(model.named_parameters(), conv_patterns=[])


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig])
def test_states_of_before_the_view_are_migrated_under_every_policy(config, caplog):
    model = make()
    first = config(conv_patterns=[]).build(model)
    train(model, first, 2)
    saved = copy.deepcopy(first.state_dict())
    saved["param_groups"] = list(map(unfolded, saved["param_groups"]))
    for group in saved["param_groups"]:
        del group["conv_patterns"]  # the key of the version that brought the view
    then = config(on_route_change="error").build(model)
    then.load_state_dict(saved)
    p = model.line.weight
    if config is HybridMuonConfig:
        assert torch.equal(then.state[p]["momentum_buffer"], first.state[p]["momentum_buffer"])
        score = first.state[p]["magma_score"].double().mean()
        torch.testing.assert_close(
            then.state[p]["magma_score"].double(), score.view(1), atol=1e-6, rtol=0
        )
    else:  # three dimensions in mode '2d' took AdamW
        expected = first.state[p]["exp_avg"] / (1 - 0.9**2)
        assert torch.equal(then.state[p]["momentum_buffer"], expected)
    assert "line.weight" in caplog.text
    train(model, then)
