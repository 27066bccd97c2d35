"""Our `dp test` against deepmd-kit's own, on one checkpoint and the same systems."""

import re

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp
from small_models import section_of
from write_systems import write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

pytestmark = MARKS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with averaged weights elsewhere, and two systems of different size with random labels."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(5)
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    for name, molecules, nframes in (("large", 3, 4), ("small", 1, 2)):
        places = 2.5 * np.arange(molecules)[:, None, None] * np.array([1.0, 0.6, 0.3])
        coord = (places + molecule).reshape(-1, 3) + random.normal(
            scale=0.05, size=(nframes, 3 * molecules, 3)
        )
        box = np.diag([9.0, 9.5, 10.0])
        box[1, 0] = 0.7
        arrays = {
            "coord": coord.reshape(nframes, -1),
            "box": np.tile(box.ravel(), (nframes, 1)),
            "energy": random.normal(size=nframes),
            "force": random.normal(size=(nframes, 9 * molecules)),
            "virial": random.normal(size=(nframes, 9)),
        }
        write_npy(tmp_path / name, [0, 1, 1] * molecules, [arrays], "OH")
    descriptor = {
        "type": "se_e2_a",
        "sel": [8, 16],
        "rcut": 4.0,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    }
    model = build_model(section_of(descriptor, {"neuron": [6, 6], "seed": 1}))
    state = to_deepmd_kit(model, {"lr": 1e-3, "step": 0})
    torch.save({"model": state}, tmp_path / "model.pt")
    (tmp_path / "systems.txt").write_text("large\nsmall\n")
    return tmp_path


def test_tables_and_detail_files_are_the_same(folder, capsys):
    words = ["test", "-m", "model.pt", "-f", "systems.txt"]
    theirs = dp(*words, "-d", "theirs")
    assert main(["--pt", *words, "-d", "ours"]) == 0
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
            (folder / f"{who}.{kind}.out").read_text(encoding="utf-8").splitlines()[0]
            for who in ("ours", "theirs")
        ]
        assert first[0] == first[1]
