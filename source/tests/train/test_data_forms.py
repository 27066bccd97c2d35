"""Training from other forms of data and other batches: the same run as from folders, exact through a restart."""

from pathlib import Path

import pytest
from compared import assert_same

from deepmd_muon.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


def test_a_run_from_lmdb_is_the_run_from_folders_through_a_restart(
    small_input, train, load, check_restart
):
    pytest.importorskip("lmdb")
    pytest.importorskip("msgpack")
    for name in ("train", "valid"):
        assert main(["convert-data", str(EXAMPLE / name), f"{name}.lmdb"]) == 0
    sections = {
        name: f"{part}.lmdb"
        for name, part in (("training_data", "train"), ("validation_data", "valid"))
    }
    given = {name: {"systems": [path], "batch_size": "mix:64"} for name, path in sections.items()}
    whole, _ = check_restart(small_input(training={**given, "numb_steps": 6, "save_freq": 3}), 3)
    curve = Path("lcurve.out").read_text()
    folders = {"training_data": EXAMPLE / "train", "validation_data": EXAMPLE / "valid"}
    given = {
        name: {"systems": [str(path)], "batch_size": "mix:64"} for name, path in folders.items()
    }
    files = {"save_ckpt": "folders", "disp_file": "folders.out"}
    assert train(small_input(training={**given, **files, "numb_steps": 6, "save_freq": 3})) == 0
    assert Path("folders.out").read_text() == curve
    assert_same(whole, load("folders-6.pt"))
