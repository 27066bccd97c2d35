"""Every setting of a loss and of a learning rate has an effect, or an answer; and which settings need others."""

import dataclasses
import functools

import pytest
import torch
from effects import asks_for_nothing, values_of, wrong_answers

from deepmd_muon.argcheck import CosineSettings, ExpSettings, WSDSettings, normalize
from deepmd_muon.argcheck.schema import Key, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.loss import ComparedAtoms
from deepmd_muon.loss.ener.module import EnergyLoss
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.setting import idle_settings
from deepmd_muon.train.learning_rate import learning_rate

# Values of settings for which the declaration gives no choices.
LOSS_VALUES = {
    **{
        f"{end}_pref_{term}": [0.0, 3.0]
        for end in ("start", "limit")
        for term in ("e", "f", "v", "ae", "pf")
    },
    "relative_f": [0.4],
    "huber_delta": [0.2, (0.1, 0.2, 0.3)],
}
PREFACTORS = [frozenset({(f"start_pref_{x}", 2.0), (f"limit_pref_{x}", 2.0)}) for x in ("v", "pf")]
RATE_VALUES = {"start_lr": [0.02], "stop_lr": [1e-4], "stop_lr_ratio": [0.2]}
RATE_VALUES |= {"warmup_steps": [700], "warmup_ratio": [0.2], "warmup_start_factor": [0.4]}
RATE_VALUES |= {"decay_steps": [900], "decay_rate": [0.01], "decay_phase_ratio": [0.4]}


def names_of(section):
    return [field.name for field in dataclasses.fields(section)]


@functools.cache
def loss_of(settings):
    """Return the loss of frames with all labels and of frames without atom_pref, and the settings without effect."""
    section = EnerLossSettings(**dict(settings))
    draw = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    shapes = {"energy": (3,), "force": (3, 4, 3), "virial": (3, 9)}
    prediction = {key: draw(*shape) for key, shape in shapes.items()}
    prediction["atom_energy"] = draw(3, 4)
    labels = {key: draw(*shape) for key, shape in shapes.items()}
    labels |= {"atom_ener": draw(3, 4), "atom_ener_coeff": draw(3, 4)}
    several = ({**labels, "atom_pref": draw(3, 4).abs()}, labels)
    loss = EnergyLoss(section, ("O",))
    atoms = ComparedAtoms(torch.zeros(3, 4, dtype=torch.int64))
    found = [float(loss.compare(prediction, some, 0.3, atoms)[0]) for some in several]
    return tuple(found), frozenset(idle_settings(section))


@pytest.mark.parametrize("name", names_of(EnerLossSettings))
def test_a_setting_of_the_loss_has_an_effect_or_an_answer_beside_every_other(name):
    cases = [
        (other, value)
        for other in names_of(EnerLossSettings)
        for value in values_of(EnerLossSettings, other, LOSS_VALUES)
    ]
    single = [frozenset({case}) for case in cases if case[0] != name]
    contexts = [
        {case for case in context | more if case[0] != name}
        for context in (frozenset(), *single)
        for more in (frozenset(), *PREFACTORS)
        if not {key for key, _ in context} & {key for key, _ in more}
    ]
    wrong = wrong_answers(
        name,
        values_of(EnerLossSettings, name, LOSS_VALUES),
        [frozenset(context) for context in contexts],
        loss_of,
        lambda settings, _: asks_for_nothing(EnerLossSettings, name, dict(settings)[name]),
    )
    assert not wrong, "\n".join(wrong)


@functools.cache
def rates_of(section, settings):
    """Return rates of a run of 20,000 steps, and the settings without effect."""
    made = section(**{"start_lr": 0.01, **dict(settings)})
    schedule = learning_rate(made, 20_000)
    steps = range(0, 20_000, 97)
    return tuple(schedule(step) for step in steps), frozenset(idle_settings(made))


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (section, name)
        for section in (ExpSettings, CosineSettings, WSDSettings)
        for name in names_of(section)
    ],
)
def test_a_setting_of_the_rate_has_an_effect_or_an_answer_beside_every_other(section, name):
    cases = [
        (other, value)
        for other in names_of(section)
        for value in values_of(section, other, RATE_VALUES)
        if other != name
    ]
    contexts = [frozenset(), *(frozenset({case}) for case in cases)]
    values = values_of(section, name, RATE_VALUES)
    wrong = wrong_answers(
        name, values, contexts, functools.partial(rates_of, section), lambda *_: False
    )
    assert not wrong, "\n".join(wrong)


# For each setting that needs others: a path, a value, and what lets it have an effect.
NEEDS = [
    ("optimizer/normuon_beta", 0.5, {"optimizer/normuon": True}),
    ("optimizer/large_matrix_dim", 9, {"optimizer/large_schedule": "keller-jordan"}),
    ("optimizer/layout", "in_out", {"optimizer/scaling": "spectral"}),
    ("learning_rate/warmup_start_factor", 0.1, {"learning_rate/warmup_steps": 10}),
    ("loss/start_pref_v", 0.1, {"loss/limit_pref_v": 1.0}),
    ("loss/limit_pref_pf", 0.1, {"loss/start_pref_pf": 1.0}),
    ("loss/huber_delta", 0.1, {"loss/use_huber": True}),
    ("loss/use_default_pf", True, {"loss/start_pref_pf": 1.0, "loss/limit_pref_pf": 1.0}),
    ("training/ema_decay", 0.9, {"training/enable_ema": True}),
    ("training/ema_tail", 0.9, {"training/enable_ema": True}),
    ("training/tensorboard_log_dir", "events", {"training/tensorboard": True}),
    ("training/tensorboard_freq", 7, {"training/tensorboard": True}),
    ("training/wandb_project", "mine", {"training/wandb": True}),
    ("training/profiling_file", "mine.json", {"training/profiling": True}),
    ("validating/validation_freq", 7, {"validating/full_validation": True}),
    ("validating/full_val_start", 0.1, {"validating/full_validation": True}),
    ("validating/validation_metric", "F:MAE", {"validating/full_validation": True}),
    ("validating/save_best", False, {"validating/full_validation": True}),
    ("validating/save_best_dir", "best", {"validating/full_validation": True}),
    ("validating/max_best_ckpt", 3, {"validating/full_validation": True}),
    ("validating/full_val_file", "all.log", {"validating/full_validation": True}),
    ("model/fitting_net/use_aparam_as_mask", True, {"model/fitting_net/numb_aparam": 1}),
]
# Settings that have an effect unless another one has this value.
EXCLUDED = [
    ("optimizer/lr_adjust_coeff", 0.4, {"optimizer/scaling": "rectangular"}),
    ("optimizer/lr_adjust_coeff", 0.4, {"optimizer/lr_adjust": 3.0}),
    ("optimizer/cautious_decay", True, {"optimizer/weight_decay": 0.0}),
    ("optimizer/nesterov", False, {"optimizer/momentum": 0.0}),
    ("optimizer/min_matrix_dim", 3, {"optimizer/muon_patterns": ["*"]}),
    ("optimizer/large_schedule", "keller-jordan", {"optimizer/schedule": "deepmd-kit"}),
    ("optimizer/precision", "float32", {"optimizer/schedule": "deepmd-kit"}),
    ("loss/relative_f", 0.1, {"loss/start_pref_f": 0.0}),
    ("loss/f_use_norm", True, {"loss/start_pref_f": 0.0, "loss/loss_func": "mae"}),
    ("loss/enable_atom_ener_coeff", True, {"loss/start_pref_e": 0.0}),
    ("loss/intensive_ener_virial", True, {"loss/loss_func": "mae"}),
    ("training/disp_avg", True, {"training/disp_training": False}),
    ("training/ema_decay", 0.9, {"training/enable_ema": True, "training/ema_tail": 0.5}),
]
# Settings of other kinds of optimizers and descriptors than the input below has.
OF_OTHER_KINDS = {
    "rms_coefficient",
    *("attn", "attn_dotr", "normalize", "scaling_factor", "temperature", "trainable_ln", "ln_eps"),
    *("smooth_type_embedding", "update_residual", "update_residual_init", "sel_reduce_factor"),
    *("a_dim", "a_compress_rate", "a_compress_e_rate", "a_compress_use_split"),
    "smooth_edge_update",
}


def an_input(water, *changes):
    water["optimizer"] = {"type": "HybridMuon", "sharded": {"replication": "repeat"}}
    for change in changes:
        for path, value in change.items():
            *sections, key = path.split("/")
            place = water
            for name in sections:
                place = place.setdefault(name, {})
            place[key] = value
    return water


@pytest.mark.parametrize(("path", "value", "needed"), NEEDS)
def test_a_setting_that_needs_others_is_answered_without_them(water, path, value, needed):
    (line,) = normalize(an_input(water, {path: value})).idle
    assert line.startswith(f"{path}: has no effect without ")
    assert next(iter(needed)).split("/")[-1] in line


@pytest.mark.parametrize(("path", "value", "needed"), NEEDS)
def test_a_setting_with_all_that_it_needs_is_quiet(water, path, value, needed):
    assert normalize(an_input(water, {path: value}, needed)).idle == ()


@pytest.mark.parametrize(("path", "value", "other"), EXCLUDED)
def test_a_setting_that_another_one_excludes_is_answered(water, path, value, other):
    idle = [line.split(":")[0] for line in normalize(an_input(water, {path: value}, other)).idle]
    assert path in idle
    # The other setting may also exclude one that the input has.
    others = {"optimizer/sharded/replication", "loss/limit_pref_e", "loss/limit_pref_f"}
    assert {*idle} <= {path, *others}


def keys_with_needs(key: Key):
    """Yield the name of every setting that declares what it needs, in a tree of settings."""
    for inner in key.keys.values():
        if inner.setting.needs:
            yield inner.name
        yield from keys_with_needs(inner)
        for kind in inner.kinds.values():
            yield from keys_with_needs(kind)


def test_every_declared_need_is_tested():
    declared = {*keys_with_needs(tree(Settings)), *keys_with_needs(tree(MultiTaskSettings))}
    tested = {path.split("/")[-1] for path, _, _ in (*NEEDS, *EXCLUDED)}
    by_terms = {name for name in names_of(EnerLossSettings) if "_pref_" in name}
    assert declared - by_terms == (tested - by_terms) | OF_OTHER_KINDS


WITHOUT_ATTENTION = {"attn_layer": 0}
ATTENTION = {"attn": 64, "attn_dotr": False, "normalize": False, "ln_eps": 1e-3, "temperature": 2.0}


@pytest.mark.parametrize(
    ("section", "off", "on"),
    [
        (WITHOUT_ATTENTION, ATTENTION, {"attn_layer": 2}),
        (WITHOUT_ATTENTION, {"scaling_factor": 2.0, "trainable_ln": False}, {"attn_layer": 2}),
        ({"temperature": 1.0}, {"scaling_factor": 2.0}, {"temperature": None}),
        (WITHOUT_ATTENTION, {"smooth_type_embedding": True}, {"tebd_input_mode": "strip"}),
    ],
)
def test_settings_of_dpa1_need_others_too(water, section, off, on):
    for given in (off, {**off, **on}):
        water["model"]["descriptor"] = {"type": "se_atten", "sel": 20, **section, **given}
        idle = {line.split(":")[0].split("/")[-1] for line in normalize(water).idle}
        assert idle == (set() if given is not off else off.keys())


RESIDUALS = {"update_residual": 0.2, "update_residual_init": "norm"}
SPLIT = {"a_compress_e_rate": 2, "a_compress_use_split": True}


@pytest.mark.parametrize(
    ("section", "off", "on"),
    [
        ({"update_style": "res_avg"}, RESIDUALS, {"update_style": "res_residual"}),
        ({"update_angle": False}, {"a_dim": 8, "smooth_edge_update": True}, {"update_angle": True}),
        ({}, SPLIT, {"a_compress_rate": 1}),
        ({"smooth_edge_update": True}, {"sel_reduce_factor": 3.0}, {"use_dynamic_sel": True}),
    ],
)
def test_settings_of_dpa3_need_others_too(water, section, off, on):
    cuts = {"e_rcut": 6.0, "e_rcut_smth": 5.0, "e_sel": 20}
    cuts |= {"a_rcut": 4.0, "a_rcut_smth": 3.0, "a_sel": 10}
    for given in (off, {**off, **on}):
        repflow = {**cuts, **section, **given}
        water["model"]["descriptor"] = {"type": "dpa3", "repflow": repflow}
        idle = {line.split(":")[0].split("/")[-1] for line in normalize(water).idle}
        assert idle == (set() if given is not off else off.keys())


def test_what_deepmd_kit_writes_into_out_json_is_quiet(water):
    """Its versions write their defaults of both: 10 and 0.2, and 0 and 0.18."""
    for switch, coefficient in ((10.0, 0.2), (10.0, 0.18), (0.0, 0.2)):
        scales = {"lr_adjust": switch, "lr_adjust_coeff": coefficient}
        water["optimizer"] = {"type": "HybridMuon", **scales}
        assert normalize(water).idle == ()
    assert normalize(normalize(water).normalized).idle == ()
