"""Words of torch's optimizers, other Muons and dion: translated, or answered with what to write instead."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from optim_builders import make_net, train
from torch import nn

from deepmd_muon.optim import (
    AdamConfig,
    AdamWConfig,
    HybridMuon,
    HybridMuonConfig,
    InvalidSettingError,
    MuonConfig,
    muon_for,
)
from deepmd_muon.optim.words import WORDS, translated

KNOWN = (
    "adam_betas",
    "adam_eps",
    "schedule",
    "lr_adjust_coeff",
    "scaling",
    "weight_decay",
    "adam_lr_ratio",
)
PAGE = Path(__file__).parents[3] / "doc" / "from-other-optimizers.md"
JORDAN = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ({"betas": (0.8, 0.9), "eps": 1e-9}, {"adam_betas": (0.8, 0.9), "adam_eps": 1e-9}),
        ({"adamw_betas": (0.8, 0.9), "wd": 0.3}, {"adam_betas": (0.8, 0.9), "weight_decay": 0.3}),
        (
            {"mu": 0.9, "epsilon": 1e-9, "cautious_wd": True},
            {"momentum": 0.9, "adam_eps": 1e-9, "cautious_decay": True},
        ),
        ({"fused": True}, {"adam_implementation": "fused"}),
        ({"fused": False, "amsgrad": False}, {"adam_implementation": "foreach"}),
        ({"fused": None, "foreach": None, "decoupled_weight_decay": True}, {}),
        ({"fused": True, "foreach": False}, {"adam_implementation": "fused"}),
        ({"fused": False, "foreach": False}, {"adam_implementation": "for-loop"}),
        ({"foreach": False}, {"adam_implementation": "for-loop"}),
        ({"foreach": True}, {"adam_implementation": "foreach"}),
        ({"lr_adjust": 0.0}, {"scaling": "match_rms", "adam_lr_ratio": 1.0}),
        ({"lr_adjust": 4.0}, {"scaling": "rectangular", "adam_lr_ratio": 0.25}),
        ({"lr_adjust": 4.0, "scaling": "none"}, {"scaling": "none", "adam_lr_ratio": 0.25}),
        ({"deepmd_kit_arithmetic": True}, {"schedule": "deepmd-kit"}),
        ({"ns_steps": 5}, {"schedule": "keller-jordan"}),
        (
            {"ns_steps": 6, "ns_coefficients": [2.0, -1.5, 0.5]},
            {"schedule": ((2.0, -1.5, 0.5),) * 6},
        ),
        ({"ns_steps": 3}, {"schedule": (JORDAN,) * 3}),
        ({"adjust_lr_fn": None}, {"scaling": "rectangular"}),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"scaling": "match_rms", "lr_adjust_coeff": 0.2}),
        ({"adjust_lr": "spectral_norm"}, {"scaling": "spectral"}),
        ({"use_muon": True}, {"muon_patterns": ["*"]}),
        ({"algorithm": "adamw"}, {"adamw_patterns": ["*"]}),
        ({"flatten": True}, {"conv_patterns": ["*"]}),
        ({"expert_keys": ["experts", "moe"]}, {"expert_patterns": ["*experts*", "*moe*"]}),
    ],
)
def test_words_become_settings(words, settings):
    assert translated(words, KNOWN) == settings


def test_all_words_that_have_no_counterpart_are_named_at_once():
    bad = {
        "adamw_params": [],
        "amsgrad": True,
        "algorithm": "lion",
        "ns_steps": 0,
        "wd": 0.1,
        "weight_decay": 0.2,
    }
    with pytest.raises(InvalidSettingError) as error:
        HybridMuon(make_net().named_parameters(), **bad)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "adamw_params",
        "amsgrad",
        "algorithm",
        "ns_steps",
        "wd stands for weight_decay, which is given, too",
    ]
    with pytest.raises(TypeError, match="'momentun'; did you mean 'momentum'"):
        HybridMuon(make_net().named_parameters(), momentun=0.9)
    with pytest.raises(TypeError, match=r"'nonsense_of_mine'$"):
        MuonConfig(nonsense_of_mine=1)


def test_arguments_of_motifs_and_other_muons_are_answered_at_once():
    words = ("warmup_step", "chunk_size", "debug", "clip_config", "use_distributed_muon")
    words += ("none_grad", "max_grad_norm")
    with pytest.raises(TypeError) as error:
        HybridMuon(make_net().named_parameters(), **dict.fromkeys(words), momentun=0.9)
    for word in words:
        assert f"{word!r}: " in str(error.value)
    assert "'momentun'; did you mean 'momentum'?" in str(error.value)
    with pytest.raises(InvalidSettingError) as both:
        MuonConfig(debug=True, amsgrad=True)
    assert [("amsgrad" in text, "debug" in text) for text in both.value.problems] == [
        (True, False),
        (False, True),
    ]
    model = make_net()
    groups = [{"params": list(model.named_parameters()), "max_grad_norm": 1.0}]
    assert HybridMuon(groups).param_groups[0]["max_grad_norm"] == 1.0


def test_the_name_of_deepmd_kits_class_is_an_alias_that_says_so():
    with pytest.warns(DeprecationWarning, match="HybridMuonOptimizer is called HybridMuon"):
        from deepmd_muon.optim import HybridMuonOptimizer
    assert HybridMuonOptimizer is HybridMuon


@pytest.mark.parametrize("config", [MuonConfig, HybridMuonConfig, AdamConfig])
def test_configuration_with_a_learning_rate_names_build(config):
    with pytest.raises(TypeError, match=r"'lr': write \w+Config\(\)\.build\(model, lr=\.\.\.\)"):
        config(lr=0.02)


@pytest.mark.parametrize(("word", "value"), [("amsgrad", True), ("decoupled_weight_decay", False)])
def test_a_word_with_one_value_says_what_to_write(word, value):
    assert translated({word: not value}, KNOWN) == {}
    with pytest.raises(InvalidSettingError, match=f"{word}: .*leave it out"):
        translated({word: value}, KNOWN)


def test_configurations_take_words_under_their_own_names():
    config = MuonConfig(betas=(0.8, 0.99), eps=1e-9, ns_steps=5, adjust_lr_fn="match_rms_adamw")
    assert (config.adam_betas, config.adam_eps, config.schedule) == (
        (0.8, 0.99),
        1e-9,
        "keller-jordan",
    )
    assert (config.scaling, config.rms_coefficient) == ("match_rms", 0.2)
    hybrid = HybridMuonConfig(betas=(0.8, 0.99), adjust_lr_fn="match_rms_adamw")
    assert (hybrid.adam_beta1, hybrid.adam_beta2, hybrid.lr_adjust_coeff) == (0.8, 0.99, 0.2)
    adamw = AdamWConfig(betas=(0.8, 0.99), eps=1e-9, fused=False)
    assert (adamw.adam_beta2, adamw.adam_eps, adamw.adam_implementation) == (0.99, 1e-9, "foreach")
    with pytest.raises(InvalidSettingError, match="betas: must be a list of 2"):
        HybridMuonConfig(betas=0.9)


def test_groups_of_muon_with_auxiliary_adam():
    """Groups as K. Jordan's MuonWithAuxAdam takes them, without names."""
    model = make_net()
    hidden = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    with pytest.warns(UserWarning, match="without names"):
        optimizer = HybridMuon(
            [
                {"params": hidden[:1], "use_muon": True, "lr": 0.02, "momentum": 0.9},
                {
                    "params": [*rest, hidden[1]],
                    "use_muon": False,
                    "lr": 3e-4,
                    "betas": (0.9, 0.99),
                    "eps": 1e-10,
                },
            ]
        )
    assert [entry.route for entry in optimizer.routing] == ["muon", "adamw", "adamw", "adamw"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    assert optimizer.param_groups[1]["adam_betas"] == (0.9, 0.99)
    assert not {"use_muon", "betas", "eps"} & optimizer.param_groups[1].keys()
    train(model, optimizer)


def test_patterns_force_muon_before_every_other_rule():
    shapes = {
        "embed.weight": (9, 4),
        "a.bias": (4, 6),
        "adam_x": (3, 3),
        "kernel": (2, 4, 5),
        "norm": (7,),
    }
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    settings = {"muon_mode": "2d", "min_matrix_dim": 4, "adamw_patterns": ["*embed*"]}
    forced = HybridMuon(params.items(), muon_patterns=["*"], **settings).routing
    assert [entry.placement for entry in forced] == [
        "muon 1x9x4",
        "muon 1x4x6",
        "muon 1x3x3",
        "muon 2x4x5",
        "adam",
    ]
    assert forced[0].reason == "matches muon_patterns '*', matrix in mode '2d'"
    plain = HybridMuon(params.items(), **settings).routing
    assert [entry.route for entry in plain] == ["adamw", "adam", "adam", "adamw", "adam"]
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4)})
    assert MuonConfig(muon_patterns=["embed.*"]).build(model).routing[0].route == "muon"
    with pytest.warns(UserWarning, match=r"no parameter matches muon_patterns 'b\.\*'"):
        HybridMuon(params.items(), muon_patterns=["b.*"])


def test_groups_keep_the_users_own_keys():
    model = make_net()
    named = list(model.named_parameters())

    def make(scale):
        return HybridMuon(
            [
                {"params": named[:2], "lr_scale": scale, "tag": {"block": 1}},
                {"params": named[2:], "weight_decay_mult": 0.5},
            ]
        )

    optimizer = make(0.1)
    assert optimizer.param_groups[0]["tag"] == {"block": 1}
    train(model, optimizer)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr_scale"] == 0.1
    assert saved["param_groups"][1]["weight_decay_mult"] == 0.5
    other = make(0.3)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr_scale"] == 0.1  # as saved, as with torch's optimizers
    assert other.state_dict()["param_groups"] == saved["param_groups"]


def test_a_group_of_adamw_can_be_handed_over():
    model = make_net()
    adamw = torch.optim.AdamW(model.named_parameters(), 0.01, (0.8, 0.9))
    torch.optim.lr_scheduler.ExponentialLR(adamw, 0.9)
    (group,) = HybridMuon(adamw.param_groups).param_groups
    assert (group["adam_betas"], group["initial_lr"], group["adam_eps"]) == ((0.8, 0.9), 0.01, 1e-8)


@pytest.mark.parametrize("named_first", [False, True])
@pytest.mark.parametrize("named_then", [False, True])
@pytest.mark.filterwarnings("ignore:HybridMuon got parameters without names")
def test_states_without_names_load_by_position(named_first, named_then):
    model, twin = make_net(), make_net()

    def make(model, named):
        params = list(model.named_parameters()) if named else list(model.parameters())
        return HybridMuon([{"params": params[:1]}, {"params": params[1:]}], 0.02)

    first, then = make(model, named_first), make(twin, named_then)
    train(model, first)
    twin.load_state_dict(model.state_dict())
    then.load_state_dict(first.state_dict())
    train(model, first)
    train(twin, then)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_states_without_names_load_by_position(kind):
    model = make_net()
    peer = kind(model.parameters(), 0.01)
    train(model, peer)
    optimizer = HybridMuon(
        model.named_parameters(), on_route_change="migrate", vector_route="adamw"
    )
    optimizer.load_state_dict(peer.state_dict())
    (weight, bias, *_) = model.parameters()
    assert torch.equal(optimizer.state[bias]["exp_avg"], peer.state[bias]["exp_avg"])
    expected = peer.state[weight]["exp_avg"] / (1 - 0.9**3)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


def test_the_plan_of_one_process_has_its_flops():
    model = make_net()
    optimizer = MuonConfig(enable_gram=False, adamw_patterns=[]).build(model)
    six, four = 5 * (4 * 6 * 6 * 9 + 2 * 6**3), 5 * (4 * 4 * 4 * 9 + 2 * 4**3)
    assert sum(optimizer.plan.domains[0].work.values()) == six + four
    assert optimizer.plan.describe().splitlines() == [
        "one process: 2 parameters, 2 matrices",
        f"  1 of 9x6: {six} FLOPs",
        f"  1 of 4x9: {four} FLOPs",
        f"a step: {six + four:.4g} FLOPs",
    ]
    assert (
        HybridMuon([("b", nn.Parameter(torch.zeros(3)))]).plan.describe()
        == "no matrices to orthogonalize"
    )


def test_the_lines_of_the_page_make_optimizers():
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(
        r"<!-- tested: test_optim_words.py -->\n```python\n(.*?)```", text, re.DOTALL
    )
    model = make_net()
    hidden, others = (
        [p for p in model.parameters() if (p.ndim == 2) == is_hidden] for is_hidden in (True, False)
    )
    names = {
        "model": model,
        "hidden": hidden,
        "others": others,
        "MuonConfig": MuonConfig,
        "HybridMuon": HybridMuon,
        "muon_for": muon_for,
    }
    exec(compile(block, PAGE.name, "exec"), names)
    assert [entry.route for entry in names["optimizer"].routing] == [
        "muon",
        "muon",
        "adamw",
        "adamw",
    ]
    names["groups"] = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
    rows = re.findall(
        r"^\| [^|]* \| `((?:MuonConfig|HybridMuon|muon_for)\(.*?)` \|$", text, re.MULTILINE
    )
    assert len(rows) == 8
    for line in rows:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "HybridMuon got parameters without names")
            routes = {entry.route for entry in eval(line, names).routing}
            assert routes - {"adam", "adamw"} == {"muon"} != routes, line


def test_the_words_of_the_page_are_those_of_the_code():
    table = PAGE.read_text(encoding="utf-8").split("| word |")[1].split("\n\n")[0]
    listed = {
        w
        for row in table.splitlines()[2:]
        for w in re.findall(r"`(\w+)(?:=\w+)?`", row.split("|")[1])
    }
    # Understood where they ask for nothing, or deepmd-kit's and of earlier revisions.
    silent = {"amsgrad", "decoupled_weight_decay", "lr_adjust", "deepmd_kit_arithmetic"}
    assert listed == WORDS - silent
