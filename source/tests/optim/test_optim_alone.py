"""The optimizer runs where torch is the only package: `pip install --no-deps deepmd-muon`."""

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[3]
# Names of modules that differ from those of their packages.
MODULES = {"PyYAML": "yaml"}
PROGRAM = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # its import fails
import torch
import deepmd_muon.optim.sharded
from deepmd_muon.optim import AdamWConfig, HybridMuon, MuonConfig, QKClip, orthogonalize

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 7))
x, y = torch.arange(7), torch.arange(7).flip(0)
for config in (MuonConfig(), AdamWConfig()):
    optimizer = config.build(model, lr=0.02)
    first = None
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7 * first, (config, first, loss.item())
    optimizer.load_state_dict(optimizer.state_dict())
print(MuonConfig().build(model).routing)
o = orthogonalize(torch.randn(6, 4))
assert torch.linalg.svdvals(o).sub(1).abs().max() < 0.05
HybridMuon([torch.nn.Parameter(torch.ones(2, 2))])
left = [name for name in {blocked!r} if sys.modules.get(name) is not None]
assert not left, left
"""


def test_no_dependency_but_torch_is_needed():
    """Every other dependency of the package, of its extras, and torch's NumPy, cannot be imported here."""
    text = (TOP / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|gpu|ase|lmdb|examples) = (\[.*?\]$)", text, re.DOTALL | re.MULTILINE)
    packages = {name for part in lists for name in re.findall(r'"([\w-]+)[><=]', part)} - {"torch"}
    blocked = sorted(MODULES.get(name, name) for name in packages)
    assert {"numpy", "h5py", "dargs", "vesin", "rich", "matplotlib", "yaml", "triton", "ase", "lmdb"} <= {*blocked}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(blocked=blocked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1.weight" in done.stdout
