"""Inputs that are right: values, defaults, aliases, comments, files."""

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping

import pytest

from deepmd_muon.argcheck import (
    CosineSettings,
    ExpSettings,
    InputError,
    WSDSettings,
    dump,
    load,
    normalize,
)
from deepmd_muon.argcheck.check import check
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.model.descriptor.se_e2_a.settings import SeE2ASettings
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.other_configs import AdamConfig, AdamWConfig, MuonConfig
from deepmd_muon.optim.sharded import ShardedSettings
from deepmd_muon.section import Section, freeze, section, thaw
from deepmd_muon.setting import InvalidSettingError, setting


def test_water_example(water):
    checked = normalize(water)
    settings = checked.settings
    assert checked.notices == ()
    assert settings.model.type_map == ("O", "H")
    assert settings.model.data_stat_nbatch == 20
    assert settings.model.descriptor == SeE2ASettings(
        sel=(46, 92),
        rcut=6.0,
        rcut_smth=0.5,
        neuron=(25, 50, 100),
        axis_neuron=16,
        type_one_side=True,
        seed=1,
    )
    assert settings.model.descriptor.type == "se_e2_a"
    assert settings.model.fitting_net.neuron == (240, 240, 240)
    assert settings.learning_rate == ExpSettings(start_lr=0.001, stop_lr=3.51e-8, decay_steps=5000)
    assert settings.loss == EnerLossSettings()
    assert settings.optimizer == AdamConfig(adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0)
    assert settings.training.training_data.systems == ("../data/data_0", "../data/data_1")
    assert settings.training.validation_data.numb_btch == 3
    assert settings.training.numb_steps == 100000
    assert settings.training.max_ckpt_keep == 5
    assert settings.validating.full_validation is False
    assert water["model"]["_comment"] == " that's all", "the caller's dict was changed"


def test_the_sharded_step_has_a_section_of_its_own(water):
    sharded = {"return_dtype": "float16", "_why": "slow network"}
    water["optimizer"] = {"type": "HybridMuon", "sharded": sharded}
    section = normalize(water).normalized["optimizer"]["sharded"]
    assert section == {**dataclasses.asdict(ShardedSettings()), "return_dtype": "float16"}
    sharded = {"replication": "spread"}
    water["optimizer"] = {"type": "HybridMuon", "offload": True, "sharded": sharded}
    settings = normalize(water).settings.optimizer
    assert (settings.offload, settings.sharded.replication) == (True, "spread")


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "HybridMuon", "weight_decay": 999},
        {"type": "Muon", "weight_decay": 99, "adam_lr_ratio": 10},
        {"type": "Adam", "weight_decay": 1e6},
    ],
)
def test_a_decay_below_the_limit_or_in_the_gradient_is_allowed(water, optimizer):
    water["optimizer"] = optimizer
    assert normalize(water).settings.optimizer.weight_decay == optimizer["weight_decay"]


def test_normalized_has_every_default_and_no_comment(water):
    normalized = normalize(water).normalized
    sections = ["model", "learning_rate", "loss", "optimizer", "training", "validating"]
    assert list(normalized) == sections
    betas = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    rest = {"weight_decay": 0.0, "adam_eps": 1e-8, "adam_implementation": "fused"}
    assert normalized["optimizer"] == {"type": "Adam", **betas, **rest}
    assert normalized["model"]["descriptor"]["activation_function"] == "tanh"
    assert normalized["model"]["fitting_net"]["type"] == "ener"
    assert normalized["model"]["fitting_net"]["rcond"] is None
    assert normalized["training"]["training_data"]["auto_prob"] == "prob_sys_size"
    assert "_comment" not in json.dumps(normalized)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "HybridMuon"}, HybridMuonConfig()),
        (
            {"type": "HybridMuon", "muon_momentum": 0.9, "muon_mode": "2d"},
            HybridMuonConfig(momentum=0.9, muon_mode="2d"),
        ),
        (
            {"type": "HybridMuon", "sharded": {"slots": 1, "bucket_bytes": 1e6}},
            HybridMuonConfig(sharded=ShardedSettings(slots=1, bucket_bytes=1_000_000)),
        ),
        (
            {"type": "Muon", "scaling": "match_rms", "adam_betas": [0.8, 0.9]},
            MuonConfig(scaling="match_rms", adam_betas=(0.8, 0.9)),
        ),
        (
            {"type": "Muon", "large_schedule": "polar-express-5"},
            MuonConfig(large_schedule="polar-express-5"),
        ),
        (
            {"type": "HybridMuon", "large_schedule": [[2, -1.5, 0.5]]},
            HybridMuonConfig(large_schedule=((2.0, -1.5, 0.5),)),
        ),
        (
            {"type": "AdamW", "adam_eps": 1e-6, "adam_implementation": "foreach"},
            AdamWConfig(adam_eps=1e-6, adam_implementation="foreach"),
        ),
        ({"type": "AdamW"}, AdamWConfig(weight_decay=0.0)),
        ({"adam_beta2": 0.99}, AdamConfig(adam_beta2=0.99)),
        ({}, AdamConfig()),
    ],
)
def test_optimizers(water, section, kind):
    scale = {"lr_adjust_coeff": 0.3} if section.get("type") == "HybridMuon" else {}
    water["optimizer"] = {**section, **scale}
    assert normalize(water).settings.optimizer == dataclasses.replace(kind, **scale)


def test_strings_that_deepmd_kit_lower_cases_are_taken_in_any_case(water):
    water["optimizer"] = {"type": "HybridMuon", "muon_mode": "Slice", "lr_adjust_coeff": 0.3}
    water["model"]["descriptor"]["activation_function"] = "TanH"
    water["model"]["fitting_net"]["activation_function"] = "None"
    checked = normalize(water)
    assert checked.settings.optimizer == HybridMuonConfig(muon_mode="slice", lr_adjust_coeff=0.3)
    assert checked.settings.model.descriptor.activation_function == "tanh"
    assert checked.normalized["model"]["fitting_net"]["activation_function"] == "none"
    for kind in (HybridMuonConfig, MuonConfig):
        assert kind(muon_mode="2D").muon_mode == "2d"


@pytest.mark.parametrize("key", ["schedule", "large_schedule"])
@pytest.mark.parametrize("kind", [HybridMuonConfig, MuonConfig])
def test_a_schedule_needs_a_step(kind, key):
    with pytest.raises(InvalidSettingError, match=f"{key}: must have at least one element"):
        kind(**{key: ()})


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"start_lr": 1}, ExpSettings(start_lr=1.0, stop_lr=5e-8)),
        ({"start_lr": 1e-3, "stop_lr_ratio": 0.01}, ExpSettings(start_lr=1e-3, stop_lr_ratio=0.01)),
        (
            {"type": "exp", "start_lr": 1e-3, "decay_rate": 0.9, "smooth": True},
            ExpSettings(start_lr=1e-3, decay_rate=0.9, smooth=True),
        ),
        (
            {"type": "cosine", "start_lr": 1e-3, "stop_lr": 0},
            CosineSettings(start_lr=1e-3, stop_lr=0.0),
        ),
        (
            {"type": "wsd", "start_lr": 1e-3, "warmup_ratio": 0.1, "decay_type": "linear"},
            WSDSettings(start_lr=1e-3, warmup_ratio=0.1, decay_type="linear"),
        ),
    ],
)
def test_learning_rates(water, section, expected):
    water["learning_rate"] = section
    assert normalize(water).settings.learning_rate == expected
    assert normalize(water).settings.learning_rate.type == section.get("type", "exp")


def test_stop_lr_is_filled_in_only_without_a_ratio():
    assert ExpSettings(start_lr=1e-3).stop_lr == 5e-8
    assert ExpSettings(start_lr=1e-3, stop_lr_ratio=0.1).stop_lr is None


@pytest.mark.parametrize(
    "spelling", ["numb_steps", "stop_batch", "num_step", "num_steps", "numb_step"]
)
def test_numb_steps_and_its_aliases(water, spelling):
    del water["training"]["numb_steps"]
    water["training"][spelling] = 1e6
    steps = normalize(water).settings.training.numb_steps
    assert steps == 1_000_000
    assert isinstance(steps, int)


@pytest.mark.parametrize("spelling", ["numb_epoch", "num_epoch", "num_epochs", "numb_epochs"])
def test_numb_epoch_and_its_aliases(water, spelling):
    del water["training"]["numb_steps"]
    water["training"][spelling] = 2.5
    assert normalize(water).settings.training.numb_epoch == 2.5
    assert normalize(water).settings.training.numb_steps is None


def test_other_aliases(water):
    water["model"]["descriptor"]["type"] = "se_a"
    water["model"]["descriptor"]["n_axis_neuron"] = water["model"]["descriptor"].pop("axis_neuron")
    water["model"]["fitting_net"]["n_neuron"] = water["model"]["fitting_net"].pop("neuron")
    water["training"]["training_data"].update(auto_prob_style="prob_sys_size;0:1:0.25;1:2:.75")
    water["training"]["validation_data"].update(sys_weights=[1])
    validation = water["training"]["validation_data"]
    validation["numb_batch"] = validation.pop("numb_btch")
    normalized = normalize(water).normalized
    assert normalized["model"]["descriptor"]["type"] == "se_e2_a"
    assert normalized["model"]["descriptor"]["axis_neuron"] == 16
    assert normalized["model"]["fitting_net"]["neuron"] == [240, 240, 240]
    assert normalized["training"]["training_data"]["auto_prob"] == "prob_sys_size;0:1:0.25;1:2:.75"
    assert normalized["training"]["validation_data"]["sys_probs"] == [1.0]
    assert normalized["training"]["validation_data"]["numb_btch"] == 3


def test_a_single_system_is_a_list_of_one(water):
    water["training"]["training_data"]["systems"] = "data.hdf5#/water"
    assert normalize(water).settings.training.training_data.systems == ("data.hdf5#/water",)


@pytest.mark.parametrize(
    "size", [4, [1, 2], "auto", "auto:64", "max:512", "filter:512", "mixed:8", "mix:512"]
)
def test_batch_sizes(water, size):
    water["training"]["training_data"]["batch_size"] = size
    found = normalize(water).settings.training.training_data.batch_size
    assert found == (tuple(size) if isinstance(size, list) else size)


@pytest.mark.parametrize("sel", ["auto", "auto:1.2", [46, 92]])
def test_selections(water, sel):
    water["model"]["descriptor"]["sel"] = sel
    assert normalize(water).normalized["model"]["descriptor"]["sel"] == sel


def test_neutral_values_of_foreign_keys_ask_for_nothing(water):
    water["model"].update(
        pair_exclude_types=[], preset_out_bias=None, srtab_add_bias=True, bridging_method="None"
    )
    neutral = {"default_fparam": None, "dim_case_embd": 0, "use_aparam_as_mask": False}
    water["model"]["fitting_net"].update(neutral)
    water["learning_rate"]["scale_by_worker"] = "linear"
    water["loss"].update(start_pref_h=0.0, limit_pref_gf=0, numb_generalized_coord=0)
    water["training"].update(acc_freq=1, checkpoint_format="file", save_dir=None)
    water["training"]["training_data"].update(set_prefix="set")
    water["validating"] = {"full_validation": False, "validation_freq": 5000, "save_best": True}
    checked = normalize(water)
    assert checked.notices == ()
    assert "acc_freq" not in checked.normalized["training"]
    assert checked.normalized["model"]["pair_exclude_types"] == []
    assert "srtab_add_bias" not in checked.normalized["model"]


def test_keys_without_effect_are_noticed(water):
    water["learning_rate"]["scale_by_worker"] = "sqrt"
    water["model"]["data_bias_nsample"] = 3
    water["training"].update(checkpoint_format="dcp")
    notices = normalize(water).notices
    assert [notice.split(" has no effect here")[0] for notice in notices] == [
        "model/data_bias_nsample",
        "learning_rate/scale_by_worker",
        "training/checkpoint_format",
    ]


def test_null_means_left_out_where_nothing_is_the_default(water):
    water["training"].update(seed=None, validation_data=None, numb_epoch=None)
    water["learning_rate"]["decay_rate"] = None
    training = normalize(water).settings.training
    assert training.seed is None
    assert training.validation_data is None


def test_settings_are_frozen_and_hold_to_their_rules(water):
    settings = normalize(water).settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.training.seed = 1
    with pytest.raises(ValueError, match="rcut_smth: must be below rcut"):
        SeE2ASettings(rcut=3.0, rcut_smth=4.0)
    with pytest.raises(ValueError, match="loss_func: must be one of 'mse', 'mae'; found 'rmse'"):
        EnerLossSettings(loss_func="rmse")
    with pytest.raises(ValueError, match="type: must be 'standard'; found 3"):
        dataclasses.replace(settings.model, type=3)


def test_out_json(tmp_path, water):
    checked = normalize(water)
    path = tmp_path / "out.json"
    path.write_text("old")
    dump(checked.normalized, path)
    assert load(path) == dataclasses.replace(checked, remarks=())  # it gives the optimizer
    text = path.read_text()
    assert text.startswith('{\n    "model": {\n        "type_map": [')
    dump(load(path).normalized, path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["out.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_dump_leaves_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        dump({"a": object()}, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_yaml_input(tmp_path, water):
    path = tmp_path / "input.yaml"
    path.write_text(
        "model:\n"
        "  type_map: [No, H]\n"
        "  descriptor: {type: se_e2_a, rcut: 6, sel: [46, 92], axis_neuron: 4}\n"
        "learning_rate: {start_lr: 1e-3}\n"
        "training:\n"
        "  training_data: {systems: data}\n"
        "  numb_steps: 1e6\n"
        "  tensorboard: true\n"
    )
    settings = load(path).settings
    assert settings.model.type_map == ("No", "H")
    assert settings.learning_rate.start_lr == 1e-3
    assert settings.training.numb_steps == 1_000_000
    assert settings.training.tensorboard is True


def test_yaml_anchors(tmp_path):
    path = tmp_path / "input.yml"
    path.write_text(
        "model:\n"
        "  type_map: [O, H]\n"
        "  descriptor: {type: se_e2_a}\n"
        "learning_rate: {start_lr: .001}\n"
        "training:\n"
        "  training_data: &data {systems: [a], batch_size: 2}\n"
        "  validation_data: {<<: *data, systems: [b]}\n"
        "  numb_steps: 10\n"
    )
    training = load(path).settings.training
    assert training.training_data.systems == ("a",)
    assert training.validation_data.systems == ("b",)
    assert training.validation_data.batch_size == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"model": {,}}',
            "is not JSON: Expecting property name enclosed in double quotes at line 1, column 12",
        ),
        ("a.json", "[1]", "must hold an object with sections; found the list [1]"),
        ("a.json", "[" * 100000, "is nested too deeply"),
        ("a.yaml", "model: [1,\n", "is not YAML: "),
        (
            "a.yaml",
            "model: &m {descriptor: *m}\n",
            "is not YAML: found unconstructable recursive node at line 1",
        ),
        (
            "a.json",
            '{"training": {"seed": 1, "_c": 1, "_c": 2, "seed": 2}}',
            "training/seed: is given more than once",
        ),
        ("a.yml", "training:\n  seed: 1\n  seed: 2\n", "training/seed: is given more than once"),
        ("a.json", b'{"model": "\xff"}', "cannot be read: it is not UTF-8 text"),
        ("a.json", None, "cannot be read: No such file or directory"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"1 problem in {path}:\n  {message}")


def test_importing_the_room_does_not_import_torch():
    code = "import sys, deepmd_muon.argcheck.document; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("optimizer", "start_lr", "expected", "chosen"),
    [
        ({}, 1e-3, 8.64, True),
        ({}, 1e-4, 8.64, True),  # fine-tuning
        ({"scaling": "match_rms", "lr_adjust": 10.0}, 2e-3, 4.32, True),
        ({"adam_lr_ratio": 0.02}, 0.048, 0.18, False),  # what it would have been
        ({"lr_adjust_coeff": 0.18}, 1e-3, 0.18, False),
        ({"deepmd_kit_arithmetic": True}, 1e-3, 0.18, False),
        ({"lr_adjust": 10.0}, 1e-3, 0.18, False),
        ({"scaling": "rectangular"}, 1e-3, 0.18, False),
    ],
)
def test_the_scale_of_muon_is_chosen_where_an_input_leaves_it_open(
    water, optimizer, start_lr, expected, chosen
):
    water["optimizer"] = {"type": "HybridMuon", **optimizer}
    water["learning_rate"]["start_lr"] = start_lr
    water["training"]["numb_steps"] = 3000
    checked = normalize(water)
    assert checked.settings.optimizer.lr_adjust_coeff == pytest.approx(expected)
    section = checked.normalized["optimizer"]
    assert section["lr_adjust_coeff"] == checked.settings.optimizer.lr_adjust_coeff
    translated = {"lr_adjust", "deepmd_kit_arithmetic"} & optimizer.keys()
    assert [notice.split(":")[0].split()[0] for notice in checked.notices] == [
        f"optimizer/{key}" for key in translated
    ]
    assert (checked.scales is not None) == chosen
    assert not chosen or "optimizer/lr_adjust_coeff is not given" in checked.scales.notice
    again = normalize(checked.normalized)
    assert again.settings == checked.settings
    assert again.scales is None


@pytest.mark.parametrize(
    ("optimizer", "start_lr", "steps", "length", "coefficient", "ratio"),
    [
        ({}, 1e-3, 3000, 6.0, 8.64, 10.0),
        ({}, 1e-3, 3000, 64.0, 1.08, 2.5),
        ({}, 1e-3, 3000, 16.0, 4.32, 10.0),
        ({}, 1e-3, 3000, 1e4, 0.00691, 1.0),
        ({}, 1e-3, 30000, 12.0, 4.32, 1.0),  # the scale of a long run is below the bound
        ({}, 1e-4, 3000, 64.0, 8.64, 10.0),  # fine-tuning
        ({"adam_lr_ratio": 3.0}, 1e-3, 3000, 64.0, 1.08, 3.0),
        ({}, 1e-3, 3000, 0.0, 8.64, 10.0),
        ({}, 1e-3, 3000, float("nan"), 8.64, 10.0),
        ({}, 1e-3, 3000, float("inf"), 8.64, 10.0),
    ],
)
def test_omitted_scales_fall_with_the_length_of_descriptors(
    water, optimizer, start_lr, steps, length, coefficient, ratio
):
    water["optimizer"] = {"type": "HybridMuon", **optimizer}
    water["learning_rate"]["start_lr"] = start_lr
    water["training"]["numb_steps"] = steps
    before = normalize(water)
    scales = before.scales.for_descriptors(length)
    suited = before.with_scales(scales)
    found = suited.settings.optimizer
    assert (found.lr_adjust_coeff, found.adam_lr_ratio) == (pytest.approx(coefficient), ratio)
    assert suited.normalized["optimizer"]["lr_adjust_coeff"] == found.lr_adjust_coeff
    assert (scales is before.scales) == (found == before.settings.optimizer)
    assert scales is before.scales or f"{length:.3g} long" in scales.notice
    assert scales.for_descriptors(length) is scales


@pytest.mark.parametrize(
    ("optimizer", "start_lr", "expected"),
    [
        ({}, 1e-3, 10.0),
        ({}, 1e-4, 10.0),
        ({}, 4e-3, 2.5),  # the Adam route starts at 0.01 at most
        ({}, 2e-2, 1.0),
        ({"adam_lr_ratio": 2.0}, 1e-3, 2.0),
        ({"lr_adjust_coeff": 8.64}, 1e-3, 1.0),
        ({"scaling": "match_rms", "lr_adjust": 10.0}, 1e-3, 0.1),
        ({"deepmd_kit_arithmetic": True}, 1e-3, 1.0),
    ],
)
def test_the_rate_of_the_adam_route_is_chosen_with_the_scale_of_muon(
    water, optimizer, start_lr, expected
):
    water["optimizer"] = {"type": "HybridMuon", **optimizer}
    water["learning_rate"]["start_lr"] = start_lr
    water["training"]["numb_steps"] = 3000
    checked = normalize(water)
    assert checked.settings.optimizer.adam_lr_ratio == expected
    said = f"and adam_lr_ratio {expected:g}," if not optimizer and expected != 1.0 else ""
    chosen = "lr_adjust_coeff" not in optimizer and "deepmd_kit_arithmetic" not in optimizer
    assert (checked.scales is not None) == chosen
    notice = checked.scales.notice if chosen else ""
    assert said in notice
    assert bool(said) == ("adam_lr_ratio" in notice)
    assert normalize(checked.normalized).settings == checked.settings
    del water["training"]["numb_steps"]
    water["training"]["numb_epoch"] = 1
    long = normalize(water).settings.optimizer.adam_lr_ratio
    assert long == (1.0 if not optimizer else expected)


@pytest.mark.parametrize(
    ("length", "start_lr", "coefficient", "ratio"),
    [
        ({"numb_steps": 1}, 1e-3, 8.64, 10.0),
        # halfway between 3000 and 10000 steps by their logarithms
        ({"numb_steps": 5477}, 1e-3, 6.11, 5.48),
        ({"numb_steps": 5477}, 2e-3, 3.05, 2.74),
        ({"numb_steps": 10000}, 1e-3, 4.32, 3.0),
        ({"numb_steps": 10000}, 1e-4, 4.32, 3.0),
        ({"numb_steps": 10000}, 2e-3, 2.16, 1.5),
        ({"numb_steps": 30000}, 1e-3, 4.32, 1.0),
        ({"numb_epoch": 1}, 1e-3, 4.32, 1.0),
        ({"numb_epoch": 1}, 2e-3, 2.16, 1.0),
    ],
)
def test_omitted_scales_fall_with_the_length_of_the_run(
    water, length, start_lr, coefficient, ratio
):
    water["optimizer"] = {"type": "HybridMuon"}
    water["learning_rate"]["start_lr"] = start_lr
    del water["training"]["numb_steps"]
    water["training"].update(length)
    scales = normalize(water).scales
    assert scales.values == {"lr_adjust_coeff": coefficient, "adam_lr_ratio": ratio}
    length = f"in {length['numb_steps']} steps" if "numb_steps" in length else "in a long run"
    assert length in scales.notice


def test_other_optimizers_have_no_scale_of_muon(water):
    water["optimizer"] = {"type": "Adam"}
    assert normalize(water).scales is None
    assert normalize(water).remarks == ()
    del water["optimizer"]
    checked = normalize(water)
    assert checked.settings.optimizer == AdamConfig()
    assert checked.notices == ()
    (remark,) = checked.remarks
    assert '"optimizer": {"type": "HybridMuon"}' in remark
    water["training"]["opt_type"] = "Adam"  # an older place
    assert normalize(water).remarks == ()


@dataclasses.dataclass(frozen=True)
class _Weights(Section):
    """Numbers by name, alone and beside a number, and sections by name."""

    rates: Mapping[str, ExpSettings] = section(doc="Sections by name.")
    weights: Mapping[str, float] | None = setting(None, minimum=0.0, doc="Weights of elements.")
    charge: Mapping[str, float] | float = setting(1.0, doc="Charge of all elements or of each.")


@pytest.mark.parametrize(
    ("plain", "place", "word"),
    [
        ({"weights": {"O": "a"}}, "weights/O", "a number; found the string 'a'"),
        ({"weights": {"O": -1}}, "weights/O", ">= 0; found -1"),
        ({"charge": {"H": None}}, "charge/H", "a number; found null"),
        ({"weights": 3}, "weights", "an object of numbers; found 3"),
        ({"rates": {"a": 3}}, "rates/a", "an object"),
    ],
)
def test_a_wrong_value_in_a_map_is_named(plain, place, word):
    plain = {"rates": {}, **plain}
    (problem,) = check(_Weights, plain).problems
    assert (problem.path, word in problem.message) == (place, True)
    with pytest.raises(InvalidSettingError, match=re.escape(place.split("/")[0])):
        freeze(_Weights, plain)


def test_maps_come_back_from_their_plain_form():
    settings = _Weights(
        weights={"O": 2.0}, charge={"H": 1.0}, rates={"a": ExpSettings(start_lr=0.1)}
    )
    plain = thaw(settings)
    assert plain["weights"] == {"O": 2.0}
    assert freeze(_Weights, plain) == settings == check(_Weights, plain).settings


#: The section as deepmd-kit 3.2.0 writes it to out.json.
OF_DEEPMD_KIT = {"type": "HybridMuon", "momentum": 0.95, "adam_beta1": 0.9, "adam_beta2": 0.95}
OF_DEEPMD_KIT |= {"weight_decay": 0.001, "lr_adjust": 0.0, "lr_adjust_coeff": 0.18}
OF_DEEPMD_KIT |= {"muon_mode": "slice", "enable_gram": True, "flash_muon": True, "magma_muon": True}


def small_steps(water, *, start_lr=1e-3, numb_steps=1000, **optimizer):
    rate = {"type": "exp", "start_lr": start_lr}
    training = {**water["training"], "numb_steps": numb_steps}
    given = {**water, "optimizer": {**OF_DEEPMD_KIT, **optimizer}, "learning_rate": rate}
    return normalize({**given, "training": training}).small_steps


def test_the_scale_that_deepmd_kit_writes_out_is_said_to_be_small(water):
    line = small_steps(water)
    assert "48 times smaller" in line
    assert "8.64" in line
    assert "24 times smaller" in small_steps(water, numb_steps=100_000)
    assert small_steps(water, start_lr=0.01)
    assert small_steps(water, start_lr=0.02) is None  # its steps are about as large as ours


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_adjust_coeff": 0.2},  # chosen
        {"lr_adjust": 10.0},  # the coefficient has no part in the update
        {"layout": "auto"},  # not a key of deepmd-kit's
    ],
)
def test_other_scales_are_the_users(water, changes):
    assert small_steps(water, **changes) is None
    assert normalize(water).small_steps is None
