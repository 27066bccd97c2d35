"""Commands on models that deepmd-kit's modules compute (`pytest -m deepmd_kit`)."""

import importlib.util
import json

import numpy as np
import pytest
from hosted_models import TYPES, hosted_input, write_data

from deepmd_muon.cli.main import main
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model.hosted.kit import has_operators

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A folder with data and a checkpoint of two steps; the function takes the kind of model."""
    monkeypatch.chdir(tmp_path)

    def train(kind):
        system = write_data(tmp_path, nframes=12)
        content = hosted_input(kind, system, 2)
        (tmp_path / "input.json").write_text(json.dumps(content))
        assert main(["train", "input.json"]) == 0
        return tmp_path / "model.ckpt.pt"

    return train


def predict(path):
    """Predict twelve random atoms in a cell."""
    coord = np.random.default_rng(1).uniform(0.0, 7.0, (1, len(TYPES), 3))
    predictor = Predictor(path, device="cpu", trust=True)
    return predictor.predict(coord, 7.0 * np.eye(3), np.array(TYPES))


def test_freeze_calls_deepmd_kits_and_dp_test_reads_the_file(trained, tmp_path, caplog):
    checkpoint = trained("dpa2")
    assert main(["freeze", "-c", str(checkpoint), "-o", "frozen"]) == 0
    assert ("LAMMPS cannot run" in caplog.text) == (not has_operators())
    frozen = predict(tmp_path / "frozen.pth")
    expected = predict(checkpoint)
    np.testing.assert_allclose(frozen.energy, expected.energy, rtol=1e-12)
    np.testing.assert_allclose(frozen.force, expected.force, atol=1e-12)
    assert main(["test", "-m", "frozen.pth", "-s", "sys"]) == 0


def test_deviation_and_check_of_two_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = hosted_input("hybrid", write_data(tmp_path, nframes=3), 2, save_freq=1)
    (tmp_path / "input.json").write_text(json.dumps(content))
    assert main(["train", "input.json"]) == 0
    models = ["model.ckpt-1.pt", "model.ckpt-2.pt"]
    assert main(["model-devi", "-m", *models, "-s", "sys"]) == 0
    (frame, *_) = np.loadtxt("model_devi.out")
    coord, box = (np.load(f"sys/set.000/{name}.npy")[:1] for name in ("coord", "box"))
    forces = [
        Predictor(name, device="cpu")
        .predict(coord.reshape(1, -1, 3), box.reshape(3, 3), np.array(TYPES))
        .force
        for name in models
    ]
    # The deviation of two is half of their difference.
    largest = 0.5 * np.linalg.norm(forces[0] - forces[1], axis=-1).max()
    assert frame[4] == pytest.approx(largest, rel=1e-5)

    short = ["--time", "0.01", "--copies", "1", "--probes", "1", "--json", "check.json"]
    assert main(["check", *models, "-s", "sys", *short]) in (0, 1)
    checked = json.loads((tmp_path / "check.json").read_text())["models"]
    assert [one["model"] for one in checked] == models
    for one in checked:
        assert {"scans", "dynamics"} <= {item["name"] for item in one["items"]}


def test_compress_and_averaged_weights_are_refused_in_words(trained, capsys):
    checkpoint = str(trained("se_e2_r"))
    assert main(["compress", "-i", checkpoint]) == 2
    assert "deepmd-kit's module computes it" in capsys.readouterr().err
    assert main(["freeze", "-c", checkpoint, "--interpolate"]) == 2
    assert "leave out --ema and --interpolate" in capsys.readouterr().err


def test_dpa4_is_compiled_only_with_deepmd_kits_operators(trained, capsys):
    checkpoint = trained("dpa4")
    if has_operators():
        pytest.skip("they are loaded here, and compiling takes many minutes")
    assert main(["freeze", "-c", str(checkpoint)]) == 2
    assert "operators" in capsys.readouterr().err


def test_show_counts_the_parts_of_a_sum_of_models(trained, caplog):
    checkpoint = str(trained("linear"))
    with caplog.at_level("INFO"):
        assert main(["show", checkpoint, "descriptor", "size"]) == 0
    lines = [record.getMessage() for record in caplog.records]
    sizes = {
        line.split(": ")[0].split()[-1]: int(line.split(": ")[1].replace(",", ""))
        for line in lines
        if line.startswith("Parameters in ")
    }
    assert sizes["total"] == sizes["descriptor"] + sizes["fitting-net"] > 0


def test_replay_trains_two_branches(trained, tmp_path):
    checkpoint = trained("dpa4")
    content = json.loads((tmp_path / "input.json").read_text())
    content["replay"] = {"frames": 10, "steps": 20}
    (tmp_path / "input.json").write_text(json.dumps(content))
    command = ["train", "input.json", "--finetune", str(checkpoint), "--replay", "pseudo"]
    assert main(command) == 0
    assert predict(tmp_path / "model.ckpt.finetuned.pt").force.shape == (1, len(TYPES), 3)
