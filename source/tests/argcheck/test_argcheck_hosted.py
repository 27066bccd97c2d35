"""Models of deepmd-kit in the input check; deepmd-kit itself checks their sections.

The last tests need deepmd-kit in this environment (`pytest -m deepmd_kit`).
"""

import importlib.util

import pytest

from deepmd_muon.argcheck import DeepmdKitOnlyError, InputError
from deepmd_muon.argcheck.load import normalize
from deepmd_muon.model.settings import HostedSettings, gives_energies

DPA4 = {"type": "dpa4", "type_map": ["O", "H"], "descriptor": {}, "fitting_net": {"neuron": [0]}}
needs_deepmd_kit = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]


def whole(model, **changes):
    content = {
        "model": model,
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
        "optimizer": {"type": "HybridMuon"},
        "training": {"training_data": {"systems": ["data"]}, "numb_steps": 10},
    }
    return {**content, **changes}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"lora": {"rank": 4}}, True),
        ({"fitting_net": {"type": "property"}}, False),
        ({"spin": {"use_spin": [True, False]}}, True),
        ({"spin": {"use_spin": [True, False], "virtual_len": [0.4]}}, False),
        ({"type": "pairwise_dprc"}, False),
        ({"type": "linear_ener", "models": [{"fitting_net": {"type": "dipole"}}]}, False),
        ({"type": ["dpa4"]}, False),
        ({"fitting_net": "ener"}, False),
        ({"fitting_net": {"type": ["ener"]}}, False),
        ({"type": "linear_ener", "models": None}, False),
    ],
)
def test_which_models_give_energies(change, expected):
    assert gives_energies(DPA4 | change) == expected


def test_without_deepmd_kit_the_model_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeepmdKitOnlyError, match="dpa4"):
        normalize(whole(DPA4))


@pytest.mark.parametrize(
    ("change", "path", "known"),
    [
        ({"type": "dpa44"}, "model/type", "dpa4"),
        ({"type": "standard", "descriptor": {"type": "dpa22"}}, "model/descriptor/type", "dpa2"),
    ],
)
def test_an_unknown_model_is_one_problem_beside_those_of_other_sections(change, path, known):
    content = whole(DPA4 | change)
    with pytest.raises(InputError) as caught:
        normalize(content)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert repr(known) in problem.message
    content["training"]["numb_steps"] = "many"
    with pytest.raises(InputError) as caught:
        normalize(content)
    assert {problem.path for problem in caught.value.problems} == {path, "training/numb_steps"}


def test_a_malformed_branch_beside_a_model_of_deepmd_kit_is_answered():
    branches = {"model_dict": {"first": DPA4, "second": "first"}}
    with pytest.raises(InputError, match="dpa4"):
        normalize(whole(branches))


class TestWithDeepmdKit:
    pytestmark = needs_deepmd_kit

    def test_a_section_is_completed_and_keeps_deepmd_kits_scale(self):
        checked = normalize(whole(DPA4))
        assert isinstance(checked.settings.model, HostedSettings)
        assert checked.normalized["model"]["descriptor"]["lmax"] >= 1
        assert checked.normalized["optimizer"]["lr_adjust_coeff"] == 0.18
        assert checked.scales is None
        again = normalize(checked.normalized)
        assert again.normalized == checked.normalized
        assert again.settings == checked.settings

    @pytest.mark.parametrize(
        ("model", "path", "word"),
        [
            (DPA4 | {"descriptor": {"lmaxx": 2}}, "model/descriptor", "lmaxx"),
            (DPA4 | {"vacuum_reff": "x"}, "model", "vacuum_reff"),
            (DPA4 | {"descriptor": {"channels": "many"}}, "model/descriptor", "channels"),
        ],
    )
    def test_an_option_that_deepmd_kit_lacks_is_one_error(self, model, path, word):
        with pytest.raises(InputError) as caught:
            normalize(whole(model))
        (problem,) = caught.value.problems
        assert problem.path == path
        assert word in problem.message

    def test_other_sections_are_ours_to_check(self):
        with pytest.raises(InputError) as caught:
            normalize(whole(DPA4, training={"training_data": {"systems": ["a"]}, "numb_stepz": 3}))
        assert {problem.path for problem in caught.value.problems} >= {"training/numb_stepz"}

    def test_newer_keys_of_the_data_are_accepted(self):
        data = {"systems": ["a"], "batch_size": "mix:64", "min_pair_dist": 0.5}
        training = {"training_data": data, "numb_steps": 3, "stat_file": "stat.hdf5"}
        training["stat_file_mode"] = "read"
        settings = normalize(whole(DPA4, training=training)).settings.training
        assert settings.training_data.batch_size == "mix:64"
        assert settings.training_data.min_pair_dist == 0.5
        assert settings.stat_file_mode == "read"

    def test_schedules_and_losses_of_its_examples_are_accepted(self):
        rate = {"type": "wsd", "start_lr": 4.5e-4, "stop_lr": 1e-6, "decay_type": "cosine"}
        rate |= {"decay_phase_ratio": 0.65, "warmup_ratio": 0.003, "warmup_start_factor": 0.2}
        loss = {"type": "ener", "loss_func": "mae", "f_use_norm": True}
        settings = normalize(whole(DPA4, learning_rate=rate, loss=loss)).settings
        assert settings.learning_rate.decay_phase_ratio == 0.65
        assert settings.loss.f_use_norm

    @pytest.mark.parametrize("key", ["preset", "vacuum_ref"])
    def test_keys_of_later_versions_are_for_deepmd_kit_to_judge(self, key):
        """3.2.0 has neither."""
        with pytest.raises(InputError, match=key) as caught:
            normalize(whole(DPA4 | {key: "dpa4-mini"}))
        (problem,) = caught.value.problems
        assert "deepmd-kit" in problem.message

    def test_reading_statistics_needs_a_file(self):
        training = {"training_data": {"systems": ["a"]}, "numb_steps": 3, "stat_file_mode": "read"}
        with pytest.raises(InputError, match="stat_file"):
            normalize(whole(DPA4, training=training))

    def test_other_labels_are_handed_over(self):
        with pytest.raises(DeepmdKitOnlyError, match="property"):
            normalize(whole(DPA4 | {"fitting_net": {"type": "property", "task_dim": 1}}))

    def test_settings_of_our_descriptors_that_we_lack_are_hosted(self):
        model = {
            "type_map": ["O", "H"],
            "descriptor": {"type": "se_e2_a", "sel": [20, 20], "type_one_side": True},
            "fitting_net": {},
            "preset_out_bias": {"energy": [None, 1.0]},
        }
        checked = normalize(whole(model))
        assert isinstance(checked.settings.model, HostedSettings)
        assert checked.normalized["model"]["preset_out_bias"] == {"energy": [None, 1.0]}
