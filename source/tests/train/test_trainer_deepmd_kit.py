"""Restarts across the two programs. Run with DEEPMD_KIT_DP set to deepmd-kit 3.2.0's dp: pytest -m deepmd_kit."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif("DEEPMD_KIT_DP" not in os.environ, reason="DEEPMD_KIT_DP is not set to deepmd-kit's dp"),
]


def test_a_checkpoint_of_deepmd_kit_continues_here(small_input, train, load):
    content = small_input(training={"numb_steps": 3, "save_freq": 3})
    content["model"]["descriptor"]["sel"] = [60]
    theirs = json.loads(json.dumps(content))
    Path("theirs.json").write_text(json.dumps(theirs))
    subprocess.run(
        [os.environ["DEEPMD_KIT_DP"], "--pt", "train", "theirs.json", "--skip-neighbor-stat"],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    before = load("model.ckpt-3.pt")
    longer = small_input(training={"numb_steps": 5, "save_ckpt": "ours"})
    longer["model"]["descriptor"]["sel"] = [60]
    assert train(longer, restart="model.ckpt-3.pt") == 0
    after = load("ours-5.pt")
    assert after["deepmd_muon"]["step"] == 5
    steps = [value["step"] for value in after["optimizer"]["state"].values() if "step" in value]
    assert steps
    assert all(int(step) == 5 for step in steps)
    name = "model.Default.atomic_model.fitting_net.filter_layers.networks.0.layers.0.matrix"
    assert before["model"][name].shape == after["model"][name].shape
    assert not torch.equal(before["model"][name], after["model"][name])
    # Two steps at this rate move the weights by little: the run continued, it did not start anew.
    assert torch.allclose(before["model"][name], after["model"][name], atol=0.02)
