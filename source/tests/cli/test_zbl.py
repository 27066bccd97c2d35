"""`dp zbl`: the table against ASE-free numbers of the literature's formula, and dimers as training data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import run_dp

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.data.zbl import zbl

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt"


def test_energies_fall_as_bare_nuclei_and_slopes_are_those_of_finite_differences():
    energy, _ = zbl("O", "H", np.array([1e-6]))
    assert energy[0] * 1e-6 == pytest.approx(14.39964548 * 8, rel=1e-4)
    # By hand: a = 0.4685/(29^0.23 + 29^0.23) = 0.107975 Å, φ(1 Å) = 0.0049765, 14.39965·841·φ = 60.27 eV.
    energy, _ = zbl("Cu", "Cu", np.array([1.0]))
    length = 0.46850 / (2.0 * 29**0.23)
    screening = sum(
        a * np.exp(-b / length)
        for a, b in ((0.18175, 3.1998), (0.50986, 0.94229), (0.28022, 0.4029), (0.02817, 0.20162))
    )
    assert energy[0] == pytest.approx(14.39964548 * 841 * screening, rel=1e-8)
    r = np.array([0.3, 0.8, 1.5])
    numeric = (zbl("O", "H", r + 1e-5)[0] - zbl("O", "H", r - 1e-5)[0]) / 2e-5
    np.testing.assert_allclose(zbl("O", "H", r)[1], numeric, rtol=1e-7)


def test_a_table_is_zbl_inside_and_ends_in_zeros(tmp_path):
    place = tmp_path / "table.txt"
    assert run_dp(f"zbl O H -o {place} --step 0.01 --begin 1 --end 2") == 0
    rows = np.loadtxt(place)
    assert rows.shape[1] == 4
    inner = rows[:, 0] <= 1.0
    for column, pair in enumerate((("O", "O"), ("O", "H"), ("H", "H")), start=1):
        np.testing.assert_allclose(rows[inner, column], zbl(*pair, rows[inner, 0])[0], rtol=1e-9)
        assert (np.diff(rows[:, column]) <= 0.0).all()
    assert not rows[-1, 1:].any()
    from deepmd_muon.model.short_range import splines_of

    assert splines_of(str(place), 2, 6.0)[1].shape[:2] == (2, 2)


@pytest.mark.parametrize("name", ["dimers", "dimers.xyz"])
def test_dimers_train_with_forces_alone(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLE / "data", "data")
    assert run_dp(f"zbl Cu --dimers {name} --begin 0.5 --end 1.0 --frames 6") == 0
    (system,) = open_systems(name, ["Cu"])
    frames = system.frames(range(6))
    distance = np.linalg.norm(frames.coord[:, 1] - frames.coord[:, 0], axis=1)
    np.testing.assert_allclose(distance, np.linspace(0.5, 1.0, 6))
    np.testing.assert_allclose(frames.force[:, 1, 0], -zbl("Cu", "Cu", distance)[1], rtol=1e-6)
    assert system.labels == {"force"}
    content = json.loads((EXAMPLE / "input.json").read_text())
    content["training"]["training_data"]["systems"].append(name)
    content["training"] |= {"numb_steps": 2, "disp_freq": 1, "save_freq": 2}
    content["training"]["validation_data"]["numb_btch"] = 1
    Path("input.json").write_text(json.dumps(content))
    assert main(["--pt", "train", "input.json"]) == 0
    assert np.isfinite(np.loadtxt("lcurve.out")[:, 1]).all()


def test_a_calculator_labels_dimers_with_its_energies(tmp_path, monkeypatch, capsys):
    emt = pytest.importorskip("ase.calculators.emt").EMT
    atoms = pytest.importorskip("ase").Atoms
    monkeypatch.chdir(tmp_path)
    words = ["--calculator", "ase.calculators.emt:EMT", "--arguments", '{"asap_cutoff": true}']
    assert (
        main(
            [
                "zbl",
                "Cu",
                "Ag",
                "--dimers",
                "d",
                "--begin",
                "1.5",
                "--end",
                "2.5",
                "--frames",
                "3",
                *words,
            ]
        )
        == 0
    )
    assert "9 dimers of 3 pairs" in capsys.readouterr().out
    (system,) = (
        one for one in open_systems("d", ["Cu", "Ag"]) if len(set(one.frames([0]).atype[0])) == 2
    )
    frames = system.frames(range(3))
    assert system.labels == {"energy", "force"}
    pair = atoms("CuAg", frames.coord[1], calculator=emt(asap_cutoff=True))
    assert frames.energy[1] == pytest.approx(pair.get_potential_energy())
    np.testing.assert_allclose(frames.force[1], pair.get_forces(), atol=1e-6)


def test_dimers_that_a_calculator_fails_for_are_left_out(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ase")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("some.py").write_text(
        "from ase.calculators.lj import LennardJones\n"
        "class Some(LennardJones):\n"
        "    def calculate(self, atoms, *words, **values):\n"
        "        if atoms.get_distance(0, 1) < 1.4:\n"
        "            raise RuntimeError('no convergence')\n"
        "        super().calculate(atoms, *words, **values)\n"
    )
    words = "zbl O --dimers d.xyz --begin 1 --frames 5 --calculator some:Some"
    assert run_dp(f"{words} --end 2") == 0
    message = "2 dimers without a label, the first at 1.000 Å (RuntimeError: no convergence)"
    assert message in capsys.readouterr().out
    assert open_systems("d.xyz", ["O"])[0].nframes == 3
    assert run_dp(f"{words} --end 1.2") == 2
    assert "no convergence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["Xx", "-o", "t"], "Xx"),
        (["O", "O", "-o", "t"], "once"),
        (["O", "-o", "t", "--begin", "3"], "grow"),
        (["O", "--dimers", "t", "--frames", "1"], "2 distances"),
        (["O", "-o", "t", "--calculator", "a:B"], "--dimers"),
        (["O", "--dimers", "t", "--arguments", "{}"], "--calculator"),
        (["O", "--dimers", "t", "--calculator", "nowhere:B"], "--calculator: nowhere"),
        (["O", "--dimers", "t", "--calculator", "a:B", "--arguments", "{"], "JSON"),
        (["O", "--dimers", "t", "--calculator", "a:B", "--time-limit", "0"], "--time-limit"),
        (["O", "--dimers", "t", "--calculator", "shutil:which"], "--calculator: shutil:which"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, words, word):
    monkeypatch.chdir(tmp_path)
    assert main(["zbl", *words]) == 2
    assert word in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
