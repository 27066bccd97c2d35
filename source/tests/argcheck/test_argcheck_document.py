"""The reference and the JSON Schema say what the check does."""

from pathlib import Path

import jsonschema
import pytest

from deepmd_muon.argcheck import normalize
from deepmd_muon.argcheck.document import reference
from deepmd_muon.argcheck.json_schema import json_schema
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import Settings

REFERENCE = Path(__file__).parents[3] / "doc" / "input-reference.md"


def keys_below(key):
    """Every key of the schema."""
    for kind in [*key.kinds.values()] or [key]:
        for inner in kind.keys.values():
            yield inner
            yield from keys_below(inner)


def test_the_page_in_doc_is_up_to_date():
    assert REFERENCE.read_text(encoding="utf-8") == reference(), (
        "write it anew: python -m deepmd_muon.argcheck.document > doc/input-reference.md"
    )


def test_every_key_is_described():
    text = " ".join(reference().split())
    keys = list(keys_below(tree(Settings)))
    assert len({key.name for key in keys}) > 90
    for key in keys:
        assert key.is_section or f"**`{key.name}`**" in text
        assert len(key.setting.doc) > 10, key.name


def test_an_entry():
    assert (
        "- **`axis_neuron`** (a whole number; ≥ 1 and ≤ 65536; default 4; also `n_axis_neuron`)  \n"
        "  Number of columns of the embedding matrix that the descriptor multiplies the whole matrix with.\n"
    ) in reference()
    assert '- **`type`** (only "ener", default "ener")' in reference()
    assert '- **`type`** (one of "exp", "cosine", "wsd", default "exp")' in reference()
    assert "\n## training\n" in reference()
    assert "\n\n\n" not in reference()


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_json_schema_accepts_what_the_check_accepts(validator, water):
    water["$schema"] = "input.schema.json"
    water["model"]["descriptor"]["type"] = "se_a"
    water["training"]["numb_steps"] = 1e6
    water["training"]["training_data"]["systems"] = "data"
    water["training"]["training_data"]["set_prefix"] = "set"
    water["optimizer"] = {"type": "HybridMuon", "muon_momentum": 0.9, "muon_mode": "Flat"}
    water["model"]["descriptor"]["activation_function"] = "SiluT:3.0"
    normalize(water)
    assert list(validator.iter_errors(water)) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "descriptr", {}),
        ("optimizer", "muon_mode", "3d"),
        ("optimizer", "vector_route", "AdamW"),
        ("optimizer", "schedule", []),
        ("optimizer", "momentum", -3),
        ("optimizer", "momentum", 1),
        ("optimizer", "type", "Adam"),
        ("optimizer", "type", "LKF"),
        ("learning_rate", "start_lr", 0),
        ("learning_rate", "decay_type", "linear"),
        ("learning_rate", "start_lr", None),
        ("training", "numb_steps", 1.5),
        ("training", "seed", True),
        ("training", "zero_stage", 4),
        ("training", "acc_freq", 2),
        ("training", "training_data", {"systems": []}),
        ("training", "training_data", {"systems": "a", "batch_size": "auto:x"}),
        ("training", "training_data", {}),
    ],
)
def test_the_json_schema_refuses_what_the_check_refuses(
    validator, water, problems, section, key, value
):
    water["optimizer"] = {"type": "HybridMuon", "momentum": 0.9}
    water[section][key] = value
    assert problems(water)
    if value == {"systems": []}:
        # A rule of Python: the schema cannot know all of them.
        return
    assert list(validator.iter_errors(water)) != []
