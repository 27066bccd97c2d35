"""The optimizer without the dependencies of the potentials: torch is enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]
# Trains, saves, restores and prints a plan, where none of these modules exist.
PROGRAM = """
import sys

sys.modules.update(dict.fromkeys(BLOCKED))  # None stands for a module that is not there
import torch
import deepmd_muon.optim as optim
from deepmd_muon.optim.qk_clip import FusedQKV, LogitRecorder, QKClip
from deepmd_muon.optim.sharded import Layout, Plan

assert all(hasattr(optim, name) for name in optim.__all__)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
clip = QKClip((FusedQKV("self_attn", "self_attn.in_proj_weight", heads=2),))
for config in (optim.MuonConfig(), optim.HybridMuonConfig(normuon=True), optim.AdamWConfig()):
    more = {} if isinstance(config, optim.AdamWConfig) else {"qk_clip": clip}
    optimizer = config.build(layer, **more)
    layer(torch.ones(1, 3, 8)).square().sum().backward()
    optim.clip_adam_grad_norm_(optimizer, 1.0)
    optimizer.step()
    config.build(layer).load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
print(optim.MuonConfig().build(layer).plan.describe().splitlines()[0])
assert not [name for name in BLOCKED if sys.modules[name] is not None]
"""


def dependencies():
    """Return the modules of everything that the package depends on but torch, and of optional packages."""
    text = (TOP / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)[1]
    names = set(re.findall(r'"([A-Za-z0-9_]+)', listed)) - {"torch"}
    return sorted({*names, "yaml", "ase", "triton", "lmdb", "msgpack"} - {"PyYAML"})


def run(folder):
    program = f"BLOCKED = {dependencies()!r}\n{PROGRAM}"
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_where_only_torch_is_installed():
    assert {"dargs", "h5py", "numpy", "ase"} <= set(dependencies())
    done = run(TOP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["one process: 4 parameters, 6 matrices"]


@pytest.mark.slow
def test_the_package_installed_without_dependencies_has_the_optimizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    shutil.copytree(
        TOP / "deepmd_muon", source / "deepmd_muon", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, source)
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--target",
        str(target),
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    assert not (target / "h5py").exists()
    done = run(target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["one process: 4 parameters, 6 matrices"]
