"""Inputs that are wrong: every problem at once, with its path and what to do."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepmd_muon.argcheck import InputError, Problem, load, normalize
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.setting import InvalidSettingError


def test_all_problems_at_once(water, problems):
    water["modle"] = {}
    water["model"]["descriptor"].update(rcut_smth=7, rcut_smoth=1, neuron=[1, "x"], trainable=1)
    water["model"]["fitting_net"]["numb_fparam"] = "2"
    water["learning_rate"].update(type="exq")
    water["optimizer"] = {"type": "HybridMuon", "muon_mode": "3d", "momentum": -3}
    water["training"].update(zero_stage=4, acc_freq=4, seed=True, num_steps=2)
    del water["training"]["training_data"]["systems"]
    assert problems(water) == {
        "modle": "is not a known key; did you mean 'model'?",
        "model/descriptor/rcut_smoth": "is not a known key; did you mean 'rcut_smth'?",
        "model/descriptor/neuron/1": "must be a whole number; found the string 'x'",
        "model/descriptor/trainable": "must be true or false; found 1",
        "model/descriptor/rcut_smth": "must be below rcut; found 7 with rcut 6",
        "model/fitting_net/numb_fparam": "must be a whole number; found the string '2'",
        "learning_rate/type": "must be one of 'exp', 'cosine', 'wsd'; found the string 'exq'; did you mean 'exp'?",
        "optimizer/muon_mode": "must be one of '2d', 'flat', 'slice'; found '3d'",
        "optimizer/momentum": "must be >= 0; found -3",
        "training/acc_freq": (
            "asks for gradients summed over several steps (see accumulate_grad_batches), which this package does not "
            "have; remove it or set 1"
        ),
        "training/seed": "must be a whole number; found true",
        "training/num_steps": "means the same as 'numb_steps', which is given too; keep one of them",
        "training/zero_stage": "must be one of 0, 1, 2, 3; found 4",
        "training/training_data/systems": "is missing; give a list of strings",
    }


def test_the_message_lists_all(water):
    water["optimizer"] = {"type": "HybridMuon", "muon_mode": "3d", "momentum": -3}
    with pytest.raises(InputError) as error:
        normalize(water, "input.json")
    assert error.value.problems == (
        Problem("optimizer/momentum", "must be >= 0; found -3"),
        Problem("optimizer/muon_mode", "must be one of '2d', 'flat', 'slice'; found '3d'"),
    )
    assert str(error.value) == (
        "2 problems in input.json:\n"
        "  optimizer/momentum: must be >= 0; found -3\n"
        "  optimizer/muon_mode: must be one of '2d', 'flat', 'slice'; found '3d'"
    )


def change(data, path, value):
    """Set the value at a path, making sections on the way."""
    *sections, key = path.split("/")
    for name in sections:
        data = data.setdefault(name, {})
    data[key] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model/type_map", ["O", "O"], "names 'O' twice"),
        ("training/save_ckpt", "", "must be the name of a file; found ''"),
        ("training/disp_file", "./", "must be the name of a file; found './'"),
        ("training/jsonl_file", " ", "must be the name of a file; found ' '"),
        ("model/type_map", "O", "must be a list of strings; found the string 'O'"),
        ("model/descriptor", [], "must be an object with keys of its own; found the list []"),
        ("model/descriptor/rcut", "6", "must be a number; found the string '6'"),
        ("model/descriptor/rcut", None, "must be a number; found null"),
        ("model/descriptor/rcut", float("nan"), "must be a number; found nan"),
        ("model/descriptor/rcut", 10**400, "must be a number; found 1" + "0" * 56 + "..."),
        ("model/descriptor/rcut", 0, "must be > 0; found 0"),
        (
            "model/descriptor/sel",
            [46],
            "must have one number for each of the 2 types in type_map; found 1",
        ),
        ("model/descriptor/sel", [0, 0], "must select at least one neighbour; found [0, 0]"),
        (
            "model/descriptor/sel",
            "auto:0.5",
            "must have a factor of at least 1; found 'auto:0.5', which would drop neighbours",
        ),
        (
            "model/descriptor/sel",
            "all",
            'must be "auto", "auto:factor" or one whole number for each type; found \'all\'',
        ),
        (
            "model/descriptor/sel",
            138,
            'must be "auto", "auto:factor" or one whole number for each type; found 138',
        ),
        ("model/descriptor/neuron", [], "must name at least one layer; found an empty list"),
        (
            "model/descriptor/axis_neuron",
            101,
            "must not exceed the last width of neuron; found 101 with neuron [25, 50, 100]",
        ),
        ("model/descriptor/axis_neuron", 4.5, "must be a whole number; found 4.5"),
        ("model/descriptor/axis_neuron", True, "must be a whole number; found true"),
        ("model/descriptor/exclude_types", [[0, 2]], "names type 2, but type_map has types 0 to 1"),
        (
            "model/descriptor/precision",
            "float16",
            "must be one of 'default', 'float64', 'float32', 'double', 'single'; found 'float16' "
            "(half precisions are not available)",
        ),
        (
            "model/fitting_net/atom_ener",
            [1.0],
            "must have one energy for each of the 2 types in type_map; found 1",
        ),
        (
            "model/fitting_net/trainable",
            [True],
            "must have one value for each of the 4 layers; found 1",
        ),
        (
            "model/fitting_net/type",
            "dos",
            "deepmd-kit has the fitting net 'dos', this package does not",
        ),
        ("model/type", "frozen", "deepmd-kit has the model 'frozen', this package does not"),
        (
            "model/spin",
            {"use_spin": [True, False]},
            "deepmd-kit has atomic spins, this package does not",
        ),
        ("learning_rate/start_lr", 0, "must be > 0; found 0"),
        ("learning_rate/stop_lr", 0.1, "must not exceed start_lr; found 0.1 with start_lr 0.001"),
        ("learning_rate/stop_lr_ratio", 0.1, None),
        ("learning_rate/decay_steps", 0, "must be >= 1; found 0"),
        ("learning_rate/decay_rate", 1.5, "must be <= 1; found 1.5"),
        (
            "learning_rate/warmup_steps",
            100000,
            "must be less than training/numb_steps; found 100000 of 100000 steps",
        ),
        ("learning_rate/warmup_ratio", 1.0, "must be < 1; found 1"),
        (
            "loss/loss_func",
            "rmse",
            "must be one of 'mse', 'mae'; found 'rmse'; did you mean 'mse'?",
        ),
        ("loss/start_pref_e", -1, "must be >= 0; found -1"),
        (
            "loss/f_use_norm",
            True,
            "needs loss_func 'mae' or use_huber; set one of them or remove it",
        ),
        (
            "loss/start_pref_h",
            1,
            "asks for a Hessian term, which this package does not have; remove it or set 0",
        ),
        ("loss/type", "dos", "deepmd-kit has the loss 'dos', this package does not"),
        ("optimizer/type", "LKF", "deepmd-kit has the optimizer 'LKF', this package does not"),
        (
            "optimizer/momentum",
            0.9,
            "is not a known key; did you mean optimizer/momentum with type 'HybridMuon' or optimizer/momentum with "
            "type 'Muon'?",
        ),
        ("optimizer/adam_beta2", 1.0, "must be < 1; found 1"),
        ("training/numb_epoch", 3, None),
        ("training/numb_steps", -1, "must be >= 0; found -1"),
        ("training/numb_steps", 1.5, "must be a whole number; found 1.5"),
        ("training/save_freq", 0, "must be >= 1; found 0"),
        (
            "training/data_parallel_replicate_degree",
            2,
            "needs zero_stage 2 or 3; found 2 with zero_stage 0",
        ),
        ("training/rank_timeout", 0, "must be > 0; found 0"),
        ("training/ema_decay", 1, "must be < 1; found 1"),
        (
            "training/training_data/batch_size",
            "auto:x",
            'must be "auto", "auto:N", "max:N", "filter:N", "mixed:N", "mix:N", '
            "a whole number or one for each system; found 'auto:x'",
        ),
        (
            "training/training_data/systems",
            [],
            "must name at least one system; found an empty list",
        ),
        (
            "training/training_data/sys_probs",
            [0.5, 0.6],
            "must sum to 1 over the entries that are not negative; found 1.1",
        ),
        (
            "training/training_data/rglob_patterns",
            ["/data/*"],
            "must be patterns of folders below systems, e.g. 'fcc*'; found ['/data/*']",
        ),
        (
            "training/training_data/sys_probs",
            [1],
            "must have one probability for each of the 2 systems; found 1",
        ),
        (
            "training/training_data/auto_prob",
            "prob_sys_size;2:1:1",
            "must have blocks start:end:weight with start < end; found '2:1:1'",
        ),
        ("validating/max_best_ckpt", 0, "must be >= 1; found 0"),
        (
            "validating/validation_metric",
            "E",
            'must be "E:MAE", "E:RMSE", "F:MAE", "F:RMSE", "S:MAE", "S:RMSE", "V:MAE" or "V:RMSE"; found \'E\'',
        ),
        (
            "nvnmd",
            {},
            "asks for training for non-von-Neumann hardware, which this package does not have; remove it",
        ),
    ],
)
def test_one_problem(water, problems, path, value, message):
    change(water, path, value)
    found = problems(water)
    if message is None:
        # A rule over several keys is reported at its first.
        assert len(found) == 1
        assert "excludes" in next(iter(found.values()))
    else:
        assert found == {path: message}


def test_wrong_elements_of_a_list_are_all_named(water, problems):
    water["model"]["descriptor"].update(
        neuron=[25, 0, 100, -1], sel=[46, "many"], exclude_types=[[0, 1], [0], [True, 1]]
    )
    water["training"]["training_data"].update(systems=["a", 1, None])
    assert problems(water) == {
        "model/descriptor/sel/1": "must be a whole number; found the string 'many'",
        "model/descriptor/neuron/1": "must be >= 1; found 0",
        "model/descriptor/neuron/3": "must be >= 1; found -1",
        "model/descriptor/exclude_types/1": "must be a list of 2 whole numbers; found the list [0]",
        "model/descriptor/exclude_types/2/0": "must be a whole number; found true",
        "training/training_data/systems/1": "must be a string; found 1",
        "training/training_data/systems/2": "must be a string; found null",
    }


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (
            "learning_rate/seed",
            "did you mean model/descriptor/seed or model/fitting_net/seed or training/seed?",
        ),
        ("training/start_lr", "did you mean learning_rate/start_lr?"),
        ("training/start_pref_f", "did you mean loss/start_pref_f?"),
        ("training/numb_btch", "did you mean training/validation_data/numb_btch?"),
        (
            "learning_rate/decay_phase_ratio",
            "did you mean learning_rate/decay_phase_ratio with type 'wsd'?",
        ),
        ("training/stop_bach", "did you mean 'stop_batch'?"),
        ("training/DISP_FREQ", "did you mean 'disp_freq'?"),
        ("model/start_learning_lr", "remove it; `dp doc-train-input` lists the keys"),
        ("loss/decay_step", "did you mean learning_rate/decay_steps?"),
    ],
)
def test_unknown_keys_name_the_nearest(water, problems, path, hint):
    change(water, path, 1)
    assert problems(water) == {path: f"is not a known key; {hint}"}


@pytest.mark.parametrize(
    ("kind", "key", "value", "hint"),
    [
        ("HybridMuon", "betas", [0.9, 0.95], '; write "adam_beta1": 0.9, "adam_beta2": 0.95'),
        ("Muon", "betas", [0.9, 0.95], '; write "adam_betas": [0.9, 0.95]'),
        ("AdamW", "eps", 1e-8, '; write "adam_eps": 1e-08'),
        ("HybridMuon", "fused", False, '; write "adam_implementation": "foreach"'),
        ("HybridMuon", "ns_steps", 5, '; write "schedule": "keller-jordan"'),
        ("HybridMuon", "ns_steps", 0, ": must be a whole number from 1 to 99; found 0"),
        ("HybridMuon", "use_muon", True, '; write "muon_patterns": ["*"]'),
        ("Adam", "amsgrad", False, "; remove it"),
        ("Adam", "ns_steps", 5, "; remove it"),
        ("HybridMuon", "adam_betas", [0.8, 0.9], '; write "adam_beta1": 0.8, "adam_beta2": 0.9'),
        ("HybridMuon", "rms_coefficient", 0.3, '; write "lr_adjust_coeff": 0.3'),
        ("Muon", "lr_adjust_coeff", 0.3, '; write "rms_coefficient": 0.3'),
        (
            "Muon",
            "adam_beta2",
            0.9,
            ": both decays are one setting: give adam_betas, such as [0.9, 0.95]",
        ),
        (
            "Muon",
            "lr_adjust",
            4.0,
            '; write "scaling": "rectangular", "adam_lr_ratio": 0.25',
        ),
        (
            "Muon",
            "adamw_lr",
            1e-3,
            ": give adam_lr_ratio = adamw_lr / lr, or a group with its own lr",
        ),
    ],
)
def test_words_of_other_optimizers_are_translated(water, problems, kind, key, value, hint):
    water["optimizer"] = {"type": kind, key: value}
    found = problems(water)
    assert found[f"optimizer/{key}"] == f"is another optimizer's word{hint}"
    assert len(found) == 1


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("optimizer/lr", "learning_rate/start_lr"),
        ("optimizer/opt_type", '"type"'),
        ("learning_rate/lr", "start_lr"),
        ("loss/force_weight", "start_pref_f"),
        ("loss/mae", 'loss_func: "mae"'),
    ],
)
@pytest.mark.parametrize("kind", ["HybridMuon", "Muon", "Adam"])
def test_a_word_of_other_programs_names_the_setting_not_the_nearest_one(
    water, problems, kind, path, word
):
    water["optimizer"] = {"type": kind}
    change(water, path, 1e-3)
    found = problems(water)
    assert list(found) == [path]
    assert word in found[path]
    assert "lr_adjust" not in found[path]


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("optimizer/type", "adamw", "AdamW"),
        ("optimizer/type", "hybrid_muon", "HybridMuon"),
        ("optimizer/scaling", "match-rms", "match_rms"),
        ("optimizer/schedule", "polar_express", "polar-express"),
        ("optimizer/muon_mode", "slices", "slice"),
        ("optimizer/precision", "float8", None),
        ("model/descriptor/type", "se_e2_b", "se_e2_a"),
        ("model/descriptor/activation_function", "sofplus", "softplus"),
        ("model/descriptor/precision", "float128", None),
        ("optimizer/muon_mode", "3d", None),
        ("optimizer/schedule", "polar-express-7", None),
        ("optimizer/type", "Ranger", None),
    ],
)
def test_a_near_value_is_named(water, problems, path, value, hint):
    water["optimizer"] = {"type": "HybridMuon"}
    change(water, path, value)
    (message,) = problems(water).values()
    assert (f"did you mean {hint!r}?" in message) == (hint is not None)
    assert ("did you mean" in message) == (hint is not None)


@pytest.mark.parametrize("value", [2, True, ["2d"], {"a": 1}, 0.5])
def test_a_wrong_type_of_a_choice_lists_its_values(water, problems, value):
    water["optimizer"] = {"type": "HybridMuon", "muon_mode": value, "schedule": value}
    found = problems(water)
    assert "'2d', 'flat', 'slice'" in found["optimizer/muon_mode"]
    if not isinstance(value, list):
        assert "'keller-jordan'" in found["optimizer/schedule"]
    with pytest.raises(InvalidSettingError, match="'2d', 'flat', 'slice'"):
        HybridMuonConfig(muon_mode=value)


@pytest.mark.parametrize("kind", ["HybridMuno", "Xyz", 3, None])
def test_a_wrong_type_does_not_hide_other_problems(water, problems, kind):
    water["optimizer"] = {"type": kind, "adam_beta1": 2, "momentun": 1, "muon_mode": "2d"}
    found = problems(water)
    # Adam has no muon_mode, HybridMuon has: without a kind, only what is wrong in all of them is reported.
    assert set(found) == {"optimizer/type", "optimizer/adam_beta1", "optimizer/momentun"}


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("model", "is missing; give a section"),
        ("learning_rate", "is missing; give a section"),
        ("training", "is missing; give a section"),
        ("model/descriptor", "is missing; give a section"),
        (
            "model/descriptor/type",
            f"is missing; give one of {', '.join(map(repr, DESCRIPTORS.settings))}",
        ),
        ("learning_rate/start_lr", "is missing; give a number"),
        ("training/training_data", "is missing; give a section"),
        ("training/numb_steps", "is missing; give numb_steps or numb_epoch"),
    ],
)
def test_missing_keys(water, problems, drop, message):
    *sections, key = drop.split("/")
    place = water
    for name in sections:
        place = place[name]
    del place[key]
    assert problems(water) == {drop: message}


def test_optional_sections_may_be_missing(water):
    for name in ("loss", "_comment"):
        del water[name]
    del water["model"]["fitting_net"]
    del water["training"]["validation_data"]
    settings = normalize(water).settings
    assert settings.loss.start_pref_f == 1000.0
    assert settings.model.fitting_net.neuron == (120, 120, 120)
    assert settings.training.validation_data is None


def test_a_rule_is_silent_when_one_of_its_values_is_wrong(water, problems):
    water["model"]["descriptor"].update(rcut="far", rcut_smth=7)
    assert problems(water) == {"model/descriptor/rcut": "must be a number; found the string 'far'"}


def test_a_rule_reports_under_the_spelling_of_the_file(water, problems):
    del water["model"]["descriptor"]["axis_neuron"]
    water["model"]["descriptor"]["n_axis_neuron"] = 200
    assert list(problems(water)) == ["model/descriptor/n_axis_neuron"]


def test_wsd_needs_a_positive_stop(water, problems):
    water["learning_rate"] = {"type": "wsd", "start_lr": 1e-3, "stop_lr_ratio": 0}
    assert problems(water) == {
        "learning_rate/stop_lr_ratio": "must be > 0 with type 'wsd', whose decay divides by it; found 0"
    }


def test_a_start_below_the_default_stop_is_an_error(water, problems):
    water["learning_rate"] = {"start_lr": 1e-8}
    assert problems(water) == {
        "learning_rate/stop_lr": "must not exceed start_lr; found 5e-08 (the default) with start_lr 1e-08"
    }


def test_a_loss_without_terms_is_an_error(water, problems):
    water["loss"] = {"limit_pref_e": 0, "start_pref_f": 0}
    assert list(problems(water)) == ["loss/start_pref_e"]


@pytest.mark.parametrize("data", [[], "text", None, 3])
def test_an_input_must_be_an_object(data):
    with pytest.raises(InputError, match="must be an object with sections"):
        normalize(data)


def test_sections_of_the_wrong_kind(problems):
    found = problems(
        {"model": 1, "learning_rate": [], "training": "x", "optimizer": None, "loss": 2}
    )
    assert set(found) == {"model", "learning_rate", "training", "optimizer", "loss"}


def paths_of(data, path=()):
    """Every path into nested dicts and lists."""
    yield path
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield from paths_of(value, (*path, key))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
OLDER = {
    "muon_2d_only": True,
    "min_2d_dim": 2,
    "opt_type": "HybridMuon",
    "warmup_steps": 9,
    "numb_test": 1,
}


@given(data=st.data())
def test_no_input_raises_anything_but_an_input_error(pristine_water, data):
    mutated = copy.deepcopy(pristine_water)
    mutated["optimizer"] = {"type": "HybridMuon", "momentum": 0.9}
    mutated["training"].update(data.draw(st.sampled_from([{}, OLDER])))
    for _ in range(data.draw(st.integers(1, 3))):
        *sections, key = data.draw(st.sampled_from([path for path in paths_of(mutated) if path]))
        place = mutated
        for name in sections:
            place = place[name]
        place[key] = data.draw(anything)
    found = None
    try:
        assert normalize(normalize(mutated).normalized).notices == ()
    except InputError as error:
        found = error
    if found is not None:
        assert found.problems
        assert all(problem.message for problem in found.problems)
        assert len(str(found).split("\n  ")) == 1 + len(found.problems)


@pytest.mark.parametrize(
    ("text", "mistake", "line"),
    [
        (
            '{\n  "model": {"type_map": ["O", "H"],},\n  "loss": {}\n}',
            "a comma after the last entry",
            2,
        ),
        ('{\n  "a": [1, 2, ]}', "a comma after the last entry", 2),
        ('{\n  "a": 1, // one\n  "b": 2}', "a comment", 2),
        ('{\n  # one\n  "a": 1}', "a comment", 2),
        ("{'a': 1}", "a single quote", 1),
        ('{"a": True}', "write true", 1),
        ('{"a": 1\n  "b": 2}', "a comma is missing", 2),
        ('{"a": [1, 2', "before every bracket is closed", 1),
    ],
)
def test_a_mistake_of_json_is_named_and_its_line_shown(tmp_path, text, mistake, line):
    path = tmp_path / "input.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert mistake in problem.message
    assert f"line {line}" in problem.message
    if "before every" not in mistake:
        shown, mark = problem.message.splitlines()[1:]
        assert shown.strip() == text.splitlines()[line - 1].strip()
        assert mark.strip() == "^"
