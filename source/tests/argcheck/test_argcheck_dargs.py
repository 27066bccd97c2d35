"""The dargs arguments for other programs: their verdict on every key and value is that of our own check."""

import copy
import json

import pytest
from dargs import Argument
from dargs.dargs import ArgumentError

import deepmd_muon.argcheck.check as checker
from deepmd_muon.argcheck import gen_args, gen_args_multi_task, normalize
from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.dargs_tree import arguments_of, encoded
from deepmd_muon.argcheck.schema import foreign_of, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.cli.main import main
from deepmd_muon.optim.config import HybridMuonConfig

# A valid value of each required key, by its name.
REQUIRED = {"start_lr": 1e-3, "systems": ["a"], "type_map": ["O"], "e_sel": 20, "a_sel": 10}
REQUIRED |= {"e_rcut": 6.0, "e_rcut_smth": 5.0, "a_rcut": 4.0, "a_rcut_smth": 3.0}
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**70, 0.5, -0.5, 1.5, 1e31, float("nan"), float("inf")),
    *("", "x", "auto", "auto:2", "auto:x", "mixed:4", "all", "prob_uniform", "F:MAE", "a/b"),
    *([], [1], [1, 2], [1, 2, 3], [0.5], [-1], [None], [True], ["a"], ["a", 1], "tanh", "TANH"),
    *([[0, 1]], [[0]], [[0, "a"]], [[1.0, 2.0, 3.0]], {}, {"a": 1}, {"a": "b"}, {"type": "x"}),
]


def minimal(key):
    """Return the smallest valid value of a section of one kind, or of the first kind of several."""
    kinds = key.kinds
    kind = next(iter(kinds.values())) if kinds else key
    plain = {"type": kind.name} if kinds else {}
    for name, inner in kind.keys.items():
        if inner.required:
            one = minimal(inner) if inner.is_section else REQUIRED[name]
            plain[name] = {"branch": one} if inner.named else one
    return plain


def sections_below(key):
    """Yield every section of one kind of a tree, the root included, by its class."""
    yield key
    for inner in key.keys.values():
        for kind in inner.kinds.values() or ([inner] if inner.is_section else []):
            yield from sections_below(kind)


def values_for(key):
    """Return values to try for a key: some of every type, its choices, and values beside them and at its bounds."""
    setting = key.setting
    choices = [str(choice) for choice in setting.choices or ()]
    bounds = [setting.minimum, setting.maximum, setting.above, setting.below]
    numbers = [bound for bound in bounds if bound is not None]
    sections = [minimal(key)] if key.is_section and not key.named else []
    sections += [{"branch": minimal(key)}] if key.named else []
    around = [bound + step for bound in numbers for step in (-1, -1e-3, 0, 1e-3, 1)]
    listed = [[value] for value in around]
    return [
        *VALUES,
        *(setting.choices or ()),
        *(choice + "x" for choice in choices),
        *(choice.upper() for choice in choices),
        *around,
        *listed,
        *sections,
    ]


def is_whole_float(value):
    return isinstance(value, float) and value.is_integer()


def dargs_takes(arguments, block):
    """Return whether dargs takes a block, as deepmd-kit uses it."""
    base = Argument("base", dict, arguments)
    try:
        base.check_value(base.normalize_value(block, trim_pattern="_*"), strict=True)
    except ArgumentError:
        return False
    return True


SECTIONS = {
    key.section: key for root in (Settings, MultiTaskSettings) for key in sections_below(tree(root))
}


def identity(key):
    """Return all that the check of a key's values depends on; several sections have such keys alike."""
    return key.name, key.annotation, repr(key.setting), key.required, tuple(key.alias)


#: The section in which all values of a key are tried.
FIRST = {}
for owner, found in SECTIONS.items():
    for each in found.keys.values():
        FIRST.setdefault(identity(each), owner)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_types_choices_and_unknown_keys_are_judged_as_by_our_check(section, monkeypatch):
    # dargs has no rules over several keys, so leave them out of ours, and of the settings built from valid values.
    monkeypatch.setattr(checker, "rules_of", lambda section: ())
    monkeypatch.setattr(checker, "_freeze", lambda found: found)
    key, arguments = SECTIONS[section], arguments_of(section)
    base = minimal(key)
    blocks = [{**base, "_comment": 1}, {**base, "unknown_key": 1}]
    for name, inner in key.keys.items():
        # dargs takes a whole number written as a float, such as 1e6, for another type.
        plain = [value for value in values_for(inner) if not is_whole_float(value)]
        if FIRST[identity(inner)] is not section:
            plain = plain[:8]
        for spelling, some in [(name, plain), *((alias, plain[:12]) for alias in inner.alias)]:
            rest = {other: value for other, value in base.items() if other != name}
            blocks += [{**rest, spelling: value} for value in some]
        blocks.append({**base, f"{name}x": 1})
        blocks.append({other: value for other, value in base.items() if other != name})
    for name in foreign_of(section):
        blocks += [{**base, name: value} for value in (None, True, False, 0, 1, "x", [], {})]
        blocks += [{**base, name: value} for value in foreign_of(section)[name].neutral]
    ours = [not check(section, block).problems for block in blocks]
    theirs = [dargs_takes(arguments, copy.deepcopy(block)) for block in blocks]
    wrong = [block for block, one, other in zip(blocks, ours, theirs, strict=True) if one != other]
    assert not wrong, wrong[:5]
    assert {*ours} == {True, False}


def test_there_are_thousands_of_blocks():
    count = sum(
        len(values_for(inner))
        for section, key in SECTIONS.items()
        for inner in key.keys.values()
        if FIRST[identity(inner)] is section
    )
    assert count > 10_000


def test_dargs_normalises_an_input_as_we_do(water):
    water["model"]["descriptor"]["type"] = "se_a"
    water["training"]["stop_batch"] = water["training"].pop("numb_steps")
    base = Argument("base", dict, gen_args())
    plain = base.normalize_value(copy.deepcopy(water), trim_pattern="_*")
    base.check_value(plain, strict=True)
    assert plain == normalize(water).normalized
    assert normalize(plain).normalized == normalize(water).normalized


def test_several_models_may_share_parts_and_keys(water):
    descriptor = water["model"].pop("descriptor")
    shared = {"all": ["O", "H"], "d": descriptor}
    branch = {"type_map": "all", "descriptor": "d:0", "fitting_net": {"neuron": [4]}}
    data = water["training"].pop("training_data")
    branches = {"a": branch, "b": {**branch, "fitting_net": {}}}
    several = {
        "model": {"shared_dict": shared, "data_stat_nbatch": 3, "model_dict": branches},
        "loss_dict": {"a": {}, "b": {"start_pref_f": 1.0}},
        "learning_rate": water["learning_rate"],
        "training": {"numb_steps": 5, "data_dict": {key: {"training_data": data} for key in "ab"}},
    }
    wanted = normalize(copy.deepcopy(several)).normalized
    base = Argument("base", dict, gen_args(multi_task=True))
    plain = base.normalize_value(copy.deepcopy(several), trim_pattern="_*")
    base.check_value(plain, strict=True)
    assert normalize(plain).normalized == wanted
    assert wanted["model"]["model_dict"]["a"]["data_stat_nbatch"] == 3
    plain["model"]["model_dict"]["a"]["descriptor"] = 3
    with pytest.raises(ArgumentError):
        base.check_value(plain, strict=True)
    assert gen_args_multi_task().sub_fields.keys() == base.sub_fields.keys()


def test_older_names_of_a_setting_are_aliases():
    (key,) = (key for key in arguments_of(HybridMuonConfig) if key.name == "min_matrix_dim")
    assert {"min_2d_dim", "muon_min_2d_dim"} <= {*key.alias}


def test_the_text_says_what_a_value_may_be_and_an_error_too():
    keys = {key.name: key for key in arguments_of(HybridMuonConfig)}
    assert 'one of "none", "match_rms", "rectangular", "spectral"' in keys["scaling"].doc
    assert "≥ 0 and < 1; no effect without normuon true" in keys["normuon_beta"].doc
    base = Argument("base", dict, [*keys.values()])
    with pytest.raises(ArgumentError, match='"match_rms"'):
        base.check_value({"scaling": "rms"})


@pytest.mark.parametrize("words", [[], ["--explore"]])
def test_the_command_prints_them_as_json(capsys, words):
    assert main(["doc-train-input", "--out-type", "json", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert all(entry["object"] == "Argument" for entry in printed)
    if not words:
        assert [entry["name"] for entry in printed] == [key.name for key in gen_args()]
        assert printed == json.loads(encoded(gen_args()))
        optimizer = next(entry for entry in printed if entry["name"] == "optimizer")
        kinds = optimizer["sub_variants"]["type"]["choice_dict"]
        assert kinds["HybridMuon"]["sub_fields"]["normuon_beta"]["type"] == ["float"]
