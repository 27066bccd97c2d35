import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_dp
from small_models import SE_E2_A
from write_systems import write_hdf5, write_npy

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

NATOMS, NFRAMES = 6, 5


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DP_BACKEND", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def input_file():
    """An input whose `sel` needs the data; its systems are beside it."""
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {**SE_E2_A, "sel": "auto", "rcut": 3.0, "rcut_smth": 0.5},
            "fitting_net": {"neuron": [6, 6], "seed": 1},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": ["water"]},
            "validation_data": {"systems": ["water.hdf5#/water"]},
            "numb_steps": 10,
        },
    }
    Path("input.json").write_text(json.dumps(content))
    return content


@pytest.fixture
def checkpoint(input_file):
    descriptor = input_file["model"]["descriptor"] | {"sel": [8, 16]}
    model_input = input_file["model"] | {"descriptor": descriptor}
    section = normalize(input_file | {"model": model_input}).normalized["model"]
    state = to_deepmd_kit(build_model(section), {"lr": 1e-3, "step": 0})
    torch.save({"model": state}, "model.ckpt.pt")
    return "model.ckpt"


@pytest.fixture
def frames(tmp_path):
    """Five frames of two molecules, whose labels are random, as an npy system and as an HDF5 group."""
    random = np.random.default_rng(1)
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = np.concatenate([molecule, molecule + 2.0]) + random.normal(
        scale=0.05, size=(NFRAMES, NATOMS, 3)
    )
    arrays = {
        "coord": coord.reshape(NFRAMES, -1),
        "box": np.tile(9.0 * np.eye(3).ravel(), (NFRAMES, 1)),
        "energy": random.normal(size=NFRAMES),
        "force": random.normal(size=(NFRAMES, 3 * NATOMS)),
        "virial": random.normal(size=(NFRAMES, 9)),
    }
    write_npy(tmp_path / "water", [0, 1, 1, 0, 1, 1], [arrays], "OH")
    write_hdf5(tmp_path / "water.hdf5", "water", [0, 1, 1, 0, 1, 1], [arrays], "OH")
    return arrays | {"coord": coord}


def table(text):
    """Read the last table of errors in a log: {"Force  RMSE": 0.123, …}."""
    lines = re.findall(r"DEEPMD INFO    (\w.*?)\s*: (\S+) eV", text)
    return {name: float(value) for name, value in lines}


def test_errors_are_those_of_the_prediction(checkpoint, frames, capsys):
    assert run_dp(f"--pt test -m {checkpoint} -s water -d detail --plot parity.png") == 0
    got = table(capsys.readouterr().err)
    predicted = Predictor(checkpoint, device="cpu").predict(
        frames["coord"], 9.0 * np.eye(3), np.array([0, 1, 1, 0, 1, 1])
    )
    energy = predicted.energy - frames["energy"]
    force = predicted.force - frames["force"].reshape(NFRAMES, NATOMS, 3)
    virial = predicted.virial - frames["virial"]
    assert got == pytest.approx(
        {
            "Energy MAE": np.abs(energy).mean(),
            "Energy RMSE": np.sqrt((energy**2).mean()),
            "Energy MAE/Natoms": np.abs(energy).mean() / NATOMS,
            "Energy RMSE/Natoms": np.sqrt((energy**2).mean()) / NATOMS,
            "Force  MAE": np.abs(force).mean(),
            "Force  RMSE": np.sqrt((force**2).mean()),
            "Virial MAE": np.abs(virial).mean(),
            "Virial RMSE": np.sqrt((virial**2).mean()),
            "Virial MAE/Natoms": np.abs(virial).mean() / NATOMS,
            "Virial RMSE/Natoms": np.sqrt((virial**2).mean()) / NATOMS,
            "Stress MAE": np.abs(virial).mean() / 729.0,
            "Stress RMSE": np.sqrt((virial**2).mean()) / 729.0,
        },
        rel=1e-6,
    )
    np.testing.assert_allclose(
        np.loadtxt("detail.e.out"), np.stack([frames["energy"], predicted.energy], axis=1)
    )
    details = np.loadtxt("detail.f.out")
    np.testing.assert_allclose(details[:, :3], frames["force"].reshape(-1, 3))
    np.testing.assert_allclose(details[:, 3:], predicted.force.reshape(-1, 3))
    assert Path("parity.png").read_bytes().startswith(b"\x89PNG")


def test_npy_hdf5_list_and_input_file_give_the_same(
    checkpoint, frames, input_file, capsys, tmp_path
):
    (tmp_path / "systems.txt").write_text("# ours\nwater\n\n")
    outputs = []
    named = ["-s water", "-s water.hdf5", "-s water.hdf5#/water", "-f systems.txt"]
    for source in [*named, "--train-data input.json", "--valid-data input.json"]:
        assert run_dp(f"test -m {checkpoint} {source}") == 0
        outputs.append(table(capsys.readouterr().err))
    assert len(outputs[0]) == 12
    assert all(output == outputs[0] for output in outputs)


def test_averages_over_systems_weigh_frames(checkpoint, frames, capsys):
    assert main(["test", "-m", checkpoint, "-s", "water"]) == 0
    once = table(capsys.readouterr().err)
    Path("systems.txt").write_text("water\nwater.hdf5\n")
    assert main(["test", "-m", checkpoint, "-f", "systems.txt"]) == 0
    shown = capsys.readouterr().err
    assert "# number of systems : 2" in shown
    assert table(shown) == pytest.approx(once, rel=1e-6)


def test_number_and_choice_of_frames(checkpoint, frames, capsys):
    assert main(["test", "-m", checkpoint, "-s", "water", "-n", "2", "-d", "first"]) == 0
    assert "# number of test data : 2" in capsys.readouterr().err
    np.testing.assert_allclose(np.loadtxt("first.e.out")[:, 0], frames["energy"][:2])
    for prefix in ("one", "other"):
        main(["test", "-m", checkpoint, "-s", "water", "--shuffle-test", "-r", "3", "-d", prefix])
    drawn = np.loadtxt("one.e.out")
    assert np.array_equal(drawn, np.loadtxt("other.e.out"))
    assert not np.allclose(drawn[:, 0], frames["energy"])
    np.testing.assert_allclose(np.sort(drawn[:, 0]), np.sort(frames["energy"]))
    assert main(["test", "-m", checkpoint, "-s", "water", "-n", "-1"]) == 2
    assert "-n must be 0 (all frames) or a number of frames; found -1" in capsys.readouterr().err


def test_log_file_holds_the_table(checkpoint, frames):
    assert main(["test", "-m", checkpoint, "-s", "water", "-v", "2", "-l", "logs/test.log"]) == 0
    assert "Force  RMSE" in Path("logs/test.log").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.pt -s water", "there is no checkpoint none.pt"),
        ("model.ckpt.pt -s nowhere", "nowhere"),
        ("model.ckpt.pt -f nowhere.txt", "there is no list of systems nowhere.txt"),
        ("model.ckpt.pt -s water --ema", "has no averaged weights"),
        ("model.ckpt.pt -s water --plot parity.doc", "no picture can be written to parity.doc"),
    ],
)
def test_mistakes_end_in_one_message(words, message, checkpoint, frames, capsys):
    assert run_dp(f"test -m {words}") == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("test -m model.ckpt -s water --shuffle-test -r -1", "-r must be 0 or more"),
        ("check model.ckpt -s water --seed -1", "--seed must be 0 or more"),
        ("model-devi -m model.ckpt model.ckpt -s water -f 0", "-f must be"),
        ("model-devi -m model.ckpt model.ckpt -s water --relative nan", "--relative must be"),
        ("model-devi -m model.ckpt model.ckpt -s water --relative_v -1", "--relative_v must be"),
        ("neighbor-stat -s water -r 0", "-r must be"),
        ("neighbor-stat -s nowhere -r 6", "nowhere"),
        ("neighbor-stat -s water -r nan", "-r must be"),
        ("neighbor-stat -s water -r 3 -t O O H", "names an element twice"),
        ("convert-data water other -t O O H", "names an element twice"),
        ("zbl O H -o table --end inf", "rows"),
        ("zbl O H -o table --step 1e-9", "rows"),
    ],
)
def test_arguments_that_make_no_sense_are_one_line(words, message, checkpoint, frames, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_change_bias_makes_the_folder_of_its_output(checkpoint, frames):
    assert main(["change-bias", checkpoint, "-s", "water", "-o", "a/b/changed.pt"]) == 0
    assert main(["test", "-m", "a/b/changed.pt", "-s", "water"]) == 0


def test_a_frozen_model_has_no_branches(checkpoint, frames, capsys):
    assert main(["freeze", "-c", checkpoint, "-o", "frozen"]) == 0
    for words in (["test", "-m", "frozen.pth"], ["model-devi", "-m", "frozen.pth", "frozen.pth"]):
        assert main([*words, "-s", "water", "--head", "water"]) == 2
        assert "holds one model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.ckpt.pt", "model.ckpt", "model"])
def test_compress_takes_checkpoints_with_and_without_their_suffix(checkpoint, name):
    if name == "model":
        Path("model.ckpt.pt").rename("model.pt")
    assert main(["compress", "-i", name, "-o", "small"]) == 0
    assert Path("small.pth").exists()


def test_a_model_of_deepmd_kit_that_we_do_not_have(checkpoint, frames, capsys, monkeypatch):
    content = torch.load("model.ckpt.pt", weights_only=True)
    content["model"]["_extra_state"]["model_params"]["descriptor"]["type"] = "dpa2"
    torch.save(content, "dpa2.pt")
    handed = []
    monkeypatch.setattr(
        "deepmd_muon.cli.main.hand_over", lambda what, words, _: handed.append((what, words)) or 7
    )
    assert main(["test", "-m", "dpa2.pt", "-s", "water"]) == 7
    [(what, words)] = handed
    assert what.startswith("this model (")
    assert "'dpa2'" in what
    assert words == ["--pt", "test", "-m", "dpa2.pt", "-s", "water"]


def test_routing_of_an_input_and_of_a_checkpoint(input_file, capsys):
    assert main(["show", "routing", "input.json"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert rows[0] == ["name", "shape", "view", "route", "reason"]
    routes = {row[0]: (row[1], row[3]) for row in rows[1:] if len(row) > 4}
    fitting = "atomic_model.fitting_net.filter_layers.networks.0.layers"
    assert routes[f"{fitting}.1.matrix"] == ("6x6", "muon")
    assert routes[f"{fitting}.1.bias"] == ("6", "adam")

    section = normalize(input_file).normalized
    section["model"]["descriptor"]["sel"] = [8, 16]
    model = build_model(section["model"])
    optimizer = normalize(input_file).settings.optimizer.build(model, lr=1e-3)
    state = to_deepmd_kit(model, {"lr": 1e-3, "step": 0})
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, "trained.pt")
    assert main(["show", "routing", "trained"]) == 0  # as train and test take it
    without_ending = capsys.readouterr().out
    assert main(["show", "routing", "trained.pt"]) == 0
    shown = capsys.readouterr().out
    assert shown == without_ending
    recorded = [line.split() for line in shown.splitlines()]
    assert {row[0]: (row[1], row[3]) for row in recorded[1:] if len(row) > 4} == routes


@pytest.mark.parametrize("section", [{"optimizer": {"type": "Adam"}}, {}])
def test_an_input_of_adam_shows_the_routes_of_hybrid_muon(input_file, capsys, section):
    assert main(["show", "routing", "input.json"]) == 0
    routes = capsys.readouterr().out
    del input_file["optimizer"]
    Path("adam.json").write_text(json.dumps(input_file | section))
    assert main(["show", "routing", "adam.json"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n\n")
    assert re.match(r"Adam treats all \d+ weights alike", first)
    assert rest == routes


def test_routing_of_what_has_none(checkpoint, capsys):
    assert main(["show", "routing", "model.ckpt.pt"]) == 2
    assert "holds no optimizer state, so no routing is recorded" in capsys.readouterr().err
    assert main(["show", "routing", "a.pt", "b.pt"]) == 2
    assert "takes one file; found a.pt, b.pt" in capsys.readouterr().err
    for topic, file in (("plan", "input.json"), ("lcurve", "lcurve.out")):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["show", topic])
        assert file in capsys.readouterr().err.splitlines()[-1]
    content = torch.load("model.ckpt.pt", weights_only=True)
    weight = torch.nn.Parameter(torch.zeros(2))
    content["optimizer"] = torch.optim.Adam([("weight", weight)]).state_dict()
    torch.save(content, "adam.pt")
    assert main(["show", "routing", "adam.pt"]) == 0
    assert "no routes" in capsys.readouterr().out


def test_learning_curve_is_drawn(capsys):
    head = "# step rmse_trn rmse_e_trn rmse_f_trn lr"
    Path("lcurve.out").write_text(f"{head}\n 1 1e0 1e-1 1e-2 1e-3\n 2 9e-1 9e-2 9e-3 1e-3\n")
    assert main(["show", "lcurve", "lcurve.out", "-o", "curve.png"]) == 0
    assert capsys.readouterr().out == "curve.png: drawn\n"
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")


def test_reference_of_the_input(capsys):
    assert main(["doc-train-input"]) == 0
    shown = capsys.readouterr().out
    assert "axis_neuron" in shown
    assert "decay_phase_ratio" in shown
    assert main(["doc-train-input", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "training", "learning_rate"} <= set(schema["properties"])


def test_frames_with_a_config_type_or_a_weight_have_errors_by_it(checkpoint, frames, capsys):
    from ase.io import read, write

    assert main(["convert-data", "water", "water.xyz"]) == 0
    images = read("water.xyz", ":")
    kinds = np.array(["bulk", "slab", "bulk", "bulk", "slab"])
    weights = np.array([1.0, 0.5, 3.0, 1.0, 0.5])
    for atoms, kind, weight in zip(images, kinds, weights, strict=True):
        atoms.info |= {"config_type": kind, "weight": weight}
    write("kinds.xyz", images, format="extxyz")
    assert main(["test", "-m", checkpoint, "-s", "kinds.xyz"]) == 0
    log = capsys.readouterr().err
    predicted = Predictor(checkpoint, device="cpu").predict(
        frames["coord"], 9.0 * np.eye(3), np.array([0, 1, 1, 0, 1, 1])
    )
    error = predicted.force - frames["force"].reshape(NFRAMES, NATOMS, 3)
    for kind in ("bulk", "slab"):
        of_kind = log.partition(f"# config_type : {kind}")[2].partition("# config_type")[0]
        expected = np.sqrt((error[kinds == kind] ** 2).mean())
        assert table(of_kind)["Force  RMSE"] == pytest.approx(expected, rel=1e-5)
    weighted = log.partition("times their weights")[2].partition("# config_type")[0]
    expected = np.sqrt(np.average((error**2).mean(axis=(1, 2)), weights=weights))
    assert table(weighted)["Force  RMSE"] == pytest.approx(expected, rel=1e-5)
    # Frames of a system without weights have weight 1, as in the loss.
    assert main(["test", "-m", checkpoint, "-s", "kinds.xyz", "water"]) == 0
    weighted = capsys.readouterr().err.partition("times their weights")[2]
    weighted = weighted.partition("# config_type")[0]
    both = np.concatenate([error, error])
    in_loss = np.concatenate([weights, np.ones(NFRAMES)])
    expected = np.sqrt(np.average((both**2).mean(axis=(1, 2)), weights=in_loss))
    assert table(weighted)["Force  RMSE"] == pytest.approx(expected, rel=1e-5)


def test_energies_are_compared_with_those_of_free_atoms_of_the_data(
    checkpoint, input_file, tmp_path, capsys
):
    random = np.random.default_rng(3)
    coord = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = coord + random.normal(scale=0.05, size=(4, 3, 3))
    energy = random.normal(size=4)
    molecules = {"coord": coord.reshape(4, -1), "energy": energy}
    free = {"O": -2.5, "H": 0.75}
    write_npy(tmp_path / "data" / "molecule", [0, 1, 1], [molecules], "OH", nopbc=True)
    for element, energy_of_atom in free.items():
        # The cell is larger than the cut-off.
        atom = {"coord": np.zeros((1, 3)), "box": 50.0 * np.eye(3).reshape(1, 9)}
        atom["energy"] = np.array([energy_of_atom])
        write_npy(tmp_path / "data" / element, [0], [atom], element)
    assert main(["test", "-m", checkpoint, "-s", "data"]) == 0
    shown = table(capsys.readouterr().err)

    predictor = Predictor(checkpoint, device="cpu")
    predicted = predictor.predict(coord, None, np.array([0, 1, 1])).energy
    alone = [predictor.predict(np.zeros((1, 1, 3)), None, np.array([k])).energy[0] for k in (0, 1)]
    error = (predicted - alone[0] - 2 * alone[1]) - (energy - free["O"] - 2 * free["H"])
    expected = np.sqrt((error**2).mean()) / 3
    assert shown["Atomization RMSE/Natoms"] == pytest.approx(expected, rel=1e-6)

    # Free atoms of the training data serve the validation data, too.
    content = json.loads(Path("input.json").read_text())
    content["training"]["training_data"]["systems"] = ["data/O", "data/H"]
    content["training"]["validation_data"]["systems"] = ["data/molecule"]
    Path("input.json").write_text(json.dumps(content))
    assert run_dp(f"test -m {checkpoint} --train-data input.json --valid-data input.json") == 0
    of_validation = capsys.readouterr().err.partition("errors of validation data")[2]
    shown = table(of_validation)
    assert shown["Atomization RMSE/Natoms"] == pytest.approx(expected, rel=1e-6)
