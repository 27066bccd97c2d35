"""A rule added to a copy of this package as the page says: one file of its own, and its settings in another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import deepmd_muon

PACKAGE = Path(deepmd_muon.__file__).parent
PAGE = Path(__file__).parents[3] / "doc" / "add-an-update-rule.md"
NOTE = "<!-- tested: test_optim_new_rule.py -->\n```python\n"

USE = """
import inspect, torch
from deepmd_muon.argcheck.check import check
from deepmd_muon.optim import HybridMuon, HybridMuonConfig, MuonConfig

assert inspect.signature(HybridMuon).parameters["shorter_steps_by"].default == 2.0
assert "Divisor of `shorter_steps`." in HybridMuon.__doc__
given = {"shorter_steps": True, "shorter_steps_by": 4}
assert check(HybridMuonConfig, given).settings.shorter_steps_by == 4.0
assert [p.path for p in check(MuonConfig, {"shorter_steps_by": 0}).problems] == ["shorter_steps_by"]
moved = []
for config in (HybridMuonConfig(), HybridMuonConfig(**given), MuonConfig(), MuonConfig(**given)):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(3, 4)
    optimizer = config.build(model, 0.01)
    decayed = before * (1 - 0.01 * config.weight_decay)
    optimizer.step()
    moved.append(model.weight.detach() - decayed)
for plain, shorter in (moved[:2], moved[2:]):
    torch.testing.assert_close(plain, 4 * shorter, rtol=1e-4, atol=1e-6)
"""


def test_a_rule_of_this_package_needs_its_own_file_and_its_settings(tmp_path):
    rule, settings = (text.split("```")[0] for text in PAGE.read_text().split(NOTE)[1:])
    copy = tmp_path / "deepmd_muon"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "optim" / "rules" / "shorter_steps.py").write_text(rule)
    config = copy / "optim" / "config.py"
    text = config.read_text()
    assert text.count("RULES = (\n") == 1
    text = text.replace("RULES = (\n", 'RULES = (\n    "shorter_steps:ShorterSteps",\n')
    first_field = "    normuon: bool = setting(\n"
    assert text.count(first_field) == 1
    config.write_text(text.replace(first_field, settings + first_field))
    command = [sys.executable, "-c", USE]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
