"""Runs that start from a frozen file have the weights of its checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from deepmd_muon.cli.main import main


def start(option, path, folder):
    """The weights after one step at a learning rate of almost 0."""
    words = ["--pt", "train", "start.json", option, path, "-o", f"{folder}.json"]
    assert main(words) == 0
    return torch.load("started.pt", weights_only=True)["model"]


@pytest.fixture
def frozen(finished, small_input):
    """The finished run's model as a frozen file; start.json takes one tiny step."""
    assert main(["--pt", "freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth"]) == 0
    content = small_input(
        learning_rate={"start_lr": 1e-30, "stop_lr": 1e-31, "decay_steps": 1},
        training={"numb_steps": 1, "disp_freq": 1, "save_ckpt": "started", "disp_file": "s.out"},
    )
    Path("start.json").write_text(json.dumps(content))


@pytest.mark.parametrize("option", ["--init-frz-model", "--finetune"])
def test_weights_are_those_of_the_checkpoint(frozen, option):
    of_checkpoint = start("--finetune" if option == "--finetune" else "-i", "model.ckpt.pt", "a")
    of_frozen = start(option, "frozen.pth", "b")
    names = [name for name, x in of_checkpoint.items() if isinstance(x, torch.Tensor)]
    assert any(name.endswith("matrix") for name in names)
    assert [name for name in names if not torch.equal(of_checkpoint[name], of_frozen[name])] == []
