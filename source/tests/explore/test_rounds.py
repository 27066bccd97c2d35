"""Rounds on disk: damaged records are named, and results of other settings are not taken for those of these."""

import json
import os
import shutil

import numpy as np
import pytest
from ase.io import read, write
from quick_input import QUICK

from deepmd_muon.cli.main import main
from deepmd_muon.explore.records import differences, flat, hash_of
from deepmd_muon.explore.rounds import Round, table_of
from deepmd_muon.explore.settings import ExploreError

DRAW = {"copies": 8, "blow_ups": 1, "followed": 0.5, "candidates": 20, "chosen": 6}
RECORD = {
    "draw": DRAW,
    "labels": {"labelled": 5, "failed": 1},
    "training": {"error_before": 0.5, "error_after": None},
    "check": {"verdict": "doubtful", "summary": "scans doubtful"},
}
DAMAGES = {
    "a list": b"[]",
    "cut": json.dumps(RECORD).encode()[:-30],
    "no UTF-8": b"\xff\xfe{}",
    "nested deeply": b'{"draw":' * 10_000,
    "a list as stage": json.dumps({**RECORD, "draw": []}).encode(),
    "a missing number": json.dumps({**RECORD, "draw": {"copies": 8}}).encode(),
    "a word as number": json.dumps({**RECORD, "draw": {**DRAW, "chosen": "six"}}).encode(),
    "nothing chosen": json.dumps({**RECORD, "draw": {**DRAW, "chosen": 0}}).encode(),
    "a word as error": json.dumps({**RECORD, "training": {"error_before": "low"}}).encode(),
    "NaN as error": json.dumps({**RECORD, "training": {"error_before": float("nan")}}).encode(),
    "an unknown verdict": json.dumps(
        {**RECORD, "check": {"verdict": "fine", "summary": ""}}
    ).encode(),
    "a number as summary": json.dumps(
        {**RECORD, "check": {"verdict": "holds", "summary": 3}}
    ).encode(),
    "an unknown stage": json.dumps({**RECORD, "drawn": DRAW}).encode(),
    "a stage twice": b'{"check": null, "check": null}',
    "a FIFO": None,
}


@pytest.mark.parametrize("name", list(DAMAGES))
@pytest.mark.parametrize("file", ["round.json", "made_from.json"])
def test_a_damaged_record_is_named(tmp_path, name, file):
    content = DAMAGES[name]
    if content is None:
        os.mkfifo(tmp_path / file)
    elif file == "made_from.json" and content.startswith(b'{"draw": {'):
        content = json.dumps({"draw": [1.0], "training": 3}).encode()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    here = Round(tmp_path, 1)
    with pytest.raises(ExploreError, match=rf"{file}[\s\S]*remove"):
        here.done() if file == "round.json" else here.begin("draw", {})


def test_a_record_is_a_row_of_the_table(tmp_path):
    (tmp_path / "round.json").write_text(json.dumps(RECORD))
    done = Round(tmp_path, 1).done()
    assert done.begun
    assert not Round(tmp_path / "none", 2).done().begun
    row = table_of([Round(tmp_path / "none", 0).done(), done])[2]
    assert " ".join(row.split()) == "1 1 of 8 20 6 5 1 0.500 -> - scans doubtful"


def test_differences_are_told_by_name_and_files_that_are_gone_are_not_compared():
    settings = flat({"time": 0.5, "inner": {"temperatures": [600.0], "seed": 1}}, "dynamics")
    assert settings == {
        "dynamics/time": 0.5,
        "dynamics/inner/temperatures": [600.0],
        "dynamics/inner/seed": 1,
    }
    recorded = {**settings, "model 0": "sha256:1", "model 1": "sha256:2", "data": "sha256:3"}
    present = {**settings, "model 0": None, "model 1": "sha256:2", "data": "sha256:4"}
    del present["dynamics/inner/seed"]
    present["dynamics/time"] = 1.0
    assert differences(recorded, present) == [
        "dynamics/time was 0.5, is 1.0",
        "dynamics/inner/seed was 1, is not set",
        "data has another content",
    ]
    assert differences(recorded, recorded) == []
    assert len(differences({str(k): k for k in range(50)}, {})) == 7


def test_the_hash_of_a_folder_is_that_of_names_and_contents(tmp_path):
    folder = tmp_path / "a"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(b"one")
    first = hash_of(folder)
    assert hash_of(tmp_path / "none") is None
    shutil.copytree(folder, tmp_path / "b")
    assert hash_of(tmp_path / "b") == first
    (tmp_path / "b" / "inner" / "file").rename(tmp_path / "b" / "inner" / "other")
    assert hash_of(tmp_path / "b") != first
    (folder / "inner" / "file").write_bytes(b"two")
    assert hash_of(folder) != first


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """A folder in which one round is finished."""
    folder = tmp_path_factory.mktemp("finished") / "copper"
    shutil.copytree(trained, folder, symlinks=True)
    settings = {**QUICK, "rounds": 1, "training": {"steps": 4}}
    (folder / "explore.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["explore", "explore.json"]) == 0
    return folder


@pytest.fixture
def again(finished, tmp_path, monkeypatch):
    """A copy of that folder, and a function that runs the command with changed keys."""
    folder = tmp_path / "copper"
    shutil.copytree(finished, folder, symlinks=True)
    monkeypatch.chdir(folder)

    def run(**changes):
        settings = json.loads((folder / "explore.json").read_text())
        for path, value in changes.items():
            *sections, name = path.split("__")
            place = settings
            for section in sections:
                place = place[section]
            place[name] = value
        (folder / "explore.json").write_text(json.dumps(settings))
        return main(["explore", "explore.json"])

    run.folder = folder
    return run


CHANGES = {
    "dynamics__temperatures": [600, 1400],
    "dynamics__seed": 3,
    "selection__frames": 5,
    "selection__closest": 0.8,
    "labels__calculator": "ase.calculators.lj:LennardJones",
    "labels__arguments": {"asap_cutoff": True},
    "labels__largest_force": 20.0,
    "labels__stress": False,
    "training__steps": 5,
    "training__share": None,
    "training__start": "restart",
}
ONE_A_SECTION = ("dynamics__seed", "selection__frames", "labels__arguments", "training__steps")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, marks=[] if key in ONE_A_SECTION else pytest.mark.slow)
        for key, value in CHANGES.items()
    ],
)
def test_a_finished_round_of_other_settings_is_refused(again, capsys, key, value):
    before = (again.folder / "explore" / "rounds.txt").read_bytes()
    assert again(**{key: value}) == 2
    message = capsys.readouterr().err
    assert f"{key.replace('__', '/')}" in message
    assert "made_from.json" in message
    assert (again.folder / "explore" / "rounds.txt").read_bytes() == before


def change_model(folder):
    import torch

    path = (folder / "model.ckpt.pt").resolve()
    content = torch.load(path, weights_only=True)
    weights = content["model"]
    name = next(name for name in weights if name.endswith("bias_atom_e"))
    weights[name] = weights[name] + 1.0
    torch.save(content, path)
    return "model 0"


def change_input(folder):
    content = json.loads((folder / "input.json").read_text())
    content["learning_rate"]["start_lr"] *= 2.0
    (folder / "input.json").write_text(json.dumps(content))
    return "input/learning_rate/start_lr"


def change_data(folder):
    path = next((folder / "data" / "train").rglob("energy.npy"))
    np.save(path, np.load(path) + 0.1)
    return "the data of the input"


def change_labels(folder):
    path = folder / "explore" / "round_1" / "labelled.xyz"
    write(path, read(path, ":")[1:])
    return "round_1/labelled.xyz"


def change_candidates(folder):
    path = folder / "explore" / "round_1" / "candidates.xyz"
    write(path, read(path, ":")[1:])
    return "round_1/candidates.xyz"


@pytest.mark.parametrize(
    "change", [change_model, change_input, change_data, change_labels, change_candidates]
)
def test_a_finished_round_of_other_files_is_refused(again, capsys, change):
    reports = {path: path.read_bytes() for path in (again.folder / "explore").rglob("check.json")}
    name = change(again.folder)
    assert again() == 2
    assert name in capsys.readouterr().err
    assert {path: path.read_bytes() for path in reports} == reports


def test_a_round_is_kept_when_nothing_that_it_depends_on_has_changed(again, capsys):
    written = {path: path.stat().st_mtime_ns for path in (again.folder / "explore").rglob("*.json")}
    content = json.loads((again.folder / "input.json").read_text())
    content["_note"] = "a comment"
    (again.folder / "input.json").write_text(json.dumps(content))
    # The weights of the last round are gone, as if somebody had cleared room.
    for path in (again.folder / "explore").rglob("model.ckpt*.pt"):
        path.unlink()
    assert again(labels__workers=2, labels__time_limit=50.0, labels__most_failed=0.9) == 0
    assert "done after round 1" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_check_of_other_settings_is_done_again(again, caplog):
    assert again(check__copies=1) == 0
    assert "check/copies was 2, is 1" in caplog.text
    for number in (0, 1):
        report = json.loads((again.folder / "explore" / f"round_{number}/check.json").read_text())
        assert "dynamics" in json.dumps(report)
        origins = json.loads(
            (again.folder / "explore" / f"round_{number}/made_from.json").read_text()
        )
        assert origins["check"]["check/copies"] == 1


def test_a_round_without_a_record_of_its_origins_is_kept_with_a_warning(again, caplog):
    (again.folder / "explore" / "round_1" / "made_from.json").unlink()
    assert again(dynamics__seed=3) == 0
    assert "does not say what its stage draw was made from" in caplog.text
    assert not (again.folder / "explore" / "round_1" / "made_from.json").exists()
