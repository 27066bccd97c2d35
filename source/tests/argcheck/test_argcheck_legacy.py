"""Older spellings: what they become, what is said about it, and where they contradict."""

import json

import pytest

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.optim.config import HybridMuonConfig, ShardedSettings
from deepmd_muon.optim.other_configs import AdamConfig, AdamWConfig

# Defaults of the version that had `muon_2d_only`, where they differ from today's.
FIRST = {
    "scaling": "rectangular",
    "adam_lr_ratio": 0.1,
    "lr_adjust_coeff": 0.2,
    "magma_muon": False,
    "layout": "as_stored",
}
# Settings that both versions have, with other values than their defaults.
CHOSEN = {"lr_adjust_coeff": 0.3, "magma_muon": True, "momentum": 0.9}
# Keys of the first version's defaults that its lr_adjust of 10 stands for.
SWITCHED = {"scaling", "adam_lr_ratio"}


def with_optimizer(data, where, keys):
    """Put optimizer keys where a version of DeePMD-kit had them."""
    if where == "training":
        data["training"].update(opt_type="HybridMuon", **keys)
    else:
        data["optimizer"] = {"type": "HybridMuon", **keys}
    return data


TO_2D = 'muon_2d_only: true; optimizer/muon_mode: "2d"'
TO_FLAT = 'muon_2d_only: false; optimizer/muon_mode: "flat"'


@pytest.mark.parametrize("where", ["training", "optimizer"])
@pytest.mark.parametrize(
    ("keys", "expected", "translations"),
    [
        ({"muon_2d_only": True}, FIRST, [TO_2D]),
        ({"muon_2d_only": False}, {**FIRST, "muon_mode": "flat"}, [TO_FLAT]),
        (
            {"min_2d_dim": 3},
            {**FIRST, "min_matrix_dim": 3},
            ["min_2d_dim: 3; optimizer/min_matrix_dim: 3"],
        ),
        (
            {"muon_min_2d_dim": 2},
            {**FIRST, "min_matrix_dim": 2},
            ["muon_min_2d_dim: 2; optimizer/min_matrix_dim: 2"],
        ),
        (
            {"muon_2d_only": False, "min_2d_dim": 5, "lr_adjust": 0.0, **CHOSEN},
            {"muon_mode": "flat", "min_matrix_dim": 5, "layout": "as_stored", **CHOSEN},
            [TO_FLAT, "min_2d_dim: 5; optimizer/min_matrix_dim: 5"],
        ),
        ({"muon_2d_only": True, "lr_adjust": 5}, {**FIRST, "adam_lr_ratio": 0.2}, [TO_2D]),
    ],
)
def test_hybrid_muon(water, where, keys, expected, translations):
    if where == "training":
        # magma_muon came after the optimizer's keys had left `training`.
        keys = {key: value for key, value in keys.items() if key != "magma_muon"}
        expected = {**expected, "magma_muon": False}
    checked = normalize(with_optimizer(water, where, keys))
    assert checked.settings.optimizer == HybridMuonConfig(**{"muon_mode": "2d", **expected})
    for translation in translations:
        older, newer = translation.split("; ")
        sentence = f"{where}/{older} is an older form; write {newer}"
        assert sum(notice.startswith(sentence) for notice in checked.notices) == 1
    given = keys.keys() | (SWITCHED if "lr_adjust" in keys else set())
    silent = {key: value for key, value in FIRST.items() if key not in given}
    filled = [
        notice for notice in checked.notices if "takes the defaults of their version" in notice
    ]
    assert len(filled) == bool(silent)
    for key in silent:
        assert f"{key}: {json.dumps(FIRST[key])}" in filled[0]


@pytest.mark.parametrize(
    "keys", [{}, {"lr_adjust_coeff": 0.3}, {"lr_adjust": 0.0, "muon_momentum": 0.9}]
)
def test_the_optimizer_of_an_input_in_training_alone_is_the_first_version(water, keys):
    checked = normalize(with_optimizer(water, "training", keys))
    given = {key.replace("muon_momentum", "momentum"): value for key, value in keys.items()}
    defaults = dict(FIRST)
    if "lr_adjust" in given:
        defaults = {key: value for key, value in FIRST.items() if key not in SWITCHED}
    assert checked.settings.optimizer == HybridMuonConfig(
        **{**defaults, "muon_mode": "2d", **given}
    )
    assert checked.scales is None
    (filled,) = [
        notice for notice in checked.notices if "takes the defaults of their version" in notice
    ]
    assert "training/opt_type" in filled
    for key in defaults.keys() - given.keys():
        assert f"{key}: {json.dumps(FIRST[key])}" in filled


def test_a_key_in_the_newer_section_is_of_a_newer_version(water):
    with_optimizer(water, "training", {})["optimizer"] = {"lr_adjust_coeff": 0.3}
    assert normalize(water).settings.optimizer == HybridMuonConfig(lr_adjust_coeff=0.3)


@pytest.mark.parametrize("layout", ["auto", "in_out"])
def test_a_layout_that_is_given_stays(water, layout):
    checked = normalize(
        with_optimizer(water, "optimizer", {"muon_2d_only": True, "layout": layout})
    )
    assert checked.settings.optimizer.layout == layout
    assert not any("layout" in notice for notice in checked.notices)


def test_the_adam_of_small_matrices_is_said_to_differ(water):
    notices = normalize(with_optimizer(water, "optimizer", {"min_2d_dim": 3})).notices
    assert "Smaller matrices still take the Adam route, but with today's Adam" in notices[0]


def test_an_input_without_legacy_keys_keeps_todays_defaults(water):
    checked = normalize(with_optimizer(water, "optimizer", {"lr_adjust_coeff": 0.3}))
    assert checked.settings.optimizer == HybridMuonConfig(lr_adjust_coeff=0.3)
    assert checked.notices == ()


@pytest.mark.parametrize("where", ["training", "optimizer"])
def test_wrong_values_are_reported_where_they_stand(water, problems, where):
    found = problems(with_optimizer(water, where, {"muon_2d_only": "yes", "muon_min_2d_dim": 0}))
    assert found == {
        f"{where}/muon_2d_only": "must be true or false; found the string 'yes' "
        '(it is now muon_mode: "2d" or "flat")',
        f"{where}/muon_min_2d_dim": "must be >= 1; found 0",
    }


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"muon_2d_only": True, "muon_mode": "2d"}, "optimizer/muon_2d_only"),
        ({"min_2d_dim": 2, "min_matrix_dim": 2}, "optimizer/min_2d_dim"),
        ({"min_2d_dim": 2, "muon_min_2d_dim": 2}, "optimizer/muon_min_2d_dim"),
    ],
)
def test_legacy_and_new_key_contradict(water, problems, keys, path):
    found = problems(with_optimizer(water, "optimizer", keys))
    assert list(found) == [path]
    assert "is given too" in found[path]


@pytest.mark.parametrize("key", ["muon_2d_only", "min_2d_dim"])
def test_legacy_keys_need_hybrid_muon(water, problems, key):
    water["training"][key] = 1
    assert problems(water) == {
        f"training/{key}": 'belongs to optimizer/type "HybridMuon"; set it or remove this'
    }


def test_optimizer_keys_in_training(water):
    water["training"].update(opt_type="AdamW", adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.01)
    checked = normalize(water)
    assert checked.settings.optimizer == AdamWConfig(
        adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.01
    )
    assert checked.notices == (
        'training/opt_type is an older place; write optimizer/type: "AdamW"',
        "training/weight_decay is an older place; write optimizer/weight_decay: 0.01",
        "training/adam_beta1 is an older place; write optimizer/adam_beta1: 0.8",
        "training/adam_beta2 is an older place; write optimizer/adam_beta2: 0.9",
    )


def test_optimizer_keys_in_both_places_contradict(water, problems):
    water["training"].update(opt_type="Adam", adam_beta1=0.8)
    water["optimizer"] = {"type": "AdamW", "adam_beta1": 0.8}
    assert problems(water) == {
        "training/opt_type": "is an older place of optimizer/type, which is given too; keep only optimizer/type",
        "training/adam_beta1": (
            "is an older place of optimizer/adam_beta1, which is given too; keep only optimizer/adam_beta1"
        ),
    }


def test_the_kalman_filter_is_refused(water, problems):
    water["training"].update(opt_type="LKF", kf_blocksize=1024)
    assert problems(water) == {
        "training/opt_type": "deepmd-kit has the optimizer 'LKF', this package does not"
    }


def test_warmup_keys_in_training(water):
    water["training"].update(warmup_steps=100, warmup_start_factor=0.1)
    checked = normalize(water)
    assert checked.settings.learning_rate.warmup_steps == 100
    assert checked.settings.learning_rate.warmup_start_factor == 0.1
    assert checked.notices == (
        "training/warmup_steps is an older place; write learning_rate/warmup_steps: 100",
        "training/warmup_start_factor is an older place; write learning_rate/warmup_start_factor: 0.1",
    )


def test_warmup_problems_name_the_place_in_the_file(water, problems):
    water["training"].update(warmup_steps="many", warmup_ratio=0.1)
    water["learning_rate"]["warmup_ratio"] = 0.2
    assert problems(water) == {
        "training/warmup_ratio": (
            "is an older place of learning_rate/warmup_ratio, which is given too; keep only learning_rate/warmup_ratio"
        ),
        "training/warmup_steps": "must be a whole number; found the string 'many'",
    }


def test_numb_test_is_left_out(water):
    water["training"]["numb_test"] = 10
    checked = normalize(water)
    assert len(checked.notices) == 1
    assert checked.notices[0].startswith("training/numb_test has no effect and is left out")
    assert "numb_test" not in checked.normalized["training"]


def test_the_layout_of_version_1(water):
    training = water["training"]
    del training["training_data"], training["validation_data"], training["numb_steps"]
    training.update(
        systems=["../data/"], set_prefix="set", stop_batch=1000000, batch_size=1, numb_test=10
    )
    training.update(disp_training=True, time_training=True, tensorboard=False, profiling=False)
    water["model"]["descriptor"]["type"] = "se_a"
    del water["loss"]["type"]
    checked = normalize(water)
    assert checked.settings.training.training_data.systems == ("../data/",)
    assert checked.settings.training.training_data.batch_size == 1
    assert checked.settings.training.numb_steps == 1000000
    assert checked.settings.optimizer == AdamConfig()
    assert [notice.split()[0] for notice in checked.notices] == [
        "training/numb_test",
        "training/systems",
        "training/batch_size",
    ]


def test_problems_of_version_1_name_the_place_in_the_file(water, problems):
    del water["training"]["training_data"]
    water["training"].update(systems=[1], batch_size=0)
    assert problems(water) == {
        "training/systems/0": "must be a string; found 1",
        "training/batch_size": "must be >= 1; found 0",
    }


def test_both_layouts_contradict(water, problems):
    water["training"].update(systems=["a"], batch_size=2)
    message = "is an older place; training/training_data is given too, keep only that"
    assert problems(water) == {"training/systems": message, "training/batch_size": message}


def test_a_lone_data_key_in_training_is_misplaced(water, problems):
    water["training"]["batch_size"] = 2
    assert problems(water) == {
        "training/batch_size": (
            "is not a known key; did you mean training/training_data/batch_size or training/validation_data/batch_size?"
        )
    }


def test_the_hessian_alias_of_the_loss(water):
    water["loss"]["type"] = "ener_hess"
    assert normalize(water).normalized["loss"]["type"] == "ener"


@pytest.mark.parametrize(
    ("given", "expected", "notice"),
    [
        ({"lr_adjust": 0.0, "scaling": None, "adam_lr_ratio": None}, {}, None),
        ({"lr_adjust": -2}, {}, None),
        (
            {"lr_adjust": 10.0, "scaling": None},
            {"scaling": "rectangular", "adam_lr_ratio": 0.1},
            'lr_adjust: 10 is DeePMD\'s switch; it means scaling: "rectangular", adam_lr_ratio: 0.1',
        ),
        (
            {"lr_adjust": 4, "scaling": "none"},
            {"scaling": "none", "adam_lr_ratio": 0.25},
            "it means adam_lr_ratio: 0.25",
        ),
        (
            {"lr_adjust": 4, "scaling": "none", "adam_lr_ratio": 2.0},
            {"scaling": "none", "adam_lr_ratio": 2.0},
            "lr_adjust has no effect",
        ),
        ({"deepmd_kit_arithmetic": False}, {}, None),
        (
            {"deepmd_kit_arithmetic": True, "schedule": "8+2", "layout": "auto"},
            {"schedule": "deepmd-kit", "layout": "as_stored"},
            'write schedule: "deepmd-kit", layout: "as_stored", lr_adjust_coeff: 0.18',
        ),
    ],
)
def test_deepmds_switch_and_its_arithmetic_become_explicit(water, given, expected, notice):
    scales = {} if "deepmd_kit_arithmetic" in given else {"lr_adjust_coeff": 0.18}
    if given.get("deepmd_kit_arithmetic") is False:
        scales = {"lr_adjust_coeff": 0.18}
    checked = normalize(with_optimizer(water, "optimizer", {**scales, **given}))
    assert checked.settings.optimizer == HybridMuonConfig(**expected)
    assert checked.scales is None
    assert len(checked.notices) == (notice is not None)
    assert notice is None or notice in checked.notices[0]


def test_the_switch_at_zero_leaves_the_scales_open(water):
    water["training"]["numb_steps"] = 1000
    checked = normalize(with_optimizer(water, "optimizer", {"lr_adjust": 0.0}))
    assert checked.scales.values == {"lr_adjust_coeff": 8.64, "adam_lr_ratio": 10.0}


@pytest.mark.parametrize("key", ["lr_adjust", "deepmd_kit_arithmetic"])
def test_a_translated_key_of_a_wrong_type_is_reported(water, problems, key):
    assert problems(with_optimizer(water, "optimizer", {key: "x"})).keys() == {f"optimizer/{key}"}


def test_rules_that_left_the_package_are_named(water, problems):
    """The file out.json of an earlier revision holds them with their defaults."""
    off = {"soap_muon": False, "soap_beta": 0.9, "norm_control": "none", "norm_brake": 0.5}
    given = with_optimizer(water, "optimizer", {**off, "lr_adjust_coeff": 0.3})
    assert normalize(given).settings.optimizer == HybridMuonConfig(lr_adjust_coeff=0.3)
    found = problems(with_optimizer(water, "optimizer", {**off, "soap_muon": True}))
    assert found.keys() == {"optimizer/soap_muon", "optimizer/soap_beta"}
    assert 'rules ["soap_muon"]' in found["optimizer/soap_muon"]


def test_removed_settings_of_several_processes_have_no_effect(water):
    former = {"exchange": "reference", "flops_per_second": 1e14, "latency": 5e-5, "slots": 2}
    checked = normalize(with_optimizer(water, "optimizer", {"sharded": former}))
    assert checked.settings.optimizer.sharded == ShardedSettings(slots=2)
    (notice,) = checked.notices
    assert "optimizer/sharded/exchange has no effect any more" in notice


def test_save_dir_is_the_folder_of_save_ckpt(water):
    water["training"] |= {"save_dir": "ckpt", "save_ckpt": "water", "ema_ckpt_keep": 3}
    checked = normalize(water)
    assert checked.normalized["training"]["save_ckpt"] == "ckpt/water"
    assert any("save_dir" in notice for notice in checked.notices)
    assert any("ema_ckpt_keep" in notice for notice in checked.notices)
    assert normalize(checked.normalized).normalized == checked.normalized
    water["training"]["save_dir"] = 3
    with pytest.raises(InputError) as caught:
        normalize(water)
    assert [problem.path for problem in caught.value.problems] == ["training/save_dir"]
