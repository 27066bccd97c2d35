"""Inputs that are wrong: every problem at once, with its path and what to do."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepmd_muon.argcheck import InputError, Problem, load, normalize
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.setting import InvalidSettingError


def refusals():
    """Yield the changes of each entry of `refusals.txt`, and its answers."""
    changes, answers = [], []
    text = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8")
    for line in [line for line in text.splitlines() if not line.startswith("#")]:
        if answers and not line.startswith(" "):
            yield pytest.param(changes, answers, id="; ".join(changes))
            changes, answers = [], []
        (answers if line.startswith(" ") else changes).append(line.strip())
    yield pytest.param(changes, answers, id="; ".join(changes))


def apply(data, change):
    """Set or remove the value at a path, making sections on the way; return the path."""
    path, setting, value = change.removesuffix(" removed").partition(" = ")
    *sections, key = path.split("/")
    for name in sections:
        data = data.setdefault(name, {})
    if setting:
        data[key] = json.loads(value)
    else:
        del data[key]
    return path


@pytest.mark.parametrize(("changes", "answers"), list(refusals()))
def test_each_wrong_input_has_its_answers(water, problems, changes, answers):
    paths = [apply(water, change) for change in changes]
    expected = dict(re.fullmatch(r"(?:(\S+): )?(.*)", answer).groups() for answer in answers)
    if None in expected:
        (path,) = paths
        expected[path] = expected.pop(None)
    found = problems(water)
    assert found.keys() == expected.keys()
    for path, sentence in expected.items():
        pattern = ".*".join(map(re.escape, sentence.split("…")))
        assert re.fullmatch(pattern, found[path]), (found[path], sentence)


def test_a_number_that_no_float_holds_is_cut_in_the_answer(water, problems):
    water["model"]["descriptor"]["rcut"] = 10**400
    shown = "1" + "0" * 56 + "..."
    assert problems(water) == {"model/descriptor/rcut": f"must be a number; found {shown}"}


@pytest.mark.parametrize("value", [2, True, ["2d"], {"a": 1}, 0.5])
def test_a_wrong_type_of_a_choice_lists_its_values(value):
    with pytest.raises(InvalidSettingError, match="'2d', 'flat', 'slice'"):
        HybridMuonConfig(muon_mode=value)


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


def test_optional_sections_may_be_missing(water):
    for name in ("loss", "_comment"):
        del water[name]
    del water["model"]["fitting_net"]
    del water["training"]["validation_data"]
    settings = normalize(water).settings
    assert settings.loss.start_pref_f == 1000.0
    assert settings.model.fitting_net.neuron == (120, 120, 120)
    assert settings.training.validation_data is None


@pytest.mark.parametrize("data", [[], "text", None, 3])
def test_an_input_must_be_an_object(data):
    with pytest.raises(InputError, match="must be an object with sections"):
        normalize(data)


def paths_of(data, path=()):
    """Every path into nested dicts and lists."""
    yield path
    if isinstance(data, list):
        data = dict(enumerate(data))
    for key, value in data.items() if isinstance(data, dict) else ():
        yield from paths_of(value, (*path, key))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
OLDER = {"muon_2d_only": True, "min_2d_dim": 2, "opt_type": "HybridMuon"}
OLDER |= {"warmup_steps": 9, "numb_test": 1}


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
