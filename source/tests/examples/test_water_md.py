"""The page on molecular dynamics and its example: the printed input is the file, and the ASE script runs."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

TOP = Path(__file__).parents[3]
PAGE = (TOP / "doc" / "molecular-dynamics.md").read_text()
EXAMPLE = TOP / "examples" / "water_md"


def test_the_page_prints_the_input_of_lammps():
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert (EXAMPLE / "in.lammps").read_text() in blocks


@pytest.mark.parametrize("script", ["make_structure.py", "nve.py", "ipi_client.py"])
@pytest.mark.parametrize(
    ("words", "status", "told"),
    [(["--help"], 0, "usage"), (["--no-such-option"], 2, "usage")],
)
def test_a_script_explains_itself(tmp_path, monkeypatch, capsys, script, words, status, told):
    pytest.importorskip("ase")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLE / script), run_name="__main__")
    assert caught.value.code == status
    printed = capsys.readouterr()
    assert told in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


def test_scripts_name_the_structure_that_they_lack(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ase")
    monkeypatch.chdir(tmp_path)
    for script in ("nve.py", "ipi_client.py"):
        monkeypatch.setattr(sys, "argv", [script, "model.pth"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLE / script), run_name="__main__")
        assert "make_structure.py" in capsys.readouterr().err


def test_no_script_of_an_example_reads_its_words_by_number():
    scripts = sorted((TOP / "examples").glob("*/*.py"))
    assert len(scripts) > 5
    assert [str(path) for path in scripts if "sys.argv[" in path.read_text()] == []


def test_its_commands_exist():
    from deepmd_muon.cli.main import build_parser

    commands = re.findall(r"^dp --pt (.*)$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == [
        "train",
        "freeze",
        "freeze",
        "compress",
        "compress",
    ]
    for command in commands:
        build_parser().parse_args(["--pt", *command.partition("#")[0].split()])


@pytest.fixture
def potential(tmp_path):
    """A checkpoint of the example's model as it starts, where the page's commands would leave the trained one."""
    import json

    from deepmd_muon.argcheck import normalize
    from deepmd_muon.model import build_model
    from deepmd_muon.model.deepmd_kit import to_deepmd_kit

    content = json.loads((TOP / "examples" / "water_xtb" / "input.json").read_text())
    content["model"]["descriptor"]["sel"] = [40, 80]
    section = normalize(content).normalized["model"]
    path = tmp_path / "model.ckpt.pt"
    torch.save({"model": to_deepmd_kit(build_model(section), {"lr": 1e-3, "step": 0})}, path)
    return path


def test_freeze_structure_and_nve_of_the_page(potential, tmp_path, monkeypatch, capsys):
    pytest.importorskip("ase")
    from deepmd_muon.cli.main import main

    assert main(["--pt", "freeze", "-c", str(potential), "-o", str(tmp_path / "model.pth")]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for script, *words in (("make_structure.py",), ("nve.py", "model.pth", "10")):
        monkeypatch.setattr(sys, "argv", [script, *words])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runpy.run_path(str(EXAMPLE / script), run_name="__main__")
        printed = capsys.readouterr()
    first, last = printed.out.splitlines()
    assert first.startswith("   0.0 fs")
    assert last.startswith("   5.0 fs")
    total = [float(line.split()[-2]) for line in (first, last)]
    assert total[0] == pytest.approx(total[1], abs=1e-3)
    assert (tmp_path / "water.data").read_text().split("\n")[2].strip().startswith("96")
