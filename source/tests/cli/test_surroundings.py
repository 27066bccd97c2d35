"""What surrounds a command: the number of threads, ranks, and the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepmd_muon.cli.main import main
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.launch import find_place


@pytest.mark.parametrize("number", ["0", "abc", "-1", "2,0", "1.5"])
def test_a_number_of_threads_that_openmp_ignores_is_refused(monkeypatch, capfd, number):
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    assert main(["train", "input.json"]) == 2
    assert "OMP_NUM_THREADS" in capfd.readouterr().err


@pytest.mark.parametrize("local", ["-1", "2"])
def test_a_local_rank_that_no_process_has_is_refused(local):
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": local,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    with pytest.raises(TrainingError, match="local rank"):
        find_place(variables)


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
