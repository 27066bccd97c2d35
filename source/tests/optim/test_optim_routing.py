"""Routes and views: DeePMD's rules, the user's own patterns, names and wrappers, tables as values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepmd_muon.optim import (
    HybridMuon,
    InvalidSettingError,
    InvalidShapeError,
    RouteTable,
    RoutingRules,
)
from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.routing.routes import canonical_name, choose_route
from deepmd_muon.optim.routing.views import MatrixView, effective_shape, matrix_view

MODES = ("2d", "flat", "slice")
shapes = st.lists(st.integers(1, 9), min_size=0, max_size=5).map(tuple)
names = st.text("abW_.019B", min_size=1, max_size=20)


FLAT, TWO = {"muon_mode": "flat"}, {"muon_mode": "2d"}
EXPERTS = {"expert_patterns": ("*.experts.*",)}
PATTERNS = {"adam_patterns": ("*.embedding.*",), "adamw_patterns": ("head.*", "*.bias")}
SMALL = {"min_matrix_dim": 5}


def fused(split):
    return {"splits": (f"*.qkv: {split}",)}


@pytest.mark.parametrize(
    ("name", "shape", "rules", "placement"),
    [
        # names come before shapes, in DeePMD's order
        ("net.b", (4, 5), {}, "adam"),
        ("net.bias", (4, 5), {}, "adam"),
        ("net.Bias_hh", (4, 5), {}, "adam"),
        ("net.adamw_bias", (4, 5), {}, "adam"),
        ("net.adam_scale", (4, 5), {}, "adam"),
        ("net.ADAM_scale", (4, 5), {}, "adam"),
        ("net.adamw_scale", (4, 5), {}, "adamw"),
        ("net.adamw_scale", (5,), {}, "adamw"),
        ("net.adamant", (4, 5), {}, "muon 1x4x5"),
        ("bias.matrix", (4, 5), {}, "muon 1x4x5"),
        ("net.bb", (4, 5), {}, "muon 1x4x5"),
        # the leaf is the last segment that is not a number
        ("net.bias.0", (4, 5), {}, "adam"),
        ("net.adamw_list.3.12", (4, 5), {}, "adamw"),
        ("layers.0.matrix.1", (4, 5), {}, "muon 1x4x5"),
        # dimensions of 1 do not count
        ("w", (), {}, "adam"),
        ("w", (7,), {}, "adam"),
        ("w", (1, 25), {}, "adam"),
        ("w", (240, 1), {}, "adam"),
        ("w", (1, 1), {}, "adam"),
        ("w", (4, 1, 5), {}, "muon 1x4x5"),
        # more than two dimensions
        ("w", (3, 4, 5), TWO, "adamw"),
        ("w", (3, 4, 5), FLAT, "muon 1x12x5"),
        ("w", (3, 4, 5), {}, "muon 3x4x5"),
        ("w", (2, 3, 4, 5), TWO, "adamw"),
        ("w", (2, 3, 4, 5), FLAT, "muon 1x24x5"),
        ("w", (2, 3, 4, 5), {}, "muon 6x4x5"),
        ("w", (2, 1, 4, 1, 5), {}, "muon 2x4x5"),
        ("w", (2, 1, 4, 1, 5), FLAT, "muon 1x8x5"),
        # small matrices, of which the smallest block counts
        ("w", (4, 50), SMALL, "adam"),
        ("w", (5, 50), SMALL, "muon 1x5x50"),
        ("w", (9, 4, 50), SMALL, "adam"),
        ("w", (9, 4, 50), {**SMALL, **FLAT}, "muon 1x36x50"),
        ("a.qkv", (64, 96), {**SMALL, **fused("columns 93+3")}, "adam"),
        # patterns come first and see the whole name; without a name only shapes count
        ("model.embedding.weight", (4, 5), PATTERNS, "adam"),
        ("head.weight", (4, 5), PATTERNS, "adamw"),
        ("layer.bias", (5,), PATTERNS, "adamw"),
        ("my.head.weight", (4, 5), PATTERNS, "muon 1x4x5"),
        (None, (4, 5), {"adam_patterns": ("a*",)}, "muon 1x4x5"),
        (None, (4, 5), {"adam_patterns": ("*",)}, "adam"),
        (None, (5,), {}, "adam"),
        # the first dimension of an expert weight counts experts
        ("moe.experts.w", (6, 4, 5), EXPERTS, "muon 6x4x5"),
        ("moe.experts.w", (6, 4, 5), {**EXPERTS, **TWO}, "muon 6x4x5"),
        ("moe.experts.w", (6, 4, 5), {**EXPERTS, **FLAT}, "muon 6x4x5"),
        ("moe.experts.w", (6, 3, 4, 5), {**EXPERTS, **FLAT}, "muon 6x12x5"),
        ("moe.experts.w", (6, 3, 4, 5), EXPERTS, "muon 18x4x5"),
        ("moe.experts.w", (6, 3, 4, 5), {**EXPERTS, **TWO}, "adamw"),
        ("moe.experts.w", (1, 4, 5), {**EXPERTS, **TWO}, "muon 1x4x5"),
        ("moe.experts.w", (6, 1, 5), EXPERTS, "adam"),
        ("moe.experts.w", (6, 5), EXPERTS, "muon 1x6x5"),
        # fused weights are cut
        ("a.qkv", (64, 96), fused("columns 3"), "muon 1x64x96 columns 32+32+32"),
        ("a.qkv", (64, 96), fused("columns 64+16+16"), "muon 1x64x96 columns 64+16+16"),
        ("a.qkv", (64, 96), fused("rows 2"), "muon 1x64x96 rows 32+32"),
        ("a.qkv", (64, 96), fused("rows 1"), "muon 1x64x96"),
        ("a.qkv", (64, 96), fused("rows rest+40"), "muon 1x64x96 rows 24+40"),
        ("a.qkv", (64, 96), fused("rows 16*4"), "muon 1x64x96 rows 16+16+16+16"),
        ("a.qkv", (64, 24), fused("columns (5+1)*4"), "muon 1x64x24 columns 5+1+5+1+5+1+5+1"),
        ("a.qkv", (9, 30), fused("columns 8*2+(3+5)+rest"), "muon 1x9x30 columns 8+8+3+5+6"),
        ("other", (64, 96), fused("rows 2"), "muon 1x64x96"),
    ],
)
def test_placements(name, shape, rules, placement):
    entry = choose_route(name, shape, RoutingRules(**rules))
    assert entry.placement == placement
    if entry.view is not None:
        assert f"muon {MatrixView.parse(str(entry.view))}" == placement


def test_reasons_name_the_deciding_rule():
    rules = RoutingRules(min_matrix_dim=5, adam_patterns=("emb*",))
    reasons = {
        ("a.bias", (4,)): "leaf 'bias' is a bias",
        ("adam_x", (4,)): "leaf 'adam_x' selects Adam",
        ("adamw_x", (4,)): "leaf 'adamw_x' selects AdamW",
        ("emb", (9, 9)): "matches adam_patterns 'emb*'",
        ("w", (9,)): "effective rank 1",
        ("w", (4, 9)): "smaller dimension 4 is below min_matrix_dim 5",
        ("w", (9, 9)): "matrix in mode 'slice'",
    }
    for (name, shape), reason in reasons.items():
        assert choose_route(name, shape, rules).reason == reason
    frozen = choose_route("w", (9, 9), rules, trainable=False)
    assert (frozen.route, frozen.view, frozen.reason) == ("frozen", None, "requires_grad is False")


@pytest.mark.parametrize(
    "wrapped",
    [
        "module.net.0.weight",
        "module.module.net.0.weight",
        "_orig_mod.net.0.weight",
        "module._orig_mod.net.0.weight",
        "net._fsdp_wrapped_module.0.weight",
        "net.0._checkpoint_wrapped_module.weight",
        "model.Default.net.0.weight",
        "module.model.Default.net.0.weight",
    ],
)
def test_wrappers_do_not_change_a_name(wrapped):
    assert canonical_name(wrapped) == "net.0.weight"
    assert choose_route(wrapped, (4, 5), RoutingRules()).name == "net.0.weight"


def test_names_that_only_look_wrapped_stay():
    assert canonical_name("my_module.weight") == "my_module.weight"
    assert canonical_name("net.module.weight") == "net.module.weight"
    assert canonical_name("x_orig_mod.weight") == "x_orig_mod.weight"


@given(names, shapes, st.sampled_from(MODES))
def test_deepmd_rules_as_an_independent_program(name, shape, mode):
    segments = [s for s in canonical_name(name).lower().split(".") if s and not s.isdigit()]
    leaf = segments[-1] if segments else ""
    dims = [d for d in shape if d != 1]
    if leaf == "b" or "bias" in leaf or leaf.startswith("adam_"):
        expected = "adam"
    elif leaf.startswith("adamw_"):
        expected = "adamw"
    elif len(dims) < 2:
        expected = "adam"
    elif mode == "2d" and len(dims) > 2:
        expected = "adamw"
    else:
        expected = "muon"
    entry = choose_route(name, shape, RoutingRules(muon_mode=mode))
    assert entry.route == expected
    assert (entry.view is not None) == (expected == "muon")


@given(shapes, st.sampled_from(MODES))
def test_views_hold_every_element_once(shape, mode):
    view = matrix_view(shape, mode)
    if view is None:
        assert len(effective_shape(shape)) < 2 or mode == "2d"
        return
    assert math.prod(view.shape) == math.prod(shape)
    assert view.columns == effective_shape(shape)[-1]
    if mode != "flat":
        assert view.rows == effective_shape(shape)[-2]
    assert MatrixView.parse(str(view)) == view


@pytest.mark.parametrize("text", ["3x4", "axbxc", "1x2x3x4", " 1x2x3"])
def test_a_view_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="a matrix view looks like '1x240x1600'"):
        MatrixView.parse(text)


def table(*parameters):
    return RouteTable([choose_route(name, shape, RoutingRules()) for name, shape in parameters])


def test_tables_are_values():
    first = table(("a.weight", (4, 5)), ("a.bias", (5,)))
    same = table(("module.a.weight", (4, 5)), ("module.a.bias", (5,)))
    assert first == same
    assert hash(first) == hash(same)
    assert first != table(("a.weight", (4, 6)), ("a.bias", (5,)))
    assert len(first) == 2
    assert first[0].name == "a.weight"
    assert first[1:] == table(("a.bias", (5,)))
    assert [entry.route for entry in first] == ["muon", "adam"]
    assert first[0].placement == "muon 1x4x5"


def test_tables_print():
    text = str(table(("a.weight", (4, 5)), ("scale", ())))
    assert text.splitlines() == [
        "name      shape   view   route  reason",
        "a.weight  4x5     1x4x5  muon   matrix in mode 'slice'",
        "scale     scalar  -      adam   effective rank 0",
    ]
    assert table(("a.weight", (4, 5)), ("a.bias", (5,))).summary() == (
        "muon 1 parameters (20 weights, 80.0 %); adam 1 parameters (5 weights, 20.0 %)"
    )


@settings(max_examples=50)
@given(
    st.lists(st.tuples(names, shapes), max_size=6, unique_by=lambda item: canonical_name(item[0]))
)
def test_texts_of_routes_survive(parameters):
    routing = table(*parameters)
    group = {"params": list(range(len(routing))), "param_names": [name for name, _ in parameters]}
    assert RouteTable.from_groups([{**group, "routes": routing.texts()}]) == routing


ROUTES = table(("a.weight", (4, 5)), ("a.bias", (5,)), ("a.scale", ()))
FORMER = {
    "routing_version": 2,
    "param_names": ["a.weight", "a.bias", "a.scale"],
    "routes": ["muon", "adam", "adam"],
    "views": ["1x4x5", "", ""],
}


def test_routes_are_stored_as_one_text_each():
    assert ROUTES.texts() == ["muon 4x5 as 1x4x5", "adam 5", "adam scalar"]


@pytest.mark.parametrize("former", [["4x5", "5", ""], [[4, 5], [5], []]])
def test_the_three_lists_of_earlier_versions_are_read(former):
    assert RouteTable.from_groups([{**FORMER, "shapes": former}]) == ROUTES


@pytest.mark.parametrize("text", ["soap 4x5", "muon", "muon 4x5 as 1x4x5 of tomorrow", "adam -1"])
def test_routes_of_later_versions_are_refused(text):
    with pytest.raises(ForeignStateError, match=r"later|'1x240x1600'"):
        RouteTable.from_groups([{"params": [0], "routes": [text]}])


@pytest.mark.parametrize("text", ["muon 4x5", "muon 4x5 as 1x4x6"])
def test_routes_that_contradict_themselves_are_refused(text):
    with pytest.raises(ForeignStateError, match="does not fit"):
        RouteTable.from_groups([{"params": [0], "routes": [text]}])
    with pytest.raises(ForeignStateError, match=r"param_groups\[0\]"):
        RouteTable.from_groups([{"params": [0]}])


def test_routing_settings_of_a_group_changed_later_are_honoured(caplog):
    random = torch.Generator().manual_seed(0)
    w, v = (nn.Parameter(torch.randn(3, 4, 6, generator=random)) for _ in range(2))
    optimizer = HybridMuon([{"params": [("w", w)]}, {"params": [("v", v)]}], 0.1)
    changed, other = optimizer.param_groups

    def step():
        for p in (w, v):
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()

    step()
    changed["muon_mode"] = "flat"
    step()
    assert [entry.placement for entry in optimizer.routing] == ["muon 1x12x6", "muon 3x4x6"]
    assert changed["routes"] == ["muon 3x4x6 as 1x12x6"]
    assert optimizer.state[w]["magma_score"].shape == (1,)
    changed["adam_patterns"] = ["w"]
    assert optimizer.state_dict()["param_groups"][0]["routes"] == ["adam 3x4x6"]
    step()
    assert set(optimizer.state[w]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[v]) == {"momentum_buffer", "magma_score"}
    told = [record.getMessage() for record in caplog.records if " is now " in record.getMessage()]
    assert told == [
        "w: the route is now muon 1x12x6; it was muon 3x4x6",
        "w: the route is now adam; it was muon 1x12x6",
    ]

    changed["adam_patterns"], other["splits"] = [], ["v: rows 3"]
    with pytest.raises(InvalidShapeError, match="4 rows"):
        step()
    changed["muon_mode"] = "3d"
    with pytest.raises(InvalidSettingError, match="muon_mode"):
        step()
    assert [entry.placement for entry in optimizer.routing] == ["adam", "muon 3x4x6"]
    changed["muon_mode"], other["splits"] = "slice", []
    step()
    assert [entry.placement for entry in optimizer.routing] == ["muon 3x4x6", "muon 3x4x6"]


def test_unknown_keys_of_a_group_are_refused_with_the_known_ones():
    w, v = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
    bad = {
        "params": [("w", w)],
        "muon_2d_only": True,
        "use_muon": 2,
        "adamw_params": [],
        "momentum": 2.0,
    }
    with pytest.raises(InvalidSettingError) as error:
        HybridMuon([bad])
    assert [problem[:30] for problem in error.value.problems] == [
        "muon_2d_only is now muon_mode:",
        "adamw_params: give all paramet",
        "use_muon: must be one of true,",
        "momentum: must be < 1; found 2",
    ]
    with pytest.raises(
        InvalidSettingError,
        match="'weight_decy': unknown in a parameter group; did you mean 'weight_decay'",
    ):
        HybridMuon([{"params": [("w", w)], "weight_decy": 0.1}])
    with pytest.raises(InvalidSettingError, match="on_nonfinite: holds for all groups"):
        HybridMuon([{"params": [("w", w)], "on_nonfinite": "skip"}])
    optimizer = HybridMuon([{"params": [("w", w)], "name": "body"}], 0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 6, cycle_momentum=False)
    optimizer.add_param_group(
        {**optimizer.param_groups[0], "params": [("v", v)], "param_names": ["v"]}
    )
    assert [entry.route for entry in optimizer.routing] == ["muon", "adam"]
