"""Words of a YAML input mean what YAML 1.2's core schema says, and whole words decide."""

import pytest

from deepmd_muon.argcheck import InputError
from deepmd_muon.argcheck.files import read


def value(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n")
    return read(path)["key"]


WORDS = (
    "2d 3d 300K 12:30 1:30:00 2026-11-21 2026-11-21T10:00:00Z 1_000 0b11 1e5x = "
    "yes no Yes NO on off y n trueish falsehood true_ .infinite nanny"
)


@pytest.mark.parametrize("word", WORDS.split())
def test_words_stay_words(tmp_path, word):
    assert value(tmp_path, word) == word


VALUES = {"true": True, "True": True, "FALSE": False, "null": None, "~": None, "": None}
VALUES |= {"12": 12, "-3": -3, "+7": 7, "010": 10, "0x1F": 31, "0o17": 15, "'12'": "12"}
VALUES |= {"1e-3": 1e-3, "1.": 1.0, ".5": 0.5, "-2.5E+3": -2500.0, "-.inf": float("-inf")}


@pytest.mark.parametrize(("text", "expected"), VALUES.items())
def test_numbers_and_truth_values(tmp_path, text, expected):
    found = value(tmp_path, text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!int many", "the string 'many' is not of type int at line 1, column 6"),
        ("!!bool maybe", "the string 'maybe' is not of type bool at line 1, column 6"),
        ("[1, !!float x]", "the string 'x' is not of type float at line 1, column 10"),
        ("!!timestamp 2026-11-21", "could not determine a constructor"),
    ],
)
def test_values_that_cannot_be_made_are_problems_with_a_place(tmp_path, text, message):
    with pytest.raises(InputError, match=r"1 problem in .*a\.yaml:\n  is not YAML: ") as error:
        value(tmp_path, text)
    assert message in str(error.value)
