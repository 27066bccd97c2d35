"""Only ASE calculators are called, whatever class or function a file names."""

import json
import sys
from pathlib import Path

import pytest
from ase.calculators.emt import EMT

from deepmd_muon.cli.main import main
from deepmd_muon.explore.calculator import CalculatorChoice, make_calculator
from deepmd_muon.explore.settings import ExploreError


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("subprocess:Popen", {"args": ["touch", "note"]}),
        ("subprocess:run", {"args": ["touch", "note"]}),
        ("os:mkdir", {"path": "note"}),
        ("builtins:open", {"file": "note", "mode": "w"}),
        ("pathlib:Path", {}),
        ("ase:Atoms", {}),
        ("labellers:NoCalculator", {"note": "note"}),
        ("labellers:unannounced", {"note": "note"}),
        ("labellers:os", {}),
    ],
)
def test_what_is_not_a_calculator_is_not_called(tmp_path, monkeypatch, name, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExploreError, match="not an ASE calculator class"):
        make_calculator(CalculatorChoice(name, arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ase.calculators.emt:EMT", "labellers:announced"])
def test_calculator_classes_and_functions_that_announce_one_are_called(name):
    made = make_calculator(CalculatorChoice(name, {"asap_cutoff": True}))
    assert type(made) is EMT
    assert made.parameters.asap_cutoff is True


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise LookupError('no licence')", "no licence"),
        ("def Thing(", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, content, words):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_module.py").write_text(content)
    with pytest.raises(ExploreError, match=words) as caught:
        make_calculator(CalculatorChoice("broken_module:Thing", {}, prefix="--"))
    assert str(caught.value).startswith("--calculator: broken_module")
    assert "broken_module" not in sys.modules


def test_a_calculator_that_refuses_its_arguments_is_named_shortly():
    with pytest.raises(ExploreError, match=r"labels/arguments: EMT refuses") as caught:
        make_calculator(CalculatorChoice("ase.calculators.emt:EMT", {"atoms": "x" * 100_000}))
    assert len(str(caught.value)) < 2000


def test_both_commands_refuse_a_program(copper, explore, capsys):
    arguments = {"args": ["touch", "note"]}
    assert explore(labels={"calculator": "subprocess:Popen", "arguments": arguments}) == 2
    assert "labels/calculator: subprocess:Popen" in capsys.readouterr().err
    words = ["--calculator", "subprocess:Popen", "--arguments", json.dumps(arguments)]
    assert main(["zbl", "Cu", "--dimers", "d", *words]) == 2
    assert "--calculator: subprocess:Popen" in capsys.readouterr().err
    assert not (copper / "note").exists()
