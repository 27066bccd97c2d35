"""Our `dp test` against deepmd-kit's own, on one checkpoint and the same systems."""

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

pytestmark = pytest.mark.deepmd_kit


@pytest.fixture(scope="module")
def deepmd_kit():
    """The words that start deepmd-kit."""
    if "DEEPMD_KIT_DP" in os.environ:
        return [os.environ["DEEPMD_KIT_DP"]]
    if importlib.util.find_spec("deepmd") is not None:
        return [sys.executable, "-m", "deepmd"]
    return pytest.skip("deepmd-kit is not here: install it, or set DEEPMD_KIT_DP to its dp")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with averaged weights elsewhere, and two systems of different size with random labels."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    for name, molecules, nframes in (("large", 3, 4), ("small", 1, 2)):
        places = 2.5 * np.arange(molecules)[:, None, None] * np.array([1.0, 0.6, 0.3])
        coord = (places + molecule).reshape(-1, 3) + random.normal(scale=0.05, size=(nframes, 3 * molecules, 3))
        (tmp_path / name / "set.000").mkdir(parents=True)
        (tmp_path / name / "type.raw").write_text("0 1 1 " * molecules)
        (tmp_path / name / "type_map.raw").write_text("O\nH\n")
        box = np.diag([9.0, 9.5, 10.0])
        box[1, 0] = 0.7
        arrays = {
            "coord": coord.reshape(nframes, -1),
            "box": np.tile(box.ravel(), (nframes, 1)),
            "energy": random.normal(size=nframes),
            "force": random.normal(size=(nframes, 9 * molecules)),
            "virial": random.normal(size=(nframes, 9)),
        }
        for label, values in arrays.items():
            np.save(tmp_path / name / "set.000" / f"{label}.npy", values)
    section = {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": [8, 16], "rcut": 4.0, "neuron": [4, 8], "axis_neuron": 2, "seed": 1},
        "fitting_net": {"neuron": [6, 6], "seed": 1},
    }
    rest = {"learning_rate": {"start_lr": 1e-3}, "training": {"training_data": {"systems": "."}, "numb_steps": 1}}
    section = normalize({"model": section, "loss": {}, **rest}).normalized["model"]
    state = to_deepmd_kit(build_model(section), {"lr": 1e-3, "step": 0})
    torch.save({"model": state}, tmp_path / "model.pt")
    (tmp_path / "systems.txt").write_text("large\nsmall\n")
    return tmp_path


def test_tables_and_detail_files_are_the_same(deepmd_kit, folder, capsys):
    words = ["--pt", "test", "-m", "model.pt", "-f", "systems.txt"]
    theirs = subprocess.run([*deepmd_kit, *words, "-d", "theirs"], capture_output=True, text=True, check=True).stderr
    assert main([*words, "-d", "ours"]) == 0
    ours = capsys.readouterr().err

    def figures(text):
        found = re.findall(r"DEEPMD INFO +((?:Energy|Force|Virial|Stress).*?): (\S+) (eV\S*)", text)
        return [(name, unit) for name, _, unit in found], [float(value) for _, value, _ in found]

    (our_names, our_values), (their_names, their_values) = figures(ours), figures(theirs)
    assert len(our_names) == 36
    assert our_names == their_names
    assert our_values == pytest.approx(their_values, rel=2e-6)
    for kind in ("e", "e_peratom", "f", "v", "v_peratom", "s"):
        mine = np.loadtxt(folder / f"ours.{kind}.out", encoding="utf-8")
        reference = np.loadtxt(folder / f"theirs.{kind}.out", encoding="utf-8")
        np.testing.assert_allclose(mine, reference, rtol=1e-9, atol=1e-12, err_msg=kind)
        first = [
            (folder / f"{who}.{kind}.out").read_text(encoding="utf-8").splitlines()[0] for who in ("ours", "theirs")
        ]
        assert first[0] == first[1]
