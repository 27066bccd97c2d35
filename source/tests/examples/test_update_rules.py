"""The rules of examples/update_rules work as their README says: registered from outside, in code and in `dp train`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from forked import run_script

FOLDER = Path(__file__).parents[3] / "examples" / "update_rules"
TRAINING = FOLDER.parent / "water_xtb"
CODE = """
import torch
from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.rules.registry import matrix_rules

torch.manual_seed(0)
model = torch.nn.Linear(6, 4)
{block}
model.weight.grad = torch.randn(4, 6)
optimizer.step()
print(*sorted(optimizer.state[model.weight]))
"""


@pytest.fixture
def page():
    text = (FOLDER / "README.md").read_text()
    return dict(re.findall(r"^```(\w+)\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE))


def test_importing_the_file_registers_the_rule(page, tmp_path):
    for file in FOLDER.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "program.py").write_text(CODE.format(block=page["python"]))
    done = run_script("program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("magma_score", "momentum_buffer", "soap_left", "soap_left_basis"),
        *("soap_right", "soap_right_basis", "soap_second_moment"),
    ]


def test_dp_trains_with_the_rules(page, tmp_path):
    content = json.loads((TRAINING / "input.json").read_text())
    content["optimizer"] = {"type": "HybridMuon", "rules": ["soap_muon", "radial_brake"]}
    content["model"]["descriptor"] |= {"neuron": [4, 8], "axis_neuron": 2}
    content["model"]["fitting_net"]["neuron"] = [8, 8]
    content["training"] |= {"numb_steps": 2, "disp_freq": 1, "save_freq": 2}
    content["training"]["training_data"] = {"systems": [str(TRAINING / "data/valid/300K")]}
    del content["training"]["validation_data"]
    (tmp_path / "input.json").write_text(json.dumps(content))
    program, *words = page["sh"].removeprefix("python ").split()
    done = run_script(FOLDER / program, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "model.ckpt-2.pt", weights_only=True)["optimizer"]["state"]
    assert sum("soap_left" in values for values in saved.values()) > 3
