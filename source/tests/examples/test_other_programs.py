"""The scripts of doc/other-programs.md, with the programs that they are for."""

import os
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.cli.main import main

pytestmark = pytest.mark.programs
TOP = Path(__file__).parents[3]
PAGE = (TOP / "doc" / "other-programs.md").read_text()
SCRIPTS = dict(re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The copper example, trained for a part of its steps."""
    import json

    folder = tmp_path_factory.mktemp("copper") / "cu_emt"
    shutil.copytree(TOP / "examples" / "cu_emt", folder)
    content = json.loads((folder / "input.json").read_text())
    content["training"].update(numb_steps=400, disp_freq=400, save_freq=400)
    (folder / "input.json").write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["--pt", "train", "input.json"]) == 0
    return folder


@pytest.fixture
def run(trained, monkeypatch):
    """Run a script of the page next to the model; return its names."""
    monkeypatch.chdir(trained)

    def start(name):
        Path(name).write_text(SCRIPTS[name])
        return runpy.run_path(name, run_name="__main__")

    return start


def test_frequencies_are_those_of_ase(run):
    from ase.phonons import Phonons

    names = run("phonons.py")
    shown = names["phonon"].qpoints.frequencies[0]
    assert Path("phonopy_params.yaml").exists()
    phonons = Phonons(names["crystal"], names["calculator"], supercell=(3, 3, 3), delta=0.01)
    phonons.run()
    phonons.read(acoustic=True)
    energies = phonons.band_structure([[0.5, 0.5, 0.0]])[0]  # [eV]
    terahertz = energies / 4.135667696e-3
    np.testing.assert_allclose(np.sort(terahertz), np.sort(shown), atol=0.05)


def test_forces_with_dispersion_are_slopes_of_the_energy(run, capsys):
    atoms = run("dispersion.py")["atoms"]
    assert "with D3" in capsys.readouterr().out
    model, dispersion = atoms.calc.mixer.calcs
    total = atoms.get_potential_energy()
    alone = [calc.get_potential_energy(atoms) for calc in (model, dispersion)]
    assert total == pytest.approx(sum(alone), abs=1e-6)
    assert alone[1] < -0.1
    force = atoms.get_forces()[3, 1]
    energies = []
    for shift in (0.01, -0.02):
        atoms.positions[3, 1] += shift
        energies.append(atoms.get_potential_energy())
    assert force == pytest.approx((energies[1] - energies[0]) / 0.02, abs=2e-3)


def test_plumed_writes_the_distance_it_restrains(run):
    from ase import units

    if not os.environ.get("PLUMED_KERNEL"):
        pytest.fail("set PLUMED_KERNEL to libplumedKernel.so of a PLUMED installation")
    run("biased.py")
    rows = np.loadtxt("COLVAR")
    assert len(rows) >= 10
    assert rows[0, 1] == pytest.approx(3.61 / np.sqrt(2), abs=0.05)
    np.testing.assert_allclose(np.diff(rows[:, 0]), 10 * units.fs, rtol=1e-3)  # 5 steps of 2 fs
