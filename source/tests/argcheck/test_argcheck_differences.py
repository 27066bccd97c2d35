"""Settings with which deepmd-kit's run from the same input is another one are said, and no others."""

import dataclasses

import pytest

from deepmd_muon.argcheck import normalize
from deepmd_muon.argcheck.differences import unlike_deepmd_kit

INPUT = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {"type": "dpa1", "sel": 20},
        "fitting_net": {},
    },
    "learning_rate": {"type": "exp", "start_lr": 1e-3},
    "training": {"training_data": {"systems": ["a"]}, "numb_steps": 1},
}
TABLE = {"use_srtab": "table.txt", "sw_rmin": 0.5, "sw_rmax": 1.0}


def lines(changes, *, finetune=False, **loss):
    model = {**INPUT["model"]}
    for key, value in changes.items():
        model[key] = {**model[key], **value} if isinstance(value, dict) else value
    given = normalize({**INPUT, "model": model, "loss": loss})
    (branch,) = given.branches.values()
    return unlike_deepmd_kit(branch, finetune=finetune)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({**TABLE, "smin_alpha": 0.2}, "model/smin_alpha"),
        ({**TABLE, "pair_exclude_types": [[0, 1]]}, "model/pair_exclude_types"),
        ({"fitting_net": {"atom_ener": [None, -1.0]}}, "model/fitting_net/atom_ener"),
        ({"fitting_net": {"rcond": 1e-3}}, "model/fitting_net/rcond"),
        ({"descriptor": {"trainable_ln": False}}, "model/descriptor/trainable_ln"),
    ],
)
def test_a_setting_that_deepmd_kit_takes_otherwise(changes, key):
    (line,) = lines(changes)
    assert line.startswith(f"{key}: ")


def test_an_energy_that_does_not_count():
    (line,) = lines({}, start_pref_e=0.0)
    assert "start_pref_e" in line


def test_the_bias_of_excluded_types_of_a_trained_model():
    assert not lines({"atom_exclude_types": [0]})
    (line,) = lines({"atom_exclude_types": [0]}, finetune=True)
    assert "atom_exclude_types" in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**TABLE, "smin_alpha": 0.1},
        TABLE,
        {"data_stat_protect": 0.3, "pair_exclude_types": [[0, 1]]},
        {"fitting_net": {"atom_ener": [None, None]}},
        {"descriptor": {"trainable_ln": False, "attn_layer": 0}},
    ],
)
def test_other_inputs_say_nothing(changes):
    assert not lines(changes)


def test_parts_of_other_packages_need_none_of_these_settings():
    (branch,) = normalize(INPUT).branches.values()
    section = dataclasses.make_dataclass("Other", [])()
    model = dataclasses.replace(branch.model)
    for part in ("descriptor", "fitting_net"):
        object.__setattr__(model, part, section)
    assert not unlike_deepmd_kit(dataclasses.replace(branch, model=model))
