"""Weights of frames, kinds of frames, frames left out for their forces, and frame parameters by name."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.data import (
    DataError,
    SystemFormatError,
    open_systems,
    with_parameters,
    writing,
)
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.frames import Parameters
from deepmd_muon.label_keys import Reading

FRAMES = (
    "energy=-1 config_type=dimer charge=0 spin=1",
    "energy=-2 config_type=dimer weight=0.5 charge=1 spin=2",
    "energy=-3 config_type=bulk config_weight=4 charge=-1 spin=2",
    "energy=-4 charge=0 spin=1",
)


@pytest.fixture(autouse=True)
def _messages(caplog):
    caplog.set_level(logging.INFO, "deepmd_muon")


@pytest.fixture
def xyz(tmp_path):
    pytest.importorskip("ase")
    rows = "H 0 0 0 {0} 0 0\nH 0.9 0 0 -{0} 0 0\n"
    path = tmp_path / "a.xyz"
    path.write_text(
        "".join(
            f"2\n{words} Properties=species:S:1:pos:R:3:forces:R:3\n{rows.format(k + 1)}"
            for k, words in enumerate(FRAMES)
        )
    )
    return str(path)


def test_a_frame_has_the_weight_of_its_header_times_that_of_its_config_type(xyz, caplog):
    (system,) = open_systems(xyz)
    assert system.frames(range(4)).weight.tolist() == [1.0, 0.5, 4.0, 1.0]
    assert any("weights in the headers of frames 1 and 2" in word for word in caplog.messages)
    assert [system.origin(k).config_type for k in range(4)] == ["dimer", "dimer", "bulk", ""]
    weights = {"dimer": 2.0, "Default": 0.25}
    (system,) = open_systems(xyz, reading=Reading(config_weights=weights))
    assert system.frames(range(4)).weight.tolist() == [2.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize("write", [writing.write_npy, writing.write_hdf5])
def test_written_frames_keep_their_config_type(xyz, tmp_path, write):
    text = Path(xyz).read_text().replace("config_type=bulk", 'config_type="cold, bulk"')
    Path(xyz).write_text(text)
    (system,) = open_systems(xyz)
    paths = write([system.select(np.array([3, 2, 0]))], tmp_path / "written")
    (written,) = open_systems(*paths)
    assert written.frames(range(3)).energy.tolist() == [-4.0, -3.0, -1.0]
    assert [written.origin(k).config_type for k in range(3)] == ["", "cold, bulk", "dimer"]
    assert written.select(np.array([2])).origin(0).config_type == "dimer"


def test_a_config_type_too_few_is_an_error(xyz, tmp_path):
    paths = writing.write_npy(open_systems(xyz), tmp_path / "written")
    (Path(paths[0]) / "config_type.raw").write_text("dimer dimer")
    (system,) = open_systems(*paths)
    with pytest.raises(SystemFormatError, match="one word per frame, 4, found 2"):
        system.origin(0)


def test_frames_of_weight_0_are_left_out_by_name(xyz, caplog):
    (system,) = open_systems(xyz, reading=Reading(config_weights={"dimer": 0.0}))
    assert system.frames(range(2)).energy.tolist() == [-3.0, -4.0]
    assert any("frames 0 and 1" in message for message in caplog.messages)
    with pytest.raises(SystemFormatError, match="weight of every frame"):
        open_systems(xyz, reading=Reading(config_weights={"Default": 0, "dimer": 0, "bulk": 0}))


def test_files_without_weights_have_none(tmp_path, xyz):
    (system,) = open_systems(write_npy(tmp_path / "s", [0, 1], [make_arrays(3, 2)]))
    assert system.frames([0]).weight is None
    arrays = make_arrays(3, 2) | {"weight": np.array([1.0, 2.0, -1.0])}
    (system,) = open_systems(write_npy(tmp_path / "negative", [0, 1], [arrays]))
    with pytest.raises(SystemFormatError, match=r"weight.*less than 0"):
        system.frames([2])


@pytest.mark.parametrize("form", ["npy", "hdf5", "lmdb", "xyz"])
def test_conversions_keep_weights(tmp_path, xyz, form):
    output = tmp_path / ("out" if form == "npy" else f"out.{form}")
    assert main(["convert-data", xyz, str(output)]) == 0
    read = [system.frames(range(system.nframes)) for system in open_systems(str(output))]
    weights = {
        (energy, weight)
        for frames in read
        for energy, weight in zip(frames.energy, frames.weight, strict=True)
    }
    assert weights == {(-1.0, 1.0), (-2.0, 0.5), (-3.0, 4.0), (-4.0, 1.0)}


def test_frames_beyond_max_force_are_left_out_by_name(tmp_path, xyz, caplog):
    force = np.ones((5, 6))
    force[3, 2] = 40.0
    arrays = make_arrays(5, 2) | {"force": force}
    path = write_hdf5(tmp_path / "data.hdf5", "a", [0, 1], [arrays])
    (system,) = open_systems(path, ["B", "A"], Reading(max_force=10.0))
    np.testing.assert_array_equal(
        system.frames(range(4)).energy, arrays["energy"][[0, 1, 2, 4]].ravel()
    )
    part = system.part(2, 4).with_types(["A", "B"])
    np.testing.assert_array_equal(part.frames([1]).energy, arrays["energy"][[4]].ravel())
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "frame 3" in warning.getMessage()
    assert "40" in warning.getMessage()
    with pytest.raises(DataError, match="max_force"):
        open_systems(path, reading=Reading(max_force=0.5))


def test_frames_below_min_pair_dist_are_left_out_by_name(tmp_path, caplog):
    coord = np.tile([0.0, 0.0, 0.0, 2.0, 0.0, 0.0], (4, 1))
    coord[2, 3] = 9.6  # 0.4 Å from the first atom's image
    arrays = make_arrays(4, 2) | {"coord": coord, "box": np.tile(10.0 * np.eye(3).ravel(), (4, 1))}
    path = write_npy(tmp_path / "s", [0, 1], [arrays])
    (system,) = open_systems(path, ["B", "A"], Reading(min_pair_dist=0.5))
    np.testing.assert_array_equal(
        system.frames(range(3)).energy, arrays["energy"][[0, 1, 3]].ravel()
    )
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "frame 2" in warning.getMessage()
    assert "0.4" in warning.getMessage()
    (whole,) = open_systems(path, reading=Reading(min_pair_dist=0.3))
    assert whole.nframes == 4
    with pytest.raises(DataError, match="min_pair_dist"):
        open_systems(path, reading=Reading(min_pair_dist=2.5))


def test_frame_parameters_come_from_headers_and_from_files_of_their_names(tmp_path, xyz):
    reading = Reading(frame_parameters=("charge", "spin"))
    expected = np.array([[0.0, 1.0], [1.0, 2.0], [-1.0, 2.0], [0.0, 1.0]])
    columns = {"charge": expected[:, 0], "spin": expected[:, 1:]}
    arrays = make_arrays(4, 2) | columns
    for path in (xyz, write_npy(tmp_path / "s", [0, 1], [arrays])):
        (system,) = with_parameters(open_systems(path, None, reading), Parameters(fparam=2))
        np.testing.assert_array_equal(system.frames([3, 1]).fparam, expected[[3, 1]])
    output = tmp_path / "out"
    words = ["convert-data", xyz, str(output), "--frame-parameters", "charge", "spin"]
    assert main(words) == 0
    np.testing.assert_array_equal(np.load(output / "set.000" / "fparam.npy"), expected)


def test_missing_frame_parameters_are_named(tmp_path, xyz):
    with pytest.raises(SystemFormatError, match=r"frame 0.*no field.*charge"):
        open_systems(xyz, None, Reading(frame_parameters=("field",)))
    path = write_npy(tmp_path / "s", [0, 1], [make_arrays(4, 2)])
    with pytest.raises(SystemFormatError, match=r"charge\.npy missing"):
        open_systems(path, None, Reading(frame_parameters=("charge",)))


def test_an_input_reads_data_by_all_of_these_settings():
    data = {
        "systems": ["a.xyz"],
        "format": "extxyz",
        "frame_parameters": ["charge"],
        "config_weights": {"dimer": 2},
        "max_force": 30,
        "min_pair_dist": 0.5,
        "keep_unconverged": True,
    }
    model = {
        "type_map": ["H"],
        "descriptor": {"type": "se_e2_a", "sel": [4], "rcut": 4.0},
        "fitting_net": {},
    }
    training = {"numb_steps": 1, "training_data": data}
    rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5}
    run = normalize({"model": model, "learning_rate": rate, "loss": {}, "training": training})
    reading = run.settings.training.training_data.reading
    assert reading == Reading(
        format="extxyz",
        keep_unconverged=True,
        config_weights={"dimer": 2.0},
        max_force=30.0,
        min_pair_dist=0.5,
        frame_parameters=("charge",),
    )


def test_two_energies_of_a_structure_name_the_header_words_that_differ(tmp_path):
    pytest.importorskip("ase")
    random = np.random.default_rng(2)
    path = tmp_path / "a.xyz"
    frames = []
    for _ in range(4):
        rows = [
            f"{element} " + " ".join(f"{x:.6f}" for x in random.normal(scale=0.1, size=3) + 1.1 * k)
            for k, element in enumerate("OHH")
        ]
        for charge in (0, 1):
            head = f"energy={-10.0 + 8.0 * charge} charge={charge} method=pbe"
            frames.append("\n".join(["3", f"{head} Properties=species:S:1:pos:R:3", *rows, ""]))
    path.write_text("".join(frames))
    (sentence,) = (line for line in suspicions(open_systems(str(path))) if "same structure" in line)
    assert "8 eV apart; their headers differ in charge (0 and 1)" in sentence
    by_charge = open_systems(str(path), reading=Reading(frame_parameters=("charge",)))
    assert not any("same structure" in line for line in suspicions(by_charge))


def test_a_cap_on_the_command_line_reaches_data_and_input(tmp_path, xyz, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert-data", xyz, "out", "--max-force", "2.5"]) == 0
    (system,) = open_systems("out")
    assert system.nframes == 2
    words = ["init", xyz, "--valid-data", "out", "--steps", "2", "--max-force", "2.5"]
    assert main(words) == 0
    training = json.loads(Path("input.json").read_text())["training"]
    assert training["training_data"]["max_force"] == 2.5
    assert main(["convert-data", xyz, "other", "--max-force", "0"]) == 2
    assert "--max-force must be above 0" in capsys.readouterr().err


def test_config_weights_become_weights_of_npy_folders_or_are_refused(tmp_path, xyz, capsys):
    output = tmp_path / "out"
    assert main(["convert-data", xyz, str(output), "--config-weights", "dimer=3", "bulk=0"]) == 0
    (system,) = open_systems(str(output))
    frames = system.frames(range(3))
    assert dict(zip(frames.energy, frames.weight, strict=True)) == {-1.0: 3.0, -2.0: 1.5, -4.0: 1.0}
    with pytest.raises(DataError, match=r"weight\.npy"):
        open_systems(str(output), reading=Reading(config_weights={"dimer": 2.0}))
    for word in ("dimer", "dimer=2,bulk=3"):
        assert main(["convert-data", xyz, str(tmp_path / "b"), "--config-weights", word]) == 2
        assert f"found '{word}'" in capsys.readouterr().err


def test_a_config_weight_that_no_frame_takes_is_named(xyz, caplog):
    open_systems(xyz, reading=Reading(config_weights={"dimmer": 2.0}))
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "dimmer" in warning.getMessage()
    assert "bulk, dimer" in warning.getMessage()
