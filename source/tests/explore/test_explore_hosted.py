"""A round of `dp explore` with a model that deepmd-kit's modules compute (`pytest -m deepmd_kit`)."""

import importlib.util
import json

import pytest
import torch
from hosted_models import MODELS

from deepmd_muon.cli.main import main

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]


def test_a_round_labels_and_trains(copper, explore):
    content = json.loads((copper / "input.json").read_text())
    descriptor = {**MODELS["se_e2_r"]["descriptor"], "sel": [60]}
    content["model"] = {**MODELS["se_e2_r"], "type_map": ["Cu"], "descriptor": descriptor}
    (copper / "input.json").write_text(json.dumps(content))
    assert main(["--pt", "train", "input.json"]) == 0
    status = explore(rounds=1, training={"start": "restart", "steps": 30})
    assert status == 0
    folder = copper / "explore" / "round_1"
    done = json.loads((folder / "round.json").read_text())
    assert done["labels"]["labelled"] > 0
    content = torch.load(folder / "model_0" / "model.ckpt.pt", weights_only=True)
    assert content["model"]["_extra_state"]["train_infos"]["step"] == 69
