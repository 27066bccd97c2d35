"""Data of a run: type map, names of labels, frames that training and validation share."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.argcheck import InputError, load, normalize
from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, TypeMapError, open_systems
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.checks.overlap import shared_frames
from deepmd_muon.model import ModelError, build_model
from deepmd_muon.train import run

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
DPA1 = {"type": "dpa1", "sel": 20, "rcut": 4.5, "rcut_smth": 2.0, "neuron": [4, 8]}
DPA1 |= {"axis_neuron": 3, "tebd_dim": 2, "attn_layer": 0, "seed": 1}


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "deepmd_muon")
    return caplog


@pytest.fixture
def train():
    """Train with the whole log, and return the exit status."""

    def start(content, **options):
        Path("input.json").write_text(json.dumps(content))
        return run(load("input.json"), **options)

    return start


def warnings_of(messages):
    return [record.getMessage() for record in messages.records if record.levelname == "WARNING"]


def without_type_map(content):
    content["model"].pop("type_map")
    return content


def relabel(names, target, source="train/fcc32"):
    """Copy a system of copper with other element names."""
    shutil.copytree(EXAMPLE / source, target)
    Path(target, "type_map.raw").write_text("\n".join(names))
    return str(target)


def test_a_type_map_comes_from_the_data_by_atomic_number(small_input, train, messages):
    data = [relabel(["Cu", "Xx"], "a"), relabel(["O", "Cu", "H"], "b")]
    content = without_type_map(small_input(model={"descriptor": DPA1}))
    content["training"] |= {"training_data": {"systems": data, "batch_size": 1}, "numb_steps": 2}
    del content["training"]["validation_data"]
    assert train(content) == 0
    assert json.loads(Path("out.json").read_text())["model"]["type_map"] == ["H", "O", "Cu", "Xx"]
    assert any("['H', 'O', 'Cu', 'Xx']" in message for message in messages.messages)


def test_a_restart_and_a_finetuning_take_the_type_map_of_the_checkpoint(
    small_input, train, messages
):
    long = {
        "model": {"descriptor": DPA1, "type_map": ["Cu", "O"]},
        "training": {"numb_steps": 2, "save_freq": 2},
    }
    assert train(small_input(**long)) == 0
    for way in ("restart", "finetune", "init_model"):
        content = without_type_map(small_input(**long))
        content["training"]["numb_steps"] = 3
        assert train(content, **{way: "model.ckpt-2.pt"}) == 0
        assert json.loads(Path("out.json").read_text())["model"]["type_map"] == ["Cu", "O"]


def test_a_type_map_that_cannot_be_found_is_an_error(small_input, train):
    content = without_type_map(small_input())
    path = relabel(["Cu"], "unnamed")
    Path(path, "type_map.raw").unlink()
    content["training"]["training_data"]["systems"] = [path]
    with pytest.raises(TypeMapError, match=r"type_map\.raw"):
        train(content)
    with pytest.raises(ModelError, match="type_map"):
        build_model(normalize(content).normalized["model"] | {"descriptor": DPA1})


def test_settings_for_types_are_checked_when_the_types_are_known(small_input, train):
    content = without_type_map(small_input())
    content["model"]["descriptor"]["sel"] = [40, 40]
    normalize(content)
    with pytest.raises(ModelError, match="one number for each of the 1 types"):
        train(content)


def test_settings_without_effect_are_warned_of_once(small_input, train, caplog):
    content = small_input(optimizer={"type": "HybridMuon", "normuon_beta": 0.5})
    content["training"].update(numb_steps=1, ema_decay=0.9)
    with caplog.at_level(logging.WARNING):
        assert train(content) == 0
    named = [line for line in caplog.messages if "has no effect" in line]
    assert len(named) == 2
    assert {line.split(":")[0] for line in named} == {
        "training/ema_decay",
        "optimizer/normuon_beta",
    }


def extxyz(path, key, count=3, seed=0):
    random = np.random.default_rng(seed)
    with Path(path).open("w") as file:
        for _ in range(count):
            rows = [f"Cu {2.4 * k:.3f} {random.random():.3f} 0 0 0 0" for k in range(4)]
            head = f'Lattice="10 0 0 0 10 0 0 0 10" Properties=species:S:1:pos:R:3:REF_forces:R:3 {key}={random.random()}'
            file.write("\n".join(["4", head, *rows, ""]))


def test_label_keys_of_the_input_hold_in_training_and_in_dp_test(
    small_input, train, messages, capsys
):
    pytest.importorskip("ase")
    extxyz("train.xyz", "pbe_e")
    extxyz("valid.xyz", "REF_energy", seed=1)
    content = small_input(training={"numb_steps": 1})
    content["training"]["training_data"] = {
        "systems": ["train.xyz"],
        "label_keys": {"energy": "pbe_e"},
    }
    content["training"]["validation_data"] = {"systems": ["valid.xyz"]}
    content["loss"] = {"type": "ener"}
    assert train(content) == 0
    assert (
        sum(
            "1 system, 3 frames of 4 atoms, 1 periodic, labels energy, force" in m
            for m in messages.messages
        )
        == 2
    )
    assert (
        json.loads(Path("out.json").read_text())["training"]["training_data"]["label_keys"][
            "energy"
        ]
        == "pbe_e"
    )
    Path("input.json").write_text(json.dumps(content))
    messages.clear()
    assert main(["test", "-m", "model.ckpt.pt", "--train-data", "input.json"]) == 0
    assert any("Energy RMSE" in message for message in messages.messages)
    messages.clear()
    assert main(["test", "-m", "model.ckpt.pt", "-s", "train.xyz"]) == 0
    assert not any("Energy RMSE" in message for message in messages.messages)
    assert main(["test", "-m", "model.ckpt.pt", "-s", "train.xyz", "--energy-key", "pbe_e"]) == 0
    assert any("Energy RMSE" in message for message in messages.messages)
    content["training"]["training_data"]["label_keys"] = {"energie": "pbe_e"}
    with pytest.raises(InputError, match="energie"):
        normalize(content)


def test_slabs_are_refused_in_training_and_in_dp_test(
    small_input, train, capsys, finished_checkpoint
):
    pytest.importorskip("ase")
    extxyz("slab.xyz", "energy")
    text = Path("slab.xyz").read_text()
    Path("slab.xyz").write_text(text.replace(" energy=", ' pbc="T T F" energy='))
    content = small_input()
    content["training"]["training_data"]["systems"] = ["slab.xyz"]
    with pytest.raises(DataError, match="T T F"):
        train(content)
    assert main(["test", "-m", finished_checkpoint, "-s", "slab.xyz"]) == 2
    assert "frame 0" in capsys.readouterr().err


@pytest.fixture
def finished_checkpoint(small_input, train):
    assert train(small_input(training={"numb_steps": 1})) == 0
    return "model.ckpt.pt"


def test_training_without_any_label_is_refused(small_input, train, messages):
    shutil.copytree(EXAMPLE / "train" / "fcc32", "bare")
    for label in ("energy", "force", "virial"):
        for file in Path("bare").glob(f"set.*/{label}.npy"):
            file.unlink()
    content = small_input(training={"training_data": {"systems": ["bare"]}, "numb_steps": 1})
    with pytest.raises(DataError, match="no frame of bare has"):
        train(content)
    assert main(["convert-data", "bare", str(EXAMPLE / "train" / "fcc32"), "both"]) == 0
    assert "bare: no labels" in warnings_of(messages)


def test_shared_frames_are_counted_across_formats(tmp_path):
    pytest.importorskip("ase")
    train, valid = (open_systems(str(EXAMPLE / name)) for name in ("train", "valid"))
    frames = sum(system.nframes for system in valid)
    assert shared_frames(train, valid) == (0, frames)
    assert shared_frames(valid, valid) == (frames, frames)
    for name in ("copy.hdf5", "copy.xyz"):
        assert main(["convert-data", str(EXAMPLE / "valid"), name]) == 0
        assert shared_frames([*train, *open_systems(name)], valid) == (frames, frames)
    # A link leads to the same place, whatever the size.
    Path("link").symlink_to(EXAMPLE / "valid")
    assert shared_frames(train + open_systems("link"), valid) == (frames, frames)
    # One frame of another system, and neighbours in time that are not copies.
    moved = open_systems(str(EXAMPLE / "valid" / "fcc32"))[0].frames([0, 1])
    shutil.copytree(EXAMPLE / "valid" / "fcc32", "moved")
    for file in Path("moved").glob("set.*"):
        shutil.rmtree(file)
    Path("moved/set.000").mkdir()
    coord = moved.coord.copy()
    coord[1, 3, 0] += 1e-2
    np.save("moved/set.000/coord.npy", coord.reshape(2, -1).astype(np.float32))
    np.save("moved/set.000/box.npy", moved.box.reshape(2, 9))
    assert shared_frames(train, open_systems("moved")) == (0, 2)
    assert shared_frames(valid, open_systems("moved")) == (1, 2)


@pytest.mark.parametrize("name", ["fcc32", "triclinic8", "cluster13"])
def test_frames_that_are_shifted_or_wrapped_are_shared(name):
    train, valid = (open_systems(str(EXAMPLE / part / name)) for part in ("train", "valid"))
    shutil.copytree(EXAMPLE / "valid" / name, "moved")
    (folder,) = Path("moved").glob("set.*")
    coord = np.load(folder / "coord.npy").reshape(valid[0].nframes, -1, 3).astype(float)
    random = np.random.default_rng(3)
    coord += random.uniform(-4, 4, (len(coord), 1, 3))
    if valid[0].pbc:
        box = np.load(folder / "box.npy").reshape(-1, 3, 3)
        coord += random.integers(-2, 3, coord.shape) @ box
    np.save(folder / "coord.npy", coord.reshape(len(coord), -1).astype(np.float32))
    frames = valid[0].nframes
    assert shared_frames(valid, open_systems("moved")) == (frames, frames)
    assert shared_frames(train, open_systems("moved")) == (0, frames)


def test_training_names_atoms_that_nearly_coincide_and_data_without_neighbours(
    small_input, train, messages
):
    """In the frames whose neighbours are counted; the shortest distance was logged at INFO alone."""
    shutil.copytree(EXAMPLE / "train" / "fcc32", "data")
    (folder,) = Path("data").glob("set.*")
    coord = np.load(folder / "coord.npy")
    close = coord.copy()
    close[5, 6:9] = close[5, :3] + 0.01 / np.sqrt(3)
    np.save(folder / "coord.npy", close)
    data = {"systems": ["data"]}
    content = small_input(training={"training_data": data, "numb_steps": 1})
    assert train(content) == 0
    said = [text for text in warnings_of(messages) if "0.01 Å apart" in text]
    assert any("frame 5: atoms 0 and 2 are" in text for text in said), said
    messages.clear()
    np.save(folder / "coord.npy", coord * 5)
    np.save(folder / "box.npy", np.load(folder / "box.npy") * 5)
    assert train(content) == 0
    assert any("no atom has a neighbour within" in text for text in warnings_of(messages))


def test_branches_may_have_other_energies_for_the_same_structures(small_input):
    shutil.copytree(EXAMPLE / "train" / "fcc32", "other")
    (file,) = Path("other").glob("set.*/energy.npy")
    np.save(file, np.load(file) + 100.0)
    both = [str(EXAMPLE / "train" / "fcc32"), "other"]
    systems = open_systems(both)
    assert any("same structure" in sentence for sentence in suspicions(systems))
    assert suspicions(systems[:1]) + suspicions(systems[1:]) == []


def test_data_of_training_and_validation_are_doubted_once(small_input, train, messages):
    shutil.copytree(EXAMPLE / "train" / "fcc32", "still")
    (file,) = Path("still").glob("set.*/force.npy")
    np.save(file, np.zeros_like(np.load(file)))
    data = {"systems": ["still"], "batch_size": 2}
    content = small_input(
        training={"training_data": data, "validation_data": data, "numb_steps": 1}
    )
    assert train(content) == 0
    assert len([text for text in warnings_of(messages) if "forces are zero" in text]) == 1


def test_training_warns_of_shared_frames(small_input, train, messages):
    data = {"systems": [str(EXAMPLE / "train")], "batch_size": 2}
    content = small_input(training={"validation_data": data, "numb_steps": 1})
    assert train(content) == 0
    frames = sum(system.nframes for system in open_systems(str(EXAMPLE / "train")))
    (warning,) = (message for message in warnings_of(messages) if "validation frames" in message)
    assert warning.startswith(f"{frames} of {frames} ")
    messages.clear()
    assert train(small_input(training={"numb_steps": 1})) == 0
    assert not any("validation frames" in message for message in warnings_of(messages))
