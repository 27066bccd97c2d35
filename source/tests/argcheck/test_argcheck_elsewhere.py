"""What an input asks for that deepmd-kit has and this package does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from deepmd_kit_program import needs_deepmd_kit, python

from deepmd_muon.argcheck import DeepmdKitOnlyError, InputError, load, normalize
from deepmd_muon.argcheck.elsewhere import TYPES


def elsewhere(data):
    with pytest.raises(DeepmdKitOnlyError) as caught:
        normalize(data)
    return caught.value


def test_names_keys_of_deepmd_kit_alone_without_the_problems_that_follow(water):
    water["model"].update(type="dpa4", use_compile=False, bridging_method="zbl")
    del water["model"]["descriptor"]["type"]
    water["model"]["fitting_net"]["neuron"] = [0]
    error = elsewhere(water)
    assert [problem.path for problem in error.problems] == ["model/type"]
    assert error.elsewhere == "the model 'dpa4'"


@pytest.mark.parametrize(
    ("section", "value", "what"),
    [
        ("optimizer", {"type": "AdaMuon", "momentum": 0.9}, "the optimizer 'AdaMuon'"),
        ("loss", {"type": "tensor", "pref": 1.0}, "the loss 'tensor'"),
        ("nvnmd", {"version": 0}, "training for non-von-Neumann hardware"),
    ],
)
def test_each_section(water, section, value, what):
    water[section] = value
    assert elsewhere(water).elsewhere == what


def test_several_are_told_once_each(water):
    branch = {"type_map": "types", "descriptor": "all", "fitting_net": {"type": "dos"}}
    parts = {"types": ["O"], "all": {"type": "dpa2"}}
    water["model"] = {"model_dict": {"a": branch, "b": branch}, "shared_dict": parts}
    water["loss_dict"] = {"a": {}, "b": {"type": "tensor"}}
    water["optimizer"] = {"type": "LKF"}
    error = elsewhere(water)
    descriptor, *others = error.elsewhere.split(" and ")
    assert descriptor == "the descriptor 'dpa2'"
    assert others == ["the fitting net 'dos'", "the optimizer 'LKF'", "the loss 'tensor'"]
    assert [problem.path for problem in error.problems][:2] == [
        "model/shared_dict/all/type",
        "model/model_dict/a/fitting_net/type",
    ]


def test_a_key_of_deepmd_kit_comes_with_advice(water):
    water["training"]["acc_freq"] = 4
    error = elsewhere(water)
    assert error.elsewhere == "gradients summed over several steps (see accumulate_grad_batches)"
    assert "remove it or set 1" in str(error)


def test_a_mistake_beside_such_a_key_is_a_mistake(water):
    water["training"].update(acc_freq=4, zero_stage=9)
    with pytest.raises(InputError) as caught:
        normalize(water)
    assert not isinstance(caught.value, DeepmdKitOnlyError)
    assert {problem.path for problem in caught.value.problems} == {
        "training/acc_freq",
        "training/zero_stage",
    }


def test_an_unknown_name_is_a_mistake(water):
    water["optimizer"] = {"type": "HybridMoun"}
    with pytest.raises(InputError, match="did you mean 'HybridMuon'") as caught:
        normalize(water)
    assert not isinstance(caught.value, DeepmdKitOnlyError)


@needs_deepmd_kit
def test_the_names_are_those_of_deepmd_kit():
    code = """
import json, deepmd.utils.argcheck as a
names = lambda p: [n for x in p.get_all_argument() for n in (x.name, *x.alias)]
model = a.model_args().sub_variants["type"]
print(json.dumps({
    "model": [*model.choice_dict, *model.choice_alias],
    "model/descriptor": names(a.descrpt_args_plugin),
    "model/fitting_net": names(a.fitting_args_plugin),
    "loss": names(a.loss_args_plugin),
    "optimizer": names(a.opt_args_plugin),
}))
"""
    (line,) = [line for line in python("-c", code).splitlines() if line.startswith("{")]
    theirs = json.loads(line)
    theirs["model"].remove("standard")
    assert {path: set(names) for path, names in TYPES.items()} == {
        path: set(names) for path, names in theirs.items()
    }


@pytest.mark.deepmd_kit
@pytest.mark.skipif(
    "DEEPMD_KIT_EXAMPLES" not in os.environ, reason="DEEPMD_KIT_EXAMPLES names no examples"
)
def test_examples_for_the_trainer_of_deepmd_kit_are_handed_over(monkeypatch):
    """`source/tests/examples` trains the others."""
    from deepmd_muon.cli import main as cli

    handed_over = []
    monkeypatch.setattr(
        cli, "hand_over", lambda what, words, advice="": handed_over.append((what, words)) or 0
    )
    expected = []
    for path in sorted(Path(os.environ["DEEPMD_KIT_EXAMPLES"]).rglob("*.json")):
        content = json.loads(path.read_text())
        if not (isinstance(content, dict) and "training" in content):
            continue
        try:
            load(path)
        except DeepmdKitOnlyError:
            words = ["--pt", "train", str(path), "-o", os.devnull, "-v", "ERROR"]
            assert cli.main(words) == 0, path
            expected.append(words)
    assert len(expected) >= 20
    assert [words for _, words in handed_over] == expected
    assert all(what for what, _ in handed_over)
