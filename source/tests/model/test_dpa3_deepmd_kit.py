"""deepmd-kit reads our DPA-3 and ours reads its own."""

import json

import numpy as np
import pytest
import torch
from commands import run_dp
from deepmd_kit_program import MARKS, dp, python
from model_batches import HERE, batch_of, read_fixture, stored_model, write_system

from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, to_deepmd_kit
from deepmd_muon.optim import HybridMuonConfig
from deepmd_muon.section import thaw

pytestmark = MARKS
FIXTURE = read_fixture(HERE / "dpa3.pt.gz")

ROUTES = """
import json, sys, torch
from deepmd.pt.optimizer import HybridMuonOptimizer
from deepmd.pt.model.model import get_model
params = json.load(open(sys.argv[1]))
found = {}
for mode in ("2d", "flat", "slice"):
    model = get_model(json.loads(json.dumps(params)))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = HybridMuonOptimizer([p for _, p in named], named_parameters=named, muon_mode=mode, magma_muon=True)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found[mode] = {name: {k: list(v.shape) for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
                   for name, p in named}
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.fixture
def system(tmp_path, monkeypatch):
    """The present folder, with a system of random labels."""
    monkeypatch.chdir(tmp_path)
    write_system(tmp_path / "system", FIXTURE["structures"]["orthorhombic"])
    return tmp_path


def given(section, optimizer="HybridMuon", steps=2):
    return {
        "model": thaw(section),
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 10},
        "loss": {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1},
        "optimizer": {"type": optimizer},
        "training": {
            "training_data": {"systems": ["system"], "batch_size": 2},
            "numb_steps": steps,
            "seed": 1,
            "disp_freq": 1,
            "save_freq": steps,
        },
    }


@pytest.mark.parametrize("name", ["split", "dynamic", "tanh"])
def test_deepmd_kit_tests_freezes_and_trains_our_checkpoint(system, name):
    model = stored_model(FIXTURE, name)
    content = {"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0}), "optimizer": {}}
    torch.save(content, system / "model.ckpt.pt")
    with torch.no_grad():
        wanted = model(batch_of(model, FIXTURE["structures"]["orthorhombic"]))
    dp("freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth")
    for file in ("model.ckpt.pt", "frozen.pth"):
        dp("test", "-m", file, "-s", "system", "-d", "detail")
        energy, force = (np.loadtxt(system / f"detail.{kind}.out") for kind in ("e", "f"))
        np.testing.assert_allclose(energy[:, 1], wanted["energy"], rtol=1e-10)
        np.testing.assert_allclose(force[:, 3:], wanted["force"].reshape(-1, 3), atol=1e-10)
    (system / "input.json").write_text(json.dumps(given(model.settings)))
    dp("train", "input.json", "--init-model", "model.ckpt.pt", "--skip-neighbor-stat")


@pytest.mark.parametrize("optimizer", ["Adam", "HybridMuon"])
def test_we_go_on_from_deepmd_kits_checkpoint(system, optimizer):
    """Two steps of deepmd-kit and two of ours."""
    section, _ = from_deepmd_kit(FIXTURE["cases"]["split"]["state"])
    (system / "input.json").write_text(json.dumps(given(section, optimizer)))
    dp("train", "input.json", "--skip-neighbor-stat")
    (system / "more.json").write_text(json.dumps(given(section, optimizer, steps=4)))
    words = "more.json --restart model.ckpt-2.pt --skip-neighbor-stat -v ERROR"
    assert run_dp(f"--pt train {words}") == 0
    saved = torch.load(system / "model.ckpt-4.pt", weights_only=True)
    assert saved["deepmd_muon"]["step"] == 4
    before = torch.load(system / "model.ckpt-2.pt", weights_only=False)["model"]
    key = "model.Default.atomic_model.descriptor.repflows.layers.0.node_self_mlp.matrix"
    change = (saved["model"][key] - before[key]).norm() / before[key].norm()
    assert 0 < change < 0.1


def test_routes_and_shapes_of_state_are_deepmd_kits(tmp_path):
    theirs = FIXTURE["cases"]["split"]["state"]
    section, _ = from_deepmd_kit(theirs)
    (tmp_path / "model.json").write_text(json.dumps(theirs["_extra_state"]["model_params"]))
    python("-c", ROUTES, "model.json", "routes.json", folder=tmp_path)
    expected = json.loads((tmp_path / "routes.json").read_text())
    for mode, states in expected.items():
        model = build_model(section)
        optimizer = HybridMuonConfig(muon_mode=mode, magma_muon=True).build(model, 1e-3)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert set(states) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            own = {
                key: list(value.shape)
                for key, value in optimizer.state[p].items()
                if torch.is_tensor(value)
            }
            own.pop("step", None)
            wanted = {key: shape for key, shape in states[name].items() if not key.endswith("_pow")}
            assert own == wanted, (mode, name)
