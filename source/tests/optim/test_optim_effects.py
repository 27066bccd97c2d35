"""Every setting has an effect beside any other one, or an answer says that it has none.

The settings and their values are taken from their declaration. A setting that gets a declared condition too many, or
misses one, or a new setting that nothing reads, fails here.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch
from effects import Settings, values_of, wrong_answers
from optim_builders import random
from torch import nn

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.setting import idle_settings

# Values of the settings for which the declaration gives no choices: the model below has names and shapes for them.
VALUES = {
    "momentum": [0.0, 0.5],
    "adam_beta1": [0.0, 0.5],
    "adam_beta2": [0.5],
    "weight_decay": [0.0, 0.3],
    "lr_adjust_coeff": [0.7],
    "adam_weight_decay": [0.2],
    "adam_eps": [0.1],
    "adam_lr_ratio": [1.0, 3.0],
    "schedule": ["muon-fsdp2", ((1.5, -0.5, 0.0),)],
    "large_schedule": ["keller-jordan"],
    "layout": ["in_out"],  # 'as_stored' and 'out_in' both take rows as the output
    "large_matrix_dim": [4],
    "min_matrix_dim": [5],
    "adam_patterns": [("square",)],
    "muon_patterns": [("bias",), ("adam_table",), ("*",)],
    "adamw_patterns": [("square",)],
    "conv_patterns": [("deep",)],
    "expert_patterns": [("deep",)],
    "local_patterns": [("square",)],
    "splits": [("square: rows 2",)],
    "normuon_beta": [0.1],
}
# Settings whose effect is not in the numbers of a step on one process and a CPU, and where it is tested.
ELSEWHERE = {
    "enable_gram": "speed (test_optim_orthogonalize)",
    "flash_muon": "GPU (test_optim_gpu)",
    "adam_implementation": "speed (test_optim_torch_conventions)",
    "precision": "GPU and 16 bits (test_optim_orthogonalize)",
    "on_route_change": "loading (test_optim_migration)",
    "on_nonfinite": "gradients that are not finite (test_optim_step)",
    "offload": "place of the state (test_optim_offload)",
    "master_weights": "16-bit parameters (test_optim_master_weights)",
    "local_patterns": "several processes (optim_sharded)",
    "sharded": "several processes (optim_sharded)",
    "rules": "rules of other packages (test_optim_new_rule)",
}


# Settings that only some models need, and the other settings with which the model below is one of them.
COMPANIONS = {
    "adam_weight_decay": {"vector_route": "adamw"},
    "large_schedule": {"large_matrix_dim": 4},
    "expert_patterns": {"muon_mode": "flat"},  # mode 'slice' separates the experts, too
}
EQUAL = [
    # '*' takes every weight with two dimensions as a matrix, of its last two dimensions, as mode 'slice' does.
    {("muon_mode", "2d"), ("muon_patterns", ("*",))},
    # Without decay both routes are Adam.
    {("vector_route", "adamw"), ("weight_decay", 0.0)},
]


class Net(nn.Module):
    """A matrix of each shape that rules and routes distinguish, a vector and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(random(6, 6, seed=1))
        self.wide = nn.Parameter(random(4, 9, seed=2))
        self.deep = nn.Parameter(random(3, 6, 5, seed=3))
        self.cube = nn.Parameter(random(2, 4, 4, seed=5))
        self.adam_table = nn.Parameter(random(5, 7, seed=6))
        self.bias = nn.Parameter(random(6, seed=4))


NAMES = [
    field.name for field in dataclasses.fields(HybridMuonConfig) if field.name not in ELSEWHERE
]
CASES = [(name, value) for name in NAMES for value in values_of(HybridMuonConfig, name, VALUES)]


@functools.cache
def outcome(settings: Settings) -> tuple[bytes, frozenset[str]]:
    """Return parameters and state after three steps, and the settings that an answer names."""
    config = HybridMuonConfig(**dict(settings))
    given = {**vars(config), "adam_betas": (config.adam_beta1, config.adam_beta2)}
    del given["adam_beta1"], given["adam_beta2"]
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = HybridMuon(model.named_parameters(), 0.02, **given)
    idle = idle_settings(config)
    assert bool(idle) == any(x.category is IdleSettingWarning for x in caught)
    words = [str(x.message) for x in caught if x.category is not IdleSettingWarning]
    patterns = {name for name, _ in settings for text in words if f"{name} '" in text}
    for step in range(3):
        for number, p in enumerate(model.parameters()):
            p.grad = random(*p.shape, seed=10 * step + number) - 0.3 * p.detach()
        optimizer.step()
    numbers = [x for p in model.parameters() for x in (p, *optimizer.state[p].values())]
    text = b"".join(x.detach().numpy().tobytes() for x in numbers if torch.is_tensor(x))
    return text, frozenset({*idle, *patterns})


def says_the_same(one: Settings, other: Settings) -> bool:
    """Return whether two inputs have the same meaning in other words, such as null for a scaling."""
    first, second = (HybridMuonConfig(**dict(settings)).explicit() for settings in (one, other))
    return first == second or any(equal <= one for equal in EQUAL)


def test_every_setting_has_values_or_a_place_where_it_is_tested():
    names = {field.name for field in dataclasses.fields(HybridMuonConfig)}
    assert ELSEWHERE.keys() <= names
    assert VALUES.keys() <= names
    assert {name for name, _ in CASES} == names - ELSEWHERE.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_has_an_effect_or_an_answer_beside_every_other(name):
    companions = COMPANIONS.get(name, {})
    contexts = [frozenset(companions.items())]
    contexts += [
        frozenset({**companions, other: value}.items()) for other, value in CASES if other != name
    ]
    values = values_of(HybridMuonConfig, name, VALUES)
    wrong = wrong_answers(name, values, contexts, outcome, says_the_same)
    assert not wrong, "\n".join(wrong)
