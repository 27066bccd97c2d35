"""The notebook of examples/five_minutes, cell by cell in one process, with few steps; Jupyter is replaced."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).parents[3]
NOTEBOOK = TOP / "examples" / "five_minutes" / "first_potential.ipynb"


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "five_minutes"
    folder.mkdir()
    (tmp_path / "cu_au_emt").symlink_to(TOP / "examples" / "cu_au_emt")
    monkeypatch.chdir(folder)
    shown = []
    display = ModuleType("IPython.display")
    display.Image = Path
    display.display = lambda *pictures: shown.extend(pictures)
    jupyter = ModuleType("IPython")
    jupyter.version_info = (9, 0)  # matplotlib asks for it
    monkeypatch.setitem(sys.modules, "IPython", jupyter)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names = {}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], f"cell {number}: outputs are of one machine"
            code = "".join(cell["source"])
            code = code.replace('"2000"', '"300"').replace('"--time", "1"', '"--time", "0.01"')
            exec(compile(code, f"cell {number}", "exec"), names)
    assert [picture.name for picture in shown] == ["lcurve.png", "parity.png", "report.png"]
    assert all(picture.exists() for picture in shown)
    assert Path("report.html").exists()
    (lattice, modulus), (of_potential, _) = names["results"].values()
    assert lattice == pytest.approx(3.59, abs=0.02)
    assert modulus == pytest.approx(134, abs=10)  # EMT's
    assert of_potential == pytest.approx(lattice, abs=0.05)
    assert "K after 0.4 ps" in capsys.readouterr().out
