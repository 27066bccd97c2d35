"""Energy models of deepmd-kit in our trainer, compared with deepmd-kit's own (`pytest -m deepmd_kit`).

They run in an environment in which both packages can be imported.
"""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from hosted_models import MODELS, TYPE_MAP, TYPES, hosted_input, write_data

from deepmd_muon.argcheck import InputError
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.ase_calculator import DeepPotCalculator
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.model import ModelError
from deepmd_muon.train import NonFiniteError

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]
JOBS = Path(__file__).with_name("jobs_in_deepmd_kit.py")
LONG = 20  # steps
# DPA-4 computes parts of its geometry in float32 whatever its precision.
TOLERANCE = {"dpa4": 1e-5}


def in_deepmd_kit(folder, contents, *words, losses=None):
    """Run deepmd-kit's `dp train` on several inputs, each in the folder of its name."""
    jobs = []
    for name, content in contents.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "input.json").write_text(json.dumps(content))
        command = ["train", "input.json", "--skip-neighbor-stat", *words]
        jobs.append({"folder": str(folder / name), "words": command, "losses": losses})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    results = folder / "results.json"
    subprocess.run([sys.executable, JOBS, folder / "jobs.json", results], check=True)
    assert json.loads(results.read_text()) == [""] * len(jobs)


@pytest.fixture(scope="module")
def in_both(tmp_path_factory):
    """The folder with deepmd-kit's runs of five steps of each model, saved after three and five."""
    folder = tmp_path_factory.mktemp("deepmd_kit")
    system = write_data(folder)
    contents = {kind: hosted_input(kind, system, 5, save_freq=3) for kind in MODELS}
    in_deepmd_kit(folder, contents)
    (folder / "long").mkdir()
    contents = {kind: hosted_input(kind, system, LONG) for kind in MODELS}
    in_deepmd_kit(folder / "long", contents, losses="losses.jsonl")
    return folder


def read(path):
    return torch.load(path, weights_only=True)


def assert_close(ours, theirs, tolerance):
    """Compare the tensors of two models, relative to the largest entry of each."""
    tensors = {name: x for name, x in theirs.items() if torch.is_tensor(x)}
    assert tensors.keys() == {name for name, x in ours.items() if torch.is_tensor(x)}
    for name, x in tensors.items():
        if x.numel() and x.is_floating_point() and not name.endswith("min_nbor_dist"):
            atol = tolerance * float(x.abs().max())
            torch.testing.assert_close(ours[name], x, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_reaches_deepmd_kits_weights(kind, in_both, train, load):
    """The same seed, frame and optimizer: five steps of Adam from the same weights."""
    content = hosted_input(kind, str(in_both / "sys"), 5)
    assert train(content, skip_neighbor_stat=True) == 0
    theirs = read(in_both / kind / "model.ckpt-5.pt")
    # Adam divides small gradients by their size: rounding grows.
    assert_close(load("model.ckpt-5.pt")["model"], theirs["model"], TOLERANCE.get(kind, 1e-6))


@pytest.mark.parametrize("kind", MODELS)
def test_losses_are_deepmd_kits(kind, in_both, train):
    """Twenty steps of Adam from the same weights, on the same frame."""
    content = hosted_input(kind, str(in_both / "sys"), LONG, jsonl_file="ours.jsonl")
    assert train(content, skip_neighbor_stat=True) == 0
    ours, theirs = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (Path("ours.jsonl"), in_both / "long" / kind / "losses.jsonl")
    )
    assert len(ours) == len(theirs) == LONG
    # deepmd-kit divides squares of energies by the square of the number of atoms in float32.
    natoms = len(TYPES)
    inverse_square = float(np.float32(1 / natoms) ** 2)
    factors = {"rmse_e": natoms * inverse_square**0.5, "rmse_f": 1.0}
    for name, factor in factors.items():
        np.testing.assert_allclose(
            [factor * step[f"{name}_trn"] for step in ours],
            [step[name] for step in theirs],
            rtol=TOLERANCE.get(kind, 1e-9),
        )


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_of_deepmd_kit_continues_here(kind, in_both, train, load):
    content = hosted_input(kind, str(in_both / "sys"), 5)
    options = {"restart": str(in_both / kind / "model.ckpt-3.pt"), "skip_neighbor_stat": True}
    assert train(content, **options) == 0
    theirs = read(in_both / kind / "model.ckpt-5.pt")
    assert_close(load("model.ckpt-5.pt")["model"], theirs["model"], TOLERANCE.get(kind, 1e-6))
    steps = {int(state["step"]) for state in load("model.ckpt-5.pt")["optimizer"]["state"].values()}
    assert steps == {5}


@pytest.mark.parametrize("kind", MODELS)
def test_a_restart_continues_bitwise(kind, tmp_path, train, load):
    """With HybridMuon, an average and random numbers of the model."""
    system = write_data(tmp_path, nframes=5)
    content = hosted_input(kind, system, 4, save_freq=2, enable_ema=True)
    content["optimizer"] = {"type": "HybridMuon"}
    content["training"]["validation_data"] = {"systems": [system], "batch_size": 1}
    if kind == "dpa4":
        content["model"]["descriptor"] |= {"random_gamma": True, "precision": "float32"}
    assert train(content, skip_neighbor_stat=True) == 0
    whole = load("model.ckpt-4.pt")
    Path("model.ckpt-4.pt").unlink()
    assert train(content, skip_neighbor_stat=True, restart="model.ckpt-2.pt") == 0
    continued = load("model.ckpt-4.pt")
    for name, x in whole["model"].items():
        if torch.is_tensor(x):
            torch.testing.assert_close(continued["model"][name], x, rtol=0, atol=0)
    for name, x in whole["ema"]["model"].items():
        torch.testing.assert_close(continued["ema"]["model"][name], x, rtol=0, atol=0)


def test_matrices_that_a_module_declares_go_to_adamw(tmp_path, train, load, monkeypatch):
    """Modules of deepmd-kit after 3.2.0 declare parts of names; our key of that name has patterns for Adam."""
    from deepmd.pt.optimizer import hybrid_muon

    monkeypatch.setattr(
        hybrid_muon, "adam_route_patterns", lambda _: ["g1_self_mlp"], raising=False
    )
    content = hosted_input("dpa2", write_data(tmp_path), 1)
    content["optimizer"] = {"type": "HybridMuon", "adam_patterns": ["*.linear1.matrix"]}
    assert train(content, skip_neighbor_stat=True) == 0
    routes = {}
    for group in load("model.ckpt-1.pt")["optimizer"]["param_groups"]:
        routes |= dict(zip(group["param_names"], group["routes"], strict=True))
    layer = "atomic_model.descriptor.repformers.layers.0"
    assert routes[f"{layer}.g1_self_mlp.matrix"].startswith("adamw ")
    assert routes[f"{layer}.g1_self_mlp.bias"].startswith("adam ")
    assert routes[f"{layer}.linear1.matrix"].startswith("adam ")
    assert routes[f"{layer}.linear2.matrix"].startswith("muon ")


def test_deepmd_kit_continues_our_checkpoints(tmp_path, train):
    system = write_data(tmp_path)
    contents = {}
    for kind in MODELS:
        content = hosted_input(kind, system, 3, save_ckpt=f"{kind}/ours")
        if kind == "dpa4":
            content["optimizer"] = {"type": "HybridMuon"}
            for part in ("descriptor", "fitting_net"):
                content["model"][part]["precision"] = "float32"
        assert train(content, skip_neighbor_stat=True) == 0
        content["training"] |= {"numb_steps": 6, "save_ckpt": "model.ckpt"}
        contents[kind] = content
    in_deepmd_kit(tmp_path, contents, "--restart", "ours-3.pt")
    for kind in MODELS:
        states = read(tmp_path / kind / "model.ckpt-6.pt")["optimizer"]["state"].values()
        # It repeats the last step. Its HybridMuon keeps powers of the decay instead of steps.
        if kind == "dpa4":
            powers = [state["beta1_pow"] for state in states if "beta1_pow" in state]
            assert powers == pytest.approx([0.9**7] * len(powers))
            assert powers
        else:
            assert {int(state["step"]) for state in states} == {7}


@pytest.mark.parametrize("kind", MODELS)
def test_fine_tuning_fits_the_bias(kind, in_both, train, load):
    """The rate is too small to move the weights; deepmd-kit's checkpoint, other energies."""
    content = hosted_input(kind, str(in_both / "sys"), 1)
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    checkpoint = str(in_both / kind / "model.ckpt-5.pt")
    assert train(content, skip_neighbor_stat=True, init_model=checkpoint) == 0
    before = load("model.ckpt-1.pt")["model"]
    assert_close(before, read(checkpoint)["model"], 1e-12)
    assert train(content, skip_neighbor_stat=True, finetune=checkpoint) == 0
    after = load("model.ckpt-1.pt")["model"]
    bias = "model.Default.atomic_model.out_bias"
    assert not torch.equal(after[bias], before[bias])
    weights = {name: x for name, x in before.items() if "out_bias" not in name}
    assert_close({name: after[name] for name in weights}, weights, 1e-12)


@pytest.mark.parametrize("way", ["init_model", "finetune", "restart"])
def test_a_checkpoint_of_an_earlier_deepmd_kit(way, tmp_path, train, load, caplog):
    """It lacks keys that are new since, and has tensors that deepmd-kit computes today."""
    content = hosted_input("dpa4", write_data(tmp_path), 1)
    assert train(content, skip_neighbor_stat=True) == 0
    checkpoint = load("model.ckpt-1.pt")
    state = checkpoint["model"]
    section = state["_extra_state"]["model_params"]
    assert section["descriptor"].pop("edge_norm") is True
    section["use_compile"] = True
    state["model.Default.atomic_model.descriptor.blocks.0.so2_conv.former_index"] = torch.ones(3)
    torch.save(checkpoint, "earlier.pt")
    still = {"learning_rate": {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}}
    still["training"] = content["training"] | {"numb_steps": 2, "save_ckpt": "again"}
    again = content | still
    assert train(again, "INFO", skip_neighbor_stat=True, **{way: "earlier.pt"}) == 0
    assert "former_index" in caplog.text
    weights = load("again-2.pt")["model"]
    assert "edge_norm" in weights["_extra_state"]["model_params"]["descriptor"]
    del state["model.Default.atomic_model.descriptor.blocks.0.so2_conv.former_index"]
    for name, x in state.items():
        if torch.is_tensor(x) and "out_bias" not in name:
            torch.testing.assert_close(weights[name], x, rtol=0, atol=1e-12, msg=name)
    script = {way: "earlier.pt", "use_pretrain_script": True}
    assert train(again, skip_neighbor_stat=True, **script) == 0
    again["model"]["descriptor"]["edge_norm"] = False
    with pytest.raises(CheckpointError, match="edge_norm was True, is False"):
        train(again, skip_neighbor_stat=True, **{way: "earlier.pt"})


def test_types_move_as_in_deepmd_kit(tmp_path, train, load):
    """Weights of a model of O and H start a model of H, O and C: its forces are the same."""
    system = write_data(tmp_path)
    content = hosted_input("dpa2", system, 3)
    assert train(content, skip_neighbor_stat=True) == 0
    content["model"]["type_map"] = ["H", "C", "O"]
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    content["training"] |= {"numb_steps": 1, "save_ckpt": "more"}
    assert train(content, skip_neighbor_stat=True, init_model="model.ckpt-3.pt") == 0
    (frame,) = open_systems([system])
    forces = []
    for path in ("model.ckpt-3.pt", "more-1.pt"):
        predictor = Predictor(path, device="cpu")
        frames = frame.with_types(predictor.type_map).frames([0])
        forces.append(predictor.predict(frames.coord[0], frames.box[0], frames.atype[0]).force)
    np.testing.assert_allclose(forces[1], forces[0], atol=1e-6 * np.abs(forces[0]).max())
    assert train(content, skip_neighbor_stat=True, finetune="model.ckpt-3.pt") == 0


def test_types_of_dpa4_stay(tmp_path, train, load):
    content = hosted_input("dpa4", write_data(tmp_path), 1)
    assert train(content, skip_neighbor_stat=True) == 0
    weights = load("model.ckpt-1.pt")["model"]
    content["model"]["type_map"] = ["H", "O"]
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    for way in ("init_model", "finetune"):
        with pytest.raises(ModelError, match="SeZM"):
            train(content, skip_neighbor_stat=True, **{way: "model.ckpt-1.pt"})
    content["training"]["save_ckpt"] = "tuned"
    script = {"finetune": "model.ckpt-1.pt", "use_pretrain_script": True}
    assert train(content, skip_neighbor_stat=True, **script) == 0
    tuned = load("tuned-1.pt")["model"]
    assert tuned["_extra_state"]["model_params"]["type_map"] == TYPE_MAP
    name = next(name for name in weights if "type_embedding" in name)
    torch.testing.assert_close(tuned[name], weights[name], rtol=0, atol=1e-12)
    # The input of `dp init` has a model of ours, whose rates are fifty times those of deepmd-kit.
    own = copy.deepcopy(content)
    own["model"] = {
        "type_map": ["H", "O"],
        "descriptor": {"type": "se_e2_a", "sel": "auto", "rcut": 4.0, "neuron": [4, 8]},
    }
    own["optimizer"] = {"type": "HybridMuon"}
    own["learning_rate"]["start_lr"] = 1e-3
    assert train(own, **script) == 0
    optimizer = json.loads(Path("out.json").read_text())["optimizer"]
    assert optimizer["lr_adjust_coeff"] == 0.18
    assert optimizer["adam_lr_ratio"] == 1.0
    content["model"]["type_map"] = ["H", "O", "C"]
    with pytest.raises(ModelError, match="SeZM"):
        train(content, skip_neighbor_stat=True, **script)


def two_branches(system, steps, **training):
    """Return an input of two DPA-4 models with one descriptor."""
    content = hosted_input("dpa4", system, steps, **{"save_freq": 2, **training})
    model = content["model"]
    branches = {}
    for name in ("first", "second"):
        branches[name] = {
            "type": "dpa4",
            "type_map": "types",
            "descriptor": "shared",
            "fitting_net": {**model["fitting_net"], "seed": len(branches)},
        }
    content["model"] = {
        "shared_dict": {
            "types": model["type_map"],
            "shared": {"type": "dpa4", **model["descriptor"]},
        },
        "model_dict": branches,
    }
    data = content["training"].pop("training_data")
    content["training"]["data_dict"] = {name: {"training_data": data} for name in branches}
    content["loss_dict"] = dict.fromkeys(branches, content.pop("loss"))
    content["optimizer"] = {"type": "HybridMuon"}
    return content


def test_branches_share_a_descriptor_and_restart_bitwise(tmp_path, train, load):
    content = two_branches(write_data(tmp_path, nframes=3), 4)
    assert train(content, skip_neighbor_stat=True) == 0
    whole = load("model.ckpt-4.pt")["model"]
    shared = [name for name in whole if name.startswith("model.first.atomic_model.descriptor.")]
    assert shared
    for name in shared:
        assert torch.equal(whole[name], whole[name.replace("first", "second", 1)])
    assert train(content, skip_neighbor_stat=True, restart="model.ckpt-2.pt") == 0
    for name, x in load("model.ckpt-4.pt")["model"].items():
        if torch.is_tensor(x):
            torch.testing.assert_close(x, whole[name], rtol=0, atol=0)
    # One branch of it becomes a model of its own.
    one = hosted_input("dpa4", content["training"]["data_dict"]["first"]["training_data"], 1)
    one["training"]["training_data"] = content["training"]["data_dict"]["first"]["training_data"]
    one["model"]["descriptor"]["type"] = "dpa4"
    options = {"finetune": "model.ckpt-4.pt", "model_branch": "second"}
    assert train(one, skip_neighbor_stat=True, use_pretrain_script=True, **options) == 0


def test_sel_auto_and_stat_file(tmp_path, train, load, caplog):
    """deepmd-kit's rule for "auto" and our counts; the second run reads what the first has fitted."""
    content = hosted_input("se_e3", write_data(tmp_path, nframes=4), 1, stat_file="stat.hdf5")
    content["model"]["descriptor"]["sel"] = "auto"
    assert train(content) == 0
    normalized = json.loads(Path("out.json").read_text())
    sel = normalized["model"]["descriptor"]["sel"]
    assert len(sel) == len(TYPE_MAP)
    assert all(number > 0 and number % 4 == 0 for number in sel)
    first = load("model.ckpt-1.pt")["model"]
    content["training"]["stat_file_mode"] = "read"
    caplog.clear()
    assert train(content, log_level="INFO") == 0
    assert "statistics come from stat.hdf5" in caplog.text
    for name, x in load("model.ckpt-1.pt")["model"].items():
        if torch.is_tensor(x):
            torch.testing.assert_close(x, first[name], rtol=0, atol=0)


def test_a_preset_bias_stays_and_statistics_that_are_missing_are_named(tmp_path, train, load):
    content = hosted_input("se_e2_r", write_data(tmp_path, nframes=2), 1)
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    content["model"]["preset_out_bias"] = {"energy": [None, 1.5]}
    assert train(content) == 0
    bias = load("model.ckpt-1.pt")["model"]["model.Default.atomic_model.out_bias"]
    assert bias[0, 1, 0] == 1.5
    content["training"] |= {"stat_file": "stat.hdf5", "stat_file_mode": "read"}
    with pytest.raises(DataError, match="stat_file_mode"):
        train(content)


@pytest.mark.parametrize("kind", ["dpa4", "linear"])
def test_named_frame_parameters_reach_the_module(kind, tmp_path, train, load):
    system = write_data(tmp_path, nframes=2)
    np.save(Path(system, "set.000", "charge.npy"), np.array([0.0, 1.0]))
    content = hosted_input(kind, system, 1)
    content["training"]["training_data"]["frame_parameters"] = ["charge"]
    assert train(content, skip_neighbor_stat=True) == 0
    weights = load("model.ckpt-1.pt")["model"]
    means = [x for name, x in weights.items() if name.endswith("fitting_net.fparam_avg")]
    assert [mean.tolist() for mean in means] == [[0.5]] * (2 if kind == "linear" else 1)


def with_charge_spin(folder, values):
    """Return an input of DPA-4 with charge and spin, and its system with these values."""
    system = write_data(folder, nframes=len(values))
    np.save(Path(system, "set.000", "charge_spin.npy"), np.array(values))
    content = hosted_input("dpa4", system, 3)
    content["model"]["descriptor"]["add_chg_spin_ebd"] = True
    return content, system


def test_charges_and_spins_of_frames_train_and_predict(tmp_path, train, load):
    content, system = with_charge_spin(tmp_path, [[1.0, 2.0]])
    assert train(content, skip_neighbor_stat=True) == 0
    in_deepmd_kit(tmp_path, {"theirs": content})
    theirs = read(tmp_path / "theirs" / "model.ckpt-3.pt")["model"]
    ours = load("model.ckpt-3.pt")["model"]
    assert_close(ours, theirs, TOLERANCE["dpa4"])
    name = "model.Default.atomic_model.descriptor.charge_spin_embedding.charge_embedding"
    rows = [x for key, x in ours.items() if key.startswith(name)]
    assert len(rows) == 1

    predictor = Predictor("model.ckpt-3.pt", device="cpu")
    (opened,) = open_systems(system, TYPE_MAP)
    frames = opened.frames([0])
    box = frames.box[0]
    arguments = (frames.coord[0], box, frames.atype[0])
    energies = [
        predictor.predict(*arguments, charge_spin=state).energy[0] for state in ([1, 2], [0, 2])
    ]
    assert energies[0] != energies[1]
    (compared,) = evaluate_system(predictor, opened)
    assert compared.prediction.energy[0] == pytest.approx(energies[0], rel=1e-14)
    types = [TYPE_MAP[kind] for kind in frames.atype[0]]
    for state, energy in zip(([1, 2], [0, 2]), energies, strict=True):
        atoms = Atoms(types, positions=frames.coord[0], cell=box, pbc=True)
        atoms.info["charge_spin"] = state
        atoms.calc = DeepPotCalculator(predictor)
        assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-14)
    with pytest.raises(PredictionInputError, match="charge_spin"):
        predictor.predict(*arguments)
    with pytest.raises(PredictionInputError, match="spin must be"):
        predictor.predict(*arguments, charge_spin=[0, -1])


def test_frames_without_charge_and_spin_need_a_default(tmp_path, train):
    content, system = with_charge_spin(tmp_path, [[1.0, 2.0], [0.0, 200.0]])
    with pytest.raises(DataError, match="spin must be a whole number"):
        train(content, skip_neighbor_stat=True)
    Path(system, "set.000", "charge_spin.npy").unlink()
    with pytest.raises(DataError, match="default_chg_spin is not set"):
        train(content, skip_neighbor_stat=True)
    content["model"]["descriptor"]["default_chg_spin"] = [0, 1]
    assert train(content, skip_neighbor_stat=True) == 0
    assert not Predictor("model.ckpt-3.pt", device="cpu").parameters.required


def test_a_run_stops_early_and_keeps_its_best(tmp_path, train, load):
    system = write_data(tmp_path, nframes=3)
    content = hosted_input("se_e2_r", system, 30)
    content["training"]["validation_data"] = {"systems": [system]}
    # No update moves the weights: the first validation is the best, and patience ends after two more.
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    content["validating"] = {
        "full_validation": True,
        "full_val_start": 0,
        "validation_freq": 2,
        "early_stop_patience": 2,
    }
    assert train(content, skip_neighbor_stat=True) == 0
    assert load()["deepmd_muon"]["step"] == 6
    (best,) = (path for path in Path().glob("best*") if not path.is_symlink())
    assert "2" in best.stem
    assert_close(load(best)["model"], load()["model"], 1e-12)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, train):
    system = write_data(tmp_path, nframes=2)
    np.save(Path(system, "set.000", "energy.npy"), np.array([1e200, -1e200]))
    content = hosted_input("dpa2", system, 3)
    with pytest.raises(NonFiniteError):
        train(content, skip_neighbor_stat=True)


def test_a_frozen_file_of_deepmd_kit_starts_a_run(tmp_path, train, load):
    content = hosted_input("hybrid", write_data(tmp_path), 2)
    assert train(content, skip_neighbor_stat=True) == 0
    assert main(["freeze", "-c", "model.ckpt-2.pt", "-o", "frozen"]) == 0
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    content["training"]["save_ckpt"] = "next"
    assert train(content, skip_neighbor_stat=True, init_model="frozen.pth") == 0
    assert_close(load("next-2.pt")["model"], load("model.ckpt-2.pt")["model"], 1e-12)


def test_what_does_not_fit_is_one_clear_error(tmp_path, train, caplog):
    system = write_data(tmp_path)
    content = hosted_input("se_e3", system, 1)
    content["model"]["type_map"] = ["O", "C"]
    with pytest.raises(DataError, match="'H'"):
        train(content, skip_neighbor_stat=True)
    content = hosted_input("se_e2_r", system, 1)
    content["model"]["descriptor"]["type"] = "se_e2_rr"
    with pytest.raises(InputError, match="se_e2_rr") as caught:
        train(content)
    assert len(caught.value.problems) == 1
    content["model"]["descriptor"]["type"] = "se_e2_r"
    content["model"]["descriptor"]["sel"] = [1, 2]
    assert train(content) == 0
    assert "model/descriptor/sel to at least" in caplog.text
    content["model"] = {
        "type": "linear_ener",
        "weights": "mean",
        "type_map": TYPE_MAP,
        "models": [content["model"]],
    }
    with pytest.raises(ModelError, match="mixed type") as caught:
        train(content)
    assert len(str(caught.value)) < 300


def test_adapters_train_and_the_rest_stays(tmp_path, train, load):
    """LoRA of DPA-4: the start is the checkpoint's energy, a restart is bitwise, deepmd-kit reads the end."""
    content = hosted_input("dpa4", write_data(tmp_path, nframes=3), 2, save_ckpt="base")
    assert train(content, skip_neighbor_stat=True) == 0
    content["model"]["lora"] = {"rank": 2, "alpha": 2.0}
    content["training"] |= {"numb_steps": 4, "save_freq": 2, "save_ckpt": "adapted"}
    content["optimizer"] = {"type": "HybridMuon"}
    assert train(content, skip_neighbor_stat=True, init_model="base-2.pt") == 0
    base = load("base-2.pt")["model"]
    adapted = load("adapted-4.pt")["model"]
    added = {name for name in adapted.keys() - base.keys() if torch.is_tensor(adapted[name])}
    assert any("A_by_l" in name for name in added)
    weights = [name for name in base if name.endswith("so3_linear_1.weight")]
    weights += [name for name in base if ".weight_m0" in name]
    assert weights
    for name in weights:
        assert torch.equal(adapted[name], base[name])
    assert any(adapted[name].abs().max() > 0 for name in added if "B_" in name)
    assert train(content, skip_neighbor_stat=True, restart="adapted-2.pt") == 0
    again = load("adapted-4.pt")["model"]
    for name, x in adapted.items():
        if torch.is_tensor(x):
            assert torch.equal(again[name], x)
    without = copy.deepcopy(content)
    without["model"].pop("lora")
    for way in ("init_model", "finetune", "restart"):
        with pytest.raises(CheckpointError, match=r"model/lora [^\x00]*use-pretrain-script"):
            train(without, skip_neighbor_stat=True, **{way: "adapted-4.pt"})
    script = {"init_model": "adapted-4.pt", "use_pretrain_script": True}
    without["training"] |= {"numb_steps": 1, "save_ckpt": "scripted"}
    assert train(without, skip_neighbor_stat=True, **script) == 0
    assert load("scripted-1.pt")["model"].keys() == adapted.keys()
    assert train(without, skip_neighbor_stat=True, init_model="adapted-4.pt", force_load=True) == 0
    assert load("scripted-1.pt")["model"].keys() == base.keys()
    # A rate of zero leaves the energies of the checkpoint.
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    content["training"] |= {"numb_steps": 1, "save_ckpt": "still"}
    assert train(content, skip_neighbor_stat=True, init_model="base-2.pt") == 0
    (system,) = open_systems(str(tmp_path / "sys"), TYPE_MAP)
    frames = system.frames([0])
    energies = [
        Predictor(path, device="cpu").evaluate(frames).energy[0]
        for path in ("base-2.pt", "still-1.pt", "adapted-4.pt")
    ]
    assert energies[1] == pytest.approx(energies[0], rel=1e-12)
    assert energies[2] != energies[0]
    from deepmd.infer import DeepPot

    theirs = DeepPot("adapted-4.pt").eval(frames.coord, frames.box, frames.atype[0])[0]
    assert float(theirs[0, 0]) == pytest.approx(energies[2], rel=1e-6)
