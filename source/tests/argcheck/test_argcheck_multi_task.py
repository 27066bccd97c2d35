"""Inputs of several models: names of shared parts, branches that do not fit together, and their normalised form."""

import json

import jsonschema
import pytest

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.argcheck.document import reference
from deepmd_muon.argcheck.json_schema import json_schema
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import MultiTaskSettings


@pytest.fixture
def several(water):
    """The water example as two branches with one descriptor."""
    model, training = water["model"], water["training"]
    descriptor = {**model["descriptor"], "type": "dpa1", "sel": 30}
    branch = {"type_map": "types", "descriptor": "all", "fitting_net": model["fitting_net"]}
    data = {key: training.pop(key) for key in ("training_data", "validation_data", "stat_file")}
    del descriptor["type_one_side"]
    water["model"] = {
        "data_stat_nbatch": 20,
        "shared_dict": {"_comment": "", "types": model["type_map"], "all": descriptor},
        "model_dict": {
            "hot": branch,
            "cold": {**branch, "descriptor": "all:1", "data_stat_nbatch": 5},
        },
    }
    water["loss_dict"] = {"hot": water["loss"], "cold": water.pop("loss")}
    training |= {"data_dict": {"hot": data, "cold": data}, "model_prob": {"hot": 3, "cold": 1}}
    return json.loads(json.dumps(water))


def test_shared_parts_are_written_out_for_each_branch(several):
    found = normalize(several)
    hot, cold = found.branches["hot"].model, found.branches["cold"].model
    assert hot.type_map == cold.type_map == ("O", "H")
    assert hot.descriptor == cold.descriptor
    assert hot.descriptor.neuron == (25, 50, 100)
    assert (hot.data_stat_nbatch, cold.data_stat_nbatch) == (20, 5)
    assert found.references["cold"]["descriptor"].level == 1
    assert found.settings.training.model_prob == {"hot": 3.0, "cold": 1.0}


def test_the_normalised_form_keeps_names_and_comes_back_the_same(several):
    once = normalize(several)
    assert once.normalized["model"]["model_dict"]["cold"]["descriptor"] == "all:1"
    assert once.normalized["model"]["shared_dict"]["types"] == ["O", "H"]
    twice = normalize(once.normalized)
    assert twice.normalized == once.normalized
    assert twice.settings == once.settings
    assert twice.notices == ()
    assert json.loads(json.dumps(once.normalized)) == once.normalized


def test_settings_without_effect_are_named_at_their_place_in_the_file_and_once(several):
    several["model"]["shared_dict"]["all"].update(attn_layer=0, attn=64)
    several["loss_dict"]["cold"]["huber_delta"] = 0.2
    places = [line.split(":")[0] for line in normalize(several).idle]
    assert sorted(places) == ["loss_dict/cold/huber_delta", "model/shared_dict/all/attn"]
    several["training"]["model_prob"] = {"hot": "a"}
    with pytest.raises(InputError, match="training/model_prob/hot: must be a number"):
        normalize(several)


def test_the_schema_accepts_both_forms_and_refuses_a_misspelt_key(several):
    validator = jsonschema.Draft202012Validator(json_schema())
    assert list(validator.iter_errors(several)) == []
    assert list(validator.iter_errors(normalize(several).normalized)) == []
    several["model"]["model_dict"]["hot"]["descriptr"] = "all"
    assert list(validator.iter_errors(several)) != []


def test_every_key_of_several_models_is_in_the_reference():
    keys = tree(MultiTaskSettings).keys
    text = reference()
    branch, training = keys["model"].keys["model_dict"], keys["training"]
    for section in (branch, training, training.keys["data_dict"]):
        assert [name for name in section.keys if name not in text] == []


def test_all_problems_are_told_at_once_where_they_stand(several, problems):
    model, training = several["model"], several["training"]
    model["model_dict"]["hot"]["descriptor"] = "al"
    model["model_dict"]["cold"]["descriptor"] = "all:2"
    model["shared_dict"]["all"]["rcut"] = -1
    model["data_stat_nbatch"] = 0
    training |= {"model_prob": {"hot": -1, "warm": 1}, "numb_epoch": 2}
    del training["data_dict"]["cold"], several["loss_dict"]["cold"]
    several["loss"] = {}
    found = problems(several)
    expected = {f"model/model_dict/{name}/descriptor" for name in ("hot", "cold")}
    expected |= {f"training/model_prob/{name}" for name in ("hot", "cold", "warm")}
    expected |= {"model/shared_dict/all/rcut", "model/data_stat_nbatch", "training/numb_epoch"}
    assert set(found) == expected | {"training/data_dict/cold", "loss_dict/cold", "loss"}
    assert "did you mean 'all'?" in found["model/model_dict/hot/descriptor"]
    assert "level 0 or 1; found 'all:2'" in found["model/model_dict/cold/descriptor"]
    assert "num_epoch_dict" in found["training/numb_epoch"]


def other_map(several):
    several["model"]["model_dict"]["cold"]["type_map"] = ["H", "O"]
    return "model/model_dict/cold/type_map", "shares 'all': ['O', 'H']; found ['H', 'O']"


def no_name(several):
    several["model"]["model_dict"]["RANDOM"] = several["model"]["model_dict"].pop("cold")
    return "model/model_dict/RANDOM", "is no name of a branch"


def no_epochs(several):
    several["training"]["num_epoch_dict"] = {"hot": 1, "cold": 1}
    return "training/numb_steps", "excludes num_epoch_dict"


def nothing_drawn(several):
    several["training"]["model_prob"] = {"hot": 0, "cold": 0}
    return "training/model_prob", "above 0"


def two_protections(several):
    several["model"]["model_dict"]["cold"]["data_stat_protect"] = 0.1
    return "model/model_dict", "one data_stat_protect"


def too_few_cases(several):
    for branch in several["model"]["model_dict"].values():
        branch["fitting_net"] = {"dim_case_embd": 1}
    return "model/model_dict", "at least 2"


def one_case(several):
    several["model"]["model_dict"]["hot"]["fitting_net"] = {"dim_case_embd": 2}
    return "model/model_dict", "hot 2, cold 0"


def an_alias_twice(several):
    several["model"]["model_dict"]["hot"]["model_branch_alias"] = ["cold"]
    return "model/model_dict", "alias 'cold' of 'hot'"


def level_of_a_fitting_net(several):
    several["model"]["shared_dict"]["net"] = {"neuron": [4]}
    several["model"]["model_dict"]["hot"]["fitting_net"] = "net:1"
    return "model/model_dict/hot/fitting_net", "level 0; found 'net:1'"


def no_validation_data(several):
    for data in several["training"]["data_dict"].values():
        del data["validation_data"]
    several["validating"] = {"full_validation": True}
    return "validating/full_validation", "validation_data of a branch"


def no_such_branch_to_export(several):
    several["training"]["export_branch"] = "warm"
    return "training/export_branch", "one of the branches hot, cold; found 'warm'"


def replay_of_several(several):
    several["replay"] = {"proportion": 0.2}
    return "replay", "belongs to an input of one model"


MISFITS = [other_map, no_name, no_epochs, nothing_drawn, two_protections, too_few_cases, one_case]
MISFITS += [an_alias_twice, level_of_a_fitting_net, no_validation_data]
MISFITS += [no_such_branch_to_export, replay_of_several]


@pytest.mark.parametrize("change", MISFITS)
def test_what_does_not_fit_is_named(several, problems, change):
    path, words = change(several)
    assert words in problems(several)[path]


def test_every_branch_and_alias_that_does_not_fit_is_named(several, problems):
    branches = several["model"]["model_dict"]
    branches["warm"] = {**branches["cold"], "type_map": ["O", "C"]}
    branches["cold"] = {**branches["cold"], "type_map": ["H", "O"]}
    for key in ("model_prob", "data_dict"):
        several["training"][key]["warm"] = several["training"][key]["cold"]
    several["loss_dict"]["warm"] = several["loss_dict"]["cold"]
    assert list(problems(several)) == [
        f"model/model_dict/{name}/type_map" for name in ("cold", "warm")
    ]
    for name in ("cold", "warm"):
        branches[name] |= {"type_map": "types", "model_branch_alias": ["hot", "ice"]}
    ((path, message),) = problems(several).items()
    assert path == "model/model_dict"
    assert (message.count("'hot'"), message.count("'ice'")) == (4, 2)


def test_a_part_that_no_branch_has_is_left_out_with_a_notice(several):
    several["model"]["shared_dict"]["idle"] = {}
    found = normalize(several)
    assert "idle" not in found.normalized["model"]["shared_dict"]
    assert any("shared_dict/idle" in notice for notice in found.notices)


@pytest.mark.parametrize("wrong", [[], "a", {"hot": 3}, {}])
def test_anything_in_place_of_the_branches_is_an_input_error(several, problems, wrong):
    several["model"]["model_dict"] = wrong
    assert problems(several)
