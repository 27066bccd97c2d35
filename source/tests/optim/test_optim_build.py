"""Configurations: settings that check themselves, one way to build, one report."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import pydoc
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from deepmd_muon.optim import (
    AdamConfig,
    AdamWConfig,
    HybridMuon,
    HybridMuonConfig,
    InvalidSettingError,
    MuonConfig,
)
from deepmd_muon.optim.buildable import OptimizerSettings
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.optim.sharded import ShardedSettings
from deepmd_muon.setting import setting_of


def make_model():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(7, 4),
            "body": nn.Linear(4, 6),
            "lm_head": nn.Linear(6, 7, bias=False),
        }
    )
    model["body"].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig, AdamConfig, AdamWConfig])
def test_every_configuration_builds_from_a_model_alone(config, caplog):
    model = make_model()
    with caplog.at_level(logging.INFO):
        optimizer = config().build(model)
    wanted = list(inspect.signature(OptimizerSettings.build).parameters.values())
    assert list(inspect.signature(config.build).parameters.values())[: len(wanted)] == wanted
    own = {HybridMuonConfig: 5e-4, MuonConfig: 0.02}.get(config, 1e-3)
    assert optimizer.param_groups[0]["lr"] == own
    assert config().build(model, lr=0.125).param_groups[0]["lr"] == 0.125
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    trained = ["embed.weight", "body.weight", "lm_head.weight"]
    assert [name for name in names if name != "body.bias"] == trained
    report = caplog.text
    assert "not trainable: body.bias" in report
    assert "4 parameters (100 weights), 3 of them trainable (94 weights)" in report
    assert ("HybridMuon routing: " in report) == isinstance(optimizer, HybridMuon)


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig, AdamConfig, AdamWConfig])
def test_build_of_parameters_asks_for_the_model(config):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module.*found generator"):
        config().build(make_model().parameters())


@pytest.mark.parametrize("given", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))])
def test_constructor_asks_for_named_parameters(given):
    with pytest.raises(
        TypeError, match=rf"found {type(given).__name__}; pass model\.named_parameters\(\)"
    ):
        HybridMuon(given)


def test_the_constructor_and_the_configuration_share_defaults_and_texts():
    config = vars(HybridMuonConfig()).copy()
    text = " ".join(pydoc.plain(pydoc.render_doc(HybridMuon)).replace("|", " ").split())
    for field in dataclasses.fields(HybridMuonConfig):
        if field.name not in ("adam_beta1", "adam_beta2"):
            assert f"{field.name} {' '.join(setting_of(field).doc.split())}" in text
    config["adam_betas"] = (config.pop("adam_beta1"), config.pop("adam_beta2"))
    for name, parameter in inspect.signature(HybridMuon).parameters.items():
        if name in config:
            assert parameter.default == config.pop(name), name
    assert not config


def test_an_optimizer_prints_its_routes_and_settings_that_are_not_defaults():
    optimizer = MuonConfig(adam_lr_ratio=0.5, expert_patterns=["a", "b", "c"]).build(make_model())
    lines = repr(optimizer).splitlines()
    assert len(lines) == 2
    assert lines[0] == f"HybridMuon: {optimizer.routing.summary()}"
    assert lines[1].startswith("group 0: 4 parameters, lr 0.02, ")
    for shown in ("weight_decay 0.1", "scaling rectangular", "expert_patterns (3 entries)"):
        assert shown in lines[1]
    assert "momentum" not in lines[1]
    groups = [{"params": [p]} for p in make_model().named_parameters()]
    assert repr(HybridMuon(groups, 1e-3)).splitlines()[1] == "group 0: 1 parameters, lr 0.001"


def test_the_defaults_of_a_plain_muon_are_the_literatures():
    optimizer = MuonConfig(adam_lr_ratio=0.01).build(make_model(), 0.03)
    assert [(e.name, e.route) for e in optimizer.routing] == [
        ("embed.weight", "adamw"),
        ("body.weight", "muon"),
        ("body.bias", "frozen"),
        ("lm_head.weight", "adamw"),
    ]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["schedule"], group["magma_muon"]) == (0.03, "keller-jordan", False)
    assert (group["vector_route"], group["adam_eps"], group["adam_lr_ratio"]) == (
        "adam",
        1e-8,
        0.01,
    )
    everything = MuonConfig(adamw_patterns=()).build(make_model())
    assert [e.route for e in everything.routing] == ["muon", "muon", "frozen", "muon"]


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (HybridMuonConfig(), False),
        (HybridMuonConfig(min_matrix_dim=1000), True),
        (HybridMuonConfig(adam_patterns=["*"]), True),
        (MuonConfig(adamw_patterns=["*"]), True),
    ],
)
def test_an_optimizer_without_a_matrix_on_the_muon_route_is_named(config, warned, caplog):
    config.build(make_model())
    found = [record for record in caplog.records if "no matrix takes the Muon" in record.message]
    assert len(found) == warned


@pytest.mark.filterwarnings("ignore:no parameter matches expert_patterns")
def test_every_setting_reaches_the_optimizer():
    config = HybridMuonConfig(
        momentum=0.8,
        adam_beta1=0.7,
        splits=("body.weight: rows 2",),
        expert_patterns=("x.*",),
        schedule=((2.0, -1.5, 0.5),),
        on_route_change="migrate",
        on_nonfinite="skip",
        layout="in_out",
        sharded=ShardedSettings(slots=1, return_dtype="float16"),
    )
    optimizer = config.build(make_model())
    (group,) = optimizer.param_groups
    assert group["momentum"] == 0.8
    assert group["adam_betas"] == (0.7, 0.95)
    assert group["schedule"] == [[2.0, -1.5, 0.5]]
    assert (optimizer.on_route_change, optimizer.on_nonfinite, group["layout"]) == (
        "migrate",
        "skip",
        "in_out",
    )
    assert optimizer.sharded == config.sharded
    assert str(optimizer.routing[1].view) == "1x6x4 rows 3+3"


def test_a_single_pattern_stands_for_a_list_of_one():
    optimizer = HybridMuon(
        make_model().named_parameters(), adam_patterns="body.*", splits="embed.weight: columns 2"
    )
    assert [e.route for e in optimizer.routing] == ["muon", "adam", "frozen", "muon"]
    assert str(optimizer.routing[0].view) == "1x7x4 columns 2+2"


def test_patterns_that_match_nothing_are_named_once():
    params = [
        ("embed.weight", nn.Parameter(torch.ones(4, 5))),
        ("body.weight", nn.Parameter(torch.ones(3, 3))),
    ]
    with pytest.warns(UserWarning, match="no parameter matches") as caught:
        optimizer = HybridMuon(
            [{"params": params[:1]}, {"params": params[1:], "adam_patterns": ["*.wieght"]}],
            adamw_patterns=["body.*", "head.*"],
            expert_patterns=["body.*"],
            splits=["body.weight: rows 3", "qkv: rows 3"],
        )
    assert [str(warning.message) for warning in caught] == [
        "no parameter matches expert_patterns 'body.*', splits 'qkv: rows 3', adamw_patterns 'head.*', adam_patterns "
        "'*.wieght'; patterns must match a whole name, such as 'embed.weight'",
        caught[1].message.args[0],
    ]
    assert "no effect: splits 'body.weight: rows 3'" in str(caught[1].message)  # it is not a matrix
    assert caught[0].filename == __file__
    late = {"params": [("late", nn.Parameter(torch.ones(3, 3)))], "adam_patterns": ["latest"]}
    with pytest.warns(UserWarning, match="no parameter matches") as caught:
        optimizer.add_param_group(late)
    assert [str(warning.message)[:46] for warning in caught] == [
        "no parameter matches adam_patterns 'latest'; p"
    ]


def test_patterns_that_match_or_are_only_usual_say_nothing():
    params = [
        ("module.body.weight", nn.Parameter(torch.ones(3, 3))),
        ("w", nn.Parameter(torch.ones(2, 3, 3))),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MuonConfig().build(nn.Linear(3, 4))
        HybridMuon(params, adam_patterns=["body.*"], expert_patterns=["w"], splits=["w: rows 3"])
        HybridMuon(
            [
                {"params": params[:1], "adam_patterns": ["w"]},
                {"params": params[1:], "adam_patterns": ["w"]},
            ]
        )


def test_the_constructor_and_groups_name_all_bad_settings_together():
    bad = {
        "lr": torch.ones(2),
        "momentum": -3,
        "muon_mode": "3d",
        "adam_betas": (0.9, None),
        "schedule": 5,
    }
    named = ["adam_betas", "lr", "momentum", "muon_mode", "schedule"]
    optimizer = HybridMuon([("w", nn.Parameter(torch.ones(3, 3)))])
    with pytest.raises(InvalidSettingError) as error:
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(3, 3)))], **bad})
    assert sorted(problem.split(":")[0] for problem in error.value.problems) == named
    bad.update(schedule="8+2", workspace=0, differentiable=True, sharded="yes")
    named = ["adam_betas", "differentiable", "lr", "momentum", "muon_mode", "sharded", "workspace"]
    with pytest.raises(InvalidSettingError) as error:
        HybridMuon([("w", nn.Parameter(torch.ones(3, 3)))], **bad)
    assert sorted(problem.split(":")[0] for problem in error.value.problems) == named
    assert all(problem in str(error.value) for problem in error.value.problems)


@pytest.mark.parametrize("kind", [HybridMuon, HybridMuonConfig])
def test_an_older_name_is_answered_with_todays(kind):
    params = [[("w", nn.Parameter(torch.ones(3, 3)))]] if kind is HybridMuon else []
    with pytest.raises(InvalidSettingError) as error:
        kind(*params, min_2d_dim=2, muon_2d_only=True, momentum=0.9)
    assert str(error.value) == (
        f'{kind.__name__}: muon_2d_only is now muon_mode: "2d" for true, "flat" for false; '
        "min_2d_dim is now min_matrix_dim"
    )
    with pytest.raises(InvalidSettingError, match="muon_min_2d_dim is now min_matrix_dim"):
        kind(*params, muon_min_2d_dim=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'min_3d_dim'"):
        kind(*params, min_3d_dim=2)
    assert "muon_mode" in inspect.signature(kind).parameters


@pytest.mark.parametrize(
    "config", [HybridMuonConfig, MuonConfig, AdamConfig, AdamWConfig, ShardedSettings]
)
def test_every_setting_is_explained(config):
    for field in dataclasses.fields(config):
        assert len(setting_of(field).doc) > 5, field.name


def test_reading_settings_does_not_import_torch():
    program = "import sys; import deepmd_muon.optim.config, deepmd_muon.optim; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_changes_no_global_setting_and_adam_steps_as_torchs_without_the_compiler(
    tmp_path,
):
    """In a process of its own, where nothing else imports the compiler, which takes seconds."""
    program = """
import itertools, sys, torch

def settings():
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return torch.get_num_threads(), precision, deterministic, torch.get_default_dtype()

before, loaded = settings(), set(sys.modules)
from deepmd_muon.optim import HybridMuon
assert settings() == before and not torch.cuda.is_initialized()
new = {name for name in set(sys.modules) - loaded if name.startswith("deepmd_muon")}
# Modules of the ground, which import the standard library alone.
new -= {"deepmd_muon", "deepmd_muon.setting", "deepmd_muon.collector"}
assert all(name.startswith("deepmd_muon.optim") for name in new), new
assert not {"triton", "dargs", "h5py", "vesin"} & (set(sys.modules) - loaded)
p = torch.ones(2, 2, requires_grad=True)
used = HybridMuon([p])
p.sum().backward()
used.step()
used.zero_grad()
used.load_state_dict(used.state_dict())
assert "torch._dynamo" not in sys.modules

from deepmd_muon.optim.other_configs import AdamConfig, AdamWConfig
torch.manual_seed(0)
gradients = [[torch.randn(2, 3), torch.randn(2)] for _ in range(3)]

def take(optimizer, used, steps):
    for values in steps:
        for p, value in zip(used.parameters(), values, strict=True):
            p.grad = value.clone()
        optimizer.step()
        optimizer.zero_grad()

stepped = []
for config, implementation in itertools.product((AdamConfig, AdamWConfig), ("foreach", "for-loop")):
    model = torch.nn.Linear(3, 2)
    start = [p.detach().clone() for p in model.parameters()]
    ours = config(adam_implementation=implementation).build(model, 1e-2)
    assert ours.defaults["foreach"] == (implementation == "foreach")
    take(ours, model, gradients[:2])
    ours.load_state_dict(ours.state_dict())
    take(ours, model, gradients[2:])
    kind = config.__name__.removesuffix("Config")
    assert isinstance(ours, getattr(torch.optim, kind)) and type(ours).__name__ == kind
    options = {key: ours.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "foreach", "fused")}
    end = [p.detach() for p in model.parameters()]
    stepped.append((kind, options, start, end, ours.state_dict()["state"][0]["exp_avg"]))
assert "torch._dynamo" not in sys.modules
torch.save((gradients, stepped), "stepped.pt")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    gradients, stepped = torch.load(tmp_path / "stepped.pt", weights_only=True)
    assert [kind for kind, *_ in stepped] == ["Adam", "Adam", "AdamW", "AdamW"]
    for kind, options, start, end, moment in stepped:
        params = [torch.nn.Parameter(x) for x in start]
        torchs = getattr(torch.optim, kind)(params, **options)
        for values in gradients:
            for p, value in zip(params, values, strict=True):
                p.grad = value.clone()
            torchs.step()
        assert all(torch.equal(p, x) for p, x in zip(params, end, strict=True))
        assert torchs.state[params[0]]["exp_avg"].equal(moment)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"adam_patterns": ["embed.*"], "muon_patterns": ["*embed*"]}, "adam_patterns 'embed.*'"),
        ({"adamw_patterns": ["body.*"], "adam_patterns": ["body.*"]}, "adamw_patterns 'body.*'"),
        ({"muon_patterns": ["norm.weight"]}, "muon_patterns 'norm.weight'"),
    ],
)
def test_patterns_that_decide_about_no_parameter_are_named(settings, idle):
    params = [
        ("embed.weight", nn.Parameter(torch.ones(4, 5))),
        ("body.weight", nn.Parameter(torch.ones(3, 3))),
        ("norm.weight", nn.Parameter(torch.ones(3))),
    ]
    with pytest.warns(UserWarning, match="no effect") as caught:
        HybridMuon(params, **settings)
    (message,) = (str(warning.message) for warning in caught)
    assert idle in message


def test_a_default_pattern_that_matches_nothing_is_named_where_it_was_given(caplog):
    model = nn.Sequential(nn.Linear(4, 5))
    with caplog.at_level(logging.WARNING):
        MuonConfig().build(model)
        assert not caplog.records
        MuonConfig(adamw_patterns=["*embed*"]).build(model)
    assert "adamw_patterns '*embed*'" in caplog.text


def test_settings_without_effect_are_named_by_the_constructor_and_by_build():
    params = [("a", nn.Parameter(torch.ones(3, 3))), ("b", nn.Parameter(torch.ones(3, 3)))]
    with pytest.warns(IdleSettingWarning, match="normuon_beta has no effect"):
        HybridMuon(params, normuon_beta=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # An effect in one group is enough, and a group without decay is not worth a warning.
        groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}]
        HybridMuon(groups, cautious_decay=True)
        HybridMuon([{**groups[0], "normuon": True}, groups[1]], normuon_beta=0.5)
    config = MuonConfig(rms_coefficient=0.3)
    with pytest.warns(IdleSettingWarning, match="rms_coefficient has no effect") as caught:
        config.build(nn.Linear(3, 3))
    assert caught[0].filename == __file__
