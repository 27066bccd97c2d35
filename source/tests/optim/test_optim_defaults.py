"""What a user gets who sets nothing: routes of experts, embedders, tables, gates and markers; restarts."""

from __future__ import annotations

import copy
import json
import logging
from typing import ClassVar

import pytest
import torch
from optim_builders import through_file, train
from torch import nn

from deepmd_muon.optim import (
    HybridMuon,
    HybridMuonConfig,
    InvalidParameterError,
    InvalidShapeError,
    MuonConfig,
    RoutingMismatchError,
)
from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS
from deepmd_muon.optim.groups.group_settings import unfolded
from deepmd_muon.optim.state.saved_choices import saved_choices


class Experts(nn.Module):
    """A layer of experts as transformers and torchtitan store them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 6))


class Mixer(nn.Module):
    """The parameters of a Mamba block."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.randn(8, 4))
        self.D = nn.Parameter(torch.ones(8))
        self.kernel = nn.Parameter(torch.randn(8, 4))
        self.kernel._no_weight_decay = True


class Declared(nn.Linear):
    muon_routes: ClassVar = {"weight": "adam"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Parameter(torch.randn(11, 8))
        self.embedder = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        self.t_embedder = nn.ModuleDict({"mlp": nn.Linear(8, 8)})
        self.patch_embed = nn.Linear(12, 8)
        self.mixer = Mixer()
        self.experts = Experts()
        self.bilinear = nn.Bilinear(4, 5, 6)
        self.lstm = nn.LSTM(8, 8, bidirectional=True)
        self.gru = nn.GRUCell(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)


def placements(model, config=MuonConfig, **settings):
    return {entry.name: entry.placement for entry in config(**settings).build(model).routing}


def test_each_kind_of_parameter_takes_its_route():
    found = placements(Net())
    assert found["tok_embeddings"] == found["head.weight"] == "adamw"
    assert found["embedder.0.weight"] == "muon 1x8x4"
    assert found["t_embedder.mlp.weight"] == "muon 1x8x8"
    assert found["patch_embed.weight"] == "muon 1x8x12"
    assert found["mixer.A_log"] == found["mixer.kernel"] == "adam"
    assert found["experts.gate_up_proj"] == "muon 3x12x8"
    assert found["experts.down_proj"] == "muon 3x8x6"
    assert found["bilinear.weight"] == "muon 6x4x5"
    assert found["lstm.weight_hh_l0_reverse"] == "muon 1x32x8 rows 8+8+8+8"
    assert found["gru.weight_ih"] == "muon 1x24x8 rows 8+8+8"
    vectors = {name for name, placement in found.items() if placement == "adam"}
    assert {"norm.weight", "norm.bias", "mixer.D", "patch_embed.bias"} <= vectors


def test_settings_replace_declarations_of_modules():
    assert placements(Net(), expert_patterns=[])["experts.down_proj"] == "adamw"
    found = placements(Net(), muon_mode="flat", adamw_patterns=["patch_embed.*"])
    assert found["experts.down_proj"] == "muon 1x24x6"
    assert found["tok_embeddings"] == "muon 1x11x8"
    assert found["patch_embed.weight"] == "adamw"
    split = placements(Net(), splits=["experts.gate_up_proj: rows 2"])
    assert split["experts.gate_up_proj"] == "muon 3x12x8 rows 6+6"
    whole = placements(Net(), splits=["gru.*: rows 1"])
    assert whole["gru.weight_hh"] == "muon 1x24x8"


@pytest.mark.parametrize("config", [MuonConfig, HybridMuonConfig])
def test_markers_and_declarations_of_modules_count(config):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Declared(8, 8), nn.Linear(8, 8))
    model[0].weight.use_muon = False
    model[1].weight.is_embedding_or_output_parameter = True
    found = placements(model, config)
    assert [found[f"{i}.weight"] for i in range(4)] == ["adamw", "adamw", "adam", "muon 1x8x8"]
    assert placements(model, config, muon_patterns=["*.weight"])["2.weight"] == "muon 1x8x8"
    table = nn.Embedding(11, 8)
    table.weight.use_muon = True
    assert placements(nn.Sequential(table), config) == {"0.weight": "muon 1x11x8"}
    model[2].muon_routes = {"weight": "sgd"}
    with pytest.raises(InvalidShapeError, match=r"2: muon_routes must say .*'sgd'"):
        config().build(model)
    model[2].muon_routes = {"wieght": "adam"}
    with pytest.raises(InvalidShapeError, match="2: muon_routes names 'wieght'"):
        config().build(model)


def test_weights_without_a_matrix_route_are_warned_about(caplog):
    model = nn.ParameterDict({"layers": torch.randn(2, 3, 8, 8), "one": torch.randn(8, 8)})
    with caplog.at_level(logging.WARNING):
        MuonConfig().build(model)
        assert "more than half of the weights have no matrix route: layers" in caplog.text
        caplog.clear()
        MuonConfig(muon_patterns=["layers"]).build(model)
        assert not caplog.text


def as_first_release(optimizer):
    """Give the groups of an optimizer the settings that version 0.1.0 chose."""
    (group,) = optimizer.param_groups
    group |= {"adamw_patterns": list(DEFAULT_ADAMW_PATTERNS), "expert_patterns": [], "splits": []}
    group |= {"adam_patterns": [], "vector_route": "adamw", "adam_lr_ratio": 1.0}
    return optimizer


def as_saved_by_first_release(optimizer):
    saved = optimizer.state_dict()
    saved["param_groups"] = list(map(unfolded, saved["param_groups"]))
    for group in saved["param_groups"]:
        constructed = json.loads(group["constructed"])
        del constructed["chosen_by_build"], group["adam_weight_decay"]
        group["constructed"] = json.dumps(constructed)
    return through_file(saved)


def test_a_run_of_an_earlier_release_goes_on_bitwise(caplog):
    torch.manual_seed(0)
    whole = Net()
    first = as_first_release(MuonConfig().build(whole))
    train(whole, first, 2)
    assert {entry.placement for entry in first.routing if "embedder" in entry.name} == {"adamw"}
    restarted = copy.deepcopy(whole)
    second = MuonConfig().build(restarted)
    second.load_state_dict(as_saved_by_first_release(first))
    assert second.routing == first.routing
    assert "expert_patterns, splits, vector_route" in caplog.text
    train(whole, first, 2, start=2)
    train(restarted, second, 2, start=2)
    for p, q in zip(whole.parameters(), restarted.parameters(), strict=True):
        assert torch.equal(p, q)
    # The next checkpoint has the choices, too.
    third = MuonConfig().build(copy.deepcopy(whole))
    third.load_state_dict(through_file(second.state_dict()))
    assert third.routing == first.routing


@pytest.mark.parametrize(
    ("key", "saved", "chosen_then", "now", "chosen_now", "used"),
    [
        ("vector_route", "adamw", ["vector_route"], "adam", ["vector_route"], "adamw"),
        ("vector_route", "adamw", ["vector_route"], "adam", ["y"], "adam"),
        ("vector_route", "adamw", [], "adam", ["vector_route"], "adam"),
        ("splits", ["x"], [], ["x", "y"], ["y"], ["x"]),
        ("splits", ["x"], [], ["z", "y"], ["y"], ["z", "y"]),
        ("splits", ["x"], [], [], ["vector_route"], []),
        ("splits", ["x"], ["x"], [], ["vector_route"], ["x"]),
    ],
)
def test_the_table_of_saved_choices(key, saved, chosen_then, now, chosen_now, used):
    """The rows of the table in `saved_choices`."""

    def group(value, chosen):
        settings = {"splits": [], "adam_patterns": [], "vector_route": "adam", "params": []}
        settings |= {"adam_weight_decay": 0.0, "routes": []}
        constructed = json.dumps({"chosen_by_build": chosen})
        return {**settings, "constructed": constructed, key: value}

    (values,) = saved_choices([group(now, chosen_now)], [group(saved, chosen_then)])
    assert values.get(key, now) == used
    assert bool(values) == (used != now)


def test_a_list_that_is_not_replaced_keeps_its_choices():
    """The user gives one of two lists anew, and an earlier release chose neither's entries."""

    def chosen_by(optimizer):
        return json.loads(optimizer.param_groups[0]["constructed"])["chosen_by_build"]

    def build(splits=()):
        model = nn.Module()
        model.rnn = nn.LSTM(4, 6)
        model.mixer = Mixer()
        model.head = nn.Linear(6, 8)
        return MuonConfig(splits=splits, on_route_change="migrate").build(model)

    optimizer = build()
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    entries = {
        "mixer.A_log",
        "mixer.kernel",
        "rnn.weight_ih_l0: rows 4",
        "rnn.weight_hh_l0: rows 4",
    }
    constructed = json.loads(group["constructed"])
    assert entries < {*constructed["chosen_by_build"]}
    constructed["chosen_by_build"] = [x for x in chosen_by(optimizer) if x not in entries]
    group |= {"constructed": json.dumps(constructed), "splits": [], "adam_patterns": []}

    second = build(["head.weight: rows 2"])
    splits = second.param_groups[0]["splits"]
    second.load_state_dict(saved)
    assert second.param_groups[0]["adam_patterns"] == []
    assert second.param_groups[0]["splits"] == splits
    assert {x for x in entries if x in chosen_by(second)} == entries & {*splits}


def test_settings_of_the_user_are_not_those_of_the_checkpoint():
    first = as_first_release(MuonConfig().build(Net()))
    saved = as_saved_by_first_release(first)
    second = MuonConfig(vector_route="adam").build(Net())
    before = copy.deepcopy([second.routing, second.param_groups[0]["expert_patterns"]])
    with pytest.raises(RoutingMismatchError, match=r"norm\.bias"):
        second.load_state_dict(saved)
    assert [second.routing, second.param_groups[0]["expert_patterns"]] == before


def test_type_muon_of_an_input_keeps_its_routes():
    from deepmd_muon.train.strategy.base import build_optimizer

    optimizer = build_optimizer(MuonConfig(), Net(), 0.02)
    (group,) = optimizer.param_groups
    assert group["adamw_patterns"] == list(DEFAULT_ADAMW_PATTERNS)
    assert (group["vector_route"], group["adam_lr_ratio"]) == ("adamw", 1.0)
    routes = {entry.name: entry.route for entry in optimizer.routing}
    of_names = {name for name, route in routes.items() if route == "adamw" and "embed" in name}
    assert {"embedder.0.weight", "patch_embed.weight", "tok_embeddings"} <= of_names
    assert routes["experts.down_proj"] == routes["norm.weight"] == "adamw"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.filterwarnings("ignore:HybridMuon got parameters without names")
def test_flat_partitions_in_place_of_matrices_are_refused(named):
    """As DeepSpeed's ZeRO 1 and 2 replace the parameters of a group."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = HybridMuon(model.named_parameters() if named else model.parameters())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])[:40].requires_grad_()
    flat.grad = torch.ones_like(flat)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(InvalidParameterError, match="ZeRO"):
        optimizer.step()
    assert flat.grad.sum() == 40


def test_partitions_of_zero_3_are_refused():
    model = nn.Linear(4, 8)
    model.weight.data = torch.empty(0)
    model.weight.ds_shape = torch.Size((8, 4))
    with pytest.raises(InvalidParameterError, match=r"'weight' is partitioned .* stage 3"):
        MuonConfig().build(model)
