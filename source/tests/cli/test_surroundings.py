"""What surrounds a command: the number of threads, ranks, and the current folder."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_dp

from deepmd_muon.cli.main import main
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.launch import find_place

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt"


@pytest.mark.parametrize("number", ["0", "abc", "-1", "2,0", "1.5"])
def test_a_number_of_threads_that_openmp_ignores_is_refused(monkeypatch, capfd, number):
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    assert main(["train", "input.json"]) == 2
    assert "OMP_NUM_THREADS" in capfd.readouterr().err


@pytest.mark.parametrize("local", ["-1", "2"])
def test_a_local_rank_that_no_process_has_is_refused(local):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": local}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(TrainingError, match="local rank"):
        find_place(variables)


@pytest.mark.parametrize("kind", ["FIFO", "bytes"])
@pytest.mark.parametrize(
    "words",
    [
        "show lcurve FILE -o picture.png",
        "freeze -c .",
        "test -m none.pt -f FILE",
        "train FILE",
        "show routing FILE",
    ],
)
def test_a_text_that_is_no_text_or_a_fifo_is_refused(tmp_path, monkeypatch, capfd, words, kind):
    monkeypatch.chdir(tmp_path)
    name = {"freeze": "checkpoint", "train": "input.json"}.get(words.split()[0], "some.json")
    if kind == "FIFO":
        os.mkfifo(name)
    else:
        Path(name).write_bytes(b"# step\n\xff\xfe\n")
    assert run_dp(words.replace("FILE", name)) == 2
    assert name in capfd.readouterr().err


def test_a_folder_whose_name_is_no_utf8(tmp_path, monkeypatch, capfd):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    # What pytest captures of a log passes between its processes in UTF-8.
    monkeypatch.setattr(logging.getLogger("deepmd_muon"), "propagate", False)
    shutil.copytree(EXAMPLE / "data/valid", "data")
    content = json.loads((EXAMPLE / "input.json").read_text())
    data = {"systems": ["data/*"], "batch_size": 1}
    content["training"] |= {"training_data": data, "numb_steps": 1, "stat_file": "stat.hdf5"}
    del content["training"]["validation_data"]
    Path("input.json").write_text(json.dumps(content))
    assert main(["train", str(folder / "input.json")]) == 0
    assert run_dp("train out.json --restart auto -o again.json") == 0
    assert run_dp(f"test -m {folder}/model.ckpt.pt -s {folder}/data -d detail -l test.log") == 0
    for name in ("detail.e.out", "test.log"):
        assert "\\udcff" in Path(name).read_text(encoding="utf-8")
    capfd.readouterr()
    assert run_dp(f"init {folder}/data --valid-data {folder}/data -o new.json") == 2
    assert "no UTF-8" in capfd.readouterr().err
    assert not Path("new.json").exists()
    assert run_dp("init data -o new.json") == 0


def test_plugins_and_modules_of_the_current_folder_are_not_taken(tmp_path):
    info = tmp_path / "evil-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[deepmd_muon.plugins]\nevil = evil\n")
    for module in ("evil", "numpy", "torch"):
        (tmp_path / f"{module}.py").write_text("open('ran', 'w')")
    root = str(Path(__file__).parents[3])
    subprocess.run(
        [sys.executable, "-m", "deepmd_muon", "train", "none.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        check=False,
    )
    assert not (tmp_path / "ran").exists()
