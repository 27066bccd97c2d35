"""The commands that DP-GEN issues for its training jobs, in its order, and the files that it fetches."""

import json
import shutil
from pathlib import Path

from deepmd_muon.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt"
FETCHED = (
    "frozen_model.pth",
    "lcurve.out",
    "checkpoint",
    "model.ckpt.pt",
    "frozen_model_compressed.pth",
)


def train(folder, *options):
    """Do what DP-GEN's shell line does: begin, or go on where there is a checkpoint."""
    if (folder / "model.ckpt.pt").exists():
        options = ("--restart", "model.ckpt")
    return main(["--pt", "train", "input.json", "--skip-neighbor-stat", *options])


def test_two_iterations(tmp_path, monkeypatch):
    content = json.loads((EXAMPLE / "input.json").read_text())
    content["model"]["descriptor"] |= {"sel": [40], "neuron": [4], "seed": 2**32 - 1}
    content["model"]["fitting_net"] |= {"neuron": [8], "seed": 2**32 - 1}
    content["training"] |= {"numb_steps": 4, "save_freq": 2, "disp_freq": 2, "seed": 2**32 - 1}
    content["training"]["training_data"]["systems"] = ["../data.init/fcc32"]
    del content["training"]["validation_data"]
    shutil.copytree(EXAMPLE / "data" / "train", tmp_path / "data.init")
    for iteration, options in (
        ("iter.000000", ()),
        ("iter.000001", ("--init-model", "old/model.ckpt")),
    ):
        folder = tmp_path / iteration
        folder.mkdir()
        (folder / "input.json").write_text(json.dumps(content))
        if options:
            shutil.copytree(tmp_path / "iter.000000", folder / "old", symlinks=True)
        monkeypatch.chdir(folder)
        assert train(folder, *options) == 0
        (folder / "input.json").write_text(
            json.dumps({**content, "training": {**content["training"], "numb_steps": 6}})
        )
        assert train(folder, *options) == 0
        assert main(["--pt", "freeze"]) == 0
        assert main(["--pt", "compress", "-s", "0.1"]) == 0
        assert all((folder / name).exists() for name in FETCHED)
        steps = [
            line.split()[0]
            for line in (folder / "lcurve.out").read_text().splitlines()
            if line[0] != "#"
        ]
        assert steps[-1] == "6"
