"""The inputs beside the example data are accepted, find their data and train."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.argcheck import load
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
INPUTS = sorted(EXAMPLES.glob("*/input.json"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.parent.name)
def test_an_input_is_accepted_as_it_stands_and_finds_its_data(path):
    checked = load(path)
    assert checked.notices == ()
    training = checked.settings.training
    for data, nsystems in ((training.training_data, 3), (training.validation_data, 3)):
        systems = open_systems([str(path.parent / name) for name in data.systems], checked.settings.model.type_map)
        assert len(systems) == nsystems


def test_copper_learns_all_three_boundary_conditions(tmp_path, monkeypatch):
    """A few steps of the example, shortened: every label is compared, and the forces get better."""
    content = json.loads((EXAMPLES / "cu_emt" / "input.json").read_text())
    for part in ("training_data", "validation_data"):
        content["training"][part]["systems"] = [
            str(EXAMPLES / "cu_emt" / name) for name in content["training"][part]["systems"]
        ]
    content["training"].update(numb_steps=60, disp_freq=30, save_freq=60)
    content["learning_rate"]["stop_lr"] = 1e-4
    monkeypatch.chdir(tmp_path)
    Path("input.json").write_text(json.dumps(content))
    assert main(["--pt", "train", "input.json"]) == 0
    names = Path("lcurve.out").read_text().splitlines()[0].split()[1:]
    rows = [dict(zip(names, row, strict=True)) for row in np.loadtxt("lcurve.out", ndmin=2)]
    assert [row["step"] for row in rows] == [1, 30, 60]
    for quantity in "efv":
        for part in ("trn", "val"):
            assert all(math.isfinite(row[f"rmse_{quantity}_{part}"]) for row in rows), (quantity, part)
    assert rows[-1]["rmse_f_trn"] < 0.5 * rows[0]["rmse_f_trn"]
