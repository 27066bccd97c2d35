"""`muon_for`: the settings in its signature, those in `Advanced`, and the answers to others."""

from __future__ import annotations

import inspect

import pytest
import torch
from optim_builders import train
from torch import nn

from deepmd_muon.optim import Advanced, InvalidSettingError, MuonConfig, muon_for
from deepmd_muon.optim.errors import IdleSettingWarning


def gpt_like(width=32):
    torch.manual_seed(0)
    body = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
    return nn.Sequential(nn.Embedding(100, width), *body, nn.Linear(width, 100, bias=False))


def test_warnings_point_to_the_caller():
    with pytest.warns(IdleSettingWarning, match="normuon_beta") as caught:
        muon_for(gpt_like(), advanced=Advanced(normuon_beta=0.5))
    optimizer = muon_for(gpt_like())
    late = {"params": [("late", nn.Parameter(torch.ones(3, 3)))], "adam_patterns": ["latest"]}
    with pytest.warns(UserWarning, match="no parameter matches") as caught_late:
        optimizer.add_param_group(late)
    assert {warning.filename for warning in (*caught, *caught_late)} == {__file__}


def test_it_steps_as_the_configuration_that_it_stands_for():
    few = {"weight_decay": 0.02, "scaling": "spectral", "muon_patterns": ["0.weight"]}
    models = [gpt_like(), gpt_like(), gpt_like()]
    optimizers = [
        MuonConfig(
            **few, adam_lr_ratio=0.5, nesterov=False, normuon=True, adam_betas=(0.8, 0.9)
        ).build(models[0], 0.01),
        muon_for(
            models[1], 0.01, **few, adam_lr=0.005, rules="normuon", betas=(0.8, 0.9),
            advanced=Advanced(nesterov=False),
        ),
        muon_for(models[2]),
    ]  # fmt: skip
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1, start=1)
    one, same, other = ([p.detach() for p in model.parameters()] for model in models)
    assert all(map(torch.equal, one, same))
    assert not any(map(torch.equal, one, other))


def test_ten_settings_stand_in_the_signature_and_each_other_is_in_advanced():
    parameters = inspect.signature(muon_for).parameters
    objects = {"model", "lr", "advanced", "replicas", "qk_clip", "words"}
    shown = parameters.keys() - objects
    assert len(shown) == 10
    renamed = {"adam_lr": "adam_lr_ratio"}
    settings = {renamed.get(name, name) for name in shown} - {"momentum_warmup"}
    assert vars(Advanced()).keys() | settings == vars(MuonConfig()).keys()
    assert not vars(Advanced()).keys() & settings


@pytest.mark.parametrize(
    ("argument", "error", "answer"),
    [
        ({"nesterov": False}, InvalidSettingError, "advanced=Advanced(nesterov=False)"),
        ({"adam_lr_ratio": 0.5}, InvalidSettingError, "adam_lr"),
        ({"adamw_lr": 0.003}, InvalidSettingError, "give adam_lr"),
        ({"adam_lr": 0.0}, InvalidSettingError, "above 0"),
        ({"max_grad_norm": 1.0}, TypeError, "clip_adam_grad_norm_"),
        ({"moment": 0.9}, TypeError, "muon_for() got an unexpected keyword argument 'moment'; did"),
        ({"momentum": 1.5}, InvalidSettingError, "momentum"),
        ({"momentum_warmup": -1}, InvalidSettingError, "momentum_warmup"),
        ({"rules": ["mgma"]}, InvalidSettingError, "mgma"),
        ({"advanced": {"nesterov": False}}, TypeError, "Advanced(...)"),
    ],
)
def test_other_arguments_are_answered_by_name(argument, error, answer):
    with pytest.raises(error) as caught:
        muon_for(gpt_like(), **argument)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("width", "settings", "ratio"),
    [
        (32, {}, 1.0),
        (256, {}, 0.25),
        (256, {"adam_lr": 0.02}, 1.0),
        (256, {"scaling": "match_rms"}, 1.0),
        (256, {"adamw_patterns": ["none"]}, 1.0),
        (256, {"adamw_patterns": ["3.weight"]}, 0.25),
    ],
)
def test_rate_of_adamw_falls_with_the_width_of_tables(width, settings, ratio):
    optimizer = muon_for(gpt_like(width), **settings)
    assert optimizer.param_groups[0]["adam_lr_ratio"] == ratio


def test_positions_and_classifiers_do_not_lower_the_rate_of_adamw():
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 7))
    model.register_parameter("pos_embed", nn.Parameter(torch.ones(1, 17, 256)))
    optimizer = muon_for(model, adamw_patterns=["pos_embed", "2.weight"])
    assert [entry.route for entry in optimizer.routing].count("adamw") == 2
    assert optimizer.param_groups[0]["adam_lr_ratio"] == 1.0


def test_restart_keeps_the_rate_of_its_checkpoint(caplog):
    model = gpt_like(256)
    earlier = MuonConfig(adam_lr_ratio=1.0).build(model)
    train(model, earlier, 1, start=1)
    saved = earlier.state_dict()
    saved["param_groups"][0]["chosen_by_build"] = ["adam_lr_ratio"]  # earlier a key of its own
    optimizer = muon_for(model)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["adam_lr_ratio"] == 1.0
    assert "adam_lr_ratio" in caplog.text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(4, [0.85, 0.875, 0.9, 0.925, 0.95, 0.95, 0.95]), (1, [0.85, 0.95, 0.95])],
)
def test_momentum_warms_up_and_goes_on_after_a_restart(steps, expected):
    model = gpt_like()
    optimizer = muon_for(model, momentum_warmup=steps, momentum=0.95)
    momenta = []
    for k in range(len(expected)):
        if k == 2:
            saved = optimizer.state_dict()
            optimizer = muon_for(model, momentum_warmup=steps, momentum=0.95)
            optimizer.load_state_dict(saved)
        before = (
            optimizer.state[model[1].weight].get("momentum_buffer", torch.zeros(96, 32)).clone()
        )
        train(model, optimizer, 1, start=k)
        after = optimizer.state[model[1].weight]["momentum_buffer"]
        gradient = model[1].weight.grad
        # m′ − g = β (m − g)
        momenta.append(((after - gradient).norm() / (before - gradient).norm()).item())
    assert momenta == pytest.approx(expected, abs=1e-4)
