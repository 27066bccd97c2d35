"""The optimizer as deepmd-kit's trainers call it, and its state in their checkpoints."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepmd_muon.argcheck import InputError
from deepmd_muon.deepmd_kit.checkpoint import of_parameters, with_names
from deepmd_muon.deepmd_kit.settings import FURTHER_KEYS, KEYS_OF_DEEPMD_KIT, further_settings
from deepmd_muon.deepmd_kit.trainer import HybridMuonTrainer
from deepmd_muon.optim import ForeignStateError, HybridMuon, HybridMuonConfig

SHAPES = {"layer.matrix": (6, 4), "layer.bias": (4,), "experts.matrix": (2, 3, 5), "empty": (0,)}
# What deepmd-kit 3.2.0's trainers pass, with the defaults of its input.
PASSED = {
    "momentum": 0.95,
    "weight_decay": 0.001,
    "adam_betas": (0.9, 0.95),
    "lr_adjust": 0.0,
    "lr_adjust_coeff": 0.18,
    "muon_mode": "slice",
    "enable_gram": True,
    "flash_muon": True,
    "magma_muon": True,
    "use_foreach": None,
}


class HybridMuonOptimizer:
    """The name by which deepmd-kit's trainers ask for its class."""


class CallingSequence:
    """The calls of deepmd-kit's trainers, in their order; `made` holds what they make without us."""

    def __init__(self, config, restart=None, kind=HybridMuonOptimizer):
        self.rank, self.sharding, self.restart_training, self.start_step = (
            0,
            SimpleNamespace(stage=0),
            True,
            2,
        )
        parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
        self.parameters = parameters
        self.wrapper = SimpleNamespace(named_parameters=lambda: iter(parameters.items()))
        self.made = self.loaded = None
        self.optimizer = self._create_optimizer(kind, lr=0.01, **PASSED)
        if kind is HybridMuonOptimizer:
            self.optimizer.set_param_names(tuple(self.wrapper.named_parameters()))
        self._load_optimizer_state(restart)

    def _create_optimizer(self, optimizer_class, **settings):
        self.made = optimizer_class
        return SimpleNamespace()

    def _load_optimizer_state(self, state):
        self.loaded = state


class Trainer(HybridMuonTrainer, CallingSequence):
    pass


def trainer(restart=None, **section):
    return Trainer({"optimizer": {"type": "HybridMuon", **section}}, restart)


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def trained(steps=3):
    made = trainer()
    for seed in range(steps):
        step(made.optimizer, made.parameters, seed)
    return made


def test_every_setting_is_deepmd_kits_or_further():
    assert {*KEYS_OF_DEEPMD_KIT, *FURTHER_KEYS} == set(HybridMuonConfig.__dataclass_fields__)
    assert {"adam_beta1", "adam_beta2", *PASSED} - {
        "adam_betas",
        "use_foreach",
        "lr_adjust",
    } == KEYS_OF_DEEPMD_KIT


def test_the_trainer_gets_our_optimizer_with_names_and_all_settings(caplog):
    with caplog.at_level(logging.INFO, "deepmd"):
        made = trainer(schedule="polar-express", adam_patterns=["experts*"], sharded={"slots": 2})
    assert made.made is None
    assert isinstance(made.optimizer, HybridMuon)
    assert [entry.route for entry in made.optimizer.routing] == ["muon", "adam", "adam", "frozen"]
    assert made.optimizer.param_groups[0]["schedule"] == "polar-express"
    assert made.optimizer.sharded.slots == 2
    assert "in place of deepmd-kit's" in caplog.text


def test_matrices_that_deepmd_kits_model_declares_go_to_adamw():
    """After 3.2.0 its trainer passes substrings as `adam_patterns`, which mean AdamW with decay."""

    class Declaring(Trainer):
        def _create_optimizer(self, optimizer_class, **settings):
            return super()._create_optimizer(
                optimizer_class, **settings, adam_patterns=["layer.", "empty"]
            )

    made = Declaring({"optimizer": {"type": "HybridMuon"}})
    routes = {entry.name: entry.route for entry in made.optimizer.routing}
    assert routes == {
        "layer.matrix": "adamw",
        "layer.bias": "adam",
        "experts.matrix": "muon",
        "empty": "frozen",
    }


def test_another_optimizer_is_left_to_deepmd_kit(caplog):
    made = Trainer({"optimizer": {"type": "Adam"}}, {"state": {}}, torch.optim.Adam)
    assert made.made is torch.optim.Adam
    assert made.loaded == {"state": {}}
    assert "the optimizer is Adam" in caplog.text


def test_settings_out_of_range_are_told_together():
    with pytest.raises(InputError) as caught:
        further_settings({"type": "HybridMuon", "momentum": -3.0, "precision": "float8"})
    assert [problem.path for problem in caught.value.problems] == [
        "optimizer/momentum",
        "optimizer/precision",
    ]


def test_the_state_carries_routes_and_what_deepmd_kits_class_reads():
    made = trained()
    saved = made.optimizer.state_dict()
    (group,) = saved["param_groups"]
    adam = saved["state"][group["param_names"].index("layer.bias")]
    assert adam["beta1_pow"] == pytest.approx(0.9**3)
    assert adam["beta2_pow"] == pytest.approx(0.95**3)
    assert group["routes"] == [entry.text for entry in made.optimizer.routing]
    assert "beta1_pow" not in made.optimizer.state[made.parameters["layer.bias"]]


def assert_same_state(made, other):
    for name, p in made.parameters.items():
        ours, theirs = (
            made.optimizer.state.get(p, {}),
            other.optimizer.state.get(other.parameters[name], {}),
        )
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), (name, key)


def test_our_state_restarts():
    made = trained()
    assert_same_state(made, trainer(restart=copy.deepcopy(made.optimizer.state_dict())))


def as_deepmd_kit(saved, *, powers=True):
    """Return a state dict in the form of deepmd-kit's class: no names, no routes, no count of steps."""
    (group,) = saved["param_groups"]
    kept = {
        "params",
        "lr",
        "momentum",
        "adam_betas",
        "lr_adjust",
        "lr_adjust_coeff",
        "muon_mode",
        "magma_muon",
    }
    state = {}
    for key, values in saved["state"].items():
        state[key] = {k: v for k, v in values.items() if k != "step"}
        if not powers and "beta1_pow" in values:
            state[key].update(beta1_pow=0.0, beta2_pow=0.0)
    return {
        "state": state,
        "param_groups": [{key: value for key, value in group.items() if key in kept}],
    }


@pytest.mark.parametrize("powers", [True, False])
def test_a_state_of_deepmd_kits_class_restarts(powers):
    made = trained()
    saved = as_deepmd_kit(made.optimizer.state_dict(), powers=powers)
    # Without powers the steps are those of the checkpoint: it counts from 0, so `start_step` 2 is three steps.
    assert_same_state(made, trainer(restart=saved))


@pytest.mark.parametrize("clock", ["of the group", "of each parameter"])
def test_a_newer_state_of_deepmd_kits_class_restarts(clock):
    """After 3.2.0 the Adam clock is on the device: β^t in the group, or 1 − β^t of a parameter."""
    made = trained()
    saved = as_deepmd_kit(made.optimizer.state_dict())
    powers = {"1": torch.tensor(0.9**3), "2": torch.tensor(0.95**3)}
    for values in saved["state"].values():
        if "beta1_pow" in values:
            for number, power in powers.items():
                del values[f"beta{number}_pow"]
                if clock == "of each parameter":
                    values[f"bias_correction{number}"] = 1.0 - power
    if clock == "of the group":
        (group,) = saved["param_groups"]
        group.update({f"beta{number}_pow_device": power for number, power in powers.items()})
    assert_same_state(made, trainer(restart=saved))


def test_a_state_by_name_restarts():
    made = trained()
    saved = made.optimizer.state_dict()
    (group,) = saved["param_groups"]
    names = dict(zip(group["params"], group["param_names"], strict=True))
    by_name = {
        "state": {names[key]: value for key, value in saved["state"].items()},
        "param_groups": [{**group, "params": list(names.values())}],
    }
    assert_same_state(made, trainer(restart=by_name))
    theirs = as_deepmd_kit(by_name)
    assert_same_state(made, trainer(restart=theirs))


def test_a_state_without_parameters_that_have_no_elements_restarts():
    made = trained()
    whole = [name for name in SHAPES if name != "empty"]
    assert_same_state(made, trainer(restart=of_parameters(made.optimizer.state_dict(), whole)))
    params = {
        name: nn.Parameter(p.detach().clone())
        for name, p in made.parameters.items()
        if name != "empty"
    }
    alone = HybridMuon(params.items())
    alone.load_state_dict(made.optimizer.state_dict())
    assert torch.equal(
        alone.state[params["layer.matrix"]]["momentum_buffer"],
        made.optimizer.state[made.parameters["layer.matrix"]]["momentum_buffer"],
    )


def test_a_part_of_a_state_holds_the_lists_of_its_parameters():
    saved = trained().optimizer.state_dict()
    part = of_parameters(saved, ["module.layer.bias", "experts.matrix"])
    (group,) = part["param_groups"]
    assert group["param_names"] == ["layer.bias", "experts.matrix"]
    assert group["routes"] == ["adam 4", "muon 2x3x5 as 2x3x5"]
    assert set(part["state"]) == set(group["params"]) == {1, 2}
    assert group["momentum"] == 0.95


def test_a_state_of_other_parameters_is_refused():
    saved = as_deepmd_kit(trained().optimizer.state_dict())
    with pytest.raises(ForeignStateError, match="4 parameters"):
        with_names(saved, ["layer.matrix"], step=3)
