"""The inputs beside the example data are accepted, find their data and train."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_muon.argcheck import load, normalize
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
INPUTS = sorted(EXAMPLES.glob("*/input.json"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.parent.name)
def test_an_input_is_accepted_as_it_stands_and_finds_its_data(path):
    checked = load(path)
    assert checked.notices == ()
    training = checked.settings.training
    for data, nsystems in ((training.training_data, 3), (training.validation_data, 3)):
        systems = open_systems(
            [str(path.parent / name) for name in data.systems], checked.settings.model.type_map
        )
        assert len(systems) == nsystems


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.parent.name)
def test_an_input_leaves_the_rates_to_the_default_and_shows_errors_of_all_frames(path):
    """An explicit lr_adjust_coeff switches off the default of adam_lr_ratio; few frames make a curve of noise."""
    content = json.loads(path.read_text())
    assert content["optimizer"] == {"type": "HybridMuon"}
    taken = normalize(content).settings.optimizer
    assert (taken.lr_adjust_coeff, taken.adam_lr_ratio) == (8.64, 10.0)
    training = content["training"]
    assert training["validation_data"]["numb_btch"] == "all"
    assert training["numb_steps"] / training["disp_freq"] >= 20


@pytest.mark.parametrize("name", ["dpa1_water", "dpa3_water"])
def test_attention_and_graph_potentials_train(name, tmp_path, monkeypatch):
    """Two steps of each, on one frame of the smallest system."""
    content = json.loads((EXAMPLES / name / "input.json").read_text())
    content["training"]["training_data"]["systems"] = [
        str(EXAMPLES / "water_xtb" / "data" / "valid" / "300K")
    ]
    content["training"]["validation_data"]["systems"] = [
        str(EXAMPLES / "water_xtb" / "data" / "valid" / "300K")
    ]
    content["training"]["validation_data"]["numb_btch"] = 1
    content["training"].update(numb_steps=2, disp_freq=1, save_freq=2)
    content["model"]["data_stat_nbatch"] = 1
    monkeypatch.chdir(tmp_path)
    Path("input.json").write_text(json.dumps(content))
    assert main(["--pt", "train", "input.json"]) == 0
    rows = np.loadtxt("lcurve.out")
    assert rows[:, 0].tolist() == [1, 2]
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("name", ["dpa1_water", "dpa3_water"])
def test_the_table_of_routes_is_that_of_the_input(name, capsys):
    assert main(["--pt", "show", "routing", str(EXAMPLES / name / "input.json")]) == 0
    *printed, _, summary = capsys.readouterr().out.splitlines()
    routes = [line.split()[:4] for line in printed[1:]]
    page = (EXAMPLES / name / "README.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (\S+) \| (\w+) \|$", page, re.MULTILINE)
    assert len(rows) > 10
    for parameter, shape, route in rows:
        assert [route.lower()] == [
            r for n, s, _, r in routes if n.endswith(parameter) and s == shape
        ], parameter
    matrices, share = re.search(r"muon (\d+) parameters .*?([\d.]+) %", summary).groups()
    assert f"Muon moves {matrices} matrices with {share} % of the weights" in page


def test_dpa3_starts_with_forces_of_the_right_size():
    """Forces a hundred times smaller than the data's have gradients to match: 1000 steps learn nothing."""
    section = load(EXAMPLES / "dpa3_water" / "input.json").normalized["model"]
    folder = EXAMPLES / "water_xtb" / "data" / "train" / "350K"
    coord, box, force = (
        np.load(folder / "set.000" / f"{key}.npy")[:1] for key in ("coord", "box", "force")
    )
    atype = np.loadtxt(folder / "type.raw", dtype=int)

    def share(model):
        started = (
            Predictor(build_model(model))
            .predict(coord.reshape(1, -1, 3), box.reshape(1, 3, 3), atype)
            .force
        )
        return np.sqrt(np.mean(started**2) / np.mean(force**2))

    assert 0.2 < share(section) < 1.0
    section["descriptor"]["repflow"].update(edge_init_use_dist=True, fix_stat_std=0.3)
    assert share(section) < 0.01  # the published settings


@pytest.mark.parametrize("name", ["dpa1_water", "dpa3_water"])
def test_the_readme_states_the_rates_that_a_run_takes(name):
    taken = normalize(json.loads((EXAMPLES / name / "input.json").read_text())).settings.optimizer
    page = (EXAMPLES / name / "README.md").read_text()
    assert (
        f"`lr_adjust_coeff` {taken.lr_adjust_coeff:g} and `adam_lr_ratio` {taken.adam_lr_ratio:g}"
        in page
    )


MUON = {
    "type": "Muon",
    "scaling": "match_rms",
    "rms_coefficient": 8.64,
    "schedule": "8+2",
    "weight_decay": 0.001,
}


@pytest.mark.parametrize("optimizer", [None, MUON], ids=["as it stands", "Muon"])
def test_copper_learns_all_three_boundary_conditions(optimizer, tmp_path, monkeypatch):
    """A few steps of the example, shortened: every label is compared, and the forces get better."""
    content = json.loads((EXAMPLES / "cu_emt" / "input.json").read_text())
    content["optimizer"] = optimizer or content["optimizer"]
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
            assert all(math.isfinite(row[f"rmse_{quantity}_{part}"]) for row in rows), (
                quantity,
                part,
            )
    assert rows[-1]["rmse_f_trn"] < 0.5 * rows[0]["rmse_f_trn"]
    (group,) = torch.load("model.ckpt-60.pt", weights_only=True)["optimizer"]["param_groups"]
    vectors = {text.split()[0] for text in group["routes"] if " as " not in text}
    # Frozen are the empty parameters that deepmd-kit's model has.
    assert vectors - {"frozen"} == {"adamw" if optimizer else "adam"}
